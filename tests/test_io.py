"""Files are whole or not there; damage is named, never loaded."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from stamppruner import io
from stamppruner.errors import CheckpointError
from stamppruner.io import (
    atomic_write,
    check_writable,
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


# ---------------------------------------------------------------------------- atomic_write


def test_writes_bytes_and_callbacks(tmp_path):
    atomic_write(tmp_path / "a", b"one")
    atomic_write(str(tmp_path / "b"), lambda file: file.write(b"two"))
    assert (tmp_path / "a").read_bytes() == b"one"
    assert (tmp_path / "b").read_bytes() == b"two"
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


@pytest.mark.parametrize("kind", [Crash, KeyboardInterrupt, ValueError])
def test_crash_in_the_middle_keeps_the_old_file(tmp_path, kind):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def half(file):
        file.write(b"ne")
        file.flush()
        raise kind

    with pytest.raises(kind):
        atomic_write(path, half)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failing_disk_keeps_the_old_file(tmp_path, monkeypatch, call):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(io.os, call, fail)
    with pytest.raises(CheckpointError, match=r"cannot write .*a'.*No space left.*check"):
        atomic_write(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.skipif(os.name == "nt", reason="POSIX permissions")
def test_permissions_are_those_of_any_file_or_of_the_old_one(tmp_path):
    path, plain = tmp_path / "a", tmp_path / "b"
    plain.write_bytes(b"")
    atomic_write(path, b"1")
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    atomic_write(path, b"2")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_follows_a_link(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(b"old")
    link.symlink_to(real)
    atomic_write(link, b"new")
    assert link.is_symlink()
    assert real.read_bytes() == b"new"


@pytest.mark.parametrize("write", [lambda p: atomic_write(p, b"x"), check_writable])
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/file", "not an existing directory; create it"),
        ("file/below", "not an existing directory|Not a directory"),
        (".", "is a directory; give a file name"),
        ("x" * 300, "name too long"),
        ("nul\0byte", "null"),
    ],
)
def test_impossible_paths(tmp_path, write, name, reason):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"(?s)(?i)cannot write .*({reason})"):
        write(tmp_path / name)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.skipif(not os.path.exists("/dev/null"), reason="needs a device file")
def test_a_device_is_not_replaced():
    with pytest.raises(CheckpointError, match="no regular file"):
        atomic_write("/dev/null", b"x")


def test_forbidden_directory(tmp_path, monkeypatch):
    def forbid(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(io.os, "open", forbid)
    with pytest.raises(CheckpointError, match="Permission denied; check the name"):
        check_writable(tmp_path / "a")


def test_read_only_file_is_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(io.os, "access", lambda *_: False)
    with pytest.raises(CheckpointError, match="read-only"):
        atomic_write(path, b"new")


def test_check_writable_leaves_nothing(tmp_path):
    check_writable(tmp_path / "new")
    assert os.listdir(tmp_path) == []
    (tmp_path / "old").write_bytes(b"old")
    check_writable(tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["old"]


# ---------------------------------------------------------------------------- safetensors


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

    monkeypatch.setattr(io.os, "fsync", crash)
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
