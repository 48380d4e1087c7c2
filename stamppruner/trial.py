"""Trying out a block on its own: NaN in place of channels tells what arrives where."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stamppruner import layers
from stamppruner.calls import FORWARD_ERRORS, floating_tensors, patched_forwards
from stamppruner.errors import UnsupportedModelError
from stamppruner.inputs import Inputs

_NORMS = (nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Call:
    """The arguments of one call of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, block: nn.Module, *, poisoned: bool = False) -> list[Tensor]:
        """Floating outputs of the block; of NaN in place of the floating arguments if asked."""

        def fresh(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            nan = poisoned and x.is_floating_point()
            return torch.full_like(x, torch.nan) if nan else x.clone()

        return floating_tensors(block(*tree_map(fresh, self.args), **tree_map(fresh, self.kwargs)))


def first_calls(model: nn.Module, inputs: Inputs) -> dict[nn.Module, Call]:
    """The first call of every module with children.

    Raises:
        UnsupportedModelError: the model fails.
    """
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in calls:
            keep = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
            calls[module] = Call(*keep)

    blocks = [m for m in model.modules() if next(m.children(), None) is not None]
    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in blocks]
    try:
        inputs.call(model)
    except FORWARD_ERRORS as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails on the example inputs {inputs.describe()}: "
            f"{type(error).__name__}: {error}. Pass example_inputs it takes"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


class Tap(nn.Identity):
    """An identity that remembers what passed."""

    seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``x``."""
        self.seen = x
        return x


def channel_axis(
    block: nn.Module, call: Call, read: Callable[[list[Tensor]], Tensor]
) -> int | None:
    """Axis of the channels of some values: the only one along which channel 0 is alone NaN.

    Where norms of unknown kinds spread the NaN, blocks of convolutions have it at 1.
    """
    with _answering(block, lambda _: True):
        nan = read(call.run(block)).isnan()
    axes = [
        axis
        for axis in range(1, nan.dim())
        if nan.shape[axis] > 1 and int(nan.movedim(axis, 0).flatten(1).any(1).sum()) == 1
    ]
    if len(axes) == 1:
        return axes[0]
    mixing = [m for m in block.modules() if layers.is_mixing(m)]
    convolutions = mixing and not any(isinstance(m, nn.Linear) for m in mixing)
    return 1 if convolutions and nan.dim() > 2 else None


def nan_arrives(
    block: nn.Module,
    call: Call,
    *,
    poisoned: Callable[[nn.Module], bool] = lambda _: False,
    everything: bool = False,
) -> bool:
    """Whether NaN arrives at the block's output, from some mixing layers or from its input."""
    with _answering(block, poisoned):
        return any(bool(x.isnan().any()) for x in call.run(block, poisoned=everything))


def is_read(block: nn.Module, call: Call, layer: nn.Module) -> bool:
    """Whether a mixing layer of the block reads what a layer writes: it is not on a shortcut."""
    read: list[bool] = []
    mixing = [m for m in block.modules() if layers.is_mixing(m)]
    handles = [
        m.register_forward_pre_hook(lambda _m, args: read.append(bool(args[0].isnan().any())))
        for m in mixing
    ]
    try:
        nan_arrives(block, call, poisoned=lambda m: m is layer)
    finally:
        for handle in handles:
            handle.remove()
    return any(read)


def is_residual(block: nn.Module, call: Call) -> bool:
    """Whether both the block's input and its mixing layers reach its output."""
    try:
        arrives = nan_arrives(block, call, everything=True)
        return arrives and nan_arrives(block, call, poisoned=lambda _: True)
    except FORWARD_ERRORS:
        return False


def _answering(
    block: nn.Module, poisoned: Callable[[nn.Module], bool]
) -> AbstractContextManager[None]:
    """Mixing layers answer with ones, and NaN in channel 0 where asked; norms let all pass."""

    def answer(module: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        y = torch.ones_like(forward(*args, **kwargs))
        if poisoned(module):
            y.select(layers.channel_axis(module, y.dim()), 0).fill_(torch.nan)
        return y

    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for module in block.modules():
        if layers.is_mixing(module):
            forwards[module] = partial(answer, module, module.forward)
        elif isinstance(module, _NORMS):
            forwards[module] = lambda x: x
    return patched_forwards(forwards)
