"""MetaPruning: a network that generates weights for any widths, and a search among the widths."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from stamppruner import ranks
from stamppruner.baselines._base import ChannelBaseline
from stamppruner.baselines._evolution import Evolution, Found
from stamppruner.baselines._learn import check_finite, epochs, training
from stamppruner.baselines._pruning_net import PruningNet
from stamppruner.baselines._widths import Widths, WidthSpace, keep_of
from stamppruner.batchnorm import recalibrate_
from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelGraph, ChannelPlan, FloatArray
from stamppruner.finetune import evaluate
from stamppruner.gates import Gates
from stamppruner.layers import first_floating
from stamppruner.meet import Met
from stamppruner.reinitialise import reinitialise_
from stamppruner.result import BATCH, PruneResult, sample_merit
from stamppruner.surgery import cut
from stamppruner.target import Target

logger = logging.getLogger(__name__)

_MILESTONES = (0.25, 0.5, 0.75)
"""Shares of the steps after which the rate is divided by ten, as in the authors' code."""

_STATISTICS = 256
"""Training images on which a candidate's batch norms are estimated (theirs: 100 batches)."""


class MetaPruning(ChannelBaseline):
    """Widths by a search, with weights from a hypernetwork (Liu et al. 2019).

    "MetaPruning: meta learning for automatic neural network channel pruning":

    1. A *PruningNet* generates the weight of every convolution by two linear layers from the
       shares of its inputs and outputs, and is trained on the target: every step draws the widths
       of all groups, crops the weights to them and descends the cross-entropy. Linear layers and
       norms have weights of their own, which all widths share.
    2. An evolutionary search finds the widths within the budget whose accuracy on held-out images
       of the target is best, with batch norms estimated anew for every candidate.
    3. The best widths are trained from random weights by ``result.finetune``, as in the paper;
       without ``reinitialise`` from the generated weights.

    The channels that stay are the first ones of every group. The defaults are cheap; the authors'
    values for ResNet-50 are in brackets. Their encoding has the widths of a whole block, and each
    width its own batch norm; the networks that are searched here lie within 5% below the budget.

    Args:
        epochs: passes over the sample in which the PruningNet is trained (32, over ImageNet).
        lr: of its SGD with momentum .9, a tenth after every quarter of the steps (.1).
        weight_decay: of all weights (1e-4).
        minibatch_size: images a step (256).
        hidden: width of the PruningNet (32).
        shares: least and largest share of a group that is drawn (.1 and 1; STAMP's section A.2
            searches between .4 and .8).
        population: candidates a generation (50).
        generations: of the search, the random one included (20).
        parents: best candidates that are mutated and crossed (10).
        mutation: probability that a mutant's group is drawn anew (.1).
        held_out: share of the sample on which candidates are compared.
        pretrained: start the PruningNet near the model's own weights; off in the paper.
        reinitialise: give the slim network random weights, as the paper does.
        settings: see :class:`~stamppruner.baselines.ChannelBaseline`.

    Raises:
        ConfigError: a value is outside its range.
    """

    name = "MetaPruning"
    any_task = False

    def __init__(
        self,
        *,
        epochs: int = 20,
        lr: float = 0.1,
        weight_decay: float = 1e-4,
        minibatch_size: int = 64,
        hidden: int = 32,
        shares: tuple[float, float] = (0.1, 1.0),
        population: int = 16,
        generations: int = 4,
        parents: int = 4,
        mutation: float = 0.1,
        held_out: float = 0.2,
        pretrained: bool = False,
        reinitialise: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        self.epochs, self.lr, self.weight_decay = epochs, lr, weight_decay
        self.minibatch_size, self.hidden, self.shares = minibatch_size, hidden, shares
        self.population, self.generations, self.parents = population, generations, parents
        self.mutation, self.held_out = mutation, held_out
        self.pretrained, self.reinitialise = pretrained, reinitialise
        for name in (
            "epochs", "minibatch_size", "hidden", "population", "generations", "parents"
        ):  # fmt: skip
            value = getattr(self, name)
            self._require(isinstance(value, int) and value >= 1, name, "a whole number from 1")
        for name in ("lr", "weight_decay"):
            self._require(0 <= getattr(self, name) < math.inf, name, "a finite number from 0")
        self._require(0 <= mutation <= 1, "mutation", "a probability")
        self._require(0 < held_out < 1, "held_out", "a share in (0, 1)")
        ordered = len(shares) == 2 and 0 < shares[0] <= shares[1] <= 1
        self._require(ordered, "shares", "two shares in (0, 1], the smaller one first")

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """Which channels stay at any width: the first ones of every block."""
        within = [np.arange(g.size) % g.block_size / g.block_size for g in graph.groups]
        return 1 - np.concatenate(within)

    def choose_(self, model: nn.Module, chooser: Chooser, target: Target, budget: Budget) -> Met:
        """Train a PruningNet, search, and give the model the weights of the best widths."""
        space = WidthSpace(
            chooser, budget, floor=self.floor, round_to=self.round_to, shares=self.shares
        )
        found = ranks.from_first(lambda: self.search_(model, space, target))
        logger.info("MetaPruning: held-out accuracy %.4f", found.fitness)
        return Met(space.plan(found.widths))

    def search_(self, model: nn.Module, space: WidthSpace, target: Target) -> Found:
        """Train a PruningNet and search; the model gets the weights of the best widths."""
        learned, held_out = split(target, self.held_out)
        net = self.pruning_net_(model, space.graph, learned)
        few = dataclasses.replace(learned, images=learned.images[:_STATISTICS])
        batches = few.image_batches(BATCH, first_floating(model).device)
        shown = list(held_out.batches(BATCH))

        def fitness(widths: Widths) -> float:
            plan = space.plan(widths)
            write_(model, net, plan)
            slim = cut(model, plan, share=True)
            recalibrate_(slim, batches)
            return evaluate(slim, shown)

        search = Evolution(
            space,
            fitness,
            population=self.population,
            parents=self.parents,
            mutation=self.mutation,
            random=np.random.default_rng([self.seed, 2]),
        )
        found = search.run(self.generations)
        write_(model, net, space.plan(found.widths))
        return found

    def pruning_net_(self, model: nn.Module, graph: ChannelGraph, target: Target) -> PruningNet:
        """A trained PruningNet; other weights of the model are trained with it, in place."""
        if not self.pretrained:
            reinitialise_(model, self.seed)
        net = PruningNet(
            model, graph, hidden=self.hidden, pretrained=self.pretrained, seed=self.seed
        )
        made = {id(model.get_submodule(name).weight) for name in net.shapes}
        own = [p for p in model.parameters() if p.requires_grad and id(p) not in made]
        optimizer = torch.optim.SGD(
            [*net.parameters(), *own], self.lr, momentum=0.9, weight_decay=self.weight_decay
        )
        generator = torch.Generator().manual_seed(self.seed)
        random = np.random.default_rng([self.seed, 1])
        device = first_floating(model).device
        batches = epochs(target, self.minibatch_size, self.epochs, generator, device)
        schedule = torch.optim.lr_scheduler.MultiStepLR(
            optimizer, [round(len(batches) * share) for share in _MILESTONES]
        )
        with training(model, self.seed), Gates(model, graph).injected() as gates:
            for x, y in batches:
                keep = keep_of(graph, self._any_widths(graph, random))
                gates.values = torch.from_numpy(keep).to(x)
                loss = F.cross_entropy(functional_call(model, net(keep), x).float(), y)
                check_finite(loss, self.name, lr=self.lr)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
        return net

    def finished_(self, result: PruneResult, target: Target) -> None:
        """Random weights, if asked for; the report tells what accuracy is left."""
        metrics = dict(result.report.metrics)
        metrics.pop("target_accuracy_before", None)  # of generated weights, at full width
        if self.reinitialise:
            reinitialise_(result.model, self.seed)
            metrics |= sample_merit(result.model, target, "after")
        result.report = dataclasses.replace(result.report, metrics=metrics)

    def _any_widths(self, graph: ChannelGraph, random: np.random.Generator) -> list[int]:
        """Widths of all groups, whatever they cost."""
        widths = []
        for group, share in zip(
            graph.groups, random.uniform(*self.shares, len(graph.groups)), strict=True
        ):
            steps = max(1, round(share * group.block_size / group.multiple))
            widths.append(min(group.block_size, steps * group.multiple))
        return widths


def split(target: Target, share: float) -> tuple[Target, Target]:
    """The sample without its last images, and these: a share, at least two on each side."""
    count = len(target.labels)
    last = min(max(2, round(share * count)), max(1, count - 2))
    return (
        dataclasses.replace(target, images=target.images[:-last], labels=target.labels[:-last]),
        dataclasses.replace(target, images=target.images[-last:], labels=target.labels[-last:]),
    )


@torch.no_grad()
def write_(model: nn.Module, net: PruningNet, plan: ChannelPlan) -> None:
    """Give the model the weights that are generated for the widths of a plan."""
    for name, weight in net(plan.keep).items():
        cast(Tensor, model.get_parameter(name)).copy_(weight)
