"""Commands under ``torchrun``: the process group, and rank 0 as the one that prints and writes."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stamppruner.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from stamppruner.data import ArrayDataset

TOGETHER = ("meta-fit", "prune", "finetune")
"""Commands that several processes do together."""


@contextmanager
def group(arguments: argparse.Namespace) -> Iterator[None]:
    """The process group that ``torchrun`` asks for, if it does; other ranks than 0 are quiet.

    Raises:
        ConfigError: the command is one for a single process.
    """
    number = int(os.environ.get("WORLD_SIZE", "1"))
    if number == 1:
        yield
        return
    if arguments.command not in TOGETHER:
        raise ConfigError(
            f"{arguments.command} runs in one process, not in WORLD_SIZE={number}: start it "
            f"without torchrun (with it: {', '.join(TOGETHER)})"
        )
    import torch
    from torch import distributed as dist

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    if dist.get_rank() > 0:
        arguments.quiet = arguments.silent = True
    try:
        yield
    finally:
        dist.destroy_process_group()


def first() -> bool:
    """Whether this process is the one that writes files."""
    from stamppruner import ranks

    return ranks.own() == 0


def own_part(data: ArrayDataset) -> ArrayDataset:
    """This rank's share of the images, as many of every class as can be."""
    from stamppruner import ranks

    if ranks.count() == 1:
        return data
    order = data.targets.argsort(stable=True)
    return data.subset(order[list(ranks.mine(len(order)))].sort().values)


def device_of(arguments: argparse.Namespace) -> torch.device:
    """``--device``, by default a GPU where there is one; under torchrun each rank has its own.

    Raises:
        ConfigError: there is no such device.
    """
    import torch

    from stamppruner.devices import why_not

    name: Any = arguments.device
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if (reason := why_not(name)) is not None:
        raise ConfigError(f"--device {name}: {reason}; pass cpu, cuda or cuda:0, say")
    return torch.empty(0, device=name).device
