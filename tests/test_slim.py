from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import CASES, Case, ChannelsFirstNorm, conv_bn, head, noise
from stripes import loader, resnet, same_state, snapshot, stripes, vgg
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import stamppruner
from stamppruner import (
    Budget,
    ChannelPlan,
    PruneResult,
    describe,
    load_slim,
    shrink,
    trace_channels,
)
from stamppruner.baselines import Random
from stamppruner.errors import CheckpointError, ConfigError
from stamppruner.io import read_safetensors, write_safetensors
from stamppruner.models import VGG
from stamppruner.slim import FORMAT, save_slim

IMAGES = stripes(4)[0]


class Normed(nn.Module):
    """Layer norm over channels, group norm, PReLU, a grouped and a transposed convolution."""

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), ChannelsFirstNorm(8)
        self.grouped, self.group_norm = nn.Conv2d(8, 8, 3, groups=2), nn.GroupNorm(2, 8)
        self.act, self.up = nn.PReLU(8), nn.ConvTranspose2d(8, 6, 2)
        self.register_buffer("offset", torch.ones(1))
        self.last = head(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        x = self.act(self.group_norm(self.grouped(x)))
        return self.last(self.up(x).relu()) + self.offset


MAKERS = {"vgg": vgg, "resnet": resnet, "normed": Normed}


def pruned(make: Any, share: float = 0.5, classes: int = 6) -> PruneResult:
    return Random().prune(make(), loader(classes=classes), Budget(macs=share))


@pytest.fixture(scope="module")
def result() -> PruneResult:
    return pruned(vgg, classes=4)


@pytest.fixture
def path(result: PruneResult, tmp_path: Path) -> Path:
    result.save(tmp_path / "slim.safetensors")
    return tmp_path / "slim.safetensors"


def outputs(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(IMAGES)


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("classes", [4, 6])
def test_the_reloaded_network_gives_the_same_bits(name: str, classes: int, tmp_path: Path) -> None:
    made = pruned(MAKERS[name], classes=classes)
    assert sum(p.numel() for p in made.model.parameters()) < 0.9 * sum(
        p.numel() for p in MAKERS[name]().parameters()
    )
    made.save(tmp_path / "slim")
    loaded = load_slim(tmp_path / "slim", MAKERS[name])
    assert torch.equal(outputs(loaded), outputs(made.model))
    assert same_state(loaded, made.model.state_dict())
    for (key, one), (_, two) in zip(
        loaded.named_modules(), made.model.named_modules(), strict=True
    ):
        assert repr(one) == repr(two), key  # the widths they note, too


@pytest.mark.parametrize("form", ["class and sizes", "function", "model"])
def test_from_a_function_or_a_model(form: str, path: Path, result: PruneResult) -> None:
    full = vgg(seed=8).train()
    before = snapshot(full)
    source: Any = {
        "class and sizes": lambda: VGG(((8,), (12, 12)), 6),
        "function": vgg,
        "model": full,
    }[form]
    loaded = load_slim(path, source)
    assert not loaded.training
    assert torch.equal(outputs(loaded), outputs(result.model))
    assert same_state(full, before)
    assert full.training


def test_what_is_no_model_and_no_device_is_named(path: Path) -> None:
    with pytest.raises(ConfigError, match="model=3"):
        load_slim(path, 3)
    for device in ("cuda:77", "meta", "nowhere"):
        with pytest.raises(ConfigError, match=device):
            load_slim(path, device=device)


def test_from_a_class(tmp_path: Path) -> None:
    made = pruned(Normed)
    made.save(tmp_path / "slim")
    assert torch.equal(outputs(load_slim(tmp_path / "slim", Normed)), outputs(made.model))


def test_a_loaded_network_can_be_trained_and_saved_again(path: Path, tmp_path: Path) -> None:
    loaded = load_slim(path, vgg)
    assert all(p.requires_grad and p.is_leaf for p in loaded.parameters())
    loaded.train()(IMAGES).sum().backward()
    assert all(p.grad is not None for p in loaded.parameters())
    save_slim(tmp_path / "again", loaded, {})
    again = load_slim(tmp_path / "again", vgg)
    assert same_state(again, loaded.state_dict())


def test_frozen_parameters_stay_frozen(path: Path) -> None:
    full = vgg()
    full.features[0].weight.requires_grad_(False)
    loaded = load_slim(path, full)
    assert not loaded.features[0].weight.requires_grad
    assert loaded.classifier.weight.requires_grad


def test_other_dtypes_survive(tmp_path: Path) -> None:
    made = pruned(vgg)
    made.model.to(torch.bfloat16)
    made.save(tmp_path / "slim")
    assert load_slim(tmp_path / "slim", vgg).classifier.weight.dtype == torch.bfloat16


def test_fine_tuned_networks_are_saved_as_they_are(tmp_path: Path) -> None:
    made = pruned(vgg)
    made.finetune(loader(), epochs=1, progress=False)
    made.save(tmp_path / "slim")
    assert torch.equal(outputs(load_slim(tmp_path / "slim", vgg)), outputs(made.model))


def test_describe_reads_the_plan(path: Path, result: PruneResult) -> None:
    record = describe(path)
    assert record["kept"] == result.plan.record()
    assert record["model_class"] == "stamppruner.models.vgg.VGG"
    assert record["input_shape"] == [3, 8, 8]
    assert record["budget"] == {"macs": 0.5}
    assert record["reached"] == result.report.reached
    assert record["settings"]["versions"]["torch"] == torch.__version__
    assert record["widths"]["classifier"]["out_features"] == 4
    assert record["widths"]["features.0"]["out_channels"] == result.model.features[0].out_channels


FRESH = """
import sys
for name in "torch_pruning torchvision tqdm matplotlib scipy sklearn timm PIL".split():
    sys.modules[name] = None  # an import of it would fail
import torch
torch.set_num_threads(1)
from stamppruner import describe, load_slim
from stamppruner.models import VGG
wanted, images = torch.load(sys.argv[2], weights_only=True)
net = load_slim(sys.argv[1], lambda: VGG(((8,), (12, 12)), 6))
assert describe(sys.argv[1])["budget"] == {"macs": 0.5}
with torch.no_grad():
    assert torch.equal(net(images), wanted)
print("equal")
"""


def test_the_same_bits_in_a_fresh_process_with_torch_and_safetensors_alone(
    path: Path, result: PruneResult, tmp_path: Path
) -> None:
    torch.save((outputs(result.model), IMAGES), tmp_path / "wanted.pt")
    root = Path(stamppruner.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", FRESH, str(path), str(tmp_path / "wanted.pt")],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "equal", run.stderr


def test_channels_last_networks_come_back_as_such(tmp_path: Path) -> None:
    made = pruned(lambda: vgg().to(memory_format=torch.channels_last))
    made.save(tmp_path / "slim")
    loaded = load_slim(tmp_path / "slim", vgg().to(memory_format=torch.channels_last))
    weight = loaded.features[4].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert not weight.is_contiguous()
    assert torch.equal(outputs(loaded), outputs(made.model))


def test_weight_norm_comes_back(tmp_path: Path) -> None:
    def make() -> nn.Module:
        return nn.Sequential(weight_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), conv_bn(8, 8), head(8))

    model = make()
    slim = shrink(model, ChannelPlan.random(trace_channels(model, IMAGES[:1]), 0.5))
    save_slim(tmp_path / "slim", slim, {})
    assert torch.equal(outputs(load_slim(tmp_path / "slim", make)), outputs(slim))


# Files that do not fit


class Large(nn.Module):
    """The names of a small net, with kernels of another size."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.one, self.two = conv_bn(3, 8, kernel), conv_bn(8, 8, 3)
        self.last = head(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.two(self.one(x).relu()).relu())


def test_kernels_of_another_size_are_refused(tmp_path: Path) -> None:
    pruned(lambda: Large(3)).save(tmp_path / "slim")
    with pytest.raises(CheckpointError, match=r"kernel of 'one.0' is \(3, 3\).* \(5, 5\)"):
        load_slim(tmp_path / "slim", lambda: Large(5))


def test_other_models_are_refused_by_name_and_left_alone(path: Path) -> None:
    others = (resnet(), VGG(((8,), (12,)), 6), VGG(((8,), (12, 12), (9,)), 6), nn.Linear(3, 4))
    for model in others:
        before = snapshot(model)
        with pytest.raises(CheckpointError, match="does not fit"):
            load_slim(path, model)
        assert same_state(model, before)
    with pytest.raises(CheckpointError, match=r"the file lacks bn1.bias.*the model lacks"):
        load_slim(path, resnet)


@pytest.mark.parametrize("read", [describe, lambda p: load_slim(p, vgg)])
def test_damaged_foreign_and_missing_files(path: Path, tmp_path: Path, read: Any) -> None:
    blob = path.read_bytes()
    files = {
        "missing": None,
        "empty": b"",
        "truncated": blob[: len(blob) // 3],
        "short": blob[:5],
        "text": b"hello, this is no safetensors file at all",
        "pickle": b"\x80\x04K\x01." * 20,
    }
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=name):
            read(tmp_path / name)
    write_safetensors(tmp_path / "foreign", {"x": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="not a slim model of this package"):
        read(tmp_path / "foreign")
    write_safetensors(tmp_path / "garbled", {}, {FORMAT: "{not json"})
    with pytest.raises(CheckpointError, match="not a slim model of this package"):
        read(tmp_path / "garbled")


def test_changed_weights_are_noticed(path: Path, tmp_path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[-100] ^= 1
    (tmp_path / "changed").write_bytes(blob)
    with pytest.raises(CheckpointError, match="damaged"):
        load_slim(tmp_path / "changed", vgg)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 99}, "version 99"),
        ({"widths": None}, "lists no widths"),
        ({"widths": {"nowhere": {"in_features": 3}}}, "no module 'nowhere'"),
        ({"widths": {"classifier": 3}}, "no module 'classifier'"),
        ({"widths": {"classifier": {"in_features": -3}}}, "cannot have in_features = -3"),
        ({"widths": {"classifier": {"in_features": True}}}, "cannot have in_features"),
        ({"widths": {"classifier": {"in_features": [3]}}}, "cannot have in_features"),
        ({"widths": {"classifier": {"in_features": 10**12}}}, "cannot have in_features"),
        ({"widths": {"classifier": {"forward": 3}}}, "cannot have forward"),
        ({"widths": {"classifier": {"normalized_shape": 3}}}, "cannot have normalized_shape"),
    ],
)
def test_plans_that_do_not_hold_together(
    path: Path, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    tensors, metadata = read_safetensors(path)
    record = json.loads(metadata[FORMAT]) | change
    write_safetensors(tmp_path / "bad", tensors, {FORMAT: json.dumps(record)})
    with pytest.raises(CheckpointError, match=reason):
        load_slim(tmp_path / "bad", vgg)


def test_nothing_is_left_where_nothing_can_be_written(result: PruneResult, tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(CheckpointError):
            result.save(place)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_networks_of_every_wiring_come_back(case: Case, tmp_path: Path) -> None:
    model = case.model(torch.float32)
    x = noise(2, *case.shapes[0], dtype=torch.float32)
    graph = trace_channels(model, x[:1])
    slim = shrink(model, ChannelPlan.random(graph, 0.5))
    save_slim(tmp_path / "slim", slim, {})
    loaded = load_slim(tmp_path / "slim", model)
    with torch.no_grad():
        assert torch.equal(loaded(x), slim.eval()(x))


class Blur(nn.Module):
    """A fixed filter along the channels that the state dict leaves out."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels
        self.register_buffer("filter", torch.rand(channels, 1, 3, 3), persistent=False)

    def forward(self, x):
        return torch.nn.functional.conv2d(x, self.filter, groups=self.channels)


def test_buffers_that_the_state_dict_leaves_out_travel_too(tmp_path):
    def make():
        layers = nn.Conv2d(3, 12, 3), nn.BatchNorm2d(12), Blur(12), nn.Conv2d(12, 8, 1)
        return nn.Sequential(*layers, nn.Flatten(1), nn.Linear(8 * 16, 5))

    model = make().eval()
    x = torch.rand(2, 3, 8, 8)
    slim = shrink(model, ChannelPlan.random(trace_channels(model, x), 0.5)).eval()
    save_slim(tmp_path / "slim.safetensors", slim, {})
    loaded = load_slim(tmp_path / "slim.safetensors", make)
    assert len(loaded[2].filter) == 6
    assert torch.equal(loaded(x), slim(x))
