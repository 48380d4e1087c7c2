"""Channel plans: random ones, records, and what is refused."""

import json

import numpy as np
import pytest
import torch
from nets import CASES, grouped, noise, plain, seeded

from stamppruner import ChannelPlan, trace_channels
from stamppruner.channels import ChannelGraph, ChannelGroup
from stamppruner.errors import PlanError


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def graph(request):
    return trace_channels(request.param.model(), noise(1, *request.param.shapes[0]))


@pytest.fixture(scope="module")
def blocked():
    return trace_channels(seeded(grouped), torch.zeros(1, 3, 8, 8))


def test_same_seed_same_plan(graph):
    assert ChannelPlan.random(graph, 0.5, 7) == ChannelPlan.random(graph, 0.5, 7)
    assert ChannelPlan.random(graph, 0.5, 7) != ChannelPlan.random(graph, 0.5, 8)


def test_equal_plans_hash_alike(graph):
    assert len({ChannelPlan.random(graph, 0.5, 7), ChannelPlan.random(graph, 0.5, 7)}) == 1


@pytest.mark.parametrize("keep", [0.001, 0.3, 0.5, 1])
def test_random_keeps_the_share_of_every_block(graph, keep):
    plan = ChannelPlan.random(graph, keep)
    for group in graph.groups:
        counts = plan.keep[group.channels].reshape(group.blocks, -1).sum(1)
        assert (counts == max(1, round(keep * group.block_size))).all()


@pytest.mark.parametrize("keep", [0, -0.1, 1.5, float("nan")])
def test_random_refuses_shares_outside_0_to_1(graph, keep):
    with pytest.raises(PlanError, match="share of channels"):
        ChannelPlan.random(graph, keep)


def test_record_survives_json(graph):
    plan = ChannelPlan.random(graph, 0.4, 3)
    record = json.loads(json.dumps(plan.record()))
    assert ChannelPlan.from_record(graph, record) == plan
    assert record.keys() == {group.name for group in graph.groups}


def test_groups_that_a_record_leaves_out_are_whole(graph):
    assert ChannelPlan.from_record(graph, {}) == ChannelPlan.full(graph)


@pytest.mark.parametrize("kept", [[], [-1], [8], [0.5], ["a"]])
def test_from_record_refuses_bad_indices(kept):
    graph = trace_channels(seeded(plain), torch.zeros(1, 3, 8, 8))
    with pytest.raises(PlanError, match=r"'0\.0': kept channels must be integers in \[0, 8\)"):
        ChannelPlan.from_record(graph, {"0.0": kept})


def test_from_record_refuses_unknown_groups(graph):
    with pytest.raises(PlanError, match="no group 'elsewhere'"):
        ChannelPlan.from_record(graph, {"elsewhere": [0]})


@pytest.mark.parametrize("length", [0, 1, 1000])
def test_keep_of_another_length_is_refused(graph, length):
    with pytest.raises(PlanError, match="build the plan from the same graph"):
        ChannelPlan(graph, np.ones(length, dtype=bool))


def test_keep_of_another_dtype_is_refused(graph):
    with pytest.raises(PlanError, match="int64"):
        ChannelPlan(graph, np.ones(graph.num_channels, dtype=np.int64))


def test_a_group_without_channels_is_refused(graph):
    keep = np.ones(graph.num_channels, dtype=bool)
    keep[graph.groups[-1].channels] = False
    with pytest.raises(PlanError, match="keeps no channel"):
        ChannelPlan(graph, keep)


def test_unequal_blocks_are_refused(blocked):
    keep = np.ones(blocked.num_channels, dtype=bool)
    group = next(group for group in blocked.groups if group.blocks > 1)
    keep[group.start] = False
    with pytest.raises(PlanError, match="keep the same number in each"):
        ChannelPlan(blocked, keep)


def test_multiples_hold_unless_the_block_is_whole():
    graph = ChannelGraph((ChannelGroup("a", 0, 10, multiple=4),), {})
    for count, valid in ((4, True), (8, True), (10, True), (3, False), (6, False), (9, False)):
        keep = np.arange(10) < count
        if valid:
            assert ChannelPlan(graph, keep).keep.sum() == count
        else:
            with pytest.raises(PlanError, match="multiple of 4"):
                ChannelPlan(graph, keep)
    assert ChannelPlan.random(graph, 0.01).keep.sum() == 4


def test_plans_do_not_change(graph):
    vector = np.ones(graph.num_channels, dtype=bool)
    plan = ChannelPlan(graph, vector)
    vector[:] = False
    assert plan.keep.all()
    with pytest.raises(ValueError, match="read-only"):
        plan.keep[0] = False


def test_cut_layers_lists_what_loses_something():
    graph = trace_channels(seeded(plain), torch.zeros(1, 3, 8, 8))
    plan = ChannelPlan.from_record(graph, {"0.0": [0, 5]})
    lost = {layer.name: (i.sum(), o.sum()) for layer, i, o in plan.cut_layers()}
    assert lost == {"0.0": (3, 2), "0.1": (2, 2), "2.0": (2, 12)}


def test_descriptions_count():
    graph = trace_channels(seeded(plain), torch.zeros(1, 3, 8, 8))
    assert (
        str(graph) == "26 removable channels in 3 groups (0 with equal blocks), 1 layers protected"
    )
    assert str(ChannelPlan.random(graph, 0.5)) == "keeps 13 of 26 channels"
