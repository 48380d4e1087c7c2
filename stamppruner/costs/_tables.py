"""Measured times on disk: one JSON file a device, so that nothing is measured twice."""

from __future__ import annotations

import json
import math
import os
import platform
import re
from pathlib import Path

import torch

from stamppruner.files import atomic_write

CACHE = "STAMPPRUNER_CACHE"
"""Environment variable: the folder of the tables; empty keeps them in memory."""

_FOLDER = "~/.cache/stamppruner"


class Tables:
    """Times of one device with a number of threads, in a precision, by what was timed.

    A file that cannot be read counts as empty, one that cannot be written is left out: tables
    save time and nothing depends on them.

    Args:
        device: such as ``"cpu"`` or ``"cuda:0"``.
        threads: of PyTorch.
        amp: the times are those under bfloat16 autocast.
    """

    def __init__(self, device: str, threads: int, *, amp: bool = False) -> None:
        name = f"{_hardware(device)} {threads} threads torch {torch.__version__}{' amp' * amp}"
        folder = os.environ.get(CACHE, _FOLDER)
        self._path = Path(folder).expanduser() / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.json"
        self._kept = bool(folder)
        self._times: dict[str, list[float]] = self._read()
        self._changed = False

    def get(self, key: str, count: int) -> list[float] | None:
        """The times, if there are so many of them."""
        found = self._times.get(key)
        return found if found is not None and len(found) == count else None

    def put(self, key: str, times: list[float]) -> None:
        """Note times in milliseconds."""
        self._times[key] = times
        self._changed = True

    def save(self) -> None:
        """Write what is new, beside what others wrote meanwhile."""
        if not (self._changed and self._kept):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(self._path, json.dumps(self._read() | self._times).encode())
        except Exception:  # noqa: BLE001 - a cache
            return

    def _read(self) -> dict[str, list[float]]:
        try:
            found = json.loads(self._path.read_bytes()) if self._kept else {}
        except (OSError, ValueError):
            return {}
        entries = found.items() if isinstance(found, dict) else ()
        return {k: v for k, v in entries if isinstance(v, list) and all(map(_is_time, v))}


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value >= 0


def _hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{device} {torch.backends.cpu.get_cpu_capability()} {_processor()}"


def _processor() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
