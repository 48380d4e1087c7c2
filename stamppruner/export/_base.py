"""What every exporter shares: a copy to work on, noise to compare on, and the report."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from stamppruner.calls import copied_module, evaluating
from stamppruner.errors import ExportError, StampError
from stamppruner.inputs import Inputs
from stamppruner.report import format as fmt

TOLERANCE = 1e-4
"""Largest difference of the outputs that an exported file may show, relative to the largest."""

BATCH_SIZES = (1, 3)
"""Batches on which a file with a dynamic batch axis is compared; it is traced with another one."""

REMEDY = (
    "see docs/deploying.md; forward must not branch on values, and with dynamic_batch=True not on "
    "the batch size"
)
"""End of the message where an exporter fails."""

_TRACED = 2  # a batch of one is taken for a constant


@dataclass(frozen=True)
class Quantization:
    """What 8-bit arithmetic costs, measured on the images that it was calibrated with.

    Attributes:
        size_bytes_float: of the same network in 32 bits, as ONNX.
        images: number of calibration images.
        noise: whether these were noise, for want of images; the figures say little then.
        max_relative_difference: to the float file's outputs, relative to the largest of them.
        agreement: share of images with the same largest logit; None if the output is no logits.
    """

    size_bytes_float: int
    images: int
    noise: bool
    max_relative_difference: float
    agreement: float | None


@dataclass(frozen=True)
class ExportReport:
    """What was written, and how far its outputs are from the model's.

    Attributes:
        path: the file.
        kind: such as ``"ONNX"``.
        size_bytes: of the file.
        inputs: shape of each input, by name; an axis that may have any length is a text.
        batch_sizes: of the batches that were compared.
        max_relative_difference: to the model's outputs, relative to the largest of them; of the
            float network where the file is quantised.
        quantization: only of int8 files.

    Example:
        >>> inputs = {"images": ("batch", 3, 8, 8)}
        >>> print(ExportReport("a.onnx", "ONNX", 2048, inputs, (1, 3), 2e-7))
        a.onnx: ONNX, 2.00 KiB
        inputs: images (batch, 3, 8, 8)
        relative difference to the model: 2.0e-07 (batches of 1, 3)
    """

    path: str
    kind: str
    size_bytes: int
    inputs: Mapping[str, tuple[int | str, ...]]
    batch_sizes: tuple[int, ...]
    max_relative_difference: float
    quantization: Quantization | None = None

    def __str__(self) -> str:
        shapes = ", ".join(
            f"{name} ({', '.join(map(str, shape))})" for name, shape in self.inputs.items()
        )
        compared = ", ".join(map(str, self.batch_sizes))
        lines = [
            f"{self.path}: {self.kind}, {fmt.size(self.size_bytes)}",
            *([f"inputs: {shapes}"] if shapes else []),
            f"relative difference to the model: {self.max_relative_difference:.1e}"
            + (f" (batches of {compared})" if compared else ""),
        ]
        if (q := self.quantization) is not None:
            agree = "" if q.agreement is None else f", same class on {fmt.share(q.agreement)}"
            lines.append(
                f"int8 against float ({fmt.size(q.size_bytes_float)}): relative difference "
                f"{q.max_relative_difference:.1e}{agree} of {q.images} "
                f"{'noise' if q.noise else 'calibration'} images"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class Subject:
    """A copy of the model in evaluation mode, and inputs of the right shape for it."""

    model: nn.Module
    inputs: Inputs
    dynamic_batch: bool

    @classmethod
    def of(
        cls, model: nn.Module, example_inputs: Any, dynamic_batch: bool, device: str | None = None
    ) -> Subject:
        """Copy a model, to ``device`` if one is given.

        Raises:
            DataError: the example inputs hold no batch.
            UnsupportedModelError: the model cannot be copied.
        """
        copied = copied_module(model).eval()
        copied = copied if device is None else copied.to(device)
        return cls(copied, Inputs.of(example_inputs, copied), dynamic_batch)

    @property
    def traced(self) -> Inputs:
        """What to trace with: noise of the examples' shapes, so that no user's data is stored."""
        return self.inputs.random(_TRACED if self.dynamic_batch else self._batch, seed=0)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Of :meth:`trials`."""
        return BATCH_SIZES if self.dynamic_batch else (self._batch, self._batch)

    def trials(self) -> Iterator[Inputs]:
        """Noise to compare on, a batch size at a time."""
        for seed, count in enumerate(self.batch_sizes, start=1):
            yield self.inputs.random(count, seed)

    def dynamic_shapes(self) -> Any:
        """The batch axes in the form that ``torch.export`` takes; None if all shapes are fixed."""
        if not self.dynamic_batch:
            return None
        axis, traced = {0: torch.export.Dim("batch")}, self.traced

        def batched(x: Any) -> Any:
            is_batch = isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == _TRACED
            return axis if is_batch else None

        bound = inspect.signature(self.model.forward).bind(*traced.args, **traced.kwargs)
        return tree_map(batched, dict(bound.arguments))

    def worst_difference(self, run: Callable[[Inputs], Sequence[Tensor]]) -> float:
        """Largest relative difference between the model's outputs and those of ``run``.

        Raises:
            ExportError: the outputs differ in number or shape.
        """
        worst = 0.0
        for inputs in self.trials():
            with evaluating(self.model):
                expected = tensors_in(inputs.call(self.model))
            with evaluating(self.model):
                found = run(inputs)
            worst = max_or_nan(worst, difference(expected, found))
        return worst

    def shapes(self, names: Iterable[str]) -> dict[str, tuple[int | str, ...]]:
        """Shapes of the inputs under some names; ``"batch"`` for an axis of any length."""
        tensors, traced = tensors_in((self.traced.args, dict(self.traced.kwargs))), _TRACED

        def shape(x: Tensor) -> tuple[int | str, ...]:
            free = self.dynamic_batch and x.dim() > 0 and x.shape[0] == traced
            return ("batch", *x.shape[1:]) if free else tuple(x.shape)

        return {name: shape(x) for name, x in zip(names, tensors, strict=False)}

    @property
    def _batch(self) -> int:
        return self.inputs.batch_size


