"""From scores and a budget to a plan whose network was measured, where the budget is a time.

The same holds for widths: which multiples are fast is measured on whole networks, for budgets of a
time, and on request (``round_to=None``) for others.

Costs that are functions of the widths are met by the choice alone. A time is predicted from tables
first; then the candidate is cut and measured beside the full network, the limit on predictions is
moved, and channels are chosen again, until the time that was *measured* lies just under the budget.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from torch import nn

from stamppruner import ranks
from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelPlan, FloatArray
from stamppruner.costs import Latency, LatencyMs, check_amp
from stamppruner.errors import BudgetError
from stamppruner.surgery import cut

logger = logging.getLogger(__name__)

_TRIALS = 10
"""Candidates that are measured at most."""

_MORE = 6
"""Candidates that are measured on top of one that leaves much of the budget unused."""

_STEPS = 60
"""Moves of the limits at most; most of them lead to candidates that are known."""

_AIM = 0.985
"""Share of a bound that the next candidate aims at: measurements scatter."""

_NEAR = 0.98
"""Share of a bound that is near enough."""

_PERHAPS = 1.1
"""Share of a bound up to which a candidate may have failed by chance, and is measured again."""

_INSIDE = 0.1
"""Share of a bracket by which the next limit keeps away from its ends."""

MULTIPLES = (8, 16, 32, 64)
"""Steps between widths that are compared."""

_AS_FAST = 1.03
"""Time a multiply-add, over the best one, up to which a finer step is taken."""

_NARROW = 0.003
"""Share of all predictions below which a bracket is done."""


@dataclass(frozen=True)
class Times:
    """Milliseconds, in one setting.

    Attributes:
        before: measured, of the full network.
        after: measured, of the network that is left.
        predicted: of it, by the tables.
    """

    before: float
    after: float
    predicted: float


@dataclass(frozen=True)
class Met:
    """A plan that meets a budget, and its times, by cost, where the budget bounds them."""

    plan: ChannelPlan
    times: Mapping[str, Times] = field(default_factory=dict)


def meet(dense: nn.Module, chooser: Chooser, scores: FloatArray, budget: Budget) -> Met:
    """Choose channels so that the budget holds, by measurement where it is a time.

    Args:
        dense: the full network.
        chooser: of it.
        scores: ``(num_channels,)``, larger is kept longer.
        budget: what must hold.

    Raises:
        BudgetError: it cannot be met; of a time, the least that was measured is named.
    """
    check_amp(dense, budget.setting)
    timed = [cost for cost in chooser.costs_of(budget) if isinstance(cost, Latency)]
    if not timed and chooser.round_to is not None:
        return Met(chooser.choose(scores, budget))

    def measured() -> tuple[npt.NDArray[np.bool_], Mapping[str, Times]]:
        clock = timed[0] if timed else chooser.cost(LatencyMs.name, budget.setting)
        search = _Search(dense, chooser, scores, budget, timed)
        assert isinstance(clock, Latency)
        plan = search.fastest(clock)
        found = search.run() if timed else Met(plan)
        return found.plan.keep, found.times

    keep, times = ranks.from_first(measured)
    return Met(ChannelPlan(chooser.graph, keep), times)


class _Bracket:
    """Where, among predicted times of one cost, the bound is met.

    Measured times are taken as linear between the longest prediction that is known to fit and the
    shortest that does not.

    Args:
        cost: of the bound.
        full: predicted for the full network.
        least: for the floors.
        bound: milliseconds that must hold.
    """

    def __init__(self, cost: Latency, full: float, least: float, bound: float) -> None:
        self.cost, self.bound = cost, bound
        self._span = full - least
        self._fits, self._fails = (least, bound * least / full), (full, max(cost.full, bound))
        self._longest = self._fits
        self._failed = [self._fails]
        self.limit = min(full, _AIM * bound)

    @property
    def is_narrow(self) -> bool:
        """Whether nothing is left between what fits and what does not."""
        return self._fails[0] - self._fits[0] < _NARROW * self._span

    def learn(self, predicted: float, measured: float) -> None:
        """Note a candidate, and move the limit for the next one."""
        if measured <= self.bound:
            stuck = self.limit <= self._fits[0]
            self._fits = max(self.limit, self._fits[0]), measured
            self._longest = max(self._longest, (predicted, measured))
        else:
            stuck = predicted >= self._fails[0]
            self._fails = min(predicted, self._fails[0]), measured
            self._failed.append((predicted, measured))
        self._move(stuck=stuck)

    def widen(self) -> None:
        """Look again between the candidates on both sides of the bound, as there are finer ones."""
        self._fits = self._longest
        self._move()

    def go_on_from(self, predicted: float, measured: float, *, anew: bool) -> None:
        """Look between a candidate that fits and the next longer prediction that failed.

        Shorter ones that failed are passed over; ``anew``, all but the full network are.
        """
        self._fits = self._longest = predicted, measured
        if anew:
            del self._failed[1:]
        longer = [failed for failed in self._failed if failed[0] > predicted]
        self._fails = min(longer, default=self._failed[0])
        self._move()

    def _move(self, *, stuck: bool = False) -> None:
        (low, short), (high, long) = self._fits, self._fails
        at = (_AIM * self.bound - short) / (long - short) if long > short else 0.5
        at = 0.5 if stuck else min(max(at, _INSIDE), 1 - _INSIDE)
        self.limit = low + at * (high - low)


class _Search:
    """Measures candidates and moves the limits on predictions."""

    def __init__(
        self,
        dense: nn.Module,
        chooser: Chooser,
        scores: FloatArray,
        budget: Budget,
        timed: list[Latency],
    ) -> None:
        self.dense, self.chooser, self.scores, self.budget = dense, chooser, scores, budget
        full = chooser.full_widths()
        limits = dict(zip(timed, budget.limits(timed), strict=True))
        self.brackets = [
            _Bracket(cost, float(cost(full)), chooser.least(cost), limit)
            for cost, limit in limits.items()
        ]
        self.known: dict[bytes, Met] = {}
        self.coarsest: dict[bytes, int | None] = {}
        self.confirmed: set[bytes] = set()
        self.left: set[bytes] = set()
        self.base = np.zeros(len(scores), dtype=bool)
        finest = chooser.round_to or 1
        self.multiples = [m for m in (finest, *MULTIPLES) if m % finest == 0]
        self.multiple = chooser.round_to

    def fastest(self, clock: Latency) -> ChannelPlan:
        """Find the multiple for widths that is fast on the device, and the plan that has it.

        Networks whose widths are multiples of each of :data:`MULTIPLES` (and ``round_to``) are cut
        to what the budget allows and measured in turns; the finest one whose time is within
        :data:`_AS_FAST` of the best is taken, as finer steps follow the scores more closely.

        Args:
            clock: a cost in milliseconds, by which they are measured.
        """
        plans: dict[bytes, tuple[int, ChannelPlan]] = {}
        for multiple in self.multiples:
            self.multiple = multiple
            plan = self._candidate()
            plans.setdefault(plan.keep.tobytes(), (multiple, plan))
        found = list(plans.values())
        taken = [0.0] * len(found)
        if len(found) > 1:
            times = clock.measure([cut(self.dense, plan) for _, plan in found])
            macs = self.chooser.costs["macs"]
            taken = [
                time / float(macs(self.chooser.widths(plan)))
                for time, (_, plan) in zip(times, found, strict=True)
            ]
        best = next(i for i, time in enumerate(taken) if time <= _AS_FAST * min(taken))
        self.multiple, plan = found[best]
        logger.info("widths are multiples of %d", self.multiple)
        return plan

    def run(self) -> Met:
        """The candidate with the best scores, of those whose measured times fit.

        Where steps of the fast multiple leave part of the budget unused, finer ones are tried.
        """
        best, most, trials = None, -np.inf, _TRIALS
        for _ in range(_STEPS):
            met = self._measured(self._candidate())
            used = self._most_used(met)
            if _NEAR <= used <= _PERHAPS:
                met = self._confirmed(met)
                used = self._most_used(met)
            logger.info("a plan that %s takes %.3f of the budget", met.plan, used)
            kept = float(self.scores[met.plan.keep].sum())
            if used <= 1 and kept > most:
                best, most = met, kept
            done = _NEAR <= used <= 1
            if not done:
                for bracket in self.brackets:
                    predicted = met.times[bracket.cost.name].predicted
                    bracket.learn(predicted, self._used(bracket, met) * bracket.bound)
                done = all(bracket.is_narrow for bracket in self.brackets) and not self._finer()
            if done or len(self.known) >= trials:
                if not self._goes_on_from(best):
                    break
                trials = len(self.known) + _MORE
        if best is None:
            raise BudgetError(self._missed())
        return best

    def _goes_on_from(self, best: Met | None) -> bool:
        """Search above the best candidate, if it leaves much of the budget unused.

        Times are no smooth function of the widths: a slower candidate with worse scores may lie
        nearer to the bound. First all longer predictions are tried; then what has all channels of
        the best candidate, and more, and so better scores.
        """
        if best is None or self._most_used(best) >= _NEAR or (best.plan.keep == self.base).all():
            return False
        key = best.plan.keep.tobytes()
        anew = key in self.left
        self.left.add(key)
        if anew:
            self.base, self.multiple = best.plan.keep, self.coarsest[key]
        for bracket in self.brackets:
            predicted = best.times[bracket.cost.name].predicted
            measured = self._used(bracket, best) * bracket.bound
            bracket.go_on_from(predicted, measured, anew=anew)
        return True

    def _finer(self) -> bool:
        """Go on with the next finer multiple, if there is one."""
        finer = [m for m in self.multiples if m < (self.multiple or 1)]
        if finer:
            self.multiple = max(finer)
            for bracket in self.brackets:
                bracket.widen()
        return bool(finer)

    def _candidate(self) -> ChannelPlan:
        """What the predictions allow; if that is nothing, the floors."""
        bounds = {b.cost.name: b.limit for b in self.brackets}
        scores = self.scores + self.base * np.ptp(self.scores)
        try:
            return self.chooser.choose(
                scores, self.budget, predicted=bounds, multiple=self.multiple
            )
        except BudgetError:
            for cost in self.chooser.costs_of(self.budget):
                (limit,) = self.budget.limits([cost])
                if cost.name not in bounds and self.chooser.least(cost) > limit:
                    raise
            return self.chooser.floors(self.scores)

    def _measured(self, plan: ChannelPlan) -> Met:
        key = plan.keep.tobytes()
        if key not in self.known:
            self.known[key] = Met(plan, self._times(plan))
            self.coarsest[key] = self.multiple
        return self.known[key]

    def _times(self, plan: ChannelPlan) -> dict[str, Times]:
        """Measure a plan's network beside the full one."""
        slim, widths = cut(self.dense, plan), self.chooser.widths(plan)
        times = {}
        for bracket in self.brackets:
            before, after = bracket.cost.measure([self.dense, slim])
            times[bracket.cost.name] = Times(before, after, float(bracket.cost(widths)))
        return times

    def _confirmed(self, met: Met) -> Met:
        """The same with times that are means of two measurements.

        Else the luckiest candidate would be taken, and an unlucky one would bar all larger ones.
        """
        key = met.plan.keep.tobytes()
        if key not in self.confirmed:
            self.confirmed.add(key)
            again = self._times(met.plan)
            times = {
                name: Times((a.before + b.before) / 2, (a.after + b.after) / 2, a.predicted)
                for (name, a), b in zip(met.times.items(), again.values(), strict=True)
            }
            self.known[key] = Met(met.plan, times)
        return self.known[key]

    def _most_used(self, met: Met) -> float:
        return max(self._used(bracket, met) for bracket in self.brackets)

    def _used(self, bracket: _Bracket, met: Met) -> float:
        """Share of the bound that was measured; shares are of the full network beside it."""
        name = bracket.cost.name
        bound, times = self.budget.bounds()[name], met.times[name]
        return times.after / (bound * times.before if bound <= 1 else bound)

    def _missed(self) -> str:
        """Why no candidate fits."""
        least = min(self.known.values(), key=lambda m: max(t.after for t in m.times.values()))
        found = ", ".join(
            f"{t.after:.3g} ms measured ({t.after / t.before:.1%} of the full network's)"
            for t in least.times.values()
        )
        return (
            f"{self.budget} cannot be met: the least that was reached is {found}. Ask for more, "
            "lower floor, or protect less"
        )
