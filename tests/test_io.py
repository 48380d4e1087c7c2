"""What was written is read again; damage is named, never loaded."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stamppruner import files, io
from stamppruner.errors import CheckpointError
from stamppruner.io import (
    read_metadata,
    read_safetensors,
    write_safetensors,
)

TENSORS = {
    "conv.weight": torch.arange(24, dtype=torch.float32).reshape(2, 3, 2, 2),
    "bn.count": torch.tensor(7),
    "empty": torch.zeros(0, 3, dtype=torch.float16),
}
METADATA = {"plan": json.dumps({"g": [0, 2]}), "umlaut": "ä ☃ \U0001f600", "empty": ""}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    write_safetensors(path, TENSORS, METADATA)
    return path


class Crash(BaseException):
    """Not an ordinary error: like Ctrl-C."""


def test_round_trip(saved):
    tensors, metadata = read_safetensors(saved)
    assert metadata == METADATA == read_metadata(saved)
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.bool, torch.int8])
def test_round_trip_dtypes(tmp_path, dtype):
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    write_safetensors(tmp_path / "a", {"t": tensor})
    tensors, metadata = read_safetensors(tmp_path / "a")
    assert torch.equal(tensors["t"], tensor)
    assert tensors["t"].dtype == dtype
    assert metadata == {}


def test_same_content_gives_the_same_bytes(saved, tmp_path):
    write_safetensors(
        tmp_path / "b",
        dict(reversed(list(TENSORS.items()))),
        dict(reversed(list(METADATA.items()))),
    )
    assert (tmp_path / "b").read_bytes() == saved.read_bytes()


def test_views_and_shared_memory(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    tensors = {
        "base": base,
        "again": base,
        "transposed": base.T,
        "row": base[1],
        "expanded": base[:1].expand(5, 4),
        "parameter": torch.nn.Parameter(base),
    }
    write_safetensors(tmp_path / "a", tensors)
    read, _ = read_safetensors(tmp_path / "a")
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor)
    assert torch.equal(base, torch.arange(12.0).reshape(3, 4))


def test_other_programs_read_and_write_the_same_files(saved, tmp_path):
    assert torch.equal(load_file(saved)["conv.weight"], TENSORS["conv.weight"])
    save_file({"a": torch.ones(3)}, tmp_path / "foreign", {"k": "v"})
    tensors, metadata = read_safetensors(tmp_path / "foreign")
    assert torch.equal(tensors["a"], torch.ones(3))
    assert metadata == {"k": "v"} == read_metadata(tmp_path / "foreign")


@pytest.mark.parametrize(
    ("tensors", "metadata", "reason"),
    [
        ({"a": [1, 2]}, {}, "'a' is not a dense tensor .list."),
        ({"a": torch.ones(2, device="meta")}, {}, "'a' is not a dense tensor"),
        ({"a": torch.eye(2).to_sparse()}, {}, "'a' is not a dense tensor"),
        ({}, {"seed": 3}, "metadata 'seed' is int; .*JSON"),
        ({"__metadata__": torch.ones(1)}, {}, "reserved"),
        ({}, {"k": "\ud800"}, "cannot store"),
        ({}, {str(i): "" for i in range(2000)}, r"\d+ entries of metadata, at most.*less metadata"),
    ],
)
def test_unstorable_content(tmp_path, tensors, metadata, reason):
    with pytest.raises(CheckpointError, match=reason):
        write_safetensors(tmp_path / "a", tensors, metadata)
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not hasattr(torch, "float8_e8m0fnu"), reason="newer dtype")
def test_what_could_not_be_read_again_is_not_written(tmp_path):
    tensors = {"a": torch.ones(2).to(torch.float8_e8m0fnu)}
    with pytest.raises(CheckpointError, match=r"could not be read again.*F8_E8M0.*convert"):
        write_safetensors(tmp_path / "a", tensors)
    assert os.listdir(tmp_path) == []


def test_crash_while_writing_keeps_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()

    def crash(*_):
        raise Crash

    monkeypatch.setattr(files.os, "fsync", crash)
    with pytest.raises(Crash):
        write_safetensors(saved, {"a": torch.ones(3)})
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


@pytest.mark.parametrize("read", [read_safetensors, read_metadata])
def test_every_truncation_is_named(saved, read):
    whole = saved.read_bytes()
    for length in range(len(whole)):
        saved.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"net\.safetensors' is cut short"):
            read(saved)


@pytest.mark.parametrize("read", [read_safetensors, read_metadata])
def test_bytes_after_the_end(saved, read):
    saved.write_bytes(saved.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match="1 bytes follow"):
        read(saved)


def test_every_flipped_bit_is_refused_or_harmless(saved):
    whole = saved.read_bytes()
    for bit in range(len(whole) * 8):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        saved.write_bytes(damaged)
        try:
            tensors, metadata = read_safetensors(saved)
        except CheckpointError:
            pass
        else:  # blanks around JSON, or the name of the digest, which then is foreign metadata
            assert METADATA.items() <= metadata.items()
            assert all(torch.equal(tensors[name], TENSORS[name]) for name in TENSORS)
        try:
            metadata = read_metadata(saved)
        except CheckpointError:
            continue
        assert all(isinstance(text, str) for text in metadata.values())


@pytest.mark.parametrize("read", [read_safetensors, read_metadata])
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut short .0 bytes"),
        (b"PK\x03\x04" + bytes(100), "cut short|header would take"),
        (b"\xff" * 100, "header would take"),
        (
            (io.MAX_HEADER_BYTES + 1).to_bytes(8, "little") + b"{}",
            f"at most {io.MAX_HEADER_BYTES} are",
        ),
        ((2).to_bytes(8, "little") + b"[]", "header cannot be read"),
        ((4).to_bytes(8, "little") + b"null", "header cannot be read"),
        ((7).to_bytes(8, "little") + b'{"a":1}', "header cannot be read"),
        ((22).to_bytes(8, "little") + b'{"__metadata__":{"a":1}', "header cannot be read"),
        ((24).to_bytes(8, "little") + b'{"__metadata__":{"a":1}}', "metadata is not text"),
        ((60_000).to_bytes(8, "little") + b"[" * 60_000, "header cannot be read"),
    ],
)
def test_other_files(tmp_path, read, content, reason):
    path = tmp_path / "net"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"net' is .*({reason}).*anew"):
        read(path)


@pytest.mark.parametrize("read", [read_safetensors, read_metadata])
def test_unreadable_paths(tmp_path, read):
    for path, reason in [(tmp_path / "none", "No such file"), (tmp_path, "directory"), ("\0", "")]:
        with pytest.raises(CheckpointError, match=f"cannot read .*{reason}.*check the name"):
            read(path)


def test_too_large_a_header_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "MAX_HEADER_BYTES", 1000)
    with pytest.raises(CheckpointError, match=r"header would take \d+ bytes.*less metadata"):
        write_safetensors(tmp_path / "a", {}, {"k": "v" * 1000})
    assert os.listdir(tmp_path) == []


@given(st.dictionaries(st.text(max_size=9), st.text(max_size=9), max_size=4))
def test_any_text_survives(tmp_path_factory, metadata):
    path = tmp_path_factory.mktemp("any") / "a"
    try:
        write_safetensors(path, {"t": torch.ones(1)}, metadata)
    except CheckpointError:
        assert any("\ud800" <= c <= "\udfff" for k, v in metadata.items() for c in k + v)
        return
    assert read_safetensors(path)[1] == metadata == read_metadata(path)
