"""Example inputs of a model, of any structure, as one value to cut, repeat and call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from stamppruner.errors import DataError
from stamppruner.layers import first_floating


@dataclass(frozen=True)
class Inputs:
    """Arguments of one forward pass; tensors whose first axis is the batch hold the samples."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @classmethod
    def of(cls, example_inputs: Any, model: nn.Module) -> Inputs:
        """Read what a user passes as ``example_inputs``.

        A tensor is the only argument, a tuple or list holds the positional arguments, a mapping
        the keyword arguments. Tensors become plain ones (subclasses are dropped) on the model's
        device; floating ones get its dtype.

        Raises:
            DataError: there is no tensor with a batch axis in it.
        """
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if isinstance(example_inputs, cls):
            args, kwargs = example_inputs.args, dict(example_inputs.kwargs)
        elif isinstance(example_inputs, Tensor):
            args = (example_inputs,)
        elif isinstance(example_inputs, Mapping):
            kwargs = dict(example_inputs)
        elif isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
            args = tuple(example_inputs)
        else:
            raise DataError(
                f"example_inputs is a {type(example_inputs).__name__}: pass a tensor, a tuple of "
                "positional arguments or a dict of keyword arguments"
            )
        like = first_floating(model)

        def plain(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            x = x.detach().as_subclass(Tensor).clone()
            return x.to(like.device, like.dtype if x.is_floating_point() else x.dtype)

        inputs = cls(tree_map(plain, args), tree_map(plain, kwargs))
        if not any(x.dim() > 0 and x.shape[0] > 0 for x in inputs._tensors()):
            raise DataError("example_inputs hold no tensor with a batch axis: pass (1, C, H, W)")
        return inputs

    @property
    def batch_size(self) -> int:
        """Length of the first axis of the first tensor."""
        return int(next(x.shape[0] for x in self._tensors() if x.dim() > 0))

    @property
    def sample_size(self) -> int:
        """Values in the largest tensor of one sample."""
        return max(x.numel() for x in self._tensors()) // self.batch_size

    @property
    def sample_shape(self) -> tuple[int, ...] | None:
        """Shape without the batch axis, where the input is a single tensor."""
        tensors = self._tensors()
        return tuple(tensors[0].shape[1:]) if len(tensors) == 1 else None

    def repeat(self, count: int, poisoned: Sequence[int] = ()) -> Inputs:
        """``count`` copies of the first sample; floating values of the poisoned rows are NaN."""

        def rows(x: Tensor) -> Tensor:
            out = x[:1].expand(count, *x.shape[1:]).clone()
            if out.is_floating_point():
                out[list(poisoned)] = torch.nan
            return out

        return self._map(rows)

    def blank(self, count: int, poisoned: Sequence[int] = ()) -> Inputs:
        """``count`` samples of one value, stored once a row, which is NaN in the poisoned rows."""

        def rows(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x[:1].expand(count, *x.shape[1:])
            out = x.new_full((count, *[1] * (x.dim() - 1)), 0.5)
            out[list(poisoned)] = torch.nan
            return out.expand(count, *x.shape[1:])

        return self._map(rows)

    def random(self, count: int, seed: int) -> Inputs:
        """``count`` samples of standard normal noise in place of the floating values."""
        generator = torch.Generator().manual_seed(seed)

        def rows(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x[:1].expand(count, *x.shape[1:]).clone()
            noise = torch.randn((count, *x.shape[1:]), generator=generator, dtype=torch.float64)
            return noise.to(x.device, x.dtype)

        return self._map(rows)

    def cropped(self, side: int) -> Inputs | None:
        """The inputs with images and frames cut to ``side`` by ``side``; None if none is larger."""
        large = [x for x in self._tensors() if x.dim() in (4, 5) and min(x.shape[-2:]) > side]
        if not large:
            return None
        return self._map(lambda x: x[..., :side, :side] if x.dim() in (4, 5) else x)

    def to(self, dtype: torch.dtype) -> Inputs:
        """Floating tensors in another dtype."""
        return self._map(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def call(self, model: nn.Module) -> Any:
        """The model's output."""
        return model(*self.args, **self.kwargs)

    def describe(self) -> str:
        """Shapes, for messages."""
        return ", ".join(str(tuple(x.shape)) for x in self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [x for x in tree_leaves((self.args, dict(self.kwargs))) if isinstance(x, Tensor)]

    def _map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """Apply to every tensor that has the batch axis."""
        batch = self.batch_size

        def apply(x: Any) -> Any:
            batched = isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == batch
            return function(x) if batched else x

        return Inputs(tree_map(apply, self.args), tree_map(apply, dict(self.kwargs)))
