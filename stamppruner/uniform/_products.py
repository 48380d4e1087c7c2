"""Products of matrices and attention, for one of equal rows, columns, terms and matrices."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from stamppruner.uniform._pointwise import pointwise
from stamppruner.uniform._views import Rule, one_value, uniform_axes


def product(func: Any, a: Any, b: Any) -> Any:
    """``a @ b``."""
    if min(a.dim(), b.dim()) < 2 or not any((*uniform_axes(a), *uniform_axes(b))):
        return NotImplemented
    rank, rows, columns = max(a.dim(), b.dim()), a.shape[-2], b.shape[-1]
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    terms = 1
    if one_value(a, -1) and one_value(b, -2):
        terms = a.shape[-1]
        a, b = a[..., :1], b[..., :1, :]
    for axis in (x for x in range(-rank, -2) if one_value(a, x) and one_value(b, x)):
        a, b = (x.narrow(axis, 0, 1) if -axis <= x.dim() else x for x in (a, b))
    a = a[..., :1, :] if one_value(a, -2) else a
    b = b[..., :1] if one_value(b, -1) else b
    return (func(a, b) * terms).expand(*batch, rows, columns)


def batched(_func: Any, a: Any, b: Any) -> Any:
    """``torch.bmm``, which wants as many matrices on both sides."""
    return product(torch.matmul, a, b)


def linear(_func: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """A linear layer's product, and its bias."""
    out = product(torch.matmul, input, weight.mT)
    if out is NotImplemented or bias is None:
        return out
    return pointwise(torch.add, out, bias)


def einsum(func: Any, equation: Any, *tensors: Any) -> Any:
    """A sum of products, in letters."""
    if not isinstance(equation, str) or not all(isinstance(x, Tensor) for x in tensors):
        return NotImplemented
    terms, _, result = equation.replace(" ", "").partition("->")
    letters = terms.split(",")
    if not result or "." in terms or len(letters) != len(tensors):
        return NotImplemented
    sizes: dict[str, int] = {}
    different = set()
    for axes, x in zip(letters, tensors, strict=True):
        for axis, letter in enumerate(axes):
            sizes[letter] = max(sizes.get(letter, 1), x.shape[axis])
            if not one_value(x, axis - x.dim()):
                different.add(letter)
    uniform = sizes.keys() - different
    small = []
    for axes, x in zip(letters, tensors, strict=True):
        for axis in (axis for axis, letter in enumerate(axes) if letter in uniform):
            x = x.narrow(axis, 0, 1)
        small.append(x)
    count = math.prod(sizes[letter] for letter in uniform if letter not in result)
    return (func(equation, *small) * count).expand([sizes[letter] for letter in result])


def attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **kwargs: Any,
) -> Any:
    """Attention of one of equal queries, to one of equal keys with equal values."""
    if attn_mask is not None or is_causal:
        return NotImplemented
    shape = (*query.shape[:-1], value.shape[-1])
    query = query[..., :1, :] if one_value(query, -2) else query
    if one_value(key, -2) and one_value(value, -2):
        key, value = key[..., :1, :], value[..., :1, :]
    for axis in range(query.dim() - 2):
        if all(one_value(x, axis - x.dim()) for x in (query, key, value)):
            query, key, value = (x.narrow(axis, 0, 1) for x in (query, key, value))
    return func(query, key, value, dropout_p=dropout_p, **kwargs).expand(shape)


PRODUCTS: dict[str, Rule] = {
    "matmul": product,
    "__matmul__": product,
    "bmm": batched,
    "linear": linear,
    "einsum": einsum,
    F.scaled_dot_product_attention.__name__: attention,
}
