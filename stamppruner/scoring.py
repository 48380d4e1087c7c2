"""The part of pruning that knows no budget: read a target, fit a head to it, score every channel.

One scoring serves any number of budgets. Only where gates go on learning on the target under the
budget's masks (``config.prune_epochs``) does each budget get scores of its own.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from stamppruner import ranks
from stamppruner.adapt import adapt_
from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelGraph, FloatArray
from stamppruner.config import STAMPConfig
from stamppruner.errors import DataError, DivergedError, UnsupportedModelError
from stamppruner.gated import GatedNet
from stamppruner.heads import find_head, num_outputs, with_classes
from stamppruner.result import fit_head_
from stamppruner.statistics import ImageStatistics
from stamppruner.target import SAMPLE, Target, check_fits
from stamppruner.warmstart import blend_target

_FIT_BATCH = 50

_CALLER = 7
"""Stack level of the user's line: below it a method of the pruner with its two decorators, and
then ``_score``, ``score`` and ``_notes``."""


class NotMetaFittedWarning(UserWarning):
    """Pruning without :meth:`STAMPPruner.meta_fit`: masks come from the target alone."""


class UnlikeImagesWarning(UserWarning):
    """The target's images seem to be scaled in another way than the reference's."""


@dataclass(frozen=True)
class Origin:
    """What a pruner knows of its own past.

    Attributes:
        meta_fitted: whether pi was learned on a reference.
        reference: statistics of the reference's images, if there was one.
        coupled: identity shortcuts that could not be projected, with the reason.
    """

    meta_fitted: bool
    reference: ImageStatistics | None
    coupled: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Scoring:
    """A target that was read, and the score of every channel for it.

    Attributes:
        net: a copy of the pruner's, with a fitted head of the target's classes.
        chooser: of its network.
        target: the sample that everything is fitted on.
        scores: ``E[m]``, ``(num_channels,)``.
        new_head: whether the head is a new one, which must be fitted.
        notes: what the report should warn of.
        timings: seconds of the steps so far.
    """

    net: GatedNet
    chooser: Chooser
    target: Target
    scores: FloatArray
    new_head: bool
    notes: tuple[str, ...]
    timings: Mapping[str, float]

    @property
    def dense(self) -> nn.Module:
        """The full network, with the target's head."""
        return self.net.model

    def under(self, budget: Budget | None, config: STAMPConfig, *, progress: bool) -> Scoring:
        """The scoring after K epochs of gate learning under a budget; itself where K is 0.

        Args:
            budget: whose hard masks are learned under; None for relaxed ones.
            config: K is its ``prune_epochs``.
            progress: show a bar where the output is a terminal.

        Raises:
            BudgetError: the budget cannot be met.
            DivergedError: the gates are not finite any more.
        """
        if config.prune_epochs <= 0:
            return self
        start = perf_counter()
        net = _copied(self.net, copy.deepcopy(self.dense), self.net.graph)
        adapt_(net, self.chooser, self.target, budget, config, progress=progress)  # line 11
        scores = _keep_probability(net, self.target, config)
        if not np.isfinite(scores).all():
            raise DivergedError(
                f"the gates diverged in K = {config.prune_epochs:g} epochs on the target: lower "
                f"pi_lr={config.pi_lr}, theta_lr={config.theta_lr} or "
                f"weights_lr={config.weights_lr}"
            )
        timings = {**self.timings}
        timings["choose_channels"] += perf_counter() - start
        return dataclasses.replace(self, net=net, scores=scores, timings=timings)


