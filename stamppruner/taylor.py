"""First-order Taylor scores: how much the loss would change if a channel were removed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from stamppruner.channels import ChannelGraph
from stamppruner.evidence import running_statistics
from stamppruner.gates import Gates
from stamppruner.layers import first_floating

Loss = Callable[[Any, Tensor], Tensor]
"""Model outputs and labels to one loss a sample, ``(B,)``."""


def taylor_scores(
    model: nn.Module,
    graph: ChannelGraph,
    batches: Iterable[tuple[Tensor, Tensor]],
    loss: Loss,
    forward: Callable[[nn.Module, Tensor], Any] = lambda model, images: model(images),
) -> Tensor:
    """Root mean square over samples of ``dL/dm_c``, ``(num_channels,)`` (Molchanov et al. 2017).

    With the gates open, the derivative by a channel's gate is the sum of activation times gradient
    over all that read it: the first-order change of the loss on removal. It is taken for every
    sample by itself, so that samples do not cancel.

    Args:
        model: in any mode; runs on its running statistics and is left as it was.
        graph: its channels.
        batches: images ``(B, C, H, W)`` and labels ``(B,)`` on the model's device.
        loss: one loss a sample, or the sum of all.
        forward: model and images to outputs.
    """
    like = first_floating(model)
    total = torch.zeros(graph.num_channels, device=like.device)
    count = 0
    with Gates(model, graph).injected() as gates, running_statistics(model), torch.enable_grad():
        for images, labels in batches:
            mask = images.new_ones(len(images), graph.num_channels).requires_grad_()
            gates.values = mask
            losses = loss(forward(model, images), labels)
            (gradient,) = torch.autograd.grad(losses.sum(), mask)
            total += gradient.detach().float().square().sum(0)
            count += len(images)
    return (total / max(1, count)).sqrt()


def relative_to_group(scores: Tensor, graph: ChannelGraph) -> Tensor:
    """Scores ``(num_channels,)`` over the root mean square of their group.

    Gradients differ in scale from layer to layer; compared as they are, whole layers would go.
    """
    groups = torch.from_numpy(graph.group_of).to(scores.device)
    size = torch.bincount(groups, minlength=len(graph.groups)).to(scores.dtype)
    square = scores.new_zeros(len(graph.groups)).index_add(0, groups, scores.square()) / size
    return scores / (square[groups] + 1e-20).sqrt()
