"""From scores and a budget to the channels that are kept."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from stamppruner.channels import KEPT, BoolArray, ChannelGraph, ChannelPlan, FloatArray, IntArray
from stamppruner.costs import (
    HERE,
    ActivationBytes,
    Cost,
    LatencyMs,
    Macs,
    Params,
    Setting,
    SizeBytes,
    TrainBytes,
    TrainStepMs,
)
from stamppruner.errors import BudgetError, PlanError, shown
from stamppruner.kinds import is_int, is_real
from stamppruner.ladder import Ladder, halvings
from stamppruner.projection import projections

_KINDS: tuple[type[Cost], ...] = (
    Macs,
    Params,
    SizeBytes,
    ActivationBytes,
    TrainBytes,
    LatencyMs,
    TrainStepMs,
)

COSTS = {kind.name: kind for kind in _KINDS}
"""The cost behind each bound of a :class:`Budget`."""

_REPORTED = ("macs", "params", "size_bytes")
"""Costs that need no forward pass, and are known of every network."""

_MOST = {"batch_size": 2**20, "threads": 2**12}

_NAMED = 4
"""Layers that an error names."""


@dataclass(frozen=True, repr=False)
class Budget:
    """Upper bounds on the slim network; at least one.

    A value up to 1 is a share of the full network's cost, a larger one an absolute number.

    Attributes:
        macs: multiply-adds a sample (one fused multiply-add counts as one), at the image size
            that the model was traced with.
        params: parameters.
        size_bytes: of the slim file.
        activation_bytes: peak of the activations at inference, for ``batch_size`` samples of the
            size that the model was traced with.
        train_bytes: peak of a training step by SGD with momentum, for as many: parameters, their
            gradients and momentum, buffers and activations.
        latency_ms: of a forward pass, measured; the share is of the full network's in the same run.
        train_step_ms: the same of a training step with SGD.
        device: where the network is to run, for bounds that depend on it; by default where the
            model is.
        batch_size: samples a pass or a training step, for bounds that depend on it.
        threads: of PyTorch on the CPU; by default as many as it uses now.
        amp: times are measured under bfloat16 autocast.

    Raises:
        BudgetError: a bound is not a positive finite number, or there is none; the batch size or
            the threads are no positive whole number, or ``amp`` is no bool.

    Example:
        >>> Budget(macs=0.25, params=1e6)
        Budget(macs=0.25, params=1000000.0)
    """

    macs: float | None = None
    params: float | None = None
    size_bytes: float | None = None
    activation_bytes: float | None = None
    train_bytes: float | None = None
    latency_ms: float | None = None
    train_step_ms: float | None = None
    device: str | None = None
    batch_size: int = 1
    threads: int | None = None
    amp: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_size", "threads"):
            value = getattr(self, name)
            if not (is_int(value, 1, _MOST[name]) or (name == "threads" and value is None)):
                raise BudgetError(
                    f"Budget({name}={shown(value)}): pass a whole number from 1 to {_MOST[name]}"
                )
        if not isinstance(self.amp, bool):
            raise BudgetError(f"Budget(amp={self.amp!r}): pass True or False")
        if self.device is not None:
            try:
                torch.device(self.device)
            except (RuntimeError, TypeError) as error:
                raise BudgetError(f"Budget(device={self.device!r}): {error}") from error
        bounds = self.bounds()
        if not bounds:
            raise BudgetError("a budget needs a bound, such as Budget(macs=0.25)")
        for name, value in bounds.items():
            if not is_real(value) or not 0 < _as_float(value) < math.inf:
                raise BudgetError(
                    f"Budget({name}={shown(value)}): pass a share in (0, 1] or a number"
                )
            plain = value if isinstance(value, int | float) else float(value)
            object.__setattr__(self, name, plain)

    def bounds(self) -> dict[str, float]:
        """The bounds that are set, by cost name."""
        found = {name: getattr(self, name) for name in COSTS}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def setting(self) -> Setting:
        """How the network is to run."""
        return Setting(self.device, self.batch_size, self.threads, self.amp)

    def __repr__(self) -> str:
        values = [(f.name, getattr(self, f.name), f.default) for f in fields(self)]
        given = [f"{name}={value!r}" for name, value, default in values if value != default]
        return f"Budget({', '.join(given)})"

    def limits(self, costs: Sequence[Cost]) -> list[float]:
        """Absolute bounds in the order of ``costs``."""
        bounds = self.bounds()
        return [bounds[c.name] * c.full if bounds[c.name] <= 1 else bounds[c.name] for c in costs]


def _as_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # of an integer
        return math.inf


class Chooser:
    """Chooses channels of one model under budgets; cheap enough to be asked every step.

    Args:
        model: the dense model.
        graph: its channels.
        floor: least share of every group that is kept (and at least one channel a block).
        round_to: kept widths are multiples of it in groups of at least eight times as many
            channels a block; narrower groups take half of it, a quarter, and so on. What the
            model's code asks for (``ChannelGroup.multiple``) holds at any width. None rounds
            nothing here and leaves it to :func:`~stamppruner.meet.meet`, which measures.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        *,
        floor: float = 0.05,
        round_to: int | None = 1,
    ) -> None:
        if not 0 <= floor <= 1 or (round_to is not None and round_to < 1):
            raise BudgetError(f"floor={floor} must lie in [0, 1] and round_to={round_to} above 0")
        self.graph, self._model = graph, model
        self._known: dict[tuple[str, Setting], Cost] = {}
        self.costs = {name: self.cost(name) for name in _REPORTED}
        self._blocks = np.array([g.blocks for g in graph.groups], dtype=np.int64)
        self._floor, self.round_to = floor, round_to
        self._made: dict[int, Ladder] = {}
        self._finest = self._ladder(1)

    def cost(self, name: str, setting: Setting = HERE) -> Cost:
        """The cost of this name; made once for every setting.

        Its ``full`` is that of the network before it was projected.
        """
        key = name, setting
        if key not in self._known:
            cost = self._known[key] = COSTS[name](self._model, self.graph, setting)
            cost.full -= cost.of({entry["name"] for entry in projections(self._model)})
        return self._known[key]

    def costs_of(self, budget: Budget) -> list[Cost]:
        """The costs that a budget bounds, in the order of its bounds."""
        return [self.cost(name, budget.setting) for name in budget.bounds()]

    def choose(
        self,
        scores: npt.ArrayLike,
        budget: Budget,
        *,
        predicted: Mapping[str, float] = MappingProxyType({}),
        multiple: int | None = None,
    ) -> ChannelPlan:
        """Keep the best channels that fit.

        Channels are admitted in the order of their scores, a rung (the step between two allowed
        widths) at a time and over all groups at once, on top of every group's floor; in groups
        with blocks the r-th best of every block come together. Once the next rung is too dear,
        the share that is left goes to later ones that fit.

        More budget never gives a cheaper network and, where nothing is rounded, never keeps less.
        A budget that ``round_to`` puts out of reach is met with half of it, a quarter, and so on.

        Args:
            scores: ``(num_channels,)``, larger is better.
            budget: what must hold.
            predicted: limits, by cost, that stand in for the budget's, for costs that are measured
                and whose predictions are off.
            multiple: of the kept widths, in place of ``round_to``.

        Raises:
            BudgetError: the floors alone cost more than the budget; the message states the least
                reachable cost and the layers that hold it.
        """
        values = self._checked(scores)
        costs = self.costs_of(budget)
        bounds = zip(costs, budget.limits(costs), strict=True)
        limits = [predicted.get(cost.name, limit) for cost, limit in bounds]

        def fits(widths: IntArray) -> BoolArray:
            """Whether the bounds hold, ``(...)``, for channels a block ``(..., G)``."""
            kept = torch.from_numpy(widths * self._blocks).double()
            held = [(c(kept) <= m).numpy() for c, m in zip(costs, limits, strict=True)]
            return np.logical_and.reduce(held)

        for ladder in self._ladders(multiple):
            if fits(ladder.least):
                ranked = self._ranked(values)
                return self._plan(ranked, ladder.climb(self._merits(values, ranked), fits))
        raise BudgetError(self._out_of_reach(budget))

    def floors(self, scores: npt.ArrayLike) -> ChannelPlan:
        """The best channels of every group at its floor."""
        return self._plan(self._ranked(self._checked(scores)), self._finest.least)

    def least(self, cost: Cost) -> float:
        """Cost of every group at its floor: no budget below it can be met."""
        return float(cost(self._least_widths()))

    def draw(self, shares: tuple[float, float], random: np.random.Generator) -> Budget:
        """A budget of MACs whose share is log-uniform in the range, as far as it can be met."""
        macs = self.costs["macs"]
        least = self.least(macs) / macs.full
        low, high = (math.log(max(share, least)) for share in shares)
        return Budget(macs=min(1.0, math.exp(random.uniform(low, high)) * (1 + 1e-9)))

    def expected_share(self, keep_probability: npt.ArrayLike) -> float:
        """MACs of the expected widths, as a share of the full network's.

        Args:
            keep_probability: ``E[m]``, ``(num_channels,)``.
        """
        groups = len(self.graph.groups)
        widths = np.bincount(self.graph.group_of, self._checked(keep_probability), groups)
        macs = self.costs["macs"]
        return float(macs(torch.from_numpy(widths))) / macs.full

    def threshold(self, scores: npt.ArrayLike, least: float) -> ChannelPlan:
        """Keep the channels whose score reaches ``least``; blocks agree on their mean count."""
        values = self._checked(scores)
        counts = np.array(
            [
                round(float((values[g.channels] >= least).sum()) / g.blocks)
                for g in self.graph.groups
            ]
        )
        return self._plan(self._ranked(values), next(self._ladders()).nearest(counts))

    def widths(self, plan: ChannelPlan) -> torch.Tensor:
        """Kept channels a group, ``(G,)`` float64, as costs take them."""
        return self.expected_widths(torch.tensor(plan.keep))

    def expected_widths(self, keep_probability: torch.Tensor) -> torch.Tensor:
        """Channels a group that are kept on average, ``(G,)`` float64 with its gradient.

        Args:
            keep_probability: ``E[m]`` of every channel, ``(num_channels,)``.
        """
        kept = keep_probability.to("cpu", torch.float64)
        groups = torch.from_numpy(self.graph.group_of)
        return kept.new_zeros(len(self.graph.groups)).index_add(0, groups, kept)

    def overspend(self, keep_probability: torch.Tensor, budget: Budget) -> torch.Tensor:
        """By what share expected costs exceed the budget, summed over its bounds.

        A scalar, 0 where ``cost(E[widths])`` fits; with the gradient to ``E[m]``
        ``(num_channels,)``.
        """
        widths, costs = self.expected_widths(keep_probability), self.costs_of(budget)
        limits = budget.limits(costs)
        shares = [cost(widths) / limit for cost, limit in zip(costs, limits, strict=True)]
        return (torch.stack(shares) - 1).clamp_min(0).sum()

    def _ladders(self, multiple: int | None = None) -> Iterator[Ladder]:
        """Allowed widths, ever finer."""
        for step in halvings(multiple or self.round_to or 1):
            yield self._ladder(step)

    def _ladder(self, multiple: int) -> Ladder:
        """Made once: channels are chosen at every step of meta-fitting."""
        if multiple not in self._made:
            self._made[multiple] = Ladder.of(self.graph, self._floor, multiple)
        return self._made[multiple]

    def full_widths(self) -> torch.Tensor:
        """Channels of every group, ``(G,)`` float64."""
        return torch.tensor([group.size for group in self.graph.groups], dtype=torch.float64)

    def _least_widths(self) -> torch.Tensor:
        return torch.from_numpy(self._finest.least * self._blocks).double()

    def _checked(self, scores: npt.ArrayLike) -> FloatArray:
        values = np.asarray(scores, dtype=np.float64)
        if values.shape != (self.graph.num_channels,) or not np.isfinite(values).all():
            raise PlanError(
                f"scores of shape {values.shape} must be {self.graph.num_channels} finite numbers"
            )
        return values

    def _ranked(self, values: FloatArray) -> list[IntArray]:
        """Channels of each block from best to worst, ``(blocks, block size)`` a group."""
        blocks = [values[g.channels].reshape(g.blocks, -1) for g in self.graph.groups]
        return [np.argsort(-block, axis=1, kind="stable") for block in blocks]

    def _merits(self, values: FloatArray, ranked: list[IntArray]) -> list[FloatArray]:
        """Scores of each group, falling, as means over its blocks: ``(block size,)`` a group."""
        return [
            np.take_along_axis(values[g.channels].reshape(order.shape), order, axis=1).mean(axis=0)
            for g, order in zip(self.graph.groups, ranked, strict=True)
        ]

    def _plan(self, ranked: list[IntArray], widths: IntArray) -> ChannelPlan:
        keep: BoolArray = np.zeros(self.graph.num_channels, dtype=bool)
        for group, order, width in zip(self.graph.groups, ranked, widths.tolist(), strict=True):
            offsets = group.start + np.arange(group.blocks)[:, None] * group.block_size
            keep[(offsets + order[:, :width]).ravel()] = True
        return ChannelPlan(self.graph, keep)

    def _out_of_reach(self, budget: Budget) -> str:
        """Why a budget cannot be met: the least reachable costs and the layers that hold them."""
        costs = self.costs_of(budget)
        least = [
            f"{self.least(c):.4g} {c.unit} ({self.least(c) / c.full:.2%} of the full network's)"
            for c in costs
        ]
        missed = [
            f"{c.unit}: {self._held(c)}"
            for c, limit in zip(costs, budget.limits(costs), strict=True)
            if self.least(c) > limit
        ]
        bounds = budget.bounds().items()
        percent = [
            f"{name}={bound / 100:g}"
            for name, bound in bounds
            if 1 < bound <= 100 and not name.endswith("_ms")
        ]
        share = f"; for a share of the full network pass {', '.join(percent)}" if percent else ""
        return (
            f"{budget} cannot be met: the least reachable is {', '.join(least)}. What holds it: "
            f"{'; '.join(missed)}. Ask for more, lower floor, or protect less{share}"
        )

    def _held(self, cost: Cost) -> str:
        """The dearest layers of the least network, each with what keeps it from shrinking."""
        widths = self._least_widths()
        total, shares = float(cost(widths)), cost.per_layer(widths)
        names = list(self.graph.layers)
        dearest = [i for i in shares.argsort(descending=True).tolist() if shares[i] > 0]
        parts = [
            f"{names[i]} {float(shares[i]) / total:.1%} ({self._reason(names[i])})"
            for i in dearest[:_NAMED]
        ]
        named = float(shares[dearest[:_NAMED]].sum())
        others = {"what is done outside of layers": cost.constant}
        others["all else"] = total - named - cost.constant
        parts += [f"{n} {v / total:.1%}" for n, v in others.items() if v > 1e-4 * total]
        return ", ".join(parts)

    def _reason(self, name: str) -> str:
        if name in self.graph.protected:
            return f"left whole: {self.graph.protected[name]}"
        outputs = self.graph.layers[name].outputs
        groups = np.unique(self.graph.group_of[outputs[outputs != KEPT]])
        kept = self._least_widths()
        floors = [
            f"{self.graph.groups[g].name} at its floor of {int(kept[g])} of "
            f"{self.graph.groups[g].size} channels"
            for g in groups[:2]
        ]
        more = f" and {len(groups) - 2} more" if len(groups) > 2 else ""
        return f"{', '.join(floors)}{more}" if floors else "nothing of it can be removed"
