"""Uniform axes: where a tensor holds one value, seen several times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

Rule = Callable[..., Any]
"""Takes a function and its arguments; returns what it gives, or NotImplemented."""


def uniform_axes(x: Tensor) -> tuple[bool, ...]:
    """Which axes hold one value, seen several times."""
    strides = x.stride()
    if 0 not in strides:
        return (False,) * len(strides)
    return tuple(s == 0 and n > 1 for s, n in zip(strides, x.shape, strict=True))


def one_value(x: Tensor, axis: int) -> bool:
    """Whether a tensor has one value along an axis, counted from the end; or no such axis."""
    return -axis > x.dim() or x.shape[axis] == 1 or x.stride(axis) == 0


def narrowed(x: Tensor, first: int = 0) -> Tensor:
    """The tensor with uniform axes, from ``first`` on, of length 1; it shares the memory."""
    for axis, uniform in enumerate(uniform_axes(x)):
        if uniform and axis >= first:
            x = x.narrow(axis, 0, 1)
    return x


def merged(x: Tensor, axis: int) -> Tensor:
    """All places of an axis in one, where NaN wins."""
    return x.narrow(axis, 0, 1) if x.stride(axis) == 0 else x.amax(axis, keepdim=True)


def broadcast(shapes: Sequence[torch.Size]) -> list[int]:
    """The common shape, sooner than ``torch.broadcast_shapes`` finds it."""
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    return [next((n for n in axis if n != 1), 1) for axis in zip(*padded, strict=True)]


def of_uniform(rule: Rule) -> Rule:
    """A rule for functions whose first argument has uniform axes."""

    @wraps(rule)
    def checked(func: Any, *args: Any, **kwargs: Any) -> Any:
        uniform = args and isinstance(args[0], Tensor) and any(uniform_axes(args[0]))
        return rule(func, *args, **kwargs) if uniform else NotImplemented

    return checked
