from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from nets import Residual, conv_bn, difference, head, noise, seeded
from stripes import dataset, loader, same_state, snapshot, stripes, vgg
from torch import Tensor, nn

from stamppruner import (
    Budget,
    ChannelPlan,
    STAMPConfig,
    STAMPPruner,
    TaskSampler,
    apply_projections,
    load_slim,
    mask,
    project_shortcuts,
    projections,
    shrink,
    trace_channels,
)
from stamppruner.baselines import Random
from stamppruner.budget import Chooser
from stamppruner.costs import Macs, Params
from stamppruner.errors import CheckpointError, ConfigError, UnsupportedModelError
from stamppruner.io import read_safetensors, write_safetensors
from stamppruner.models import ResNet, resnet18
from stamppruner.projection import without_projections
from stamppruner.pruner import NotMetaFittedWarning
from stamppruner.pruner_file import FORMAT as PRUNER_FORMAT
from stamppruner.shortcuts import find_shortcuts
from stamppruner.slim import FORMAT, save_slim

SMALL = STAMPConfig(
    iterations=2, tasks_per_iteration=1, ways=3, shots=8, minibatch_size=12, set_size=32
)
SHAPE = (2, 3, 16, 16)


class Basic(nn.Module):
    """The block of widely used CIFAR networks: an empty ``Sequential`` where nothing changes."""

    def __init__(self, inputs: int, planes: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, planes, 3, stride, 1), nn.BatchNorm2d(planes)
        self.conv2, self.bn2 = nn.Conv2d(planes, planes, 3, 1, 1), nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, planes, 1, stride), nn.BatchNorm2d(planes)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


def empty_sequentials() -> nn.Module:
    return nn.Sequential(conv_bn(3, 8), Basic(8, 8), Basic(8, 12, 2), Basic(12, 12), head(12))


def written() -> nn.Module:
    return nn.Sequential(conv_bn(3, 8), Residual(8, 6), Residual(8, 10), head(8))


class Flat(nn.Module):
    """Sums in the forward of the whole network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.last = conv_bn(3, 8), conv_bn(8, 8), conv_bn(8, 8)
        self.head = head(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.body(x)).relu()
        return self.head(self.last(x) + x)


class Tokens(nn.Module):
    """Channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


def tokens() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), Swap(), Tokens(), nn.Linear(8, 6))


class Swap(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def mobile() -> nn.Module:
    settings = [[1, 8, 1, 1], [2, 8, 2, 2], [2, 12, 2, 1]]
    return torchvision.models.MobileNetV2(6, 0.5, settings)


def bottlenecks() -> nn.Module:
    return torchvision.models.ResNet(
        torchvision.models.resnet.Bottleneck, [2, 1, 2, 1], 6, width_per_group=16
    )


def basics() -> nn.Module:
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [2, 2, 1, 1], 6)


def ours() -> nn.Module:
    return resnet18(6, width=0.125)


NETS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "ours": (ours, 5),
    "basics": (basics, 3),
    "bottlenecks": (bottlenecks, 2),
    "mobile": (mobile, 3),
    "empty_sequentials": (empty_sequentials, 2),
    "written": (written, 2),
    "flat": (Flat, 2),
    "tokens": (tokens, 1),
}


@pytest.mark.parametrize("name", NETS)
def test_both_sides_are_pruned_on_their_own(name: str, tmp_path: Path) -> None:
    make, count = NETS[name]
    model, x = seeded(make), noise(*SHAPE, dtype=torch.float32)
    before = snapshot(model)
    net = project_shortcuts(model, x[:1])
    assert same_state(model, before)
    assert len(projections(net)) == count
    with torch.no_grad():
        assert difference(model(x), net(x)) < 1e-6
    own, new = set(before), set(net.state_dict())
    assert new - own == {entry["name"] + ".weight" for entry in projections(net)}
    assert own <= new

    coupled, graph = trace_channels(model, x[:1]), trace_channels(net, x[:1])
    assert len(graph.groups) == len(coupled.groups) + count
    assert graph.protected.keys() == coupled.protected.keys()
    plan = ChannelPlan.random(graph, 0.5, seed=3)
    slim = shrink(net, plan)
    with torch.no_grad():
        assert difference(mask(net, plan)(x), slim(x)) < 1e-5

    save_slim(tmp_path / "slim", slim, {})
    loaded = load_slim(tmp_path / "slim", make)
    with torch.no_grad():
        assert torch.equal(loaded(x), slim(x))
    assert projections(loaded) == projections(slim)


