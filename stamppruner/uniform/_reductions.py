"""Means, pools, norms and softmax over places that are equal."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from stamppruner.uniform._views import narrowed, of_uniform, uniform_axes

REDUCTIONS = ("mean", "amax", "amin", "var")
POOLS = {f"{kind}_pool{d}d" for kind in ("avg", "max", "adaptive_avg") for d in (1, 2, 3)}


@of_uniform
def reduced(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A mean, maximum or biased variance over axes."""
    axes = tree_leaves(kwargs.get("dim", args[:1]))
    biased = kwargs.get("unbiased") is False or kwargs.get("correction") == 0
    if not axes or len(args) > 1 or (func.__name__ == "var" and not biased):
        return NotImplemented
    axes = [axis % x.dim() for axis in axes]
    keep, shape = kwargs.get("keepdim"), x.shape
    for axis, uniform in enumerate(uniform_axes(x)):
        if uniform and (axis in axes or keep):
            x = x.narrow(axis, 0, 1)
    out = func(x, *args, **kwargs)
    return out.expand([1 if a in axes else n for a, n in enumerate(shape)]) if keep else out


@of_uniform
def softmax(func: Any, x: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Equal values have equal shares."""
    if dim is None:
        return NotImplemented
    small = narrowed(x)
    share = small.shape[dim] / x.shape[dim]
    return (func(small, dim, *args, **kwargs) * share).expand(x.shape)


@of_uniform
def pooled(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A pool or an interpolation over equal places: the value itself."""
    if not all(uniform_axes(x)[2:]):
        return NotImplemented
    one = func(x[:1, :1], *args, **kwargs)
    if not isinstance(one, Tensor):  # with indices
        return NotImplemented
    return narrowed(x, 2).clone().expand(*x.shape[:2], *one.shape[2:])


@of_uniform
def batch_norm(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A batch norm on its running statistics."""
    if kwargs.get("training", True):
        return NotImplemented
    return func(narrowed(x, 2), *args, **kwargs).expand(x.shape)
