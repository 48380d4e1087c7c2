"""What a batch teaches: how it is passed through a model, its loss, and its figure of merit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from stamppruner.batches import Batch, as_loader, checked_batches
from stamppruner.errors import ConfigError, DataError, DivergedError, StampError
from stamppruner.tasks import check_batch

ForwardFn = Callable[[nn.Module, Any], Any]
"""Model and inputs of a batch, on the model's device, to outputs."""

LossFn = Callable[[Any, Any], Tensor]
"""Outputs and targets of a batch to a scalar, the mean over its samples."""

MetricFn = Callable[[Any, Any], float | Tensor]
"""Outputs and targets of a batch to a number, the mean over its samples; larger is better."""


_UNFIT = (
    "channels",
    "expected scalar type",
    "should be the same",
    "same type",
    "same dtype",
    "mixed dtype",
    "cannot be multiplied",
    "normalized_shape",
)
"""In messages of PyTorch about inputs that a layer does not take."""


@dataclass(frozen=True)
class Supervision:
    """The three functions of a task; without any it is classification.

    A batch that is a pair holds inputs and targets, of any structure of tensors; any other batch
    (a dict, say) is both. For classification batches are images ``(B, C, H, W)`` and labels
    ``(B,)``, and are checked.

    Attributes:
        loss_fn: of outputs and targets; by default the cross-entropy of logits and labels.
        forward_fn: by default the model's call with the inputs.
        metric_fn: by default the accuracy of logits, or nothing where there is a ``loss_fn``.
        label_smoothing: of the default loss.
    """

    loss_fn: LossFn | None = None
    forward_fn: ForwardFn | None = None
    metric_fn: MetricFn | None = None
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        for name in ("loss_fn", "forward_fn", "metric_fn"):
            value = getattr(self, name)
            if value is not None and not callable(value):
                raise ConfigError(f"{name}={value!r}: pass a function, or None")

    @property
    def classifies(self) -> bool:
        """Whether batches are images and labels, and outputs are logits."""
        return self.loss_fn is None

    @property
    def metric(self) -> str | None:
        """Name of the figure of merit; None if there is none."""
        if self.metric_fn is not None:
            return "metric"
        return "accuracy" if self.classifies else None

    def batches(self, loader: Any, device: torch.device) -> Iterator[tuple[Any, Any, int]]:
        """Inputs, targets and number of samples of every batch, on the device.

        Raises:
            DataError: for classification a batch that is none; else one without a tensor.
        """
        plain = self.classifies and self.forward_fn is None
        for batch in checked_batches(loader) if plain else as_loader(loader):
            pair = isinstance(batch, tuple | list) and len(batch) == 2
            inputs, targets = batch if pair else (batch, batch)
            sizes = [len(x) for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim()]
            if not sizes:
                raise DataError(
                    f"a batch is {type(batch).__name__} without a tensor: yield (inputs, targets)"
                )
            yield _to(inputs, device), _to(targets, device), sizes[0]

    def image_batches(self, loader: Any, *, channels: int | None = None) -> Iterator[Batch]:
        """Images ``(B, C, H, W)`` and targets ``(B, ...)`` of every batch, checked.

        Args:
            loader: of a data set that is pruned for.
            channels: if given, images have so many.

        Raises:
            DataError: a batch is no such pair; for classification, see
                :func:`~stamppruner.batches.checked_batches`.
        """
        if self.classifies:
            yield from checked_batches(loader, channels=channels)
            return
        for number, batch in enumerate(as_loader(loader)):
            where = f"target batch {number}"
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise DataError(
                    f"{where} is a {type(batch).__name__}: to prune for it, yield (images, targets)"
                )
            images, targets = batch
            check_batch(images, channels=channels, where=where)
            if not isinstance(targets, Tensor) or targets.shape[:1] != images.shape[:1]:
                kind = type(targets).__name__
                found = tuple(targets.shape) if isinstance(targets, Tensor) else kind
                raise DataError(
                    f"{where}: targets are {found} for {len(images)} images: give one tensor "
                    "(B, ...), and take it apart in loss_fn"
                )
            yield images, targets

    def each(self, outputs: Any, targets: Tensor) -> Tensor:
        """Losses that sum to the batch's mean loss times its size, by sample where known."""
        if self.loss_fn is None:
            return F.cross_entropy(outputs.float(), targets, reduction="none")
        return self.loss(None, outputs, targets) * len(targets)

    def outputs(self, model: nn.Module, inputs: Any) -> Any:
        """What the model makes of the inputs.

        Raises:
            DataError: it takes no such inputs, or cannot train on a batch of one sample.
        """
        try:
            return model(inputs) if self.forward_fn is None else self.forward_fn(model, inputs)
        except RuntimeError as error:
            if not isinstance(inputs, Tensor) or not any(t in str(error) for t in _UNFIT):
                raise
            kind = "images" if inputs.dim() == 4 else "inputs"
            raise DataError(
                f"{type(model).__name__} does not take {kind} of {tuple(inputs.shape[1:])}, "
                f"{inputs.dtype} ({str(error).splitlines()[0]}): give them the shape and type that "
                "it was made for"
            ) from error
        except ValueError as error:
            if not isinstance(inputs, Tensor) or len(inputs) > 1:
                raise
            raise DataError(
                f"{type(model).__name__} cannot train on a batch of one image ({error}): pass a "
                "loader with drop_last=True, or another batch size"
            ) from error

    def loss(self, model: nn.Module | None, outputs: Any, targets: Any) -> Tensor:
        """The scalar to minimise.

        Raises:
            StampError: outputs that are no logits; ConfigError: a ``loss_fn`` that gives no scalar.
            DataError: labels beyond the outputs.
        """
        if self.loss_fn is not None:
            value = self.loss_fn(outputs, targets)
            if not isinstance(value, Tensor) or value.numel() != 1:
                shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ConfigError(f"loss_fn gives {shape}: it must give a tensor of one number")
            return value.reshape(())
        check_logits(model, outputs, targets)
        return F.cross_entropy(
            outputs.float(), targets.long(), label_smoothing=self.label_smoothing
        )

    def merit(self, model: nn.Module, outputs: Any, targets: Any) -> float | None:
        """The figure of merit of a batch, None if there is none.

        Raises:
            StampError: outputs that are no logits, or are NaN.
        """
        if self.metric_fn is not None:
            return float(self.metric_fn(outputs, targets))
        if not self.classifies:
            return None
        check_logits(model, outputs, targets)
        if bool(outputs.isnan().any()):  # the largest of NaNs is the first, which may be right
            raise DivergedError(
                f"{type(model).__name__} gives NaN for some images: its weights are not finite, or "
                f"its activations overflow {outputs.dtype}"
            )
        return float((outputs.argmax(1) == targets).double().mean())


