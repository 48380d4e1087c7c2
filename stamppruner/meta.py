"""First-order MAML over W, pi and theta: the function STAMP of Algorithm 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from stamppruner import objective
from stamppruner.batchnorm import frozen_statistics, recalibrate_
from stamppruner.budget import Chooser
from stamppruner.config import STAMPConfig
from stamppruner.errors import DataError
from stamppruner.gated import GatedNet
from stamppruner.heads import fit_ridge_, head_inputs, new_head, set_module
from stamppruner.history import History
from stamppruner.progress import bar
from stamppruner.slimmable import SlimmableTraining
from stamppruner.tasks import Task, TaskSampler, TaskSource

Callback = Callable[[int, dict[str, float]], None]
"""Called after every iteration with its number and figures."""

_RECALIBRATION_TASKS = 8

Mask = Callable[[Tensor], Tensor]


@dataclass
class MetaLearner:
    """Runs Algorithm 1, lines 1 to 9, on a gated network.

    Attributes:
        net: phi; changed in place.
        source: draws tasks.
        config: settings.
        head: name of the classification head, None if there is not a single one.
        fitted_heads: fit a head for every task in closed form, for tasks whose labels are not
            those of the head; else the head's rows of the task's classes are used.
        task_keep: ``(T, num_channels)`` keep probabilities of reference tasks; given them and a
            :class:`~stamppruner.TaskSampler`, W is trained under masks in every iteration.
    """

    net: GatedNet
    source: TaskSource
    config: STAMPConfig
    head: str | None
    fitted_heads: bool
    task_keep: Tensor | None = None

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.config.seed)
        self._random = np.random.default_rng(self.config.seed)
        self._chooser = Chooser(
            self.net.model,
            self.net.graph,
            floor=self.config.floor,
            round_to=self.config.round_to,
        )
        self._kl_weight = self.config.kl_scale / self.source.num_images
        self._slimmable: SlimmableTraining | None = None
        if self.task_keep is None or not isinstance(self.source, TaskSampler):
            return
        if self.config.weight_steps and self.net.weights():
            self._slimmable = SlimmableTraining(
                self.net, self.source, self._chooser, self.task_keep, self.config
            )

    def run(self, *, progress: bool, callback: Callback | None) -> History:
        """Do all iterations (line 2) and return their figures.

        Each row has ``loss``, ``accuracy`` (of the last minibatches), ``macs`` (expected share)
        and ``live`` (share of channels with E[m] above the threshold); where W is trained under
        masks, ``weight_loss`` as well.
        """
        history = History()
        parameters = self.net.parameters()
        outer = objective.adam(self.net, self.config)
        shown = bar(range(self.config.iterations), description="meta-fit", shown=progress)
        for i in shown:
            rate = _decay(i, self.config.iterations)
            start = [p.detach().clone() for p in parameters]
            gradients = [torch.zeros_like(p) for p in parameters]
            rows = []
            for task in self.source.tasks(self.config.tasks_per_iteration):  # lines 3 to 5
                task = task.to(self.net.device)
                try:
                    rows.append(self._inner(task, self._mask(i), rate))  # line 6
                    for total, p in zip(gradients, parameters, strict=True):
                        if p.grad is not None:
                            total.add_(p.grad)
                finally:
                    with torch.no_grad():
                        for p, value in zip(parameters, start, strict=True):
                            p.copy_(value)
            for total, p in zip(gradients, parameters, strict=True):
                p.grad = total
            for group in outer.param_groups:
                group["lr"] = group["initial_lr"] * rate
            outer.step()  # line 8, Eq. 4
            figures = {k: float(np.mean([row[k] for row in rows])) for k in rows[0]}
            if self._slimmable is not None:
                figures["weight_loss"] = self._slimmable.run(self.config.weight_steps)
            history.add(iteration=i, **figures)
            shown.set_postfix({k: f"{v:.3g}" for k, v in figures.items()})
            if callback is not None:
                callback(i, figures)
        for p in parameters:
            p.grad = None
        self._recalibrate()
        return history

    def _recalibrate(self) -> None:
        """Batch-norm statistics of the whole network under the weights just learned."""
        tasks = self.source.tasks(_RECALIBRATION_TASKS)
        size = max(2, self.config.minibatch_size)
        images = [x.to(self.net.device) for task in tasks for x, _ in task.minibatches(size)]
        recalibrate_(self.net.model, images)

    def _inner(self, task: Task, mask: Mask, rate: float) -> dict[str, float]:
        """Adapt to one task; leaves the gradient of its last minibatch in ``.grad``."""
        inner = objective.adam(self.net, self.config, rate)
        batches = list(task.minibatches(self.config.minibatch_size))
        self.net.model.train()
        with self._task_head(task) as logits_of, frozen_statistics(self.net.model):
            for step, (images, labels) in enumerate(batches):
                inner.zero_grad()
                gate = mask(task.images)
                with self.net.masked(gate) as model:
                    logits = logits_of(objective.forward(model, images, self.config))
                loss = objective.loss(logits, labels, self.net, self._kl_weight)
                loss.backward()
                if step < len(batches) - 1:
                    inner.step()
        if not torch.isfinite(loss.detach()):
            raise DataError(
                f"meta-fitting diverged (loss {float(loss.detach())}): lower weights_lr="
                f"{self.config.weights_lr} and pi_lr={self.config.pi_lr}, or scale the images"
            )
        accuracy = float((logits.argmax(1) == labels).float().mean())
        with torch.no_grad():
            expected = self.net.keep_probability(task.images)
            return {
                "loss": float(loss),
                "accuracy": accuracy,
                "macs": self._chooser.expected_share(expected.cpu().numpy()),
                "live": float((expected > self.config.threshold).float().mean()),
            }

    def _mask(self, iteration: int) -> Mask:
        """How masks are drawn for a task: relaxed first, then under random hard budgets.

        Budgets that protected layers put out of reach are not drawn.
        """
        config = self.config
        if iteration < round((1 - config.budget_share) * config.iterations):
            return objective.Relaxed(self.net, config.temperature, self._generator)
        budget = self._chooser.draw(config.budget_range, self._random)
        return objective.Budgeted(self.net, self._chooser, budget)

    @contextmanager
    def _task_head(self, task: Task) -> Iterator[Callable[[Tensor], Tensor]]:
        """Logits of the task's classes, from the reference head's rows or a head of its own."""
        if not self.fitted_heads:
            rows = torch.tensor(task.classes, device=task.images.device)
            yield lambda logits: logits.index_select(1, rows)
            return
        if self.head is None:
            raise DataError(
                "these tasks need a head of their own, but the model's output is not written by "
                "one linear layer: pass a TaskSampler whose labels are the model's outputs"
            )
        old = self.net.model.get_submodule(self.head)
        assert isinstance(old, nn.Linear)
        head = new_head(old, task.ways)
        batches = list(task.images.split(max(2, self.config.minibatch_size)))
        with torch.no_grad(), self.net.masked(self.net.keep_probability(task.images)):
            features = head_inputs(self.net.model, self.head, batches)
        if features is not None:
            fit_ridge_(head, features, task.labels)
        set_module(self.net.model, self.head, head)
        try:
            yield lambda logits: logits
        finally:
            set_module(self.net.model, self.head, old)


def _decay(iteration: int, iterations: int) -> float:
    """Learning rates fall to a tenth at 50% and again at 80% (paper, section A.2)."""
    return 0.1 ** sum(iteration >= share * iterations for share in (0.5, 0.8))
