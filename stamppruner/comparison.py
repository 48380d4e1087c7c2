"""Compares a masked dense network with a slim one, layer by layer.

Both run on the same noise in evaluation mode, in double precision where the model takes it, and
are compared at the input and output of *every* mixing layer and at the model's output, so a wrong
index map is found at the layer where it first shows, even if later layers would hide it. Layers
that are called in training mode only (auxiliary heads) are compared as well.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from stamppruner import layers
from stamppruner.calls import FORWARD_ERRORS, evaluating, floating_tensors, run
from stamppruner.channels import ChannelPlan, LayerMap
from stamppruner.errors import EquivalenceError, StampError
from stamppruner.gates import Gates
from stamppruner.inputs import Inputs

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference relative to the largest value at the same place; 2e-2 in half precision."""

_BATCH = 2
_LARGE = 2**18
"""Values of a sample from which on a batch is one sample, for want of memory: 300x300 pixels.
Such networks are traced with smaller images if they take them, and proved there on a pair."""

_CANCELLED = 1e-3
"""Share of the tolerance below which a difference, relative to the largest value at any layer so
far, is rounding: what remains of sums that cancel, as means of normalised values do. If it is not,
and something makes it large again, it shows there."""

_DIGEST = 4
"""Values that are kept of each channel of a sample, at each layer."""


@dataclass(frozen=True)
class Equivalence:
    """How far the slim network is from the masked dense one.

    Attributes:
        max_abs: largest absolute difference of the outputs.
        max_rel: largest difference at any layer, relative to the largest value there.
        worst_layer: where ``max_rel`` was seen; empty for the model's output.
        side: of that layer: ``"input"`` or ``"output"``.
        positions: positions there that differ, in the dense numbering.
        tolerance: bound on ``max_rel`` that was applied.
        error: what the slim network raised, if it did not run.
        agreed: inputs and outputs of layers that agreed, in call order, before any that did not.

    Example:
        >>> from stamppruner import ChannelPlan, check_equivalence, trace_channels
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> graph = trace_channels(net, torch.zeros(1, 3, 9, 9))
        >>> found = check_equivalence(net, ChannelPlan.random(graph, keep=0.5))
        >>> found.passed, found.max_abs < 1e-9
        (True, True)
    """

    max_abs: float
    max_rel: float
    worst_layer: str = ""
    side: Literal["input", "output"] = "input"
    positions: tuple[int, ...] = ()
    tolerance: float = 0.0
    error: str = ""
    agreed: int = 0

    @property
    def passed(self) -> bool:
        """Whether the networks agree."""
        return not self.error and self.max_rel <= self.tolerance

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        if self.error:
            return f"the slim network fails before layer {self.worst_layer!r}: {self.error}"
        where = f"{self.side} of layer {self.worst_layer!r}" if self.worst_layer else "the output"
        verdict = "equal" if self.passed else "DIFFERENT"
        return (
            f"{verdict}: relative difference {self.max_rel:.2g} at {where} "
            f"(bound {self.tolerance:.0e}), absolute {self.max_abs:.2g} at the output"
        )


def compare(
    dense: nn.Module,
    slim: nn.Module,
    plan: ChannelPlan,
    inputs: Inputs,
    *,
    passes: Sequence[bool] = (False,),
    seed: int = 0,
    tolerance: float | None = None,
    limit: int | None = None,
) -> Equivalence:
    """Compare a dense model under the plan's mask with a slim model.

    Neither model is changed; both are copied where double precision needs it.

    Args:
        dense: the whole model.
        slim: the cut one.
        plan: the cut.
        inputs: give the shapes of the noise.
        passes: see :func:`~stamppruner.calls.run`.
        seed: of the noise.
        tolerance: bound on the relative difference; by default that of the precision.
        limit: number of inputs and outputs of layers, in call order, after which both models are
            ended and count as equal.

    Raises:
        EquivalenceError: the dense model itself fails on the inputs.
    """
    like = layers.first_floating(dense)
    own = TOLERANCE.get(like.dtype, 2e-2)
    if like.dtype != torch.float64:
        # A cut weight that was written through a parametrization was rounded in that precision.
        bound = own if any(is_parametrized(m) for m in slim.modules()) else TOLERANCE[torch.float64]
        doubled = inputs.to(torch.float64)
        try:
            found = _observed(in_double(slim), plan, doubled, passes, seed, limit)  # one at a time
            return _compared(in_double(dense), plan, found, doubled, passes, seed, bound)
        except StampError:
            pass  # the model insists on its own precision
    found = _observed(slim, plan, inputs, passes, seed, limit)
    del slim  # free the memory, where the caller does not need it either
    bound = own if tolerance is None else tolerance
    return _compared(dense, plan, found, inputs, passes, seed, bound)


