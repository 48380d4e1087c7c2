"""The mode under which functions of PyTorch compute with uniform tensors."""

from __future__ import annotations

from functools import cache
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from stamppruner.uniform import _pointwise, _products, _reductions, _shapes
from stamppruner.uniform._views import Rule, uniform_axes

_PLAIN = {"__get__", "dim", "size", "stride", "detach", "transpose", "permute", "unsqueeze"}
"""Functions, in frequent use, that give views or no tensors at all."""

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_pointwise.POINTWISE, _pointwise.pointwise),
    "cat": _pointwise.concatenated,
    "__setitem__": _pointwise.assign,
    "__getitem__": _shapes.looked_up,
    "contiguous": _shapes.contiguous,
    "view": _shapes.reshaped,
    "reshape": _shapes.reshaped,
    "flatten": _shapes.reshaped,
    "roll": _shapes.rolled,
    "pad": _shapes.padded,
    **dict.fromkeys(_reductions.REDUCTIONS, _reductions.reduced),
    **dict.fromkeys((*_reductions.POOLS, "interpolate"), _reductions.pooled),
    "softmax": _reductions.softmax,
    "batch_norm": _reductions.batch_norm,
    **_products.PRODUCTS,
}


class UniformTensors(TorchFunctionMode):
    """Computes with uniform tensors as far as it can, and as usual from there on.

    Where what is not uniform is written into a uniform tensor, or tensors of different values are
    concatenated along a uniform axis, the places are merged: NaN at one of them becomes NaN at all.

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
        if rule := _RULES.get(name):
            out = rule(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        if _pointwise.writes(name, kwargs) and args and _uniform(args[0]):
            raise RuntimeError(f"{name} writes into a uniform tensor")
        if isinstance(func, FunctionType) and func.__globals__ is vars(F):
            with self:
                return _opened(func)(*args, **kwargs)
        return func(*args, **kwargs)


def _uniform(x: Any) -> bool:
    return isinstance(x, Tensor) and any(uniform_axes(x))


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