def test_the_whole_torchvision_networks() -> None:
    for make, count in ((torchvision.models.resnet18, 5), (torchvision.models.mobilenet_v2, 10)):
        found = find_shortcuts(make(num_classes=4), noise(1, 3, 32, 32))
        assert (len(found.record), found.coupled) == (count, {})
    assert len(find_shortcuts(torchvision.models.resnet50(), noise(1, 3, 32, 32)).record) == 12


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [ours, written])
def test_new_layers_follow_their_block_and_learn(make: Any, training: bool) -> None:
    model = seeded(make).double().train(training)
    model.requires_grad_(False)
    net = project_shortcuts(model, noise(*SHAPE))
    assert {m.training for m in net.modules()} == {training}
    layers = [net.get_submodule(entry["name"]) for entry in projections(net)]
    net(noise(*SHAPE)).square().mean().backward()
    for layer in layers:
        assert layer.weight.dtype == torch.float64
        assert layer.weight.requires_grad
        assert layer.weight.grad.abs().sum() > 0
        assert layer.bias is None
    names = {entry["name"] + ".weight" for entry in projections(net)}
    assert {n for n, p in net.named_parameters() if p.requires_grad} == names


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = seeded(written).to(dtype)
    net = project_shortcuts(model, noise(*SHAPE))
    x = noise(*SHAPE, dtype=dtype)
    assert {p.dtype for p in net.parameters()} == {dtype}
    with torch.no_grad():
        assert torch.equal(net(x), model(x))


def test_volumes_and_sequences() -> None:
    class Block(nn.Module):
        def __init__(self, conv: Any) -> None:
            super().__init__()
            self.conv, self.downsample = conv(4, 4, 3, padding=1), None

        def forward(self, x: Tensor) -> Tensor:
            same = x if self.downsample is None else self.downsample(x)
            return self.conv(x.relu()) + same

    for conv, shape in ((nn.Conv1d, (8,)), (nn.Conv3d, (4, 4, 4))):
        model = nn.Sequential(conv(3, 4, 1), Block(conv), conv(4, 2, 1)).eval()
        net = project_shortcuts(model, torch.randn(1, 3, *shape))
        assert projections(net) == [
            {"name": "1.downsample", "layer": conv.__name__, "width": 4},
        ]


def test_a_network_without_shortcuts() -> None:
    with pytest.raises(UnsupportedModelError, match="no shortcut of VGG can be projected"):
        STAMPPruner(vgg(), stripes(1)[0], shortcuts="project")
    with pytest.raises(ConfigError, match="couple, project"):
        STAMPPruner(vgg(), shortcuts="both")  # type: ignore[arg-type]


class Moody(nn.Module):
    """Its code depends on the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.body = conv_bn(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.body(x), 0.1, self.training)


class Bent(Moody):
    """Its code depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if x.sum() > -1e9 else x


