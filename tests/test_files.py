"""Files are whole or not there, and what cannot be written is said beforehand."""

import os
import stat

import pytest

from stamppruner import files
from stamppruner.errors import CheckpointError
from stamppruner.files import atomic_write, check_writable


class Crash(BaseException):
    """Not an ordinary error: like Ctrl-C."""


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

    monkeypatch.setattr(files.os, call, fail)
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

    monkeypatch.setattr(files.os, "open", forbid)
    with pytest.raises(CheckpointError, match="Permission denied; check the name"):
        check_writable(tmp_path / "a")


def test_read_only_file_is_left_alone(tmp_path, monkeypatch):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    monkeypatch.setattr(files.os, "access", lambda *_: False)
    with pytest.raises(CheckpointError, match="read-only"):
        atomic_write(path, b"new")


def test_check_writable_leaves_nothing(tmp_path):
    check_writable(tmp_path / "new")
    assert os.listdir(tmp_path) == []
    (tmp_path / "old").write_bytes(b"old")
    check_writable(tmp_path / "old")
    assert (tmp_path / "old").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["old"]
