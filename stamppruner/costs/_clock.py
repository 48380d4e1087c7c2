"""What single layers take at other widths than their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from stamppruner import layers
from stamppruner.calls import evaluating
from stamppruner.channels import ChannelGraph
from stamppruner.costs._tables import Tables
from stamppruner.inputs import Inputs

GRID = (0.125, 0.5, 1.0)
"""Shares of the full widths at which layers are measured."""

_SECONDS = 0.005

_CONVOLUTIONS: tuple[Any, ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


class LayerClock:
    """Measures layers, or reads what was measured before.

    Args:
        statement: what is timed, of ``layer`` and ``x``.
        tables: of the device; they are not saved here.
    """

    def __init__(self, statement: str, tables: Tables) -> None:
        self.statement, self.tables = statement, tables

    def grid(self, module: nn.Module, shape: tuple[int, ...]) -> Tensor:
        """Milliseconds ``(3, 3)`` at the shares :data:`GRID` of the input and output widths.

        Args:
            module: a convolution or linear layer.
            shape: of its input.
        """
        pairs = [widths_at(module, i, o) for i in GRID for o in GRID]
        return torch.tensor(self._times(module, shape, pairs), dtype=torch.float64).view(3, 3)

    def _times(
        self, module: nn.Module, shape: tuple[int, ...], pairs: list[tuple[int, int]]
    ) -> list[float]:
        dtype = layers.first_floating(module).dtype
        key = f"{self.statement} {module} {dtype} {shape} {pairs}"
        found = self.tables.get(key, len(pairs))
        if found is None:
            found = [self._time(module, shape, *pair) for pair in pairs]
            self.tables.put(key, found)
        return found

    def _time(self, module: nn.Module, shape: tuple[int, ...], inputs: int, outputs: int) -> float:
        from torch.utils.benchmark import Timer  # slow to import

        like = layers.first_floating(module)
        axis = layers.channel_axis(module, len(shape))
        with torch.random.fork_rng([]):  # a new layer draws weights
            layer = resized(module, inputs, outputs).to(like.device, like.dtype)
        x = like.new_zeros(*shape[:axis], inputs, *shape[axis + 1 :]).requires_grad_()
        known = {"torch": torch, "layer": layer, "x": x}
        timer = Timer(self.statement, globals=known, num_threads=torch.get_num_threads())
        with torch.enable_grad():
            return 1e3 * timer.blocked_autorange(min_run_time=_SECONDS).median


def resized(module: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """A new layer of the same kind with other widths, on the CPU in float32."""
    bias = getattr(module, "bias", None) is not None
    if isinstance(module, nn.Linear):
        return nn.Linear(inputs, outputs, bias)
    assert isinstance(module, _ConvNd)
    kind = next(k for k in _CONVOLUTIONS if isinstance(module, k))
    options = {n: getattr(module, n) for n in ("stride", "padding", "dilation", "padding_mode")}
    if module.transposed:
        options["output_padding"] = module.output_padding
    groups = inputs if layers.is_depthwise(module) else module.groups
    return kind(inputs, outputs, module.kernel_size, groups=groups, bias=bias, **options)


def _multiple(share: float, full: int, module: nn.Module) -> int:
    """About a share of the channels: a multiple of what the layer needs, and of 8 if wide."""
    step = 1 if layers.is_depthwise(module) else layers.blocks(module)
    if full >= 64 and full % 8 == 0:
        step = math.lcm(step, 8)
    return min(full, max(step, round(share * full / step) * step))


def widths_at(module: nn.Module, share_in: float, share_out: float) -> tuple[int, int]:
    """Input and output width at about these shares of the full ones."""
    full_in, full_out = layers.input_width(module), layers.output_width(module)
    inputs = _multiple(share_in, full_in, module)
    if layers.is_depthwise(module):
        return inputs, inputs * (full_out // full_in)
    return inputs, _multiple(share_out, full_out, module)


def calls(
    model: nn.Module, graph: ChannelGraph, samples: int
) -> dict[str, list[tuple[tuple[int, ...], int]]]:
    """Input shape, and output elements, of every call of every layer that has a table."""
    found: dict[str, list[tuple[tuple[int, ...], int]]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: Any, output: Tensor) -> None:
            found.setdefault(name, []).append((tuple(args[0].shape), output.numel()))

        return hook

    modules = dict(model.named_modules())
    timed = [n for n in graph.layers if isinstance(modules[n], _ConvNd | nn.Linear)]
    handles = [modules[name].register_forward_hook(note(name)) for name in timed]
    try:
        with evaluating(model):
            Inputs.of(graph.example, model).random(samples, seed=0).call(model)
    finally:
        for handle in handles:
            handle.remove()
    return found
