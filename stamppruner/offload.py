"""Tensors that lie outside of the device's memory while nothing needs them.

An accelerator has main memory beside it, and a CPU a disk. Tensors stay the same objects: their
storages are emptied meanwhile, as fully sharded training does it, and hold the same bits after.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage

from stamppruner.errors import CheckpointError, ConfigError, reason
from stamppruner.files import PathLike, check_folder
from stamppruner.heap import give_back

HOST = "cpu"
"""Name of main memory as a place."""

_CHECKED = "offload"
"""Name of the file that is tried in a folder."""

_PART = 2**20
"""Bytes that go to a file or come from it at once."""


class _Place(Protocol):
    def write(self, storages: list[UntypedStorage]) -> None: ...

    def read(self, storages: list[UntypedStorage]) -> None: ...


class Offload:
    """Makes places for tensors to rest in.

    Args:
        where: a folder on a disk, made if missing; ``"cpu"`` for main memory; None leaves all
            where it is.
        device: of the tensors.

    Raises:
        ConfigError: neither a path nor None, or main memory, where the tensors are anyway.
        CheckpointError: files cannot be made in the folder.
    """

    def __init__(self, where: PathLike | None, device: torch.device) -> None:
        if where is not None and not (isinstance(where, str | os.PathLike) and str(where)):
            raise ConfigError(f"offload={where!r}: pass a folder, 'cpu', or None")
        if where == HOST and device.type == "cpu":
            raise ConfigError(
                "offload='cpu' is where a model on the CPU is: pass a folder on a disk, or None"
            )
        self._folder = None if where in (None, HOST) else check_folder(where, [_CHECKED])
        self._host = where == HOST

    def resting(self, tensors: Callable[[], Iterable[Tensor]]) -> Resting:
        """These tensors, which stay here until they are sent away or were used once."""
        if self._folder is not None:
            return Resting(tensors, _File(self._folder))
        return Resting(tensors, _Host() if self._host else None)


NOWHERE = Offload(None, torch.device("cpu"))
"""Leaves all where it is, on any device."""


class Resting:
    """Tensors that are sent away, and come back for a while.

    Args:
        tensors: gives them; asked when they are sent away.
        place: where to; None leaves them here.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]], place: _Place | None) -> None:
        self._tensors, self._place = tensors, place
        self._away: dict[UntypedStorage, int] = {}
        self._users = 0
        self._written = False

    def send(self) -> None:
        """Send them away, unless they are.

        Raises:
            CheckpointError: they cannot be written; they stay here.
        """
        if self._place is None or self._away:
            return
        storages = _storages(self._tensors())
        if not self._written:
            self._place.write(storages)
        self._away = {storage: storage.nbytes() for storage in storages}
        for storage in storages:
            storage.resize_(0)
        give_back()

    def bring(self) -> None:
        """Bring them back, to stay.

        Raises:
            CheckpointError: they cannot be read.
        """
        if self._place is None or not self._away:
            return
        away, self._away = self._away, {}
        for storage, size in away.items():
            storage.resize_(size)
        self._place.read(list(away))
        self._written = True

    @contextmanager
    def here(self, *, changed: bool = True) -> Iterator[None]:
        """Back inside the block, and away after it; it may be nested.

        Args:
            changed: the block may change them.

        Raises:
            CheckpointError: they cannot be read, or not be written.
        """
        self.bring()
        if changed:
            self._written = False
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self.send()


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """The storages behind tensors, each once."""
    found: dict[int, UntypedStorage] = {}
    for tensor in tensors:
        if not tensor.untyped_storage().resizable():  # of a file that was read
            tensor.data = tensor.detach().clone()
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
    return list(found.values())


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _staged(storages: Iterable[UntypedStorage]) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of storages as bytes, each with a buffer in main memory.

    A storage that numpy has seen cannot be emptied any more.
    """
    buffer = torch.empty(_PART, dtype=torch.uint8)
    for storage in storages:
        for part in _bytes(storage).split(_PART):
            yield part, buffer[: len(part)]


class _Host:
    """Page-locked main memory, for the device to copy to and from at its full speed."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def write(self, storages: list[UntypedStorage]) -> None:
        if [block.numel() for block in self._blocks] != [s.nbytes() for s in storages]:
            pinned = torch.cuda.is_available()
            self._blocks = [
                torch.empty(s.nbytes(), dtype=torch.uint8, pin_memory=pinned) for s in storages
            ]
        for block, storage in zip(self._blocks, storages, strict=True):
            block.copy_(_bytes(storage))

    def read(self, storages: list[UntypedStorage]) -> None:
        for block, storage in zip(self._blocks, storages, strict=True):
            _bytes(storage).copy_(block)


class _File:
    """A file without a name, which the system removes however the process ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: FileIO | None = None

    def write(self, storages: list[UntypedStorage]) -> None:
        with self._named("write to"):
            if self._file is None:
                file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
                weakref.finalize(self, file.close)
                self._file = file
            self._file.seek(0)
            for part, staged in _staged(storages):
                staged.copy_(part)
                left = staged.numpy().data
                while left:
                    left = left[self._file.write(left) :]

    def read(self, storages: list[UntypedStorage]) -> None:
        assert self._file is not None
        with self._named("read from"):
            self._file.seek(0)
            for part, staged in _staged(storages):
                left = staged.numpy().data
                while left:
                    number = self._file.readinto(left)
                    if not number:
                        raise OSError("the file ends early")
                    left = left[number:]
                part.copy_(staged)

    @contextmanager
    def _named(self, did: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(
                f"cannot {did} the offload folder {str(self._folder)!r} ({reason(error)}): free "
                "space on that disk, or pass another folder"
            ) from error
