"""The interface of a baseline, and what those share that remove channels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
from torch import nn

from stamppruner import ranks
from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelGraph, ChannelPlan, FloatArray
from stamppruner.errors import ConfigError
from stamppruner.heads import find_head, with_classes
from stamppruner.layers import check_no_nan, first_floating
from stamppruner.meet import Met, meet
from stamppruner.result import PruneResult, check_prunable, finish, fit_head_
from stamppruner.supervision import ForwardFn, LossFn, MetricFn, Supervision
from stamppruner.target import SAMPLE, Target, check_fits, first_images
from stamppruner.trace import trace_channels
from stamppruner.undisturbed import undisturbed


@dataclass(frozen=True)
class Prepared:
    """What every baseline starts from.

    Attributes:
        model: a copy whose head has the target's classes; free to be changed.
        graph: its channels.
        target: a sample of the data.
        head: name of its head; None if the output is not that of one linear layer.
    """

    model: nn.Module
    graph: ChannelGraph
    target: Target
    head: str | None


class Baseline(ABC):
    """A pruning method to compare with.

    Args:
        sample: most target images that scores, batch norms and the head are fitted on.
        measure_latency: time forward passes of both networks for the report.
        loss_fn, forward_fn, metric_fn: of a task that is not classification, as for
            :func:`stamppruner.finetune`; not of every method.
        seed: of everything random.

    Raises:
        ConfigError: a ``loss_fn`` for a method that learns classes.
    """

    name: str
    """Title of its reports."""

    structured: ClassVar[bool] = True
    """Whether it removes channels; else it holds single weights at zero."""

    any_task: ClassVar[bool] = True
    """Whether it prunes for a ``loss_fn`` of one's own."""

    def __init__(
        self,
        *,
        sample: int = SAMPLE,
        measure_latency: bool = True,
        loss_fn: LossFn | None = None,
        forward_fn: ForwardFn | None = None,
        metric_fn: MetricFn | None = None,
        seed: int = 0,
    ) -> None:
        self.sample, self.measure_latency, self.seed = sample, measure_latency, seed
        self.task = Supervision(loss_fn, forward_fn, metric_fn)
        if loss_fn is not None and not self.any_task:
            raise ConfigError(f"{type(self).__name__} learns classes: leave out loss_fn")

    @abstractmethod
    def prune(
        self,
        model: nn.Module,
        loader: Any,
        budget: Budget | None = None,
        *,
        graph: ChannelGraph | None = None,
    ) -> PruneResult:
        """Prune the model for the loader's data under a budget; the model is not changed.

        In a distributed job all ranks call it, as for :meth:`stamppruner.STAMPPruner.prune`.

        Args:
            model: a trained network.
            loader: yields (images, labels).
            budget: what must hold; None keeps everything.
            graph: of the model, if it was traced before.

        Raises:
            DataError: the target cannot be used.
            BudgetError: the budget cannot be met.
            UnsupportedModelError: the model cannot be traced, or nothing of it can be removed.
            RankError: ranks of a distributed job disagree, or another one failed.
        """

    def settings(self) -> dict[str, Any]:
        """The arguments that it was made with, for the report."""
        return {k: v for k, v in vars(self).items() if k not in ("name", "task")}

    def _prepared(
        self, model: nn.Module, loader: Any, graph: ChannelGraph | None, *, remove: bool
    ) -> Prepared:
        """Trace, sample, and give a copy of the model the target's classes.

        With ``remove``, a model without channels to remove is refused before data are read.
        """
        if graph is None:
            graph = trace_channels(model, first_images(loader, self.task)[:1])
        else:
            check_no_nan(model)  # as tracing does
        if remove:
            check_prunable(graph)
        target = ranks.sample_target(loader, self.sample, seed=self.seed, task=self.task)
        dense, graph = with_classes(model, graph, target.num_classes)
        head = find_head(dense, graph) if self.task.classifies else None
        image = target.images[:1].to(first_floating(dense).device)
        logits = head is not None or not self.structured
        check_fits(dense, image, target.num_classes if logits else 0, self.task)
        return Prepared(dense, graph, target, head)

    def _require(self, holds: bool, name: str, what: str) -> None:
        """Raise ConfigError with what an argument must be, unless it is."""
        if not holds:
            raise ConfigError(f"{type(self).__name__}({name}={getattr(self, name)!r}): pass {what}")


class ChannelBaseline(Baseline):
    """A method that scores channels; a budget is met by keeping the best.

    Args:
        floor: share of every group that is always kept.
        round_to: kept widths are multiples of this where a group is wide enough, as in
            :class:`~stamppruner.STAMPConfig`.
        reconstruct: re-solve weights by least squares after the cut, as STAMP does; off, as in
            the methods' own papers.
        settings: see :class:`Baseline`.
    """

    def __init__(
        self,
        *,
        floor: float = 0.05,
        round_to: int = 8,
        reconstruct: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.floor, self.round_to, self.reconstruct = floor, round_to, reconstruct

    @abstractmethod
    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """``(num_channels,)``, larger is kept longer.

        Args:
            model: full network whose head was fitted to the target by ridge regression.
            graph: its channels.
            target: a sample of the data.
        """

    def learn_(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """:meth:`scores`, for a model whose weights may be changed, as some methods do."""
        return self.scores(model, graph, target)

    def choose_(self, model: nn.Module, chooser: Chooser, target: Target, budget: Budget) -> Met:
        """What to keep of a model whose weights may be changed."""
        scores = ranks.mean(self.learn_(model, chooser.graph, target))
        return meet(model, chooser, scores, budget)

    @undisturbed()
    @ranks.together()
    def prune(
        self,
        model: nn.Module,
        loader: Any,
        budget: Budget | None = None,
        *,
        graph: ChannelGraph | None = None,
    ) -> PruneResult:
        """Cut the model for the loader's data under a budget. See :meth:`Baseline.prune`."""
        ready = self._prepared(model, loader, graph, remove=budget is not None)
        dense, target = ready.model, ready.target
        start = perf_counter()
        if ready.head is not None:
            fit_head_(dense, ready.head, target)
        chooser = Chooser(dense, ready.graph, floor=self.floor, round_to=self.round_to)
        if budget is None:
            met = Met(ChannelPlan.full(ready.graph))
        else:
            met = self.choose_(dense, chooser, target, budget)
        result = finish(
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
            settings=self.settings(),
            measure_latency=self.measure_latency,
        )
        self.finished_(result, target)
        return result

    def finished_(self, result: PruneResult, target: Target) -> None:
        """What a method does to the slim network at the end: nothing."""


def rank_within_groups(scores: FloatArray, graph: ChannelGraph) -> FloatArray:
    """Rank of each channel in its group, from 0 to 1: every layer is pruned by the same share."""
    ranks = np.empty_like(scores)
    for group in graph.groups:
        order = scores[group.channels].argsort().argsort()
        ranks[group.channels] = order / max(1, group.size - 1)
    return ranks
