"""Functions that move values and change none: reshapes, copies, look-ups."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from stamppruner.uniform._views import narrowed, of_uniform, one_value, uniform_axes


@of_uniform
def contiguous(_func: Any, x: Tensor, **_kwargs: Any) -> Tensor:
    """A copy of one place: the ordinary tensor would have memory of its own."""
    return narrowed(x).clone().expand(x.shape)


@of_uniform
def reshaped(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Another shape, or some axes in one; of a view as well, as the ordinary tensor allows it."""
    if "dtype" in kwargs or isinstance(next(iter(args), None), torch.dtype):
        return NotImplemented
    shape = func(torch.empty(x.shape, device="meta"), *args, **kwargs).shape
    return _with_shape(x, shape) if x.numel() else x.reshape(shape)


@of_uniform
def looked_up(_func: Any, x: Tensor, index: Any) -> Any:
    """``x[index]`` for numbers of equal rows."""
    numbers = isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64)
    if not (numbers and uniform_axes(x)[0]):
        return NotImplemented
    return x[0].expand(*index.shape, *x.shape[1:])


@of_uniform
def rolled(_func: Any, x: Tensor, shifts: Any = None, dims: Any = ()) -> Any:
    """The same, rolled along uniform axes."""
    axes, uniform = tree_leaves(dims), uniform_axes(x)
    return x if axes and all(uniform[axis] for axis in axes) else NotImplemented


@of_uniform
def padded(_func: Any, x: Tensor, pad: Any = (), *_args: Any, **_kwargs: Any) -> Any:
    """The same, padded by nothing."""
    return NotImplemented if any(pad) else x


def _with_shape(x: Tensor, shape: torch.Size) -> Tensor:
    """The values in another shape; axes that are split or merged stay uniform if all are."""
    small = list(shape)
    source = target = 0
    while source < x.dim():
        first_source, first_target = source, target
        before, after = x.shape[source], 1
        source += 1
        while before != after or (source == x.dim() and target < len(shape)):
            if before < after:
                before, source = before * x.shape[source], source + 1
            else:
                after, target = after * shape[target], target + 1
        if all(one_value(x, axis - x.dim()) for axis in range(first_source, source)):
            for axis in range(first_source, source):
                x = x.narrow(axis, 0, 1)
            small[first_target:target] = [1] * (target - first_target)
    return x.reshape(small).expand(shape)
