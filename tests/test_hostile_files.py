"""Whatever a file holds, reading it gives what was saved or a CheckpointError, and runs no code."""

from __future__ import annotations

import builtins
import json
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import CODE, DEEP, Meter, Read, damaged, mutated, packed, unpack
from nets import ChannelsFirstNorm, Net, Residual, conv_bn, head
from stripes import stripes
from torch import Tensor, nn

from stamppruner import (
    ChannelPlan,
    STAMPPruner,
    describe,
    load_slim,
    project_shortcuts,
    pruner_file,
    shrink,
    trace_channels,
)
from stamppruner.errors import CheckpointError
from stamppruner.factory import Structure, recognise
from stamppruner.io import read_metadata, read_safetensors
from stamppruner.models import ResNet
from stamppruner.slim import FORMAT, save_slim

IMAGES = stripes(1)[0]
LIMITS = {"pruner": (10.0, 1000.0)}  # its file says for which images the model is traced
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
        nn.ConvTranspose2d(12, 8, 1), ChannelsFirstNorm(8), nn.Softmax(1),
        nn.ChannelShuffle(2), head(8),
    )  # fmt: skip


def split() -> nn.Module:
    def wiring(net: Any, x: Tensor) -> Tensor:
        a, b = torch.split(net.first(x).relu(), [4, 12], 1)
        return net.head(torch.cat([net.a(a), net.b(b)], 1))

    layers = {"first": conv_bn(3, 16), "a": conv_bn(4, 6), "b": conv_bn(12, 6), "head": head(12)}
    return Net(wiring, **layers)


def stock() -> nn.Module:
    """One whose file names the function that makes it, which is called when it is loaded."""
    return ResNet((1, 1), (8, 12), 5)


SLIM = {"shortcuts": shortcuts, "norms": norms, "split": split, "stock": stock}
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
        factory = recognise(Structure.of(make(kind)))
        assert (factory is not None) == (kind == "stock")
        plan = {"kept": {"0": [0, 2]}, "factory": factory and factory.to_json()}
        save_slim(folder / kind, slim(kind), plan)
    pruner = STAMPPruner(make("pruner"), IMAGES[:1], shortcuts="project")
    pruner.history.add(iteration=0, loss=float("nan"))
    pruner.save(folder / "pruner")
    return {kind: (folder / kind).read_bytes() for kind in KINDS}


@pytest.fixture(autouse=True)
def no_code_ran() -> Iterator[None]:
    yield
    assert not hasattr(builtins, "hostile_code_ran")


@pytest.fixture
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
        given = None if kind == "stock" else make(kind)
        own = {"load": lambda path: load_slim(path, given), "describe": describe}
    return {"metadata": read_metadata, "safetensors": read_safetensors, **own}


def read_all(kind: str, content: bytes, path: Path, meter: Meter) -> dict[str, Any]:
    """What the readers return; those that refuse the file are left out."""
    path.write_bytes(content)
    found, said = {}, [""]
    for name, read in readers(kind).items():
        with meter.reading():
            try:
                found[name] = read(path)
            except CheckpointError as error:
                said.append(str(error))
    assert max(map(len, said)) < 10_000
    assert all(text.replace("\n", "").replace("\t", "").isprintable() for text in said)
    seconds, mebibytes = LIMITS.get(kind, (SECONDS, MEBIBYTES))
    assert meter.seconds < seconds
    assert meter.mebibytes < mebibytes + 8 * len(content) / 2**20
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


# One by one: what random mutations may miss


@pytest.mark.parametrize("kind", KINDS)
def test_every_kibibyte_of_truncation_is_refused(
    kind: str, whole: dict[str, bytes], tmp_path: Path, meter: Meter
) -> None:
    for length in range(0, len(whole[kind]), 1024 if kind != "pruner" else 32 * 1024):
        assert read_all(kind, whole[kind][:length], tmp_path / "f", meter) == {}


INJECTED = f'0.x" if exec("{CODE}") else "body'
SPLICED = {"name": "1.shortcut_0", "layer": "Conv2d", "width": 8, "sum": 0, "side": 0}
ATTRIBUTE = {"name": "2.shortcut", "layer": "Conv2d", "width": 8}
PLANS: dict[str, dict[str, Any]] = {
    "code in a name": {"projections": [SPLICED | {"name": "1." + INJECTED[2:]}]},
    "huge layer": {"projections": [ATTRIBUTE | {"width": 2**14}]},
    "many layers": {"projections": [ATTRIBUTE | {"name": f"2.s{i}"} for i in range(5000)]},
    "one layer twice": {"projections": [ATTRIBUTE, ATTRIBUTE]},
    "one place twice": {"projections": [SPLICED, SPLICED | {"name": "1.shortcut_1"}]},
    "of every module": {"projections": [ATTRIBUTE | {"name": "2._is_full_backward_hook"}]},
    "the branch's side": {"projections": [SPLICED | {"side": 1}, ATTRIBUTE]},
    "a keyword": {"projections": [SPLICED | {"name": "1.class"}]},
    "a method": {"projections": [SPLICED | {"name": "1.forward"}]},
    "an option of a layer": {"projections": [ATTRIBUTE | {"name": "0.1.momentum"}]},
    "unknown module": {"widths": {"../../outside": {"out_channels": 3}}},
    "dunder module": {"widths": {"0.__class__": {"out_channels": 3}}},
    "huge width": {"widths": {"0.0": {"out_channels": 2**24 - 1}}},
    "whole number as text": {"version": "1"},
    "true for one": {"version": True},
    "deep": {"widths": DEEP},
}


