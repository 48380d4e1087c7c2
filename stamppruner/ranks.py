"""Work on all ranks of a distributed job: one sample, one plan, one network.

To prune, every rank reads its own part of the target; the sample is pooled, scores are averaged,
the plan is compared, and the slim network is that of rank 0. To learn, every rank does its share of
a step and gradients are summed. Without ``torch.distributed``, or on a single rank, nothing here
does anything.

Ranks talk through one kind of message, so that a rank that fails meets the others wherever they
are, and all of them raise.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch import distributed as dist
from torch import nn

from stamppruner.channels import ChannelPlan
from stamppruner.errors import RankError, shown
from stamppruner.supervision import CLASSIFICATION, Supervision
from stamppruner.target import Target, check_labels, read_target

if dist.is_available():
    # Its functions have the process group of the moment of the import as a default argument. The
    # first step of an optimizer imports it: a group that is there by then is never freed, and its
    # threads can abort the process at its end.
    import torch.distributed.nn

T = TypeVar("T")

_LARGE, _BUCKET = 2**18, 2**23
"""Numbers from which on a tensor is sent where it is, and smaller ones are sent together."""


def count() -> int:
    """Ranks that prune together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def own() -> int:
    """Number of this rank, from 0."""
    return dist.get_rank() if count() > 1 else 0


def mine(number: int) -> range:
    """This rank's share of so many pieces of work."""
    return range(own(), number, count())


