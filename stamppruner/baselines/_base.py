"""The interface of a baseline: scores for channels; all else is shared."""

from __future__ import annotations

from abc import ABC, abstractmethod
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
from torch import nn

from stamppruner import ranks
from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelGraph, ChannelPlan, FloatArray
from stamppruner.heads import find_head, with_classes
from stamppruner.layers import first_floating
from stamppruner.meet import Met, meet
from stamppruner.result import PruneResult, check_prunable, finish, fit_head_
from stamppruner.target import SAMPLE, check_fits, first_images
from stamppruner.trace import trace_channels


class Baseline(ABC):
    """A pruning method that scores channels.

    Args:
        floor: share of every group that is always kept.
        round_to: kept widths are multiples of this where a group is wide enough, as in
            :class:`~stamppruner.STAMPConfig`.
        sample: most target images that scores, batch norms and the head are fitted on.
        reconstruct: re-solve weights by least squares after the cut, as STAMP does; off, as in
            the methods' own papers.
        measure_latency: time forward passes of both networks for the report.
        seed: of everything random.
    """

    name: ClassVar[str]

    def __init__(
        self,
        *,
        floor: float = 0.05,
        round_to: int = 8,
        sample: int = SAMPLE,
        reconstruct: bool = False,
        measure_latency: bool = True,
        seed: int = 0,
    ) -> None:
        self.floor, self.round_to, self.sample, self.seed = floor, round_to, sample, seed
        self.reconstruct, self.measure_latency = reconstruct, measure_latency

    @abstractmethod
    def scores(self, model: nn.Module, graph: ChannelGraph, target: Any) -> FloatArray:
        """``(num_channels,)``, larger is kept longer.

        Args:
            model: full network whose head was fitted to the target by ridge regression.
            graph: its channels.
            target: :class:`~stamppruner.target.Target`.
        """

    def learn_(self, model: nn.Module, graph: ChannelGraph, target: Any) -> FloatArray:
        """:meth:`scores`, for a model whose weights may be changed, as some methods do."""
        return self.scores(model, graph, target)

    @ranks.together()
    def prune(
        self,
        model: nn.Module,
        loader: Any,
        budget: Budget | None = None,
        *,
        graph: ChannelGraph | None = None,
    ) -> PruneResult:
        """Cut the model for the loader's data under a budget; the model is not changed.

        In a distributed job all ranks call it, as for :meth:`stamppruner.STAMPPruner.prune`.

        Args:
            model: a trained network.
            loader: yields (images, labels).
            budget: what must hold; None keeps every channel.
            graph: of the model, if it was traced before.

        Raises:
            DataError: the target cannot be used.
            BudgetError: the budget cannot be met.
            UnsupportedModelError: the model cannot be traced, or nothing of it can be removed.
            RankError: ranks of a distributed job disagree, or another one failed.
        """
        if graph is None:
            graph = trace_channels(model, first_images(loader)[:1])
        if budget is not None:
            check_prunable(graph)
        target = ranks.sample_target(loader, self.sample, seed=self.seed)
        dense, graph = with_classes(model, graph, target.num_classes)
        head = find_head(dense, graph)
        image = target.images[:1].to(first_floating(dense).device)
        check_fits(dense, image, target.num_classes if head is not None else 0)
        start = perf_counter()
        if head is not None:
            fit_head_(dense, head, target)
        chooser = Chooser(dense, graph, floor=self.floor, round_to=self.round_to)
        if budget is None:
            met = Met(ChannelPlan.full(graph))
        else:
            scores = ranks.mean(self.learn_(dense, graph, target))
            met = meet(dense, chooser, scores, budget)
        return finish(
            dense,
            met,
            target,
            chooser,
            title=self.name,
            budget=budget,
            fit_head=True,
            recalibrate=True,
            reconstruct=self.reconstruct,
            warnings=[],
            timings={"choose_channels": perf_counter() - start},
            settings={
                "seed": self.seed,
                "floor": self.floor,
                "round_to": self.round_to,
                "reconstruct": self.reconstruct,
            },
            measure_latency=self.measure_latency,
        )


def rank_within_groups(scores: FloatArray, graph: ChannelGraph) -> FloatArray:
    """Rank of each channel in its group, from 0 to 1: every layer is pruned by the same share."""
    ranks = np.empty_like(scores)
    for group in graph.groups:
        order = scores[group.channels].argsort().argsort()
        ranks[group.channels] = order / max(1, group.size - 1)
    return ranks
