"""Files that are either whole or not there: atomic writing, and checks before long computations."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from stamppruner.errors import CheckpointError, reason

_STRAY = ".stamppruner-"

PathLike = str | os.PathLike[str]


def check_writable(path: PathLike) -> None:
    """Raise before a long computation what :func:`atomic_write` would raise after it.

    Raises:
        CheckpointError: no file can be written at ``path``. Nothing is left behind.
    """
    target = writable(path)
    descriptor, temporary = _open_temporary(target)
    os.close(descriptor)
    os.unlink(temporary)


def check_folder(directory: PathLike, files: Iterable[str]) -> Path:
    """The folder, made if missing, in which files of these names can be written.

    Raises:
        CheckpointError: it cannot be made, or a file not be written.
    """
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot make the folder {str(folder)!r} ({error}): choose another"
        ) from error
    for file in files:
        check_writable(folder / file)
    return folder


def remove_strays(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder that is one's own."""
    for path in folder.glob(f"{_STRAY}*.tmp"):
        path.unlink(missing_ok=True)


def atomic_write(path: PathLike, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Write ``content`` to ``path``, all of it or nothing.

    Args:
        path: file to create or replace. A symbolic link is followed.
        content: the bytes, or a function that writes them to the binary file it is given.

    Raises:
        CheckpointError: the file cannot be written. What ``content`` raises itself passes through;
            in both cases an older file at ``path`` is left as it was.
    """
    target = writable(path)
    descriptor, temporary = _open_temporary(target)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if target.exists():
            os.chmod(temporary, stat.S_IMODE(target.stat().st_mode))
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):
            raise _cannot_write(path, error) from error
        raise
    _sync_directory(target.parent)


def writable(path: PathLike) -> Path:
    """The file behind ``path``, links followed, if something can be written there."""
    try:
        target = Path(os.path.realpath(path))
        try:
            mode = target.stat().st_mode
        except FileNotFoundError:
            mode = None
        missing = not target.parent.is_dir()
    except (OSError, ValueError) as error:
        raise _cannot_write(path, error) from error
    if missing:
        raise CheckpointError(
            f"cannot write {str(path)!r}: {str(target.parent)!r} is not an existing directory; "
            f"create it first"
        )
    if mode is not None and stat.S_ISDIR(mode):
        raise CheckpointError(f"cannot write {str(path)!r}: it is a directory; give a file name")
    if mode is not None and not stat.S_ISREG(mode):
        raise CheckpointError(f"cannot write {str(path)!r}: it is no regular file; give another")
    if mode is not None and not os.access(target, os.W_OK):
        raise CheckpointError(
            f"cannot write {str(path)!r}: it is read-only; change its permissions or the name"
        )
    return target


def _open_temporary(target: Path) -> tuple[int, Path]:
    """A new file beside ``target``, where renaming is atomic, with the permissions of any file."""
    temporary = target.parent / f"{_STRAY}{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        return os.open(temporary, flags, 0o666), temporary
    except OSError as error:
        raise _cannot_write(target, error) from error


def _sync_directory(directory: Path) -> None:
    """Make a rename survive a power cut, on systems that let a directory be opened."""
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _cannot_write(path: PathLike, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"cannot write {str(path)!r}: {reason(error)}; check the name, the permissions and the "
        "space"
    )
