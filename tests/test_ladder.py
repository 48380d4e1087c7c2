"""Allowed widths, and the climb over them."""

import itertools

import numpy as np
import pytest

from stamppruner.channels import ChannelGraph, ChannelGroup
from stamppruner.ladder import Ladder


def graph_of(*shapes):
    """Groups by size, or (size, blocks), or (size, blocks, multiple)."""
    groups, start = [], 0
    for number, shape in enumerate(shapes):
        size, blocks, multiple = (*np.atleast_1d(shape).tolist(), 1, 1)[:3]
        groups.append(ChannelGroup(f"g{number}", start, size, blocks, multiple=multiple))
        start += size
    return ChannelGraph(tuple(groups), {})


def rungs(shape, floor=0.0, round_to=8):
    return Ladder.of(graph_of(shape), floor, round_to).rungs[0].tolist()


@pytest.mark.parametrize(
    ("shape", "step"),
    [(7, 1), (15, 1), (16, 2), (31, 2), (32, 4), (63, 4), (64, 8), (512, 8), ((64, 4), 2),
     ((256, 4), 2), ((256, 8), 1), ((48, 1, 3), 6), ((40, 1, 40), 40), ((96, 2, 3), 6)],
)  # fmt: skip
def test_steps_follow_the_width_of_the_group(shape, step):
    """Halvings of 8, until the block is eight steps wide; blocks share the multiple."""
    found = rungs(shape)
    size, blocks, _ = (*np.atleast_1d(shape).tolist(), 1, 1)[:3]
    assert found == [*range(step, size // blocks, step), size // blocks]


def test_the_floor_is_rounded_up_and_the_whole_is_always_allowed():
    assert rungs(100, floor=0.1) == [16, 24, 32, 40, 48, 56, 64, 72, 80, 88, 96, 100]
    assert rungs(100, floor=0.99) == [100]
    assert rungs(5, floor=0.5, round_to=1) == [3, 4, 5]


def test_nearest():
    ladder = Ladder.of(graph_of(100, 5), 0.1, 8)
    counts = [(0, 0), (19, 1), (20, 2), (21, 5), (97, 3), (99, 4), (100, 5)]
    found = [ladder.nearest(np.array(c)).tolist() for c in counts]
    assert found == [[16, 1], [16, 1], [16, 2], [24, 5], [96, 3], [100, 4], [100, 5]]


def climb(ladder, merits, price, limit):
    widths = ladder.climb(merits, lambda w: (w * price).sum(-1) <= limit)
    return widths.tolist()


def test_rungs_are_taken_by_merit_and_too_dear_ones_are_passed_over():
    ladder = Ladder.of(graph_of(64, 64), 0.0, 8)
    merits = [np.linspace(1, 0.5, 64), np.linspace(0.4, 0.1, 64)]
    price = np.array([10, 1])
    assert climb(ladder, merits, price, 88 + 159) == [16, 64]  # two of the first would be 248
    assert climb(ladder, merits, price, 88 + 160) == [24, 8]
    assert climb(ladder, merits, price, 88 + 175) == [24, 16]


def test_without_rounding_the_climb_ends_at_the_first_that_is_too_dear():
    ladder = Ladder.of(graph_of(8, 8), 0.0, 1)
    merits = [np.linspace(1, 0.5, 8), np.linspace(0.4, 0.1, 8)]
    assert climb(ladder, merits, np.array([10, 1]), 39) == [3, 1]


@pytest.mark.parametrize("seed", range(5))
def test_cost_rises_with_the_limit(seed):
    rng = np.random.default_rng(seed)
    ladder = Ladder.of(graph_of(64, (96, 2), 30, (48, 1, 3), 128), 0.0, 8)
    merits = [np.sort(rng.random(r[-1]))[::-1] for r in ladder.rungs]
    price = rng.integers(1, 30, 5)
    costs = [
        float((climb(ladder, merits, price, limit) * price).sum())
        for limit in range(int((ladder.least * price).sum()), 3000, 7)
    ]
    assert all(a <= b for a, b in itertools.pairwise(costs))
    assert len(set(costs)) > 50


def test_equal_merits_fill_in_the_order_of_the_groups():
    ladder = Ladder.of(graph_of(64, 64), 0.0, 8)
    assert climb(ladder, [np.ones(64), np.ones(64)], np.array([1, 1]), 80) == [64, 16]
