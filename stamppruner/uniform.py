"""Forward passes over tensors that are the same at every place, at the price of one place.

A layer under probing answers with one value a channel. As a view of stride 0 over the places (a
*uniform* axis) the answer takes no memory, and pointwise functions, pools and concatenations of
such views are computed once and seen everywhere; products of matrices and attention are computed
for one of several equal rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
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
_PLAIN = {"__get__", "dim", "size", "stride", "detach", "transpose", "permute", "unsqueeze"}
_PRODUCTS = ("matmul", "__matmul__", "bmm")
_REDUCTIONS = ("mean", "amax", "amin", "var")
_POOLS = {f"{kind}_pool{d}d" for kind in ("avg", "max", "adaptive_avg") for d in (1, 2, 3)}


class UniformTensors(TorchFunctionMode):
    """Computes with uniform tensors as far as it can, and as usual from there on.

    Where a pointwise function writes into a uniform tensor what is not uniform, or tensors of
    different values are concatenated along a uniform axis, the places are merged: NaN at one of
    them becomes NaN at all of them.

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
        if getattr(func, "__name__", "") in _PLAIN:
            return func(*args, **kwargs or {})
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
            if name == "__setitem__":
                return _assign(*args)
            if name == "__getitem__" and uniform[0] and _is_index(args[1]):
                return first[0].expand(*args[1].shape, *first.shape[1:])
            if _writes(name, kwargs):
                raise RuntimeError(f"{name} writes into a uniform tensor")
            if name == "batch_norm" and not kwargs.get("training", True):
                small = func(narrowed(first, 2), *args[1:], **kwargs)
                return small.expand(first.shape)
            if name == "contiguous":
                return narrowed(first).clone().expand(first.shape)
            if name in ("reshape", "flatten") or (name == "view" and not _is_dtype(args[1:])):
                return _reshaped(first, func(_shapes_alone(first), *args[1:], **kwargs).shape)
            if name == "roll" and all(
                uniform[axis] for axis in _listed(kwargs.get("dims", args[2:]))
            ):
                return first
            if name == "pad" and not any(args[1] if len(args) > 1 else kwargs["pad"]):
                return first
            if name in _REDUCTIONS:
                return _reduced(func, *args, **kwargs)
            if name == "softmax" and (dim := kwargs.get("dim", args[1:2])) not in ((), None):
                return _softmax(func, first, dim[0] if isinstance(dim, tuple) else dim)
            if (name in _POOLS or name == "interpolate") and all(uniform[2:]):
                one = func(first[:1, :1], *args[1:], **kwargs)
                if isinstance(one, Tensor):  # without indices
                    return narrowed(first, 2).clone().expand(*first.shape[:2], *one.shape[2:])
        if name == "linear" and isinstance(first, Tensor) and first.dim() > 1:
            return self._linear(*args, **kwargs)
        if name in _PRODUCTS and len(args) == 2 and not kwargs:
            return _product(func, *args)
        if name == "einsum":
            return _einsum(func, args)
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if isinstance(func, FunctionType) and func.__globals__ is vars(F):
            with self:
                return _opened(func)(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        with self:
            out = input @ weight.mT
            return out if bias is None else out + bias


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
    shape = _broadcast([x.shape for x in tensors])
    deciding = tensors if written is None else [written]
    long = [a for a in range(-len(shape), 0) if shape[a] > 1]
    axes = [a for a in long if all(_one_value(x, a) for x in deciding)]
    if not axes:
        return func(*args, **kwargs)

    def sliced(x: Any) -> Any:
        for axis in axes if isinstance(x, Tensor) else ():
            if -axis <= x.dim() and x.shape[axis] > 1:
                x = _merged(x, axis)
        return x

    out = func(*tree_map(sliced, args), **tree_map(sliced, kwargs))
    return out.expand(shape) if written is None else written


def _assign(x: Tensor, index: Any, value: Any) -> None:
    target, value = x[index], torch.as_tensor(value, dtype=x.dtype, device=x.device)
    if target.untyped_storage().data_ptr() != x.untyped_storage().data_ptr():
        raise RuntimeError("an index of tensors writes into a uniform tensor")
    value = value.expand(target.shape)
    for axis, uniform in enumerate(uniform_axes(target)):
        if uniform:
            target, value = target.narrow(axis, 0, 1), _merged(value, axis)
    target.copy_(torch.where(target.isnan(), target, value))


def _is_index(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.int32, torch.int64)


def _is_dtype(args: tuple[Any, ...]) -> bool:
    return not args or isinstance(args[0], torch.dtype)


def _listed(axes: Any) -> tuple[int, ...]:
    return tuple(tree_leaves(axes))


def _shapes_alone(x: Tensor) -> Tensor:
    return torch.empty(x.shape, device="meta")


def _reshaped(x: Tensor, shape: torch.Size) -> Tensor:
    """The values in another shape; axes that are split or merged stay uniform if all are."""
    if not x.numel():
        return x.reshape(shape)
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
        if all(_one_value(x, axis - x.dim()) for axis in range(first_source, source)):
            for axis in range(first_source, source):
                x = x.narrow(axis, 0, 1)
            small[first_target:target] = [1] * (target - first_target)
    return x.reshape(small).expand(shape)


@cache
def _opened(func: FunctionType) -> FunctionType:
    """A function of ``torch.nn.functional`` that leaves it to its parts to be overridden."""
    asks = [name for name in func.__code__.co_names if name.startswith("has_torch_function")]
    opened = FunctionType(
        func.__code__,
        {**func.__globals__, **dict.fromkeys(asks, lambda *_: False)},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    opened.__kwdefaults__ = func.__kwdefaults__
    return opened


def _reduced(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A mean, maximum or variance over axes, of one of equal places."""
    axes = _listed(kwargs.get("dim", args[:1]))
    biased = kwargs.get("unbiased") is False or kwargs.get("correction") == 0
    if not (axes and len(args) < 2) or (func.__name__ == "var" and not biased):
        return func(x, *args, **kwargs)
    axes = tuple(axis % x.dim() for axis in axes)
    keep, shape = kwargs.get("keepdim"), x.shape
    for axis, uniform in enumerate(uniform_axes(x)):
        if uniform and (axis in axes or keep):
            x = x.narrow(axis, 0, 1)
    out = func(x, *args, **kwargs)
    return out.expand([1 if a in axes else n for a, n in enumerate(shape)]) if keep else out


def _softmax(func: Any, x: Tensor, dim: int) -> Tensor:
    small = narrowed(x)
    share = small.shape[dim] / x.shape[dim]
    return (func(small, dim=dim) * share).expand(x.shape)


def _product(func: Any, a: Tensor, b: Tensor) -> Tensor:
    """A product of matrices, for one of equal rows, columns and matrices."""
    if min(a.dim(), b.dim()) < 2 or not (any(uniform_axes(a)) or any(uniform_axes(b))):
        return func(a, b)
    rank, rows, columns = max(a.dim(), b.dim()), a.shape[-2], b.shape[-1]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    terms = 1
    if _one_value(a, -1) and _one_value(b, -2):
        terms = a.shape[-1]
        a, b = a[..., :1], b[..., :1, :]
    if func is not torch.bmm and func is not Tensor.bmm:
        for axis in (x for x in range(-rank, -2) if _one_value(a, x) and _one_value(b, x)):
            a, b = (x.narrow(axis, 0, 1) if -axis <= x.dim() else x for x in (a, b))
    a = a[..., :1, :] if _one_value(a, -2) else a
    b = b[..., :1] if _one_value(b, -1) else b
    return (func(a, b) * terms).expand(*batch, rows, columns)


def _einsum(func: Any, args: tuple[Any, ...]) -> Tensor:
    """A sum of products, for one of equal terms and of equal results."""
    equation, *tensors = args
    if not isinstance(equation, str) or not all(isinstance(x, Tensor) for x in tensors):
        return func(*args)
    terms, _, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if not result or "." in terms or len(letters) != len(tensors):
        return func(*args)
    sizes: dict[str, int] = {}
    different = set()
    for axes, x in zip(letters, tensors, strict=True):
        for axis, letter in enumerate(axes):
            sizes[letter] = max(sizes.get(letter, 1), x.shape[axis])
            if not _one_value(x, axis - x.dim()):
                different.add(letter)
    uniform = sizes.keys() - different
    small = []
    for axes, x in zip(letters, tensors, strict=True):
        for axis in (axis for axis, letter in enumerate(axes) if letter in uniform):
            x = x.narrow(axis, 0, 1)
        small.append(x)
    count = math.prod(sizes[letter] for letter in uniform if letter not in result)
    return (func(equation, *small) * count).expand([sizes[letter] for letter in result])


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Tensor:
    """Attention of one of equal queries, to one of equal keys with equal values."""
    shape = (*query.shape[:-1], value.shape[-1])
    if attn_mask is None and not is_causal:
        query = query[..., :1, :] if _one_value(query, -2) else query
        if _one_value(key, -2) and _one_value(value, -2):
            key, value = key[..., :1, :], value[..., :1, :]
        for axis in range(query.dim() - 2):
            if all(_one_value(x, axis - x.dim()) for x in (query, key, value)):
                query, key, value = (x.narrow(axis, 0, 1) for x in (query, key, value))
    attend = F.scaled_dot_product_attention
    return attend(query, key, value, attn_mask, dropout_p, is_causal, **kwargs).expand(shape)


def _broadcast(shapes: Sequence[torch.Size]) -> list[int]:
    """The common shape, sooner than ``torch.broadcast_shapes`` finds it."""
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return [next((n for n in axis if n != 1), 1) for axis in zip(*padded, strict=True)]


def _merged(x: Tensor, axis: int) -> Tensor:
    """All places of an axis in one, where NaN wins."""
    return x.narrow(axis, 0, 1) if x.stride(axis) == 0 else x.amax(axis, keepdim=True)


def _one_value(x: Tensor, axis: int) -> bool:
    return -axis > x.dim() or x.shape[axis] == 1 or x.stride(axis) == 0


def _concatenated(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = args[0] if args else kwargs.get("tensors", ())
    dim = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    ranks = {x.dim() for x in tensors}
    if len(ranks) != 1 or "out" in kwargs or not isinstance(dim, int):
        return func(*args, **kwargs)
    (rank,) = ranks
    uniform = [all(x) for x in zip(*(uniform_axes(x) for x in tensors), strict=True)]
    dim %= rank
    merged = all(_one_value(x, dim - rank) for x in tensors) and any(
        x.shape[dim] > 1 for x in tensors
    )
    common = [a for a in range(rank) if (merged if a == dim else uniform[a])]
    index = tuple(slice(1) if a in common else slice(None) for a in range(rank))
    out = func([x[index] for x in tensors], dim)
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return (out.amax(dim, keepdim=True) if merged else out).expand(shape)
