"""The prune stage's K steps on the target (Algorithm 1, line 11)."""

from __future__ import annotations

import math

import torch

from stamppruner import objective
from stamppruner.batchnorm import frozen_statistics
from stamppruner.budget import Budget, Chooser
from stamppruner.config import STAMPConfig
from stamppruner.gated import GatedNet
from stamppruner.progress import bar
from stamppruner.target import Target


def adapt_(
    net: GatedNet,
    chooser: Chooser,
    target: Target,
    budget: Budget | None,
    config: STAMPConfig,
    *,
    progress: bool,
) -> None:
    """Learn W, pi and theta on the target for ``config.prune_epochs`` epochs, in place.

    Masks are hard ones of the budget where there is one, else relaxed samples as in the paper.
    """
    generator = torch.Generator().manual_seed(config.seed)
    mask: objective.Relaxed | objective.Budgeted
    if budget is not None:
        mask = objective.Budgeted(net, chooser, budget)
    else:
        mask = objective.Relaxed(net, config.temperature, generator)
    optimizer = objective.adam(net, config)
    images = target.images[: config.set_size].to(net.device)
    count, size = len(target.labels), config.minibatch_size
    training = net.model.training
    net.model.train()
    for _ in bar(
        range(math.ceil(config.prune_epochs * count / size)), description="prune", shown=progress
    ):
        chosen = torch.randint(count, (size,), generator=generator)
        x, y = target.images[chosen].to(net.device), target.labels[chosen].to(net.device)
        evidence = net.evidence(images)
        with net.masked(mask.of(evidence)) as model, frozen_statistics(model):
            logits = objective.forward(model, x, config, net.task)
        optimizer.zero_grad()
        loss = objective.loss(logits, y, net, config.kl_scale / target.num_images)
        (loss + objective.penalty(mask, evidence, config)).backward()
        optimizer.step()
    net.model.train(training)