def in_double(model: nn.Module) -> nn.Module:
    """A copy of a model in double precision; nothing else is copied on the way."""

    def doubled(x: Tensor) -> Tensor:
        return x.detach().to(torch.float64, copy=True)

    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            double = doubled(parameter)
            memo[id(parameter)] = nn.Parameter(double, parameter.requires_grad)
            vars(memo[id(parameter)]).update(vars(parameter))
    memo |= {id(b): doubled(b) for b in model.buffers() if b.is_floating_point()}
    return copy.deepcopy(model, memo)


def _noise(inputs: Inputs, seed: int) -> Inputs:
    return inputs.random(1 if inputs.sample_size > _LARGE else _BATCH, seed)


def _observed(
    slim: nn.Module,
    plan: ChannelPlan,
    inputs: Inputs,
    passes: Sequence[bool],
    seed: int,
    limit: int | None,
) -> _Readings:
    found = _Readings(slim, plan, limit)
    found.observe(_noise(inputs, seed), passes)
    found.model = nn.Module()  # free the memory
    return found


def _compared(
    dense: nn.Module,
    plan: ChannelPlan,
    found: _Readings,
    inputs: Inputs,
    passes: Sequence[bool],
    seed: int,
    tolerance: float,
) -> Equivalence:
    noise, like = _noise(inputs, seed), layers.first_floating(dense)
    comparison = _Comparison(dense, plan, found, tolerance)
    gates = Gates(dense, plan.graph)
    gates.values = torch.from_numpy(plan.keep.copy()).to(like.device, like.dtype)
    with gates.injected():
        try:
            comparison.observe(noise, passes)
        except _DifferenceError as difference:
            return replace(difference.verdict, agreed=comparison.count)
    if comparison.error:
        raise EquivalenceError(
            f"{type(dense).__name__} fails on {noise.describe()}: {comparison.error}"
        )
    return replace(comparison.outputs(), agreed=comparison.count)


@dataclass
class _Reading:
    """What went in or out of a layer: of every channel of a sample, its values or a digest."""

    layer: LayerMap
    side: Literal["input", "output"]
    shape: torch.Size
    axis: int
    values: Tensor


def _read(
    layer: LayerMap, side: Literal["input", "output"], module: nn.Module, x: Tensor
) -> _Reading:
    """Note a tensor as it is before anything changes it in place: ``(samples, C, values)``.

    Of more places a channel than :data:`_DIGEST`, as many random sums over all of them: they
    differ where any place does.
    """
    axis = layers.channel_axis(module, x.dim())
    values = (x if axis else x.unsqueeze(0)).detach().movedim(axis or 1, 1)
    values = values.flatten(2) if values.dim() > 2 else values.unsqueeze(2)
    places = values.shape[2]
    digest = values @ _weights(places).to(values) if places > _DIGEST else values.clone()
    return _Reading(layer, side, x.shape, axis, digest)


@lru_cache(maxsize=8)
def _weights(places: int) -> Tensor:
    """Of random sums whose size is that of a single value."""
    generator = torch.Generator().manual_seed(places)
    return torch.randn(places, _DIGEST, generator=generator, dtype=torch.float64) / places**0.5


class _EnoughError(Exception):
    """Ends a forward pass at the limit of readings."""


class _Readings:
    """Records what mixing layers read and write, in call order, until the model ends or fails."""

    def __init__(self, model: nn.Module, plan: ChannelPlan, limit: int | None) -> None:
        self.model, self.plan, self.limit = model, plan, limit
        self.watched = [layer for layer in plan.graph.layers.values() if layer.kind == "mixing"]
        self.read: list[_Reading] = []
        self.output: list[Tensor] = []
        self.error = ""
        self.count = 0

    def observe(self, inputs: Inputs, passes: Sequence[bool]) -> None:
        """Run the model and note everything."""
        handles = []
        for layer in self.watched:
            module = self.model.get_submodule(layer.name)
            handles += [
                module.register_forward_pre_hook(
                    lambda m, args, layer=layer: self._see(_read(layer, "input", m, args[0]))
                ),
                module.register_forward_hook(
                    lambda m, _, out, layer=layer: self._see(_read(layer, "output", m, out)),
                    prepend=True,  # before a rewired layer scatters
                ),
            ]
        try:
            with evaluating(self.model):
                self.output = floating_tensors(run(self.model, inputs, passes))
        except _EnoughError:
            pass
        except FORWARD_ERRORS as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            for handle in handles:
                handle.remove()

    def note(self, reading: _Reading) -> None:
        """Note one input or output of a layer."""
        self.read.append(reading)

    def _see(self, reading: _Reading) -> None:
        self.note(reading)
        self.count += 1
        if self.count == self.limit:
            raise _EnoughError


