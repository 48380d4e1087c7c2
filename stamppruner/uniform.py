"""Forward passes over tensors that are the same at every place, at the price of one place.

A layer under probing answers with one value a channel. As a view of stride 0 over the places (a
*uniform* axis) the answer takes no memory, and pointwise functions, pools and concatenations of
such views are computed once and seen everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_UNARY = (
    "abs celu clamp clip dropout elu erf exp gelu hardsigmoid hardswish hardtanh leaky_relu log "
    "log1p logsigmoid mish neg reciprocal relu relu6 rsqrt selu sigmoid silu softplus softsign "
    "sqrt square tanh"
)
_BINARY = "add div maximum minimum mul multiply pow __rpow__ sub __rsub__ subtract true_divide"
_POINTWISE = {name + end for name in f"{_UNARY} {_BINARY}".split() for end in ("", "_")}
_POOLS = {f"{kind}_pool{d}d" for kind in ("avg", "max", "adaptive_avg") for d in (1, 2, 3)}


class UniformTensors(TorchFunctionMode):
    """Computes with uniform tensors as far as it can, and as usual from there on.

    Where a pointwise function writes into a uniform tensor what is not uniform, the places are
    merged: NaN at one of them becomes NaN at all of them.

    Attributes:
        largest: bytes of the largest result so far.

    Raises:
        RuntimeError: from the forward pass, where something else writes into a uniform tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = self._computed(func, args, kwargs or {})
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if name in _POINTWISE:
            return _pointwise(func, args, kwargs, written=first if _writes(name, kwargs) else None)
        if name == "cat":
            return _concatenated(func, args, kwargs)
        if isinstance(first, Tensor) and any(uniform := uniform_axes(first)):
            if _writes(name, kwargs):
                raise RuntimeError(f"{name} writes into a uniform tensor")
            if name == "batch_norm" and not kwargs.get("training", True):
                small = func(narrowed(first, 2), *args[1:], **kwargs)
                return small.expand(first.shape)
            if (name in _POOLS or name == "interpolate") and all(uniform[2:]):
                one = func(first[:1, :1], *args[1:], **kwargs)
                if isinstance(one, Tensor):  # without indices
                    return narrowed(first, 2).clone().expand(*first.shape[:2], *one.shape[2:])
        return func(*args, **kwargs)


def uniform_axes(x: Tensor) -> tuple[bool, ...]:
    """Which axes hold one value, seen several times."""
    strides = x.stride()
    if 0 not in strides:
        return (False,) * len(strides)
    return tuple(s == 0 and n > 1 for s, n in zip(strides, x.shape, strict=True))


def narrowed(x: Tensor, first: int = 0) -> Tensor:
    """The tensor with uniform axes, from ``first`` on, of length 1; it shares the memory."""
    for axis, uniform in enumerate(uniform_axes(x)):
        if uniform and axis >= first:
            x = x.narrow(axis, 0, 1)
    return x


def _writes(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether the function of this name writes into its first argument."""
    in_place = name.endswith("_") and not name.startswith("__")
    return in_place or name in ("__setitem__", "__ipow__") or bool(kwargs.get("inplace"))


def _pointwise(func: Any, args: Any, kwargs: dict[str, Any], *, written: Tensor | None) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not tensors or "out" in kwargs:
        return func(*args, **kwargs)
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    deciding = tensors if written is None else [written]
    long = [a for a in range(-len(shape), 0) if shape[a] > 1]
    axes = [a for a in long if all(_one_value(x, a) for x in deciding)]
    if not axes:
        return func(*args, **kwargs)

    def sliced(x: Any) -> Any:
        for axis in axes if isinstance(x, Tensor) else ():
            if -axis <= x.dim() and x.shape[axis] > 1:
                one = x.stride(axis) == 0
                x = x.narrow(axis, 0, 1) if one else x.amax(axis, keepdim=True)  # NaN wins
        return x

    out = func(*tree_map(sliced, args), **tree_map(sliced, kwargs))
    return out.expand(shape) if written is None else written


def _one_value(x: Tensor, axis: int) -> bool:
    return -axis > x.dim() or x.shape[axis] == 1 or x.stride(axis) == 0


def _concatenated(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if args else kwargs.get("tensors", ())
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    shapes = {(x.dim(), *uniform_axes(x)) for x in tensors}
    if len(shapes) != 1 or "out" in kwargs or not isinstance(dim, int):
        return func(*args, **kwargs)
    ((rank, *uniform),) = shapes
    common = [a for a in range(rank) if uniform[a] and a != dim % rank]
    index = tuple(slice(1) if a in common else slice(None) for a in range(rank))
    out = func([x[index] for x in tensors], dim)
    return out.expand([tensors[0].shape[a] if a in common else n for a, n in enumerate(out.shape)])