@pytest.mark.parametrize("name", PLANS)
def test_hostile_plans(name: str, whole: dict[str, bytes], tmp_path: Path, meter: Meter) -> None:
    header, data = unpack(whole["shortcuts"])
    record = json.loads(header["__metadata__"][FORMAT])
    header["__metadata__"][FORMAT] = json.dumps(record | PLANS[name])
    for digest in (False, True):
        found = read_all("shortcuts", packed(header, data, digest=digest), tmp_path / "f", meter)
        assert "load" not in found


ENTRY = '{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
HEADERS: dict[str, str] = {
    "deep": '{"a":' * 100_000,
    "a key twice": f'{{"a":{ENTRY},"a":{ENTRY}}}',
    "metadata twice": f'{{"__metadata__":{{}},"__metadata__":{{}},"a":{ENTRY}}}',
    "overlapping": f'{{"a":{ENTRY},"b":{ENTRY}}}',
    "with a gap": f'{{"a":{ENTRY.replace("[0,4]", "[4,8]")}}}',
    "huge shape": f'{{"a":{ENTRY.replace("[1]", "[4611686018427387904,4]")}}}',
    "zero times huge": f'{{"a":{ENTRY.replace("[1]", "[0,9223372036854775808]")}}}',
    "negative": f'{{"a":{ENTRY.replace("[1]", "[-1,-1]")}}}',
    "true for one": f'{{"a":{ENTRY.replace("[1]", "[true]")}}}',
    "NaN": f'{{"a":{ENTRY.replace("[1]", "[NaN]")}}}',
    "digits": f'{{"a":{ENTRY.replace("[1]", "[" + "1" * 10_000 + "]")}}}',
    "unknown dtype": f'{{"a":{ENTRY.replace("F32", "F4")}}}',
    "many lists": '{"a":[' + "[]," * 250_000 + "[]]}",
    "many tensors": "{" + ",".join(f'"{i}":{ENTRY}' for i in range(100_000)) + "}",
    "many texts": '{"__metadata__":{' + ",".join(f'"{i}":""' for i in range(400_000)) + "}}",
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers(name: str, tmp_path: Path, meter: Meter) -> None:
    text = HEADERS[name].encode()
    content = len(text).to_bytes(8, "little") + text + bytes(4)
    assert read_all("norms", content, tmp_path / "f", meter) == {}


@pytest.mark.parametrize("dtype", ["BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2"])
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_of_another_kind_are_refused(
    kind: str, dtype: str, whole: dict[str, bytes], tmp_path: Path, meter: Meter
) -> None:
    header, data = unpack(whole[kind])
    name = next(n for n, e in header.items() if n.endswith(".bias") and e["dtype"] == "F32")
    first, last = header[name]["data_offsets"]
    for other in header.values():
        for i in (0, 1):
            if "data_offsets" in other and other["data_offsets"][i] >= last:
                other["data_offsets"][i] -= (last - first) * 3 // 4
    header[name]["dtype"] = dtype
    data = data[: first + (last - first) // 4] + data[last:]
    found = read_all(kind, packed(header, data), tmp_path / "f", meter)
    assert "safetensors" in found
    assert "load" not in found


RECORDS: dict[str, dict[str, Any]] = {
    "huge images": {"image_shape": [3, 2**20, 2**20]},
    "many planes": {"image_shape": [2**20, 1, 1]},
    "shape of text": {"image_shape": "388"},
    "fraction": {"image_shape": [3, 8.5, 8]},
    "settings of text": {"config": {"gamma": "0.1"}},
    "huge setting": {"config": {"gamma": 10**400}},
    "huge seed": {"config": {"seed": 2**64}},
    "text for true": {"config": {"fit_head": "no"}},
    "pattern": {"protect": "*"},
    "pattern of nothing": {"protect": ["nothing"]},
    "rows": {"history": [3]},
    "statistics": {"image_statistics": {"mean": [10**400] * 3, "std": [1, 1, 1]}},
    "channels": {"image_statistics": {"mean": [1], "std": [1]}},
    "least": {"image_statistics": {"mean": [1] * 3, "std": [1] * 3, "least": None}},
    "groups": {"groups": None},
    "group": {"groups": [None]},
    "reasons": {"coupled": [1, 2]},
    "fitted": {"meta_fitted": "no"},
}


@pytest.mark.parametrize("name", RECORDS)
def test_hostile_records_of_pruners(
    name: str, whole: dict[str, bytes], tmp_path: Path, meter: Meter
) -> None:
    header, data = unpack(whole["pruner"])
    record = json.loads(header["__metadata__"][pruner_file.FORMAT])
    header["__metadata__"][pruner_file.FORMAT] = json.dumps(record | RECORDS[name])
    assert "load" not in read_all("pruner", packed(header, data), tmp_path / "f", meter)


def test_tensors_of_no_part_are_refused(
    whole: dict[str, bytes], tmp_path: Path, meter: Meter
) -> None:
    header, data = unpack(whole["pruner"])
    header["nobody.weight"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    assert "load" not in read_all("pruner", packed(header, data), tmp_path / "f", meter)