def part(size: int) -> slice:
    """This rank's share of a batch: as many rows as the others have, or one more."""
    sizes = [size // count() + (rank < size % count()) for rank in range(count())]
    start = sum(sizes[: own()])
    return slice(start, start + sizes[own()])


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


@contextmanager
def all_ready(step: str) -> Iterator[None]:
    """What fails in the block on one rank fails on all; between computations that are shared.

    Cheaper than :func:`together`, inside which it must be.

    Raises:
        RankError: another rank failed.
    """
    try:
        yield
    except Exception:
        any_of(True)
        raise  # ``together`` tells the others why
    if any_of(False):
        gathered(step, None)


def sample_target(
    loader: Any,
    limit: int,
    *,
    channels: int | None = None,
    seed: int = 0,
    task: Supervision = CLASSIFICATION,
) -> Target:
    """A uniform sample of the data of all ranks, the same on each.

    Args:
        loader: this rank's part, as for :func:`stamppruner.target.sample_target`.
        limit: most images, of all ranks together.
        channels: of the images.
        seed: of the choice.
        task: what is to be learned of the data.

    Raises:
        DataError: see there; classes are those of all ranks.
        RankError: the ranks have images of several shapes or types, or another rank failed.
    """
    target, labels = read_target(loader, limit, channels=channels, seed=seed + own(), task=task)
    if count() == 1:
        if task.classifies:
            check_labels(labels)
        return target
    shape, targets_shape = (tuple(x.shape[1:]) for x in (target.images, target.labels))
    facts = (target.num_images, shape, targets_shape, target.images.dtype, labels)
    numbers, shapes, targets_shapes, dtypes, seen = zip(*_messages("target", facts), strict=True)
    if len({*zip(shapes, targets_shapes, dtypes, strict=True)}) > 1:
        raise RankError(
            f"the ranks' target images have shapes {list(shapes)} and types {list(dtypes)}, their "
            f"targets {list(targets_shapes)}: give all ranks data of one kind"
        )
    if task.classifies:
        check_labels(set().union(*seen))
    total = sum(numbers)
    share = max(1, min(len(target.labels), round(limit * target.num_images / total)))
    parts = _messages("images", (target.images[:share].cpu(), target.labels[:share].cpu()))
    order = torch.from_numpy(np.random.default_rng(seed).permutation(sum(len(y) for _, y in parts)))
    images, targets = (torch.cat(p)[order] for p in zip(*parts, strict=True))
    return Target(
        images.to(target.images.device),
        targets.to(target.labels.device),
        max(max(s) for s in seen) + 1 if task.classifies else 0,
        total,
        target.facts,
        task,
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


def gathered(step: str, value: T) -> list[T]:
    """The values of all ranks, in their order; ``step`` tells what they are.

    Raises:
        RankError: another rank failed, or is at another step.
    """
    return [value] if count() == 1 else _messages(step, value)


def sent_from_first(value: Any) -> Any:
    """What rank 0 has, on all ranks; for what is too large to be gathered."""
    if count() == 1:
        return value
    box = [value if own() == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def any_of(flag: bool, device: torch.device | None = None) -> bool:
    """Whether the flag is up on some rank."""
    if count() == 1:
        return flag
    found = torch.tensor(float(flag), device=device or torch.device("cpu"))
    sum_([found])
    return bool(found > 0)


@torch.no_grad()
def sum_(tensors: Sequence[torch.Tensor]) -> None:
    """Sum tensors over the ranks, in place; all ranks get the same bits."""
    if count() == 1:
        return
    under_way = []
    for bucket in _buckets(tensors):
        (first, *others), device = bucket, _device(bucket[0])
        if others or first.device.type != device.type or not _alone(first, tensors):
            flat = torch.cat([tensor.flatten() for tensor in bucket]).to(device)
        else:
            flat = first
        under_way.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
    for bucket, flat, work in under_way:
        work.wait()
        if flat is bucket[0]:
            continue
        for tensor, total in zip(bucket, flat.split([t.numel() for t in bucket]), strict=True):
            tensor.copy_(total.view(tensor.shape))


@torch.no_grad()
def average_gradients_(parameters: Sequence[nn.Parameter], images: int) -> None:
    """Average gradients over the images of all ranks, in place; ``images`` are this rank's."""
    if count() == 1:
        return
    total = torch.tensor(float(images))
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad.mul_(images)
    gradients = [p.grad for p in parameters if p.grad is not None]
    sum_([*gradients, total])
    torch._foreach_div_(gradients, float(total))


@torch.no_grad()
def average_statistics_(model: nn.Module) -> None:
    """Average the floating-point buffers of a model over the ranks, in place; add up counts."""
    buffers = list(model.buffers())
    sum_(buffers)
    if count() > 1 and (real := [b for b in buffers if b.is_floating_point()]):
        torch._foreach_div_(real, count())


def _alone(tensor: torch.Tensor, others: Sequence[torch.Tensor]) -> bool:
    """Whether it can be summed where it is: as it lies there, and in no other's memory."""
    place = tensor.untyped_storage().data_ptr()
    shared = sum(other.untyped_storage().data_ptr() == place for other in others) > 1
    return tensor.is_contiguous() and not (shared or tensor.is_neg() or tensor.is_conj())


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype and device that are sent together; large ones by themselves."""
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        bucket: list[torch.Tensor] = []
        for tensor in tensors:
            if (tensor.dtype, tensor.device) != kind:
                continue
            if tensor.numel() >= _LARGE:
                yield [tensor]
                continue
            bucket.append(tensor)
            if sum(t.numel() for t in bucket) >= _BUCKET:
                yield bucket
                bucket = []
        if bucket:
            yield bucket


def check_same(what: str, value: Any) -> None:
    """See that all ranks were given the same.

    Raises:
        RankError: some rank has another value; both are shown.
    """
    found = gathered(what, value)
    for rank, other in enumerate(found):
        if other != found[0]:
            raise RankError(
                f"rank {rank} has {what} {shown(other)} and rank 0 {shown(found[0])}: give all "
                "ranks the same"
            )


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
        raise RankError("the ranks have models of other shapes: build the same model on all")
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
            raise RankError(f"another rank failed ({'; '.join(failed)})")
        if len(steps := {m.step for m in found}) > 1:
            raise RankError(f"the ranks are at other steps ({sorted(steps)}): call the same on all")
    return [m.value for m in found]


def _device(tensor: torch.Tensor) -> torch.device:
    """Where the backend can send a tensor from."""
    return torch.device("cuda") if dist.get_backend() == "nccl" else tensor.device
