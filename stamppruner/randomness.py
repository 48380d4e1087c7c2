"""Global random streams that models (dropout) and data sets (augmentation) draw from.

Nothing of this package draws from them. Inside the block they are set anew for every piece of work,
by its number, so that a run gives the same figures after a resume and on any number of ranks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch


def set_streams(seed: int, *numbers: int) -> None:
    """Set all global streams by numbers."""
    low, high = np.random.SeedSequence([seed, *numbers]).generate_state(2, np.uint32).tolist()
    torch.manual_seed((high << 32 | low) & (2**63 - 1))
    random.seed(low)
    np.random.seed(low)  # noqa: NPY002 (the users' data sets draw from it)


@contextmanager
def streams_kept(device: torch.device | None = None) -> Iterator[None]:
    """All global streams go on after the block as before it; it also decorates functions.

    Args:
        device: whose stream is kept beside the CPU's; None is the GPU in use, if there is one.
    """
    if device is None:
        used = torch.cuda.is_available() and torch.cuda.is_initialized()
        device = torch.device("cuda", torch.cuda.current_device()) if used else torch.device("cpu")
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = [device] if device.type != "cpu" else []
    kind = device.type if devices else "cuda"
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


@contextmanager
def numbered_streams(seed: int, device: torch.device) -> Iterator[Callable[..., None]]:
    """Gives a function that sets all global streams by numbers; they go on afterwards as before.

    Example:
        >>> with numbered_streams(0, torch.device("cpu")) as at:
        ...     at(3, 1)
        ...     first = torch.rand(2)
        ...     at(3, 1)
        ...     bool((first == torch.rand(2)).all())
        True
    """
    with streams_kept(device):
        yield partial(set_streams, seed)


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Torch's deterministic algorithms inside the block, if wanted; settings are restored."""
    if not wanted:
        yield
        return
    before = torch.are_deterministic_algorithms_enabled()
    warn = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark
