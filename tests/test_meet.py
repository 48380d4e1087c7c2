"""Budgets in milliseconds, on a clock that counts multiply-adds: the search, without noise."""

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from stamppruner import Budget, trace_channels
from stamppruner.budget import Chooser
from stamppruner.costs import LatencyMs, TrainStepMs
from stamppruner.errors import BudgetError
from stamppruner.meet import meet
from stamppruner.models import resnet18
from stamppruner.surgery import cut

MODEL = resnet18(10, width=0.5).eval()
GRAPH = trace_channels(MODEL, torch.zeros(1, 3, 32, 32))
SCORES = np.random.default_rng(0).random(GRAPH.num_channels)


def clock(power: float, factor: float = 1.0):
    """Milliseconds as a power of the multiply-adds, a batch."""

    def timed(models, inputs, *, samples, seconds):
        found = []
        for model in models:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                inputs.random(samples, 0).call(model)
            found.append(factor * (counter.get_total_flops() / 1e6) ** power)
        return found

    return staticmethod(timed)


@pytest.fixture(params=[0.4, 1.0, 1.6], ids=lambda power: f"macs**{power}")
def chooser(request, monkeypatch):
    monkeypatch.setattr(LatencyMs, "timed", clock(request.param))
    monkeypatch.setattr(TrainStepMs, "timed", clock(1.0, 3.0))
    return Chooser(MODEL, GRAPH, floor=0.02)


@pytest.mark.parametrize("share", [0.8, 0.5, 0.35])
def test_what_was_measured_fits_and_uses_the_budget(chooser, share):
    cost = chooser.cost("latency_ms")
    met = meet(MODEL, chooser, SCORES, Budget(latency_ms=share))
    times = met.times["latency_ms"]
    assert 0.95 * share <= times.after / times.before <= share
    assert cost.measure([cut(MODEL, met.plan)]) == [pytest.approx(times.after)]
    assert times.predicted == pytest.approx(float(cost(chooser.widths(met.plan))))


def test_milliseconds_are_taken_as_they_are(chooser):
    whole = chooser.cost("latency_ms").full
    assert whole > 2
    met = meet(MODEL, chooser, SCORES, Budget(latency_ms=0.6 * whole))
    assert 0.57 * whole <= met.times["latency_ms"].after <= 0.6 * whole


def test_several_bounds_hold_at_once(chooser):
    budget = Budget(latency_ms=0.7, train_step_ms=0.3, macs=0.6, params=0.9)
    met = meet(MODEL, chooser, SCORES, budget)
    shares = {name: t.after / t.before for name, t in met.times.items()}
    for name in ("macs", "params"):
        cost = chooser.costs[name]
        shares[name] = float(cost(chooser.widths(met.plan))) / cost.full
    bounds = budget.bounds()
    assert all(shares[name] <= bound for name, bound in bounds.items())
    assert any(shares[name] >= 0.95 * bound for name, bound in bounds.items())


def test_out_of_reach_names_what_was_measured(chooser):
    with pytest.raises(BudgetError, match=r"ms measured \(.*% of the full network's\)"):
        meet(MODEL, chooser, SCORES, Budget(latency_ms=1e-5))
    with pytest.raises(BudgetError, match=r"least reachable.*MACs"):
        meet(MODEL, chooser, SCORES, Budget(latency_ms=0.5, macs=1e-5))


def test_budgets_of_widths_alone_measure_nothing(chooser, monkeypatch):
    monkeypatch.setattr(LatencyMs, "measure", lambda *_: pytest.fail("measured"))
    met = meet(MODEL, chooser, SCORES, Budget(macs=0.5))
    assert not met.times
    assert (met.plan.keep == chooser.choose(SCORES, Budget(macs=0.5)).keep).all()


def test_a_clock_that_stands_still_ends(chooser, monkeypatch):
    monkeypatch.setattr(
        LatencyMs, "timed", staticmethod(lambda models, *_, **__: [1.0] * len(models))
    )
    met = meet(MODEL, chooser, SCORES, Budget(latency_ms=1.0))
    assert met.times["latency_ms"].after == 1
    with pytest.raises(BudgetError, match=r"100\.0%"):
        meet(MODEL, chooser, SCORES, Budget(latency_ms=0.5))