def tensors_in(tree: Any) -> list[Tensor]:
    """Tensors of a nested structure, in its order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def difference(expected: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Largest absolute difference relative to the largest value, over pairs of tensors.

    Raises:
        ExportError: the tensors differ in number or shape.
    """
    shapes = [[tuple(x.shape) for x in tensors] for tensors in (expected, found)]
    if shapes[0] != shapes[1]:
        raise ExportError(
            f"the exported model gives outputs of shapes {shapes[1]}, the model {shapes[0]}: "
            "return tensors alone from its forward"
        )
    worst = 0.0
    for one, two in zip(expected, found, strict=True):
        if one.numel():
            a, b = one.detach().cpu().double(), two.detach().cpu().double()
            scale = float(a.abs().max().clamp_min(torch.finfo(torch.float64).tiny))
            worst = max_or_nan(worst, float((a - b).abs().max()) / scale)
    return worst


def max_or_nan(a: float, b: float) -> float:
    """The larger one; NaN if one of them is."""
    return float(torch.tensor([a, b], dtype=torch.float64).max())


def check_difference(worst: float, subject: Subject, kind: str, tolerance: float) -> None:
    """Raise ExportError if the outputs are further apart than ``tolerance``, or are not numbers."""
    if not worst <= tolerance:
        raise ExportError(
            f"{kind} of {type(subject.model).__name__} differs from the model by {worst:.1e} of "
            f"the largest output on noise (allowed: {tolerance:.1e}), so it is not written: look "
            "for code that depends on the batch size or on values, and for outputs that are not "
            "finite"
        )


@contextmanager
def naming(what: str, remedy: str) -> Iterator[None]:
    """Turn whatever a library raises inside the block into ExportError.

    Args:
        what: was done, such as ``"torch.export of ResNet"``.
        remedy: the end of the message.
    """
    try:
        yield
    except StampError:
        raise
    except Exception as error:  # exporters raise many kinds, of several libraries
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0][:300] if lines else 'no message'}"
        raise ExportError(f"{what} failed ({reason}): {remedy}") from error
