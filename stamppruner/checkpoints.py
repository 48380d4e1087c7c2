"""Checkpoints of a long run in a folder: whole or not there, the last few kept, one run's alone."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from stamppruner.errors import CheckpointError, shown
from stamppruner.files import PathLike, check_folder, remove_strays
from stamppruner.io import parse_record, read_safetensors, write_safetensors

logger = logging.getLogger(__name__)

FORMAT = "stamppruner.checkpoint"
VERSION = 1

_NAME = re.compile(r"meta-fit-(\d{8,})\.safetensors")


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a file holds.

    Attributes:
        path: of the file.
        tensors: by name.
        record: all else, JSON-able.
    """

    path: str
    tensors: dict[str, Tensor]
    record: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: made if missing; what killed writers left in it is removed.
        keep: so many of the last ones stay.
        identity: what makes the run the one that it is, by name, JSON-able.

    Raises:
        CheckpointError: the folder cannot be written to.
    """

    def __init__(self, directory: PathLike, keep: int, identity: Mapping[str, Any]) -> None:
        self.folder = check_folder(directory, [_name(0)])
        self.keep = keep
        self.identity: dict[str, Any] = json.loads(json.dumps(dict(identity)))
        remove_strays(self.folder)

    def files(self) -> list[Path]:
        """The files, the last first."""
        found = [(m, path) for path in self.folder.iterdir() if (m := _NAME.fullmatch(path.name))]
        return [path for _, path in sorted(found, key=lambda pair: -int(pair[0][1]))]

    def write(self, number: int, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> Path:
        """Write a checkpoint after so many iterations, and remove those that are too many.

        Raises:
            CheckpointError: it cannot be written; the older ones stay.
        """
        path = self.folder / _name(number)
        whole = {"version": VERSION, "torch": torch.__version__, **record}
        whole |= {"identity": self.identity}
        write_safetensors(path, tensors, {FORMAT: json.dumps(whole)})
        for old in self.files()[self.keep :]:
            old.unlink(missing_ok=True)
        return path

    def check_empty(self) -> None:
        """Raise CheckpointError if there are some already."""
        if files := self.files():
            raise CheckpointError(
                f"{str(self.folder)!r} has checkpoints (the last is {files[0].name}): pass "
                "resume=True (--resume) to go on from it, or another folder"
            )

    def latest(self) -> Checkpoint | None:
        """The last one that can be read, None if there are no files.

        Raises:
            CheckpointError: none can be read, or it is of another run; what differs is named.
        """
        files = self.files()
        for path in files:
            try:
                tensors, metadata = read_safetensors(path)
                record = parse_record(metadata, FORMAT, VERSION, path, noun="checkpoint")
            except CheckpointError as error:
                logger.warning("left out a checkpoint that cannot be read: %s", error)
                continue
            self._check(record, path)
            if record.get("torch") != torch.__version__:
                logger.warning(
                    "%s was written with torch %s, this is %s: figures may differ in last digits",
                    path, shown(record.get("torch")), torch.__version__,
                )  # fmt: skip
            return Checkpoint(str(path), tensors, record)
        if files:
            raise CheckpointError(
                f"none of the {len(files)} checkpoints in {str(self.folder)!r} can be read: remove "
                "them to begin anew, or pass another folder"
            )
        return None

    def _check(self, record: Mapping[str, Any], path: Path) -> None:
        found = record.get("identity")
        if not isinstance(found, dict):
            raise CheckpointError(f"{path} does not say of which run it is: remove it")
        for name in [*self.identity, *found]:
            was, now = found.get(name), self.identity.get(name)
            if was != now:
                raise CheckpointError(
                    f"{path} is of another run: {name} was {shown(was)} there and is {shown(now)} "
                    "here; pass what that run was begun with, or another folder"
                )


def digest(module: nn.Module) -> str:
    """Of the names, shapes and values of a module's state."""
    found = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        plain = tensor.detach().cpu().contiguous()
        found.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode())
        found.update(memoryview(plain.flatten().view(torch.uint8).numpy()))
    return found.hexdigest()[:16]


def _name(number: int) -> str:
    return f"meta-fit-{number:08d}.safetensors"
