"""Channel groups: what is found on known wirings, against another tool, and on random nets."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_pruning as tp
from nets import CASES, Net, concat, conv_bn, head, noise, plain, residual, seeded, unet
from torch import nn

from stamppruner import ChannelPlan, check_equivalence, trace_channels
from stamppruner.channels import KEPT


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def traced(request):
    model = request.param.model()
    return model, trace_channels(model, noise(1, *request.param.shapes[0]))


def groups(graph):
    return {g.name: g.size for g in graph.groups}


def test_groups_cover_every_channel_once(traced):
    _, graph = traced
    covered = np.concatenate([np.arange(g.start, g.start + g.size) for g in graph.groups])
    assert (covered == np.arange(graph.num_channels)).all()
    assert (np.bincount(graph.group_of) == [g.size for g in graph.groups]).all()


def test_groups_have_names_of_their_own_and_layers_of_the_model(traced):
    model, graph = traced
    modules = dict(model.named_modules())
    assert len(groups(graph)) == len(graph.groups)
    for group in graph.groups:
        assert group.writers
        assert group.readers
        assert {*group.writers, *group.readers} <= modules.keys()


def test_every_channel_is_written_and_read(traced):
    _, graph = traced
    mixing = [layer for layer in graph.layers.values() if layer.kind == "mixing"]
    written = np.concatenate([layer.outputs for layer in mixing])
    read = np.concatenate([layer.inputs for layer in mixing])
    everything = set(range(graph.num_channels))
    assert set(written[written != KEPT].tolist()) == everything
    assert set(read[read != KEPT].tolist()) == everything


def test_every_wiring_has_something_to_remove_and_keeps_its_output(traced):
    _, graph = traced
    assert graph.num_channels > 0
    assert graph.output_layers
    for name in graph.output_layers:
        assert (graph.layers[name].outputs == KEPT).all()
        assert graph.protected[name] == "writes the model's output"


def test_plain_net():
    graph = trace_channels(seeded(plain), torch.zeros(1, 3, 8, 8))
    assert groups(graph) == {"0.0": 8, "2.0": 12, "4": 6}
    assert graph.groups[0].readers == ("2.0",)
    assert graph.layers["2.0"].inputs.tolist() == list(range(8))
    assert graph.layers["0.1"].kind == "channelwise"
    assert graph.spatial["0.0"] == 64


def test_residual_sums_make_one_group_of_all_writers():
    graph = trace_channels(seeded(residual), torch.zeros(1, 3, 8, 8))
    assert groups(graph) == {"0.0": 8, "1.body.0.0": 6, "2.body.0.0": 10}
    assert graph.groups[0].writers == ("0.0", "1.body.2.0", "2.body.2.0")


def test_concat_has_offsets_and_the_models_input_stays():
    graph = trace_channels(seeded(concat), noise(1, 3, 8, 8))
    a, b = (next(g for g in graph.groups if g.name == n).start for n in ("a.0", "b.0"))
    b_channels = list(range(b, b + 4))
    expected = [*b_channels, KEPT, KEPT, KEPT, *range(a, a + 6), *b_channels]
    assert graph.layers["c.0"].inputs.tolist() == expected


def test_flatten_gives_a_channel_all_its_positions():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6, 2)).eval()
    graph = trace_channels(model, torch.zeros(1, 3, 4, 5))
    assert graph.layers["2"].inputs.tolist() == np.repeat(range(4), 6).tolist()


def test_equal_blocks_of_grouped_convs_and_chunks():
    blocks = {}
    for name in ("grouped", "chunked", "group_norm", "shuffled"):
        case = next(case for case in CASES if case.name == name)
        graph = trace_channels(case.model(), noise(1, *case.shapes[0]))
        blocks[name] = {g.name: g.blocks for g in graph.groups if g.blocks > 1}
    assert blocks["grouped"] == {"0.0": 4, "2.0": 4}
    assert blocks["chunked"] == {"split.0": 2}
    assert blocks["group_norm"] == {"0": 3}
    assert "last.0" in blocks["shuffled"]


@pytest.mark.parametrize("times", ["depthwise", "repeated", "depthwise and repeated"])
def test_a_shuffle_ties_its_columns_also_where_they_are_read_several_times(times):
    def wiring(net, x):
        x = F.channel_shuffle(net.first(x).relu(), 2)
        x = net.each(x) if "depthwise" in times else x
        x = x.repeat_interleave(2, 1) if "repeated" in times else x
        return net.head(net.last(x))

    each = nn.Conv2d(8, 16, 3, groups=8)
    width = 8 * 2 ** (times.count("depthwise") + times.count("repeated"))
    layers = {"each": each} if "depthwise" in times else {}
    model = seeded(
        lambda: Net(wiring, first=conv_bn(3, 8), **layers, last=conv_bn(width, 6), head=head(6))
    )
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    assert groups(graph) == {"first.0": 4, "last.0": 6}
    assert not graph.rewired
    assert all(check_equivalence(model, ChannelPlan.random(graph, 0.5, s)) for s in range(10))


def test_user_protects_outputs_and_inputs_by_name_and_pattern():
    model = seeded(unet)
    graph = trace_channels(
        model, torch.zeros(1, 3, 8, 8), protect=["to*"], protect_inputs=["merge.0"]
    )
    assert groups(graph) == {"deep.0": 8, "merge.0": 7}
    assert graph.protected["top.0"] == "protected by the user"
    assert graph.protected["up"] == "protected by the user"


def test_shared_layers_are_protected_and_name_one_another():
    shared = nn.Conv2d(8, 8, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), shared, nn.ReLU(), nn.Conv2d(8, 8, 3), head(8))
    model[3].weight = shared.weight
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    assert "3" in graph.protected["1"]
    assert "1" in graph.protected["3"]


def test_a_layer_called_twice_ties_what_it_reads():
    def wiring(net, x):
        return net.head(net.last(net.twice(net.twice(net.first(x)).relu())))

    model = Net(wiring, first=conv_bn(3, 6), twice=conv_bn(6, 6), last=conv_bn(6, 4), head=head(4))
    graph = trace_channels(model.eval(), torch.zeros(1, 3, 8, 8))
    assert (graph.layers["twice.0"].inputs == graph.layers["twice.0"].outputs).all()


@pytest.mark.parametrize("name", ["plain", "residual", "depthwise", "squeeze_excite", "flattened"])
def test_groups_equal_those_of_torch_pruning(name):
    case = next(case for case in CASES if case.name == name)
    model, x = case.model(torch.float32), noise(1, *case.shapes[0], dtype=torch.float32)
    graph = trace_channels(model, x)
    theirs = tp.DependencyGraph().build_dependency(model, example_inputs=(x,))
    names = {module: name for name, module in model.named_modules()}
    for group in graph.groups:
        root = model.get_submodule(group.writers[0])
        found = (
            theirs.get_pruning_group(root, tp.prune_conv_out_channels, [1])
            if isinstance(root, nn.Conv2d)
            else theirs.get_pruning_group(root, tp.prune_linear_out_channels, [1])
        )
        readers, writers = set(), set()
        for dependency, _ in found:
            member = names.get(dependency.target.module)
            if member is None or member not in graph.layers:
                continue
            if graph.layers[member].kind == "mixing":
                side = writers if theirs.is_out_channel_pruning_fn(dependency.handler) else readers
                side.add(member)
        assert readers == set(group.readers)
        assert writers == set(group.writers)


def test_strides_of_a_sum_are_counted_in_channels():
    """The sum's channels go in pairs up to the concat's second part, and alone from there."""

    def wiring(net, x):
        x = net.twofold(net.first(x))
        x = torch.cat([x, net.side(x)], 1)
        return net.head(net.last(x + net.branch(x)))

    model = Net(
        wiring, first=conv_bn(3, 6), twofold=nn.Conv2d(6, 12, 3, padding=1, groups=6),
        side=conv_bn(12, 4), branch=conv_bn(16, 16), last=conv_bn(16, 6), head=head(6),
    )  # fmt: skip
    graph = trace_channels(model.eval(), torch.zeros(1, 3, 8, 8))
    assert groups(graph) == {"first.0": 6, "side.0": 4, "last.0": 6}


def test_same_graph_twice(traced):
    model, graph = traced
    again = trace_channels(model, graph.example)
    assert again.groups == graph.groups
    for name, layer in graph.layers.items():
        assert (again.layers[name].inputs == layer.inputs).all()