class _DifferenceError(Exception):
    """Ends a forward pass of the dense network at the first difference."""

    def __init__(self, verdict: Equivalence) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class _Comparison(_Readings):
    """Compares what the dense network reads and writes with the readings of the slim one."""

    def __init__(
        self, model: nn.Module, plan: ChannelPlan, slim: _Readings, tolerance: float
    ) -> None:
        super().__init__(model, plan, slim.limit)
        self.slim, self.tolerance = slim, tolerance
        self.worst = Equivalence(0.0, 0.0, tolerance=tolerance)
        self.largest = 0.0

    def note(self, reading: _Reading) -> None:
        """Compare with the slim network's reading at the same place.

        Raises:
            _DifferenceError: they differ.
        """
        layer, x, shape = reading.layer, reading.values, list(reading.shape)
        if self.count == len(self.slim.read):
            raise _DifferenceError(self._failed(reading, self.slim.error))
        slim = self.slim.read[self.count]
        if (slim.layer.name, slim.side) != (layer.name, reading.side):
            raise _DifferenceError(self._failed(reading, ""))
        y = slim.values
        lookup = layer.kept_inputs if reading.side == "input" else layer.kept_outputs
        kept = torch.from_numpy(lookup(self.plan.keep)).to(x.device).nonzero().squeeze(1)
        shape[reading.axis] = len(kept)
        if tuple(shape) != tuple(slim.shape):
            shapes = f"{tuple(slim.shape)} instead of {tuple(shape)}"
            raise _DifferenceError(self._failed(reading, f"the {reading.side} has shape {shapes}"))
        x = x.index_select(1, kept)
        rounding = self._rounding(x)
        relative = _relative(x, y, rounding)
        if relative > self.worst.max_rel:
            self.worst = Equivalence(0.0, relative, layer.name, reading.side, (), self.tolerance)
        if relative > self.tolerance:
            wrong = (x - y).abs().amax((0, 2))
            wrong = ~(wrong <= max(rounding, self.tolerance * float(x.abs().max())))
            places = tuple(kept[wrong].tolist())
            raise _DifferenceError(
                Equivalence(0.0, relative, layer.name, reading.side, places, self.tolerance)
            )

    def outputs(self) -> Equivalence:
        """The verdict, from the outputs and the readings before."""
        same = (self.count, len(self.output)) == (len(self.slim.read), len(self.slim.output))
        if self.slim.error or not same:
            return self._failed(None, self.slim.error)
        max_abs, worst = 0.0, self.worst
        for x, y in zip(self.output, self.slim.output, strict=True):
            if x.shape != y.shape:
                return self._failed(None, "the outputs have different shapes")
            max_abs = max(max_abs, float((x - y).abs().max()) if x.numel() else 0.0)
            if (relative := _relative(x, y, self._rounding(x))) > worst.max_rel:
                worst = Equivalence(0.0, relative, tolerance=self.tolerance)
        return replace(worst, max_abs=max_abs)

    def _rounding(self, x: Tensor) -> float:
        """Differences up to it are rounding, from here on: see :data:`_CANCELLED`."""
        self.largest = max(self.largest, _size(x))
        return _CANCELLED * self.tolerance * self.largest

    def _failed(self, reading: _Reading | None, error: str) -> Equivalence:
        """The verdict on a slim network that does not come to a reading, or to the output."""
        error = error or "the networks call different layers"
        if reading is None:
            return Equivalence(0.0, 0.0, tolerance=self.tolerance, error=error)
        positions = reading.layer.inputs if reading.side == "input" else reading.layer.outputs
        places = tuple((positions >= 0).nonzero()[0].tolist())
        return Equivalence(
            0.0, 0.0, reading.layer.name, reading.side, places, self.tolerance, error
        )


def _size(x: Tensor) -> float:
    """The largest finite value."""
    return float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0


def _relative(x: Tensor, y: Tensor, rounding: float) -> float:
    """Largest difference above that of rounding, over the largest value.

    Infinite where only one side is finite, and where nothing is finite: NaN proves nothing.
    """
    if not x.numel():
        return 0.0
    if not x.isfinite().any():
        return torch.inf
    difference = (x - y).abs()
    same = (x == y) | (x.isnan() & y.isnan()) | (difference <= rounding)
    difference = torch.where(same, 0.0, difference).nan_to_num(torch.inf)
    return float(difference.max()) / max(_size(x), torch.finfo(x.dtype).tiny)
