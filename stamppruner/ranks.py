"""Pruning on all ranks of a distributed job: one sample, one plan, one slim network.

Every rank reads its own part of the target; the sample is pooled, scores are averaged, the plan is
compared, and the slim network is that of rank 0. Without ``torch.distributed``, or on a single
rank, nothing here does anything.

Ranks talk through one kind of message, so that a rank that fails meets the others wherever they
are, and all of them raise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from stamppruner.channels import ChannelPlan
from stamppruner.errors import RankError
from stamppruner.target import Target, check_labels, read_target

T = TypeVar("T")


def count() -> int:
    """Ranks that prune together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own() -> int:
    """Number of this rank, from 0."""
    return dist.get_rank() if count() > 1 else 0


@contextmanager
def together() -> Iterator[None]:
    """What fails in the block on one rank fails on all, with that rank's message.

    All ranks must enter it. It also decorates functions.

    Raises:
        RankError: another rank failed.
    """
    if count() == 1:
        yield
        return
    try:
        yield
    except RankError:  # raised on every rank
        raise
    except Exception as error:
        _messages("failed", error=f"{type(error).__name__}: {error}")
        raise
    _messages("done")


def sample_target(loader: Any, limit: int, *, channels: int | None = None, seed: int = 0) -> Target:
    """A uniform sample of the data of all ranks, the same on each.

    Args:
        loader: this rank's part, as for :func:`stamppruner.target.sample_target`.
        limit: most images, of all ranks together.
        channels: of the images.
        seed: of the choice.

    Raises:
        DataError: see there; classes are those of all ranks.
        RankError: the ranks have images of several shapes or types, or another rank failed.
    """
    target, labels = read_target(loader, limit, channels=channels, seed=seed + own())
    if count() == 1:
        check_labels(labels)
        return target
    facts = (target.num_images, tuple(target.images.shape[1:]), target.images.dtype, labels)
    numbers, shapes, dtypes, seen = zip(*_messages("target", facts), strict=True)
    if len(set(shapes)) > 1 or len(set(dtypes)) > 1:
        raise RankError(
            f"the ranks' target images have shapes {list(shapes)} and types {list(dtypes)}: give "
            "all ranks images of one kind"
        )
    check_labels(set().union(*seen))
    total = sum(numbers)
    share = max(1, min(len(target.labels), round(limit * target.num_images / total)))
    parts = _messages("images", (target.images[:share].cpu(), target.labels[:share].cpu()))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(sum(len(y) for _, y in parts)))
    images, targets = (torch.cat(p)[order] for p in zip(*parts, strict=True))
    return Target(
        images.to(target.images.device),
        targets.to(target.labels.device),
        max(max(s) for s in seen) + 1,
        total,
        target.facts,
    )


def mean(scores: np.ndarray) -> np.ndarray:
    """Scores averaged over the ranks, bit for bit the same on each.

    Raises:
        RankError: other numbers of channels on other ranks.
    """
    if count() == 1:
        return scores
    found = _messages("scores", np.asarray(scores))
    if len({s.shape for s in found}) > 1:
        raise RankError(
            f"the ranks score {[s.size for s in found]} channels: build the same model, protected "
            "alike, on all of them"
        )
    return np.mean(np.stack(found), axis=0)


def from_first(make: Callable[[], T]) -> T:
    """What rank 0 makes, on all ranks.

    Raises:
        RankError: rank 0 failed.
    """
    if count() == 1:
        return make()
    return _messages("first", make() if own() == 0 else None)[0]


def check_plan(plan: ChannelPlan) -> None:
    """See that all ranks are about to make the same cut.

    Raises:
        RankError: some rank has another plan.
    """
    if count() == 1:
        return
    digest = hashlib.sha256(json.dumps(plan.record()).encode()).hexdigest()
    found = _messages("plan", (digest, str(plan)))
    if others := [r for r, (other, _) in enumerate(found) if other != found[0][0]]:
        raise RankError(
            f"ranks {others} have other plans than rank 0 ({found[others[0]][1]}; {found[0][1]}): "
            "give all ranks the same model, settings and budget"
        )


@torch.no_grad()
def copy_from_first_(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, in place.

    Raises:
        RankError: the ranks have models of other shapes.
    """
    if count() == 1:
        return
    tensors = list(itertools.chain(model.parameters(), model.buffers()))
    shapes = [(tuple(t.shape), t.dtype) for t in tensors]
    if any(other != shapes for other in _messages("weights", shapes)):
        raise RankError("the ranks have slim models of other shapes: build the same model on all")
    for tensor in tensors:
        sent = tensor.detach().to(_device(tensor)).contiguous()
        dist.broadcast(sent, src=0)
        tensor.copy_(sent)


@dataclasses.dataclass(frozen=True)
class _Message:
    """What a rank tells the others at one step, or why it stops."""

    step: str
    value: Any = None
    error: str | None = None


def _messages(step: str, value: Any = None, *, error: str | None = None) -> list[Any]:
    """The values of all ranks at this step; a rank that reports an error gets them unchecked."""
    found: list[Any] = [None] * count()
    dist.all_gather_object(found, _Message(step, value, error))
    if error is None:
        failed = [f"rank {r}: {m.error}" for r, m in enumerate(found) if m.error is not None]
        if failed:
            raise RankError(f"pruning failed on another rank ({'; '.join(failed)})")
        if len(steps := {m.step for m in found}) > 1:
            raise RankError(f"the ranks are at other steps ({sorted(steps)}): call prune on all")
    return [m.value for m in found]


def _device(tensor: torch.Tensor) -> torch.device:
    """Where the backend can send a tensor from."""
    return torch.device("cuda") if dist.get_backend() == "nccl" else tensor.device