class Counting(Moody):
    """It counts its calls."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.body(x)


@pytest.mark.parametrize(
    ("block", "reason"),
    [(Moody, "differs between training"), (Bent, "cannot trace"), (Counting, "attributes")],
)
def test_what_cannot_be_rewritten_stays_coupled_and_is_named(block: Any, reason: str) -> None:
    model = seeded(lambda: nn.Sequential(conv_bn(3, 8), block(), Residual(8, 6), head(8)))
    found = find_shortcuts(model, noise(*SHAPE))
    assert [entry["name"] for entry in found.record] == ["2.shortcut_0"]
    assert list(found.coupled) == ["1"]
    assert reason in found.coupled["1"]
    with pytest.raises(UnsupportedModelError, match=reason):
        project_shortcuts(model[:2], noise(*SHAPE))


def test_a_chain_of_sums_gets_one_layer() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = conv_bn(8, 8), conv_bn(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.a(x) + self.b(x)

    model = seeded(lambda: nn.Sequential(conv_bn(3, 8), Chain(), head(8)))
    assert [(e["sum"], e["side"]) for e in find_shortcuts(model, noise(*SHAPE)).record] == [(0, 0)]


def test_an_attribute_that_is_on_no_shortcut_is_left_alone() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.body = nn.Identity(), conv_bn(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.proj(x)
            return x + self.body(x)

    model = seeded(lambda: nn.Sequential(conv_bn(3, 8), Block(), head(8)))
    net = project_shortcuts(model, noise(*SHAPE))
    assert [e["name"] for e in projections(net)] == ["1.shortcut_0"]
    assert isinstance(net[1].proj, nn.Identity)  # type: ignore[index]


def test_a_shared_block_stays_shared() -> None:
    def make() -> nn.Module:
        block = Residual(8, 6)
        return nn.Sequential(conv_bn(3, 8), block, block, head(8))

    net: Any = project_shortcuts(seeded(make), noise(*SHAPE))
    assert net[1] is net[2]
    assert len(projections(net)) == 1


def test_costs_are_shares_of_the_network_as_given() -> None:
    model, x = ours(), torch.zeros(1, 3, 16, 16)
    net = project_shortcuts(model, x)
    coupled, graph = trace_channels(model, x), trace_channels(net, x)
    chooser = Chooser(net, graph)
    for cost in (Macs, Params):
        given, dense = cost(model, coupled), cost(net, graph)
        assert chooser.costs[cost.name].full == given.full < dense.full
        names = [entry["name"] for entry in projections(net)]
        assert dense.of(names) == dense.full - given.full
        plan = chooser.choose(torch.rand(graph.num_channels).numpy(), Budget(**{cost.name: 0.4}))
        assert cost(net, graph)(chooser.widths(plan)) <= 0.4 * given.full
    plain = without_projections(net)
    assert plain.state_dict().keys() == model.state_dict().keys()
    assert without_projections(model) is model


def small() -> nn.Module:
    return seeded(lambda: ResNet((2, 1), (8, 12), 6))


def test_pruning_and_both_files(tmp_path: Path) -> None:
    model = small().train()
    before, images = snapshot(model), stripes(4)[0]
    pruner = STAMPPruner(model, config=SMALL, shortcuts="project")
    pruner.meta_fit(TaskSampler(dataset(), ways=3, shots=8), progress=False)
    assert same_state(model, before)
    assert len(projections(pruner._gated().model)) == 2
    assert all(m.training for m in pruner._gated().model.modules())
    result = pruner.prune(loader(), Budget(macs=0.5), progress=False)
    assert result.report.after["macs"] <= 0.5 * result.report.before["macs"]
    assert result.report.settings["shortcuts"] == "project"
    assert len(result.report.settings["projections"]["layers"]) == 2
    assert result.report.before["macs"] == Macs(model, trace_channels(model, images[:1])).full

    result.save(tmp_path / "slim")
    slim = load_slim(tmp_path / "slim", small)
    with torch.no_grad():
        assert torch.equal(slim(images), result.model.eval()(images))

    pruner.save(tmp_path / "pruner")
    loaded = STAMPPruner.load(tmp_path / "pruner", small)
    assert loaded.shortcuts == "project"
    assert same_state(loaded._gated().model, snapshot(pruner._gated().model))
    assert loaded.prune(loader(), Budget(macs=0.5), progress=False).plan == result.plan
    loaded.save(tmp_path / "again")
    assert len(projections(STAMPPruner.load(tmp_path / "again", small)._gated().model)) == 2


def test_reports_name_what_stays_coupled() -> None:
    model = seeded(lambda: nn.Sequential(conv_bn(3, 8), Moody(), Residual(8, 6), head(8, 6)))
    pruner = STAMPPruner(model, stripes(1)[0], shortcuts="project")
    with pytest.warns(NotMetaFittedWarning):
        result = pruner.prune(loader(), Budget(macs=0.6), progress=False)
    assert any("left coupled: 1 (1: its code differs" in text for text in result.report.warnings)


def test_other_methods_take_projected_networks(tmp_path: Path) -> None:
    net = project_shortcuts(small(), stripes(1)[0])
    result = Random().prune(net, loader(), Budget(macs=0.5))
    result.save(tmp_path / "slim")
    images = stripes(4)[0]
    with torch.no_grad():
        slim = load_slim(tmp_path / "slim", small)
        assert torch.equal(slim(images), result.model.eval()(images))
        again = load_slim(tmp_path / "slim", lambda: project_shortcuts(small(), images))
        assert torch.equal(again(images), slim(images))


GOOD = {"name": "stages.0.0.shortcut", "layer": "Conv2d", "width": 8}
SPLICED = {"name": "1.shortcut_0", "layer": "Conv2d", "width": 8, "sum": 0, "side": 0}
DAMAGED: list[tuple[Any, str]] = [
    ("text", "text"),
    ([3], "no name"),
    ([{}], "no name"),
    ([GOOD | {"width": 0}], "stages.0.0.shortcut"),
    ([GOOD | {"width": 2**40}], "stages.0.0.shortcut"),
    ([GOOD | {"width": True}], "stages.0.0.shortcut"),
    ([GOOD | {"layer": "Bilinear"}], "stages.0.0.shortcut"),
    ([GOOD | {"layer": []}], "stages.0.0.shortcut"),
    ([GOOD | {"more": 1}], "stages.0.0.shortcut"),
    ([GOOD | {"name": "stages.7.shortcut"}], "stages.7.shortcut"),
    ([GOOD | {"name": "stages.0.0.conv1"}], "stages.0.0.conv1"),
    ([GOOD | {"name": "stages.0.0.forward"}], "stages.0.0.forward"),
    ([SPLICED | {"name": "stages.0.0.x", "sum": 9}], "stages.0.0.x"),
    ([SPLICED | {"name": "stages.0.0.conv1"}], "stages.0.0.conv1"),
    ([SPLICED | {"side": 2}], "1.shortcut_0"),
]


@pytest.mark.parametrize(("record", "named"), DAMAGED)
def test_damaged_records_are_refused_by_name(record: Any, named: str, tmp_path: Path) -> None:
    net = project_shortcuts(small(), stripes(1)[0])
    save_slim(tmp_path / "slim", net, {})
    tensors, metadata = read_safetensors(tmp_path / "slim")
    plan = json.loads(metadata[FORMAT]) | {"projections": record}
    write_safetensors(tmp_path / "slim", tensors, {FORMAT: json.dumps(plan)})
    with pytest.raises(CheckpointError, match=named):
        load_slim(tmp_path / "slim", small)


def test_a_damaged_record_of_a_pruner(tmp_path: Path) -> None:
    STAMPPruner(small(), stripes(1)[0], shortcuts="project").save(tmp_path / "pruner")
    tensors, metadata = read_safetensors(tmp_path / "pruner")
    plan = json.loads(metadata[PRUNER_FORMAT])
    for key, value in (("projections", [GOOD | {"width": 9}]), ("shortcuts", "neither")):
        damaged = {PRUNER_FORMAT: json.dumps(plan | {key: value})}
        write_safetensors(tmp_path / "damaged", tensors, damaged)
        with pytest.raises(CheckpointError):
            STAMPPruner.load(tmp_path / "damaged", small)


def test_a_record_is_applied_without_data_and_once() -> None:
    model = small()
    net = project_shortcuts(model, stripes(1)[0])
    replayed = apply_projections(model, projections(net))
    assert same_state(replayed, net.state_dict())
    assert projections(model) == []
    twice = apply_projections(replayed, projections(net))
    assert projections(twice) == projections(net)
    assert projections(copy.deepcopy(net)) == projections(net)
    with pytest.raises(UnsupportedModelError, match="of another"):
        apply_projections(vgg(), [GOOD | {"name": "of another"}])
