"""Functions of every value by itself, and what writes and joins values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from stamppruner.uniform._views import broadcast, merged, of_uniform, one_value, uniform_axes

_UNARY = (
    "abs celu clamp clip dropout elu erf exp gelu hardsigmoid hardswish hardtanh leaky_relu log "
    "log1p logsigmoid mish neg reciprocal relu relu6 rsqrt selu sigmoid silu softplus softsign "
    "sqrt square tanh"
)
_BINARY = "add div maximum minimum mul multiply pow __rpow__ sub __rsub__ subtract true_divide"
POINTWISE = {name + end for name in f"{_UNARY} {_BINARY}".split() for end in ("", "_")}


def writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether the function of this name writes into its first argument."""
    in_place = name.endswith("_") and not name.startswith("__")
    return in_place or name in ("__setitem__", "__ipow__") or bool(kwargs.get("inplace"))


def pointwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute at one place; where a uniform tensor is written to, all places are merged."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not tensors or "out" in kwargs:
        return NotImplemented
    written = args[0] if args and writes(func.__name__, kwargs) else None
    shape = broadcast([x.shape for x in tensors])
    deciding = tensors if written is None else [written]
    long = [a for a in range(-len(shape), 0) if shape[a] > 1]
    axes = [a for a in long if all(one_value(x, a) for x in deciding)]
    if not axes:
        return func(*args, **kwargs)

    def sliced(x: Any) -> Any:
        for axis in axes if isinstance(x, Tensor) else ():
            if -axis <= x.dim() and x.shape[axis] > 1:
                x = merged(x, axis)
        return x

    out = func(*tree_map(sliced, args), **tree_map(sliced, kwargs))
    return out.expand(shape) if written is None else written


@of_uniform
def assign(_func: Any, x: Tensor, index: Any, value: Any) -> None:
    """``x[index] = value``, where NaN that was there stays: the places are merged."""
    target, value = x[index], torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if target.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        raise RuntimeError("an index of tensors writes into a uniform tensor")
    value = value.expand(target.shape)
    for axis, uniform in enumerate(uniform_axes(target)):
        if uniform:
            target, value = target.narrow(axis, 0, 1), merged(value, axis)
    target.copy_(torch.where(target.isnan(), target, value))


def concatenated(
    func: Any, tensors: Any = (), dim: Any = 0, *, axis: Any = None, out: Any = None
) -> Any:
    """Join one place of each; along an axis that is uniform in all, the places are merged."""
    dim = dim if axis is None else axis
    ranks = {x.dim() for x in tensors}
    if len(ranks) != 1 or out is not None or not isinstance(dim, int):
        return NotImplemented
    (rank,) = ranks
    dim %= rank
    uniform = [all(x) for x in zip(*(uniform_axes(x) for x in tensors), strict=True)]
    lengths = [x.shape[dim] for x in tensors]
    uniform[dim] = max(lengths) > 1 and all(one_value(x, dim - rank) for x in tensors)
    if not any(uniform):
        return NotImplemented
    index = tuple(slice(1) if own else slice(None) for own in uniform)
    joined = func([x[index] for x in tensors], dim)
    joined = joined.amax(dim, keepdim=True) if uniform[dim] else joined
    shape = list(tensors[0].shape)
    shape[dim] = sum(lengths)
    return joined.expand(shape)
