"""First values of pi: from scores on data instead of one value for all channels."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn import functional as F

from stamppruner.gated import GatedNet
from stamppruner.tasks import Task
from stamppruner.taylor import relative_to_group, taylor_scores

_BATCH = 50


def task_scores(net: GatedNet, tasks: Iterable[Task]) -> Tensor:
    """Taylor scores on reference tasks: ``(T, C)``.

    For classification each has the head's rows of its classes.
    """
    scores = []
    for task in tasks:
        task = task.to(net.device)
        batches = task.minibatches(_BATCH)
        if not net.task.classifies:
            each, outputs = net.task.each, net.task.outputs
            scores.append(taylor_scores(net.model, net.graph, batches, each, outputs))
            continue
        rows = torch.tensor(task.classes, device=net.device)

        def loss(logits: Tensor, labels: Tensor, rows: Tensor = rows) -> Tensor:
            return F.cross_entropy(logits.index_select(1, rows), labels, reduction="none")

        scores.append(taylor_scores(net.model, net.graph, batches, loss))
    return torch.stack(scores)


def warm_start_on_tasks(net: GatedNet, scores: Tensor) -> None:
    """Set pi from the scores ``(T, C)`` of reference tasks: their root mean square, by rank."""
    net.posterior.warm_start(keep_by_rank(scores.square().mean(0).sqrt(), net))


def blend_target(net: GatedNet, batches: Iterable[tuple[Tensor, Tensor]], weight: float) -> None:
    """Move pi towards Taylor scores on the target, whose classes the head already has.

    The prior knowledge of the reference and the evidence of the target are averaged as keep
    probabilities, ``(1 - weight) E[pi] + weight * rank``.
    """
    task = net.task
    scores = taylor_scores(net.model, net.graph, batches, task.each, task.outputs)
    target = keep_by_rank(scores, net)
    with torch.no_grad():
        prior = net.posterior.keep_probability()
    net.posterior.warm_start((1 - weight) * prior + weight * target.to(prior))


def keep_by_rank(scores: Tensor, net: GatedNet) -> Tensor:
    """Keep probabilities that are uniform in the rank of a channel's relative score."""
    rank = relative_to_group(scores, net.graph).argsort().argsort().to(scores.dtype)
    return 0.02 + 0.96 * rank / max(1, len(rank) - 1)