CLASSIFICATION = Supervision()
"""Images to classes by logits, their cross-entropy and accuracy."""


@dataclass(frozen=True)
class Distillation:
    """A teacher's outputs as further targets (Hinton et al. 2015, "Distilling the Knowledge").

    Attributes:
        teacher: runs in evaluation mode, and is not changed.
        weight: of the teacher, in [0, 1], against the loss of the targets.
        temperature: that both networks' logits are divided by.
    """

    teacher: nn.Module
    weight: float = 0.5
    temperature: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.weight <= 1 or not self.temperature > 0:
            raise ConfigError(
                f"distill={self.weight}, temperature={self.temperature}: give a weight in [0, 1] "
                "and a temperature above 0"
            )

    def mixed(self, loss: Tensor, logits: Any, theirs: Any) -> Tensor:
        """``(1 - w) loss + w T^2 KL(teacher || student)``, with softmaxes at temperature T.

        Raises:
            ConfigError: the two do not give logits of one shape.
        """
        if not (isinstance(logits, Tensor) and isinstance(theirs, Tensor)) or (
            logits.shape != theirs.shape
        ):
            shapes = [tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
                      for x in (logits, theirs)]  # fmt: skip
            raise ConfigError(
                f"teacher gives {shapes[1]} where the model gives {shapes[0]}: pass a teacher of "
                "the same classes, such as that of the full network for this data set"
            )
        t = self.temperature
        kl = F.kl_div(
            F.log_softmax(logits.float() / t, 1), F.log_softmax(theirs.float() / t, 1),
            reduction="none", log_target=True,
        ).sum(1).mean()  # fmt: skip
        return (1 - self.weight) * loss + self.weight * t * t * kl


class Mixup:
    """Images that are mixed in pairs, as their losses are then (Zhang et al. 2018, "mixup").

    Args:
        alpha: of the beta distribution of the shares; 0 mixes nothing.
        seed: of the shares and pairs.
    """

    def __init__(self, alpha: float, seed: int) -> None:
        self._alpha, self._random = alpha, np.random.default_rng(seed)

    def __call__(self, inputs: Any, targets: Any) -> tuple[Any, Any, float]:
        """Inputs ``(B, ...)``, targets of their partners (None: not mixed), and their own share."""
        if not self._alpha:
            return inputs, None, 1.0
        share = float(self._random.beta(self._alpha, self._alpha))
        order = torch.from_numpy(self._random.permutation(len(inputs))).to(inputs.device)
        return share * inputs + (1 - share) * inputs[order], targets[order], share


def check_logits(model: nn.Module | None, logits: Any, labels: Any) -> None:
    """Raise unless they are logits that have an output for every label.

    Raises:
        StampError: no logits ``(B, classes)``. DataError: a label beyond them.
    """
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise StampError(
            f"{type(model).__name__} returns {type(logits).__name__}, not logits (B, classes): "
            "pass a loss_fn of its outputs and the targets"
        )
    if int(labels.max()) >= logits.shape[1]:
        raise DataError(
            f"label {int(labels.max())} needs {int(labels.max()) + 1} outputs and "
            f"{type(model).__name__} has {logits.shape[1]}: give the head more outputs"
        )


def _to(values: Any, device: torch.device) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, values)
