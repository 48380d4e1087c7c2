"""Keep the memory of glibc's heap between passes, so that arithmetic takes the time.

By default glibc gives large blocks back to the system as soon as they are free, and gets new,
zeroed pages for the next ones. On a CPU that can take most of a forward pass of large activations,
and whether it happens depends on what the process did before. Serving runtimes and caching
allocators keep their memory, as PyTorch itself does on CUDA.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch

CPU = torch.device("cpu")

# malloc.h
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4

_MIB = 1 << 20
_LARGEST_THRESHOLD = 32 * _MIB  # to which glibc raises its threshold by itself on 64 bits
_DEFAULT_MMAP_MAX = 65536

_lock = Lock()
_users = 0


@contextmanager
def memory_kept(device: torch.device = CPU) -> Iterator[None]:
    """Within it, memory that is freed stays with the process; at its end what is free is returned.

    From then on glibc behaves as after the release of a block of 32 MiB: blocks up to that size
    come from the heap. Nothing happens on another device than the CPU, without glibc, or where
    the environment configures it (``MALLOC_*_`` or ``GLIBC_TUNABLES``). It may be nested, and
    entered by several threads.

    Source: ``mallopt(3)``.
    """
    glibc = None if device.type != "cpu" or _is_configured() else _glibc()
    if glibc is None:
        yield
        return
    _enter(glibc)
    try:
        yield
    finally:
        _leave(glibc)


def give_back() -> None:
    """Return what is free in the heap to the system now, holes between blocks included."""
    glibc = None if _is_configured() else _glibc()
    if glibc is not None:
        glibc.malloc_trim(0)


def _enter(glibc: ctypes.CDLL) -> None:
    global _users
    with _lock:
        _users += 1
        if _users == 1:
            glibc.mallopt(_MMAP_MAX, 0)
            glibc.mallopt(_TRIM_THRESHOLD, -1)


def _leave(glibc: ctypes.CDLL) -> None:
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            glibc.mallopt(_MMAP_MAX, _DEFAULT_MMAP_MAX)
            glibc.mallopt(_MMAP_THRESHOLD, _LARGEST_THRESHOLD)
            glibc.mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_THRESHOLD)
            glibc.malloc_trim(0)


def _is_configured() -> bool:
    """Whether the user decided on the heap."""
    return "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "") or any(
        name.startswith("MALLOC_") and name.endswith("_") for name in os.environ
    )


def _glibc() -> ctypes.CDLL | None:
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    known = all(hasattr(library, name) for name in ("gnu_get_libc_version", "malloc_trim"))
    return library if known else None
