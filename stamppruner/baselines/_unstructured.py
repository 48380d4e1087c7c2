"""What baselines share that hold single weights at zero."""

from __future__ import annotations

import dataclasses
import math
from abc import abstractmethod
from collections.abc import Mapping
from time import perf_counter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from stamppruner import ranks
from stamppruner.baselines._base import Baseline, Prepared
from stamppruner.batchnorm import recalibrate_
from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelGraph, ChannelPlan
from stamppruner.errors import BudgetError, UnsupportedModelError
from stamppruner.factory import Structure
from stamppruner.layers import first_floating
from stamppruner.report import Report
from stamppruner.result import BATCH, PruneResult, fit_head_, sample_merit
from stamppruner.summary import make_report
from stamppruner.target import Target
from stamppruner.undisturbed import undisturbed
from stamppruner.zeros import held, hold_, num_held, released, weights_of

Masks = Mapping[str, Tensor]
"""Booleans of the weight's shape by name of the layer; True stays."""


class WeightBaseline(Baseline):
    """A method that holds single weights of convolutions and linear layers at zero.

    The network keeps its shape: multiply-adds, bytes and latency stay those of the full one, and
    fine-tuning trains the weights that are not held. The budget bounds ``params``, the number of
    parameters of the whole network that are not held at zero.

    Args:
        pretrained: start from the model's own weights, and give it a head that is fitted to the
            target; else all weights are drawn anew first.
        skip_1x1: leave 1x1 convolutions whole.
        skip_linear: leave linear layers whole.
        settings: see :class:`Baseline`.
    """

    structured: ClassVar[bool] = False
    any_task: ClassVar[bool] = False

    def __init__(
        self,
        *,
        pretrained: bool = False,
        skip_1x1: bool = False,
        skip_linear: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.pretrained = pretrained
        self.skip_1x1, self.skip_linear = skip_1x1, skip_linear

    @abstractmethod
    def draw_(self, model: nn.Module) -> None:
        """Draw all weights anew, in place."""

    @abstractmethod
    def choose_(
        self, model: nn.Module, layers: Mapping[str, nn.Module], target: Target, count: int
    ) -> Masks:
        """The weights that stay.

        Args:
            model: full network; its weights may be changed, its head has the target's classes.
            layers: of it, whose weights can be held.
            target: a sample of the data.
            count: weights of the layers that may stay.
        """

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
        """Hold weights of a copy of the model at zero. See :meth:`Baseline.prune`.

        Raises:
            BudgetError: it bounds anything but ``params``, or cannot be met.
            UnsupportedModelError: the model has no weights that can be held, or gives no logits.
        """
        ready = self._prepared(model, loader, graph, remove=False)
        dense, target = ready.model, ready.target
        layers = self.layers(dense)
        chooser = Chooser(dense, ready.graph)
        count = self._count(chooser, layers, budget)
        structure = Structure.of(dense)
        start = perf_counter()
        metrics: dict[str, float] = {}
        if not self.pretrained:
            self.draw_(dense)
        elif ready.head is not None:
            fit_head_(dense, ready.head, target)
            metrics |= sample_merit(dense, target, "before")
        if count is not None:
            hold_(dense, ranks.from_first(lambda: self.choose_(dense, layers, target, count)))
        timings = {"choose_weights": perf_counter() - start}
        start = perf_counter()
        self._fit_(ready)
        ranks.copy_from_first_(dense)
        timings["fit_weights"] = perf_counter() - start
        metrics |= sample_merit(dense, target, "after")
        report = self._report(dense, chooser, budget, metrics, timings)
        plan = ChannelPlan.full(ready.graph)
        return PruneResult(dense, plan, report, structure=structure, facts=target.facts)

    def layers(self, model: nn.Module) -> dict[str, nn.Module]:
        """Layers whose weights the method may hold, by name."""
        return {
            name: layer
            for name, layer in weights_of(model).items()
            if not (self.skip_linear and isinstance(layer, nn.Linear))
            and not (self.skip_1x1 and isinstance(layer, _ConvNd) and _is_1x1(layer))
        }

    def _count(
        self, chooser: Chooser, layers: Mapping[str, nn.Module], budget: Budget | None
    ) -> int | None:
        """Weights of the layers that may stay; None without a budget."""
        if budget is None:
            return None
        if not layers:
            raise UnsupportedModelError(
                f"{self.name} finds no weight that it can hold at zero: it needs convolutions"
                f"{'' if self.skip_linear else ' or linear layers'} with weights of their own"
            )
        if set(budget.bounds()) != {"params"}:
            raise BudgetError(
                f"{self.name} holds weights at zero, which lowers no other cost than params: pass "
                f"Budget(params=...), not {budget}"
            )
        cost = chooser.costs["params"]
        (limit,) = budget.limits([cost])  # of the network without projected shortcuts
        weights = sum(cast(Tensor, layer.weight).numel() for layer in layers.values())
        rest = int(cost(chooser.full_widths())) - weights
        least = rest + len(layers)
        if (count := math.floor(limit * (1 + 1e-12)) - rest) < len(layers):
            raise BudgetError(
                f"{budget} cannot be met by {self.name}: the least reachable is {least} parameters "
                f"({least / cost.full:.2%} of the full network's): {rest} in biases, norms and "
                "layers that are left whole, and a weight in each of the others"
            )
        return min(count, weights)

    def _fit_(self, ready: Prepared) -> None:
        """Batch norms for the network with its zeros; also the head, where weights are kept."""
        model, target = ready.model, ready.target
        recalibrate_(model, target.image_batches(BATCH, first_floating(model).device))
        if self.pretrained and ready.head is not None and ready.head not in held(model):
            fit_head_(model, ready.head, target)

    def _report(
        self,
        model: nn.Module,
        chooser: Chooser,
        budget: Budget | None,
        metrics: Mapping[str, float],
        timings: dict[str, float],
    ) -> Report:
        """The report of a dense network, in which ``params`` counts what is not held at zero."""
        plain = released(model)
        zeros = num_held(model)
        note = (
            f"unstructured: {zeros} weights are held at zero, and params counts the others; "
            "multiply-adds, the file and latency stay those of the full network"
        )
        report = make_report(
            plain,
            plain,
            ChannelPlan.full(chooser.graph),
            chooser,
            title=self.name,
            budget=budget,
            warnings=[note],
            metrics=metrics,
            timings=timings,
            settings={**self.settings(), "held_at_zero": zeros},
            measure_latency=self.measure_latency,
        )
        after = {**report.after, "params": report.after["params"] - zeros}
        bounds = budget.bounds() if budget else {}
        reached = {
            name: after[name] / report.before[name] if bound <= 1 else after[name]
            for name, bound in bounds.items()
        }
        off = {name: int((~mask).sum()) for name, mask in held(model).items()}
        rows = tuple(
            dataclasses.replace(row, params_after=row.params_after - off.get(row.name, 0))
            for row in report.layers
        )
        return dataclasses.replace(report, after=after, reached=reached or None, layers=rows)


def top(scores: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Masks of the ``count`` largest of all scores; of equal ones, the first."""
    flat = torch.cat([score.flatten() for score in scores.values()])
    best = flat.argsort(descending=True, stable=True)[:count]
    mask = torch.zeros(len(flat), dtype=torch.bool, device=flat.device)
    mask[best] = True
    parts = mask.split([score.numel() for score in scores.values()])
    return {n: part.view(s.shape) for (n, s), part in zip(scores.items(), parts, strict=True)}


def _is_1x1(layer: _ConvNd) -> bool:
    return all(size == 1 for size in layer.kernel_size)
