"""Budgets in milliseconds, on a clock that counts multiply-adds: the search, without noise."""

import copy
from zlib import crc32

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stamppruner import Budget, summary, trace_channels
from stamppruner.baselines import Magnitude
from stamppruner.budget import Chooser
from stamppruner.costs import LatencyMs, TrainStepMs
from stamppruner.costs._clock import LayerClock
from stamppruner.errors import BudgetError
from stamppruner.meet import meet
from stamppruner.models import resnet18
from stamppruner.surgery import cut

MODEL = resnet18(10, width=0.5).eval()
GRAPH = trace_channels(MODEL, torch.zeros(1, 3, 32, 32))
SCORES = np.random.default_rng(0).random(GRAPH.num_channels)


def clock(milliseconds):
    """A clock that reads ``milliseconds(model, millions of operations a batch)``."""

    def timed(models, inputs, *, samples, seconds):
        found = []
        for model in models:
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                inputs.random(samples, 0).call(model)
            found.append(milliseconds(model, counter.get_total_flops() / 1e6))
        return found

    return staticmethod(timed)


@pytest.fixture
def tables(monkeypatch):
    """What tables of layers predict, kept on no disk."""
    monkeypatch.setattr(LayerClock, "_time", lambda _clock, _module, _shape, i, o: 1e-3 * i * o + 1)
    monkeypatch.setenv("STAMPPRUNER_CACHE", "")


@pytest.fixture(params=[0.4, 1.0, 1.6], ids=lambda power: f"macs**{power}")
def chooser(request, monkeypatch, tables):
    monkeypatch.setattr(LatencyMs, "timed", clock(lambda _, work: work**request.param))
    monkeypatch.setattr(TrainStepMs, "timed", clock(lambda _, work: 3 * work))
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


@pytest.mark.parametrize("rung", [1, 8])
def test_a_budget_above_the_full_network_keeps_it(chooser, rung):
    own = Chooser(MODEL, GRAPH, round_to=rung)
    met = meet(MODEL, own, SCORES, Budget(latency_ms=2 * chooser.cost("latency_ms").full))
    assert met.plan.keep.all()


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


def wasteful(multiple, factor=1.3):
    """A clock that is slow for convolutions whose widths are no multiples."""

    def milliseconds(model, work):
        widths = [m.out_channels for m in model.modules() if isinstance(m, nn.Conv2d)]
        odd = any(width > 4 and width % multiple for width in widths)
        return work * (factor if odd else 1.0)

    return clock(milliseconds)


WIDE = nn.Sequential(nn.Conv2d(3, 512, 3), nn.ReLU(), nn.Conv2d(512, 512, 1), nn.ReLU(),
                     nn.Conv2d(512, 4, 1)).eval()  # fmt: skip
WIDE_GRAPH = trace_channels(WIDE, torch.zeros(1, 3, 6, 6))
WIDE_SCORES = np.random.default_rng(0).random(WIDE_GRAPH.num_channels)


@pytest.mark.parametrize("multiple", [1, 16, 64])
@pytest.mark.parametrize("budget", [Budget(macs=0.4), Budget(latency_ms=0.5)], ids=str)
def test_the_finest_widths_that_are_fast_are_taken(monkeypatch, tables, multiple, budget):
    monkeypatch.setattr(LatencyMs, "timed", wasteful(multiple))
    chooser = Chooser(WIDE, WIDE_GRAPH, round_to=None)
    met = meet(WIDE, chooser, WIDE_SCORES, budget)
    kept = [int(met.plan.keep[g.channels].sum()) for g in WIDE_GRAPH.groups]
    assert all(count % multiple == 0 for count in kept)
    finer = chooser.choose(WIDE_SCORES, Budget(macs=0.4), multiple=multiple)
    if budget.macs:
        assert (met.plan.keep == finer.keep).all()


@pytest.mark.parametrize("share", [0.6, 0.33, 0.2])
def test_finer_widths_use_what_fast_ones_leave(monkeypatch, tables, share):
    monkeypatch.setattr(LatencyMs, "timed", wasteful(64, 1.05))
    chooser = Chooser(WIDE, WIDE_GRAPH, round_to=None)
    times = meet(WIDE, chooser, WIDE_SCORES, Budget(latency_ms=share)).times["latency_ms"]
    assert 0.95 * share <= times.after / times.before <= share


def rough(salt):
    """A clock that any change of widths moves by up to a fifth."""

    def milliseconds(_model, work):
        chance = crc32(f"{salt} {round(work * 1e6)}".encode()) % 1000 / 1000
        return work * (1 + 0.2 * chance)

    return clock(milliseconds)


