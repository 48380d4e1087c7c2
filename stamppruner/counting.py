"""Multiply-adds of a forward pass, in layers or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from stamppruner.calls import evaluating
from stamppruner.inputs import Inputs

aten = torch.ops.aten


def macs_of_pass(model: nn.Module, inputs: Inputs) -> float:
    """Multiply-adds of a forward pass of one sample, in evaluation mode.

    Half of what ``torch.utils.flop_counter`` counts, and what it leaves out: recurrent layers that
    are one kernel, attention in one on a CPU.

    Args:
        model: it is not changed.
        inputs: the first sample is taken.
    """
    with evaluating(model), _layers_apart(), _Counter() as counter:
        inputs.repeat(1).call(model)
    return counter.flops / 2


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        count = _MORE.get(func.overloadpacket) or flop_registry.get(func.overloadpacket)
        if count is not None:
            self.flops += count(*args, **kwargs, out_val=out)
        return out


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _recurrent_one(x: Tensor, of_input: Tensor, of_hidden: Tensor, *_: Any, **__: Any) -> int:
    """One layer in one direction."""
    return _recurrent(x, [of_input, of_hidden])


def _recurrent(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """All layers; ``x`` has steps and samples, in any order or packed, and features."""
    return 2 * x.shape[:-1].numel() * sum(w.numel() for w in weights if w.dim() == 2)


_MORE: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten.mkldnn_rnn_layer: _recurrent_one,
    aten._cudnn_rnn: _recurrent,
}


@contextmanager
def _layers_apart() -> Iterator[None]:
    """Attention layers do their products one by one, where they can be counted."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
