"""First-order MAML over W, pi and theta: the function STAMP of Algorithm 1."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stamppruner import objective, ranks
from stamppruner.batchnorm import frozen_statistics, reestimated_statistics
from stamppruner.budget import Chooser
from stamppruner.config import STAMPConfig
from stamppruner.errors import DataError, DivergedError
from stamppruner.gated import GatedNet
from stamppruner.gradients import add_gradients_, moments, set_, use_gradients_, wide
from stamppruner.guards import (
    Skips,
    compiling_named,
    finite,
    first_not_finite,
    memory_named,
)
from stamppruner.heads import borrowed_parameters, fit_ridge_, head_inputs, new_head
from stamppruner.history import History
from stamppruner.offload import NOWHERE, Offload
from stamppruner.progress import bar
from stamppruner.randomness import numbered_streams
from stamppruner.reading import Draws, Reader
from stamppruner.slimmable import SlimmableTraining
from stamppruner.tasks import Task, TaskSampler, TaskSource
from stamppruner.workers import Piece

Callback = Callable[[int, dict[str, float]], None]
"""Called after every iteration with its number and figures."""

_RECALIBRATION_TASKS = 8

Streams = Callable[..., None]


class _NotFiniteError(Exception):
    """A loss is not finite; says what was so first."""


Mask = objective.Relaxed | objective.Budgeted
Figures = dict[str, float]


@dataclass
class MetaLearner:
    """Runs Algorithm 1, lines 1 to 9, on a gated network.

    On several ranks each does its share of an iteration's tasks, and gradients are summed once.

    Attributes:
        net: phi; changed in place.
        reader: of a source that draws tasks, the same on all ranks.
        config: settings.
        head: name of the classification head, None if there is not a single one.
        fitted_heads: fit a head for every task in closed form, for tasks whose labels are not
            those of the head; else the head's rows of the task's classes are used.
        task_keep: ``(T, num_channels)`` keep probabilities of reference tasks; given them and a
            :class:`~stamppruner.TaskSampler`, W is trained under masks in every iteration.
        max_skipped: steps in a row that may be left out because their loss is not finite.
        places: where what rests between steps lies.
        compile: masked passes are those of ``torch.compile``.
        history: a row for every iteration done.
        images: that this process has trained on, since it began.
    """

    net: GatedNet
    reader: Reader
    config: STAMPConfig
    head: str | None
    fitted_heads: bool
    task_keep: Tensor | None = None
    max_skipped: int = 10
    places: Offload = NOWHERE
    compile: bool = False
    history: History = field(default_factory=History)
    images: int = 0

    def __post_init__(self) -> None:
        config = self.config
        self.generator = torch.Generator().manual_seed(config.seed)
        self.random = np.random.default_rng(config.seed)
        self.outer = objective.adam(self.net, config)
        self._moments = self.places.resting(lambda: moments(self.outer))
        self.slimmable: SlimmableTraining | None = None
        self.skips = Skips(
            min(self.max_skipped, config.iterations),
            f"lower weights_lr={config.weights_lr} and pi_lr={config.pi_lr}, or scale the images",
        )
        self._chooser = Chooser(
            self.net.model, self.net.graph, floor=config.floor, round_to=config.round_to
        )
        self._kl_weight = config.kl_scale / self.source.num_images
        self._draws = Draws(self.reader, config.tasks_per_iteration, 0)
        self._tasks: Iterator[Task] = iter(())
        if self.task_keep is None or not isinstance(self.source, TaskSampler):
            return
        if config.weight_steps and self.net.weights():
            self.slimmable = SlimmableTraining(
                self.net,
                self.reader,
                self._chooser,
                self.task_keep,
                config,
                max_skipped=self.max_skipped,
                places=self.places,
            )

    @property
    def source(self) -> TaskSource:
        """Of the tasks."""
        return self.reader.source

    @contextmanager
    def whole(self, *, changed: bool) -> Iterator[None]:
        """All that the learner remembers is in memory inside the block, which may change it."""
        inner = nullcontext() if self.slimmable is None else self.slimmable.whole(changed=changed)
        with self._moments.here(changed=changed), inner:
            yield

    def run(self, *, progress: bool, callback: Callback | None) -> History:
        """Do the iterations that are left (line 2) and return the figures of all.

        Each row has ``loss``, ``accuracy`` (of the last minibatches), ``macs`` (expected share),
        ``live`` (share of channels with E[m] above the threshold) and ``skipped`` (steps that were
        left out, as their loss was not finite); where W is trained under masks, ``weight_loss`` as
        well.

        Raises:
            DivergedError: too many steps in a row were not finite; phi is that of the last good
                iteration.
            LoaderTimeoutError: images did not come in time.
            MemoryLimitError: the device has not enough memory.
            ConfigError: the model cannot be compiled.
        """
        config, first = self.config, len(self.history)
        todo = range(first, config.iterations)
        remedy = (
            f"lower minibatch_size={config.minibatch_size}, weight_batch={config.weight_batch} or "
            f"shots={config.shots} (a task has ways * shots images), or set amp=True"
        )
        shown = bar(todo, description="meta-fit", shown=progress, initial=first,
                    total=config.iterations)  # fmt: skip
        with (
            memory_named(remedy),
            compiling_named(),
            self.net.compiled(self.compile),
            numbered_streams(config.seed, self.net.device) as streams,
        ):
            self._draws = Draws(self.reader, config.tasks_per_iteration, first)
            self._tasks = self.reader.stream(self._pieces(todo), "the images of a task")
            for i in shown:
                before = self.images
                figures = self._iteration(i, streams)
                self._draws.over(i)
                self.history.add(iteration=i, **figures)
                shown.set_postfix(
                    {k: f"{v:.3g}" for k, v in figures.items() if k != "skipped" or v}
                    | {"images": self.images - before}
                )
                if callback is not None:
                    callback(i, figures)
            self._recalibrate()
        return self.history

    def _pieces(self, iterations: range) -> Iterator[Piece]:
        """This rank's tasks, as they are asked for."""
        for i in iterations:
            drawn = self._draws.of(i)
            for j in ranks.mine(len(drawn)):
                yield Piece((i, 1, j), drawn[j].read)

    def _iteration(self, i: int, streams: Streams) -> Figures:
        """Lines 3 to 8: one outer step, and the steps under masks that follow it."""
        parameters = self.net.parameters()
        start = [p.detach().clone() for p in parameters]
        started = self.places.resting(lambda: start)
        started.send()

        def restart() -> None:
            with started.here(changed=False):
                set_(parameters, start)

        skips = [self.skips] if self.slimmable is None else [self.skips, self.slimmable.skips]
        before = sum(s.total for s in skips)
        try:
            figures = self._outer_step(i, restart, streams)
            if self.slimmable is not None:
                figures["weight_loss"] = self.slimmable.run(self.config.weight_steps, streams)
                self.images += self.config.weight_steps * self.config.weight_batch // ranks.count()
        except DivergedError:
            restart()
            raise
        finally:
            for p in parameters:
                p.grad = None
        return {**figures, "skipped": float(sum(s.total for s in skips) - before)}

    def _outer_step(self, i: int, restart: Callable[[], None], streams: Streams) -> Figures:
        config, parameters = self.config, self.net.parameters()
        rate = _decay(i, config.iterations)
        gradients = [torch.zeros_like(p, dtype=wide(p)) for p in parameters]
        sums = self.places.resting(lambda: gradients)
        sums.send()
        rows: dict[int, Figures] = {}
        bad: dict[int, str] = {}
        drawn = self._draws.of(i)  # line 3
        for j, one in enumerate(drawn):  # line 4
            mask = self._mask(i)
            if j not in ranks.mine(len(drawn)):
                mask.skip(one.minibatches(config.minibatch_size))
                continue
            task = next(self._tasks).to(self.net.device)  # line 5
            streams(i, 5, j)
            try:
                rows[j], where = self._inner(task, mask, rate)  # line 6
                if where is not None:
                    bad[j] = f"{where}, in task {j} of iteration {i}"
                else:
                    with sums.here():
                        add_gradients_(gradients, parameters)
            finally:
                restart()
            self.images += len(task)
        for others, wrong in ranks.gathered("iteration", (rows, bad)):
            rows, bad = rows | others, bad | wrong
        sums.bring()
        if not bad:
            ranks.sum_(gradients)
            if not finite(gradients):
                bad = {-1: f"the outer gradient of iteration {i}"}
        if bad:
            self.skips.bad(bad[min(bad)], hopeless=not finite(parameters))
        else:
            self.skips.good()
            use_gradients_(parameters, gradients)
            for group in self.outer.param_groups:
                group["lr"] = group["initial_lr"] * rate
            with self._moments.here():
                self.outer.step()  # line 8, Eq. 4
        good = [rows[j] for j in sorted(rows) if j not in bad] or list(rows.values())
        return {name: float(np.mean([row[name] for row in good])) for name in good[0]}

    def _recalibrate(self) -> None:
        """Batch-norm statistics of the whole network under the weights just learned."""
        number = self.config.iterations
        draws = Draws(self.reader, _RECALIBRATION_TASKS, number)
        drawn = draws.of(number)
        draws.over(number)
        pieces = (Piece((j, 6), one.read) for j, one in enumerate(drawn))
        size = max(2, self.config.minibatch_size)
        with reestimated_statistics(self.net.model), torch.no_grad():
            for task in self.reader.stream(pieces, "the images of a task"):
                for images, _ in task.minibatches(size):
                    self.net.model(images.to(self.net.device))

    def _inner(self, task: Task, mask: Mask, rate: float) -> tuple[Figures, str | None]:
        """Adapt to one task; leaves the gradient of its last minibatch in ``.grad``.

        Returns:
            Figures of the last minibatch, and what was not finite, if its loss was not.
        """
        inner, net = objective.adam(self.net, self.config, rate), self.net
        *batches, last = task.minibatches(self.config.minibatch_size)
        net.model.train()
        evidence_of = net.evidence_of(task.images)
        with frozen_statistics(net.model), self._task_head(task) as logits_of:

            def loss_of(images: Tensor, labels: Tensor) -> tuple[Tensor, Any, Tensor]:
                evidence = evidence_of()
                gate = mask.of(evidence)
                with net.masked(gate, by_weight=True) as model:
                    logits = logits_of(objective.forward(model, images, self.config, net.task))
                loss = objective.loss(logits, labels, net, self._kl_weight)
                loss = loss + objective.penalty(mask, evidence, self.config)
                if not torch.isfinite(loss.detach()):
                    raise _NotFiniteError(first_not_finite(net, images, gate.detach()))
                return loss, logits, evidence.detach()

            try:
                for images, labels in batches:
                    inner.zero_grad()
                    loss_of(images, labels)[0].backward()
                    inner.step()
                inner.zero_grad()
                loss, logits, evidence = loss_of(*last)
            except _NotFiniteError as error:
                merits = [net.task.metric] if net.task.metric else []
                return dict.fromkeys(("loss", *merits, "macs", "live"), math.nan), str(error)
            loss.backward()
        with torch.no_grad():
            expected = net.posterior.keep_probability(evidence)
            merit = net.task.merit(net.model, logits, last[1])
        figures = {
            "loss": float(loss.detach()),
            **({} if merit is None else {str(net.task.metric): merit}),
            "macs": self._chooser.expected_share(expected.cpu().numpy()),
            "live": float((expected > self.config.threshold).float().mean()),
        }
        return figures, None

    def _mask(self, iteration: int) -> Mask:
        """How masks are drawn for a task: relaxed first, then under random hard budgets.

        Budgets that protected layers put out of reach are not drawn.
        """
        config = self.config
        if iteration < round((1 - config.budget_share) * config.iterations):
            return objective.Relaxed(self.net, config.temperature, self.generator)
        budget = self._chooser.draw(config.budget_range, self.random)
        return objective.Budgeted(self.net, self._chooser, budget)

    @contextmanager
    def _task_head(self, task: Task) -> Iterator[Callable[[Any], Any]]:
        """Logits of the task's classes, from the reference head's rows or a head of its own."""
        if not self.net.task.classifies:
            yield lambda outputs: outputs
            return
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
        with borrowed_parameters(old, head):
            yield lambda logits: logits


def _decay(iteration: int, iterations: int) -> float:
    """Learning rates fall to a tenth at 50% and again at 80% (paper, section A.2)."""
    return 0.1 ** sum(iteration >= share * iterations for share in (0.5, 0.8))