def score(
    traced: GatedNet, target_loader: Any, config: STAMPConfig, origin: Origin, *, start: float
) -> Scoring:
    """Read a target and score the channels of a network for it.

    Args:
        traced: the pruner's; not changed.
        target_loader: of the target.
        config: settings.
        origin: what the pruner knows of its past.
        start: when reading began, by ``time.perf_counter``.

    Raises:
        DataError: the target cannot be used.
        UnsupportedModelError: the model takes no images, or gives no logits.
        RankError: ranks of a distributed job disagree, or another one failed.
    """
    shape = image_shape(traced.graph)
    task = traced.task
    target = ranks.sample_target(
        target_loader, SAMPLE, channels=shape[0], seed=config.seed, task=task
    )
    net = _copied(traced, *with_classes(traced.model, traced.graph, target.num_classes))
    dense, graph = net.model, net.graph
    chooser = Chooser(dense, graph, floor=config.floor, round_to=config.round_to)
    head = find_head(dense, graph) if task.classifies else None
    timings = {"read_target": perf_counter() - start}
    start = perf_counter()
    check_fits(dense, target.images[:1].to(net.device), target.num_classes, task)
    notes = _notes(target, shape, head, origin)
    new_head = task.classifies and target.num_classes != num_outputs(traced.model, head)
    if head is not None and (config.fit_head or new_head or not origin.meta_fitted):
        fit_head_(dense, head, target)
    weight = config.target_evidence if origin.meta_fitted else 1.0
    if weight > 0:
        blend_target(net, target.batches(_FIT_BATCH, net.device), weight)
    scores = _keep_probability(net, target, config)
    if not np.isfinite(scores).all():
        raise DataError(
            "the scores of the channels are not finite: scale the target's images as those that "
            f"the network was trained on (their largest value is {float(target.images.max()):.3g})"
        )
    timings["choose_channels"] = perf_counter() - start
    return Scoring(net, chooser, target, scores, new_head, tuple(notes), timings)


def image_shape(graph: ChannelGraph) -> tuple[int, ...]:
    """``(C, H, W)`` of the images that a model was traced with.

    Raises:
        UnsupportedModelError: it takes something else.
    """
    shape = graph.example.sample_shape if graph.example else None
    if shape is None or len(shape) != 3:
        raise UnsupportedModelError(
            f"the set encoder needs a model of one image tensor (B, C, H, W), not {shape}: use "
            "trace_channels, mask and shrink for other models"
        )
    return shape


def _notes(target: Target, shape: tuple[int, ...], head: str | None, origin: Origin) -> list[str]:
    """What a report should warn of; what the user should know at once is warned of here."""
    notes = []
    if target.images.shape[1:] != shape:
        notes.append(
            f"the target's images are {tuple(target.images.shape[1:])}: multiply-adds are "
            f"counted for {shape}, the size that the model was traced with"
        )
    found = origin.reference.unlike(ImageStatistics.of(target.images)) if origin.reference else None
    if found is not None:
        notes.append(found)
        warnings.warn(found, UnlikeImagesWarning, stacklevel=_CALLER)
    if head is None and target.task.classifies:
        notes.append(
            "the head was left as it is: the model's output is not that of one linear layer"
        )
    if origin.coupled:
        name, why = next(iter(origin.coupled.items()))
        listed = ", ".join(origin.coupled)
        notes.append(f"identity shortcuts left coupled: {listed} ({name}: {why})")
    if not origin.meta_fitted:
        notes.append("not meta-fitted: channels are ranked by Taylor scores on the target")
        text = f"{notes[-1]}; call meta_fit first"
        warnings.warn(text, NotMetaFittedWarning, stacklevel=_CALLER)
    return notes


def _copied(net: GatedNet, model: nn.Module, graph: ChannelGraph) -> GatedNet:
    """A model of one's own under a copy of a net's gates."""
    parts = copy.deepcopy((net.posterior, net.encoder))
    return GatedNet(model, graph, *parts, net.task)


def _keep_probability(net: GatedNet, target: Target, config: STAMPConfig) -> FloatArray:
    """``E[m]`` for the target's images, ``(num_channels,)``, the mean over all ranks."""
    images = target.images[: config.set_size].to(net.device)
    with torch.no_grad():
        return ranks.mean(net.keep_probability(images).cpu().numpy())
