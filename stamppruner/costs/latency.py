"""Milliseconds of a forward pass or a training step, from tables of measured layers.

The tables hold what each convolution and linear layer takes at three input and three output
widths, on the device, with the batch size and the threads that are asked for; between them it is
interpolated, bilinearly, since the time of a wide layer is a multiple of both. What the full
network takes beyond its layers (norms, activations, sums, overhead) is split into a constant and a
part that follows the activations. Tables are kept in a file for each device, so a network is
measured once on a machine.

A prediction is good enough to start with; :mod:`~stamppruner.meet` measures candidates end to end.
How a network lies in memory can change its time by several percent, for as long as the process
lives, so a short pass on a CPU is measured on several copies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from stamppruner import layers
from stamppruner.channels import ChannelGraph
from stamppruner.costs._base import HERE, Cost, Setting, check_amp
from stamppruner.costs._clock import GRID, LayerClock, calls
from stamppruner.costs._tables import Tables
from stamppruner.devices import why_not
from stamppruner.errors import BudgetError
from stamppruner.heap import memory_kept
from stamppruner.inputs import Inputs
from stamppruner.latency import latencies_ms, running_with, train_steps_ms
from stamppruner.progress import bar

_SECONDS = 0.25  # a model at each of its places

_PLACES = 4  # in memory, at most
_ALL_SECONDS = 2.0  # no other places after that

Timed = Callable[..., list[float]]


class Latency(Cost):
    """The common part of both costs: milliseconds, measured layer by layer and as a whole.

    Raises:
        BudgetError: the graph was made without example inputs, so there is nothing to time; there
            is no such device, or not the autocast that is asked for.
    """

    unit = "ms"
    timed: ClassVar[Timed]
    _statement: ClassVar[str]

    def __init__(self, model: nn.Module, graph: ChannelGraph, setting: Setting = HERE) -> None:
        if graph.example is None:
            raise BudgetError(f"Budget({self.name}=...) needs a graph with example inputs")
        self._inputs = graph.example
        self._layer_share, self._rest, self._fixed = 1.0, 0.0, 0.0
        device = setting.device or str(layers.first_floating(model).device)
        if (reason := why_not(device)) is not None:
            raise BudgetError(f"Budget(device={device!r}): {reason}")
        check_amp(model, setting)
        with running_with(setting.threads, amp=setting.amp, device=device), memory_kept():
            placed = copy.deepcopy(model).to(device)
            self._measure_layers(placed, graph, setting, device)
            super().__init__(model, graph, setting)
            whole = self.measure([placed])[0]
        self._layer_share = min(1.0, whole / self.full)  # layers may be slower on their own
        self._fixed = self._rest = max(0.0, whole - self.full) / 2
        self.full = whole

    def measure(self, models: Sequence[nn.Module]) -> list[float]:
        """Milliseconds of each model, which take turns, in the cost's setting.

        On a CPU they are means over the models and copies of them at other addresses.
        """
        device, amp = self.setting.device, self.setting.amp
        places = [[copy.deepcopy(m).to(device) if device else m for m in models]]
        found: list[list[float]] = []
        start = perf_counter()
        placed_on = layers.first_floating(places[0][0]).device
        with running_with(self.setting.threads, amp=amp, device=placed_on):
            inputs = Inputs.of(self._inputs, places[0][0])
            while len(found) < (_PLACES if placed_on.type == "cpu" else 1):
                if found:
                    places.append([copy.deepcopy(m) for m in places[0]])  # others keep theirs
                found.append(
                    type(self).timed(
                        places[-1],
                        inputs,
                        samples=self.setting.batch_size,
                        seconds=_SECONDS,
                    )
                )
                if perf_counter() - start > _ALL_SECONDS:
                    break
        return [float(ms) for ms in np.mean(found, axis=0)]

    def per_layer(self, widths: Tensor) -> Tensor:
        """Predicted milliseconds of each layer, with its share of what lies between layers."""
        ins = self._layers.inputs(widths) / self._in_full
        outs = self._layers.outputs(widths) / self._out_full
        grid = torch.tensor(GRID, dtype=torch.float64)
        rows, columns = _between(ins, grid), _between(outs, grid)  # (..., L, 3)
        table = (rows.unsqueeze(-1) * columns.unsqueeze(-2) * self._table).sum((-1, -2))
        return table * self._layer_share + self._rest * self._activations * outs

    @property
    def constant(self) -> float:
        """What no width changes."""
        return self._fixed

    def _measure_layers(
        self, model: nn.Module, graph: ChannelGraph, setting: Setting, device: str
    ) -> None:
        """Fill the tables: by measurement, or from what was measured before."""
        maps = list(graph.layers.values())
        self._in_full = torch.tensor([float(len(m.inputs)) for m in maps])
        self._out_full = torch.tensor([float(len(m.outputs)) for m in maps])
        tables = Tables(device, torch.get_num_threads(), amp=setting.amp)
        clock = LayerClock(self._statement, tables)
        modules, seen = dict(model.named_modules()), calls(model, graph, setting.batch_size)
        grids = torch.zeros(len(maps), len(GRID), len(GRID), dtype=torch.float64)
        elements = torch.zeros(len(maps), dtype=torch.float64)
        for i, layer in enumerate(bar(maps, description="measuring", shown=True, delay=2.0)):
            module = modules[layer.name]
            for shape, written in seen.get(layer.name, ()):
                elements[i] += written
                grids[i] += clock.grid(module, shape)
        clock.tables.save()
        # a wider layer is never predicted to be faster
        self._table = grids.cummax(1).values.cummax(2).values
        self._activations = elements / elements.sum().clamp_min(1.0)


class LatencyMs(Latency):
    """Of a forward pass in evaluation mode."""

    name = "latency_ms"
    timed = staticmethod(latencies_ms)
    _statement = "with torch.no_grad(): layer(x)"


class TrainStepMs(Latency):
    """Of a training step: forward and backward pass, and SGD with momentum."""

    name = "train_step_ms"
    timed = staticmethod(train_steps_ms)
    _statement = "layer(x).sum().backward()"


def _between(x: Tensor, grid: Tensor) -> Tensor:
    """Weights of the grid points, ``(..., n)``, in a linear interpolation at ``x`` ``(...)``."""
    x = x.clamp(grid[0], grid[-1]).unsqueeze(-1)
    rising = (x - grid[:-1]) / (grid[1:] - grid[:-1])
    rising = torch.cat([torch.ones_like(x), rising.clamp(0, 1)], -1)
    falling = torch.cat([rising[..., 1:], torch.zeros_like(x)], -1)
    return rising - falling
