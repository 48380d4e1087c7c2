"""Whatever a file holds, reading it gives what was saved or a CheckpointError, and runs no code."""

from __future__ import annotations

import builtins
import dataclasses
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import CODE, DEEP, Meter, Read, damaged, encoded, mutated, packed, unpack
from nets import ChannelsFirstNorm, Net, Residual, conv_bn, head
from stripes import stripes
from torch import Tensor, nn

from stamppruner import (
    ChannelPlan,
    STAMPConfig,
    STAMPPruner,
    describe,
    load_slim,
    project_shortcuts,
    pruner_file,
    shrink,
    trace_channels,
)
from stamppruner.errors import CheckpointError
from stamppruner.io import read_metadata, read_safetensors
from stamppruner.slim import FORMAT, save_slim

IMAGES = stripes(1)[0]
SECONDS, MEBIBYTES = 1.0, 100.0


class Block(nn.Module):
    """A residual block with an empty shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.shortcut = nn.Conv2d(8, 8, 3, padding=1), nn.Sequential()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu() + self.shortcut(x)


def shortcuts() -> nn.Module:
    return nn.Sequential(conv_bn(3, 8), Residual(8, 6), Block(), head(8))


def norms() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12), nn.PReLU(12), nn.Conv2d(12, 12, 3, groups=12),
        nn.ConvTranspose2d(12, 8, 1), ChannelsFirstNorm(8), nn.Softmax(1), nn.ChannelShuffle(2), head(8),
    )  # fmt: skip


def split() -> nn.Module:
    def wiring(net: Any, x: Tensor) -> Tensor:
        a, b = torch.split(net.first(x).relu(), [4, 12], 1)
        return net.head(torch.cat([net.a(a), net.b(b)], 1))

    layers = {"first": conv_bn(3, 16), "a": conv_bn(4, 6), "b": conv_bn(12, 6), "head": head(12)}
    return Net(wiring, **layers)


SLIM = {"shortcuts": shortcuts, "norms": norms, "split": split}
KINDS = (*SLIM, "pruner")


def make(kind: str) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return SLIM.get(kind, shortcuts)()


@cache
def slim(kind: str) -> nn.Module:
    model = make(kind)
    if kind == "shortcuts":
        model = project_shortcuts(model, IMAGES[:1])
    return shrink(model, ChannelPlan.random(trace_channels(model, IMAGES[:1]), 0.5)).eval()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files as they are written, by kind."""
    folder = tmp_path_factory.mktemp("whole")
    for kind in SLIM:
        save_slim(folder / kind, slim(kind), {"kept": {"0": [0, 2]}, "budget": {"macs": 0.5}})
    pruner = STAMPPruner(make("pruner"), IMAGES[:1], shortcuts="project")
    pruner.history.add(iteration=0, loss=float("nan"))
    pruner.save(folder / "pruner")
    return {kind: (folder / kind).read_bytes() for kind in KINDS}


@pytest.fixture(autouse=True)
def no_code_ran() -> Iterator[None]:
    yield
    assert not hasattr(builtins, "hostile_code_ran")


@pytest.fixture(scope="module")
def meter() -> Iterator[Meter]:
    meter = Meter()
    yield meter
    print(f"{meter.count} readings, at most {meter.seconds:.2f} s, {meter.mebibytes:.0f} MiB")  # noqa: T201


def readers(kind: str) -> dict[str, Read]:
    if kind == "pruner":
        own: dict[str, Read] = {
            "load": lambda path: STAMPPruner.load(path, make(kind)),
            "read": pruner_file.read,
            "model_in": pruner_file.model_in,
        }
    else:
        own = {"load": lambda path: load_slim(path, make(kind)), "describe": describe}
    return {"metadata": read_metadata, "safetensors": read_safetensors, **own}


def read_all(kind: str, content: bytes, path: Path, meter: Meter) -> dict[str, Any]:
    """What the readers return; those that refuse the file are left out."""
    path.write_bytes(content)
    found = {}
    for name, read in readers(kind).items():
        with meter.reading():
            try:
                found[name] = read(path)
            except CheckpointError as error:
                assert str(error).isprintable() or "\n" in str(error)
                assert len(str(error)) < 10_000
    assert meter.seconds < SECONDS
    assert meter.mebibytes < MEBIBYTES + 8 * len(content) / 2**20
    return found


def check_loaded(kind: str, found: dict[str, Any], same: bool) -> None:
    """A net that was loaded is what its file says; with ``same``, what was saved."""
    if "load" not in found or "safetensors" not in found:
        assert "load" not in found
        return
    tensors = found["safetensors"][0]
    if kind == "pruner":
        state = {
            f"{part}.{name}": tensor
            for part, module in found["load"]._parts().items()
            for name, tensor in module.state_dict().items()
        }
    else:
        state = found["load"].state_dict()
    assert state.keys() == tensors.keys()
    assert all(
        torch.equal(state[n], t.to(state[n].dtype)) or t.isnan().any() for n, t in tensors.items()
    )
    if same and kind != "pruner":
        with torch.no_grad():
            assert torch.equal(found["load"](IMAGES), slim(kind)(IMAGES))


def mutation(kind: str, blob: bytes, draw: random.Random) -> tuple[bytes, bool]:
    """A mutated file, and whether its tensors are those that were saved."""
    header, data = unpack(blob)
    name = pruner_file.FORMAT if kind == "pruner" else FORMAT
    way, digest = draw.choice(("record", "record", "header", "bytes")), draw.random() < 0.5
    if way == "bytes":
        return damaged(packed(header, data, digest=digest), draw), False
    if way == "header":
        changed = mutated({k: v for k, v in header.items() if k != "__metadata__"}, draw)
        if isinstance(changed, dict):
            changed = {"__metadata__": header["__metadata__"], **changed}
        return packed(changed, data, digest=digest), False
    record = json.loads(header["__metadata__"][name])
    for _ in range(draw.choice((1, 1, 2))):
        record = mutated(record, draw)
    header["__metadata__"][name] = json.dumps(record)
    return packed(header, data, digest=digest), True


def fuzz(kind: str, blob: bytes, path: Path, meter: Meter, seeds: range) -> None:
    for seed in seeds:
        content, same = mutation(kind, blob, random.Random(seed))
        try:
            check_loaded(kind, read_all(kind, content, path, meter), same)
        except BaseException as error:
            error.add_note(f"mutation {seed} of {kind}")
            raise


@pytest.mark.parametrize("kind", KINDS)
def test_whole_files_are_read(
    kind: str, whole: dict[str, bytes], tmp_path: Path, meter: Meter
) -> None:
    for digest in (False, True):
        content = packed(*unpack(whole[kind]), digest=digest)
        found = read_all(kind, content, tmp_path / "f", meter)
        assert found.keys() == readers(kind).keys()
        check_loaded(kind, found, same=True)


@pytest.mark.parametrize("kind", KINDS)
def test_random_mutations(kind: str, whole: dict[str, bytes], tmp_path: Path, meter: Meter) -> None:
    fuzz(kind, whole[kind], tmp_path / "f", meter, range(60))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_mutations(
    kind: str, whole: dict[str, bytes], tmp_path: Path, meter: Meter
) -> None:
    fuzz(kind, whole[kind], tmp_path / "f", meter, range(100, 2600))