@pytest.mark.parametrize(
    ("salt", "share"), [(2, 0.35), (5, 0.5), (6, 0.5), (7, 0.35), (9, 0.35), (13, 0.35)]
)
def test_a_fast_network_does_not_end_the_search_for_larger_ones(monkeypatch, tables, salt, share):
    """A slower one with fewer channels lies just below the bound, and is no reason to stop."""
    monkeypatch.setattr(LatencyMs, "timed", rough(salt))
    chooser = Chooser(MODEL, GRAPH, floor=0.02, round_to=8)
    times = meet(MODEL, chooser, SCORES, Budget(latency_ms=share)).times["latency_ms"]
    assert 0.95 * share <= times.after / times.before <= share


def test_a_lucky_measurement_is_not_believed(chooser, monkeypatch):
    """Scatter of a tenth: of candidates that seem to fit, the mean of two times is taken."""
    exact, random = LatencyMs.timed, np.random.default_rng(0)

    def scattered(models, inputs, **kinds):
        found = exact(models, inputs, **kinds)
        return [found[0], *(time * random.uniform(0.9, 1.1) for time in found[1:])]

    off = []
    for _ in range(6):
        monkeypatch.setattr(LatencyMs, "timed", staticmethod(scattered))
        met = meet(MODEL, chooser, SCORES, Budget(latency_ms=0.5))
        monkeypatch.setattr(LatencyMs, "timed", staticmethod(exact))
        full, left = chooser.cost("latency_ms").measure([MODEL, cut(MODEL, met.plan)])
        off.append(left / full / 0.5 - 1)
    assert abs(np.mean(off)) < 0.04


def test_widths_are_not_compared_where_all_are_alike(chooser, monkeypatch):
    """The groups are too narrow for any of the steps to differ."""
    small = resnet18(10, width=0.0625).eval()
    graph = trace_channels(small, torch.zeros(1, 3, 32, 32))
    monkeypatch.setattr(LatencyMs, "measure", lambda *_: pytest.fail("measured"))
    own = Chooser(small, graph, round_to=8)
    scores = np.random.default_rng(0).random(graph.num_channels)
    assert not meet(small, own, scores, Budget(macs=0.5)).times


def test_a_clock_that_stands_still_ends(chooser, monkeypatch):
    monkeypatch.setattr(
        LatencyMs, "timed", staticmethod(lambda models, *_, **__: [1.0] * len(models))
    )
    met = meet(MODEL, chooser, SCORES, Budget(latency_ms=1.0))
    assert met.times["latency_ms"].after == 1
    with pytest.raises(BudgetError, match=r"100\.0%"):
        meet(MODEL, chooser, SCORES, Budget(latency_ms=0.5))


class Images(torch.utils.data.Dataset):
    """Labelled noise."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i):
        return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(i)), i % 10


def test_the_report_has_what_was_asked_predicted_and_measured(chooser):
    budget = Budget(latency_ms=0.6, activation_bytes=0.9, batch_size=4, threads=1)
    report = Magnitude().prune(MODEL, Images(), budget, graph=GRAPH).report
    before, after = report.before["latency_ms"], report.after["latency_ms"]
    assert report.budget == {"latency_ms": 0.6, "activation_bytes": 0.9}
    assert report.reached["latency_ms"] == pytest.approx(after / before)
    assert 0.56 <= report.reached["latency_ms"] <= 0.6
    assert report.reached["activation_bytes"] <= 0.9
    assert report.after["activation_bytes"] < report.before["activation_bytes"]
    assert report.settings["latency_ms_predicted"] > 0
    assert report.settings["latency_batch_size"] == 4
    assert "samples on cpu" in str(report)


def test_a_budget_without_a_time_is_reported_under_its_autocast(chooser):
    report = Magnitude().prune(MODEL, Images(), Budget(macs=0.5, amp=True), graph=GRAPH).report
    assert report.settings["latency_amp"]
    with pytest.raises(BudgetError, match="float64"):
        meet(
            copy.deepcopy(MODEL).double(), chooser, np.ones(GRAPH.num_channels),
            Budget(macs=0.5, amp=True),
        )  # fmt: skip


def test_a_network_that_is_not_faster_names_the_layers(monkeypatch):
    """The tables say that one layer takes as long with fewer channels."""

    def time(_clock, module, _shape, inputs, outputs):
        return 500.0 if getattr(module, "kernel_size", ()) == (3, 3) else 1e-4 * inputs * outputs

    monkeypatch.setattr(LayerClock, "_time", time)
    monkeypatch.setattr(summary, "latencies_ms", lambda *_, **__: [4.0, 4.5])
    monkeypatch.setenv("STAMPPRUNER_CACHE", "")
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 1), nn.ReLU(), nn.Conv2d(64, 64, 3),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    report = Magnitude().prune(model, Images(), Budget(macs=0.3)).report
    (warning,) = [w for w in report.warnings if w.startswith("latency did not fall")]
    named = warning.partition("layers that are not faster: ")[2].partition(":")[0].split(", ")
    assert {"4"} <= set(named) <= {"0", "4"}  # the first loses fewer channels
