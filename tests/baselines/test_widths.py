"""Widths that are drawn under a budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nets import grouped
from stripes import SIZE, loader, vgg

from stamppruner import Budget, trace_channels
from stamppruner.baselines import Random, RandomWidths
from stamppruner.baselines._widths import TOLERANCE, WidthSpace, keep_of
from stamppruner.budget import Chooser
from stamppruner.errors import BudgetError, ConfigError
from stamppruner.models import VGG

X = torch.zeros(1, 3, SIZE, SIZE)
ALL = (0.1, 1.0)


def wide() -> VGG:
    return VGG(((16, 16), (32, 32)), 6)


def space(
    budget: Budget, *, round_to: int = 1, floor: float = 0.05, shares: Any = ALL
) -> WidthSpace:
    model = wide()
    chooser = Chooser(model, trace_channels(model, X), floor=floor, round_to=round_to)
    return WidthSpace(chooser, budget, floor=floor, round_to=round_to, shares=shares)


@pytest.mark.parametrize("budget", [Budget(macs=0.3), Budget(params=0.3), Budget(params=5000)])
def test_draws_meet_the_budget_and_use_it(budget: Budget) -> None:
    where = space(budget)
    random = np.random.default_rng(0)
    drawn = np.stack([where.draw(random) for _ in range(50)])
    used = where.used(drawn)
    assert (used <= 1).all()
    assert (used >= 1 - TOLERANCE).all()
    shares = where.relative(drawn)
    assert len(np.unique(drawn, axis=0)) > 40
    assert (shares.std(0) > 0.1).all()  # every layer has a width of its own
    assert shares.min() >= 0.09
    assert where.fits(drawn).all()


def test_used_is_the_share_of_the_tightest_bound() -> None:
    """VGG of 3-16-16-32-32-6: parameters and multiply-adds counted by hand."""
    where = space(Budget(params=10000, macs=1e6))
    a, b, c, d = widths = (4, 8, 16, 8)
    macs = 9 * (64 * (3 * a + a * b) + 16 * (b * c + c * d)) + 6 * d
    params = 9 * (3 * a + a * b + b * c + c * d) + 2 * sum(widths) + 6 * d + 6
    assert float(where.used(np.array(widths))) == pytest.approx(max(macs / 1e6, params / 10000))


def test_shares_bound_what_is_drawn() -> None:
    where = space(Budget(macs=0.36), shares=(0.4, 0.8))
    random = np.random.default_rng(0)
    shares = np.stack([where.relative(where.draw(random)) for _ in range(30)])
    assert shares.min() >= 0.4 - 1 / 32
    assert shares.max() <= 0.8 + 1 / 32


@pytest.mark.parametrize("share", [0.012, 0.97])
def test_budgets_that_no_draw_meets_scale_a_draw(share: float) -> None:
    where = space(Budget(macs=share))
    widths = where.draw(np.random.default_rng(0))
    assert 0.7 < float(where.used(widths)) <= 1


def test_multiples_and_floors_hold() -> None:
    where = space(Budget(macs=0.5), round_to=2, floor=0.5)
    random = np.random.default_rng(0)
    for _ in range(20):
        widths = where.draw(random)
        assert not (widths % 2).any()
        assert (where.relative(widths) >= 0.5).all()


def test_some_groups_are_drawn_anew() -> None:
    where = space(Budget(macs=0.3))
    random = np.random.default_rng(0)
    widths = where.draw(random)
    moved = np.stack(
        [where.moved(widths, np.array([False, True, False, True]), random) for _ in range(20)]
    )
    assert (moved[:, [0, 2]] == widths[[0, 2]]).all()
    assert (moved[:, [1, 3]] != widths[[1, 3]]).any(0).all()


def test_kept_channels_are_the_first_or_the_best_of_every_block() -> None:
    graph = trace_channels(grouped(), torch.zeros(1, 3, 8, 8))
    blocks = [g.blocks for g in graph.groups]
    assert max(blocks) == 4
    widths = [2 if g.blocks == 4 else 3 for g in graph.groups]
    scores = np.random.default_rng(0).random(graph.num_channels)
    first, best = keep_of(graph, widths), keep_of(graph, widths, scores)
    for group, width in zip(graph.groups, widths, strict=True):
        rows = first[group.channels].reshape(group.blocks, -1)
        assert (rows == (np.arange(group.block_size) < width)).all()
        chosen = best[group.channels].reshape(group.blocks, -1)
        values = scores[group.channels].reshape(group.blocks, -1)
        assert (chosen.sum(1) == width).all()
        assert all(v[c].min() > v[~c].max() for v, c in zip(values, chosen, strict=True))


def test_times_and_budgets_out_of_reach_are_refused() -> None:
    with pytest.raises(BudgetError, match="latency_ms is not"):
        space(Budget(latency_ms=0.5))
    with pytest.raises(BudgetError, match="least reachable"):
        space(Budget(macs=1e-5))


def shares_of(result: Any) -> np.ndarray:
    plan = result.plan
    return np.array([plan.keep[g.channels].mean() for g in plan.graph.groups])


def test_random_widths_differ_from_layer_to_layer_and_random_ones_do_not() -> None:
    budget = Budget(macs=0.3)
    kinds = {
        kind: np.stack(
            [
                shares_of(
                    kind(seed=s, round_to=1, measure_latency=False).prune(wide(), loader(), budget)
                )
                for s in range(3)
            ]
        )
        for kind in (Random, RandomWidths)
    }
    assert (np.ptp(kinds[Random], axis=1) < 0.1).all()
    assert (np.ptp(kinds[RandomWidths], axis=1) > 0.2).all()
    assert len(np.unique(kinds[RandomWidths], axis=0)) == 3


def test_random_widths_keep_random_channels() -> None:
    result = RandomWidths(round_to=1).prune(vgg(), loader(), Budget(macs=0.5))
    first = keep_of(
        result.plan.graph,
        [int(result.plan.keep[g.channels].sum()) for g in result.plan.graph.groups],
    )
    assert (result.plan.keep != first).any()


@pytest.mark.parametrize("shares", [(0.0, 1.0), (0.5, 0.4), (0.5, 1.1), (0.5,)])
def test_values_out_of_range_are_refused(shares: Any) -> None:
    with pytest.raises(ConfigError, match="shares"):
        RandomWidths(shares=shares)
