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


def warm_start_on_tasks(net: GatedNet, tasks: Iterable[Task]) -> None:
    """Set pi from Taylor scores on reference tasks, each with the head's rows of its classes."""
    squares = []
    for task in tasks:
        task = task.to(net.device)
        rows = torch.tensor(task.classes, device=net.device)

        def loss(logits: Tensor, labels: Tensor, rows: Tensor = rows) -> Tensor:
            return F.cross_entropy(logits.index_select(1, rows), labels, reduction="none")

        scores = taylor_scores(net.model, net.graph, task.minibatches(_BATCH), loss)
        squares.append(scores.square())
    _set(net, torch.stack(squares).mean(0).sqrt())


def warm_start_on_target(net: GatedNet, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set pi from Taylor scores on the target, whose classes the head already has."""

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits, labels, reduction="none")

    _set(net, taylor_scores(net.model, net.graph, batches, loss))


def _set(net: GatedNet, scores: Tensor) -> None:
    """Make the keep probabilities uniform in the rank of a channel's relative score."""
    relative = relative_to_group(scores, net.graph)
    rank = relative.argsort().argsort().to(scores.dtype)
    net.posterior.warm_start(0.02 + 0.96 * rank / max(1, len(rank) - 1))
