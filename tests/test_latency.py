"""Latencies: of networks that take turns, in passes that stay short."""

import itertools
import time
from functools import partial

import pytest
import torch
from nets import noise, plain, seeded
from torch import nn

from stamppruner.inputs import Inputs
from stamppruner.latency import BATCH, batch_size, did_not_fall, in_turns_ms, latencies_ms


class Sleeps(nn.Module):
    """Takes a while, and counts its passes and their samples."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.seconds, self.seen = seconds, []

    def forward(self, x):
        self.seen.append((len(x), self.training, torch.is_grad_enabled()))
        time.sleep(self.seconds)
        return x * self.weight


def inputs(model):
    return Inputs.of(noise(1, 3, 8, 8, dtype=torch.float32), model)


def test_turns_are_taken_in_no_fixed_order():
    order = []

    def call(name):
        order.append(name)
        return 0.0

    in_turns_ms([partial(call, name) for name in "abc"], 0.01)
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert {"".join(sorted(found)) for found in rounds} == {"abc"}
    assert len(set(rounds)) > 2


@pytest.mark.parametrize("period", [2, 3])
def test_a_core_that_is_taken_away_again_and_again_slows_nobody(period):
    """In turns of a fixed order, every second pass is always that of the same network."""
    passes = itertools.count()

    def call():
        return 9.0 if next(passes) % period == 0 else 1.0

    assert in_turns_ms([call, call], 0.2) == [1.0, 1.0]


def test_times_in_the_order_of_the_models():
    quick, slow = Sleeps(0.002), Sleeps(0.02)
    a, b = latencies_ms([quick, slow], inputs(quick), samples=3)
    assert 2 <= a < b
    assert b >= 20
    assert quick.seen == slow.seen
    assert set(slow.seen) == {(3, False, False)}
    assert quick.training
    assert 4 <= len(slow.seen) < 15


def test_slow_networks_get_few_passes_and_large_ones_few_samples():
    slow = Sleeps(0.15)
    start = time.perf_counter()
    latencies_ms([slow], inputs(slow), samples=1)
    assert len(slow.seen) == 4
    assert time.perf_counter() - start < 1.5
    assert [batch_size(m) for m in (0, 1e3, 1e9, 5e11)] == [BATCH, BATCH, 2, 1]


def test_small_networks_are_done_in_a_moment():
    model = seeded(plain)
    start = time.perf_counter()
    latencies_ms([model, model], inputs(model), samples=BATCH)
    assert time.perf_counter() - start < 0.8


@pytest.mark.parametrize(
    ("before", "after", "left", "warns"),
    [(2, 1, 0.5, False), (2, 2, 0.5, True), (2, 3, 0.99, True), (2, 3, 1.0, False)],
)
def test_a_warning_where_it_did_not_fall(before, after, left, warns):
    text = did_not_fall(before, after, left=left, where="1 sample on cpu")
    assert (text is not None) == warns
    if text:
        assert f"({before} ms before, {after} ms after; 1 sample on cpu)" in text
        assert f"fell to {left:.0%}" in text
