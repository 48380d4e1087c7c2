"""Weights that work under every mask: the small networks are trained before they are cut.

One set of weights learns, on the reference data, to serve the full network and those that the
masks of many tasks and budgets leave of it, with the backbone as their teacher (compare slimmable
networks, Yu et al. 2019, and once-for-all networks, Cai et al. 2020; there the small networks are
the same for all data).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import methodcaller

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stamppruner import objective, ranks
from stamppruner.batchnorm import frozen_statistics
from stamppruner.budget import Chooser
from stamppruner.config import STAMPConfig
from stamppruner.evidence import running_statistics
from stamppruner.finetune import warm_cosine
from stamppruner.gated import GatedNet
from stamppruner.gradients import add_gradients_, moments, use_gradients_, wide
from stamppruner.guards import Skips, finite, first_not_finite
from stamppruner.offload import NOWHERE, Offload
from stamppruner.reading import Reader
from stamppruner.shared_batch import shared_batch
from stamppruner.tasks import TaskSampler
from stamppruner.tasks.labelled import IntArray
from stamppruner.taught import Taught
from stamppruner.workers import Piece

_WHOLE_EVERY = 4
"""Every so many steps train the full network."""

_TEMPERATURE = 2.0
"""Of the distillation (Hinton et al. 2015)."""

_WARM_UP = 0.05

Streams = Callable[..., None]


def _leave(*_numbers: int) -> None:
    """Leaves the global random streams as they are."""


class SlimmableTraining:
    """Trains W of a gated network under hard masks of random tasks and budgets.

    Args:
        net: its weights are changed in place; it must be the backbone still, which is copied as
            the teacher.
        reader: of a sampler whose labels are the model's outputs.
        chooser: of the network.
        keep: ``(T, num_channels)`` keep probabilities by the evidence of T reference tasks; masks
            mix them with the posterior's prior in any proportion.
        config: settings.
        max_skipped: steps in a row that may be left out because their loss is not finite.
        places: where the teacher and momentum are between calls of :meth:`run`.

    Attributes:
        done: steps so far.
        random: of the masks.
        teacher: the backbone.
        optimizer: of W.
        skips: steps that were left out.
    """

    def __init__(
        self,
        net: GatedNet,
        reader: Reader,
        chooser: Chooser,
        keep: Tensor,
        config: STAMPConfig,
        *,
        max_skipped: int = 10,
        places: Offload = NOWHERE,
    ) -> None:
        self.net, self.reader, self.chooser, self.config = net, reader, chooser, config
        self.keep = keep.cpu().double().numpy()
        self.total = config.iterations * config.weight_steps
        self.done = 0
        self.skips = Skips(
            min(max_skipped, max(1, self.total)), f"lower weight_lr={config.weight_lr}"
        )
        self.random = np.random.default_rng([config.seed, 1])
        self.teacher = copy.deepcopy(net.model)
        self._taught: Taught | None = None
        self._batches: Iterator[tuple[Tensor, Tensor]] | None = None
        source = self.source
        again = self.total * config.weight_batch >= source.num_images  # images come, on the mean
        self._to_ask = again and source.transform is None
        fused = objective.can_be_fused(net.weights())
        self.optimizer = torch.optim.SGD(
            net.weights(), config.weight_lr, momentum=0.9, nesterov=True, weight_decay=5e-4,
            foreach=not fused, fused=fused,
        )  # fmt: skip
        self._momentum = places.resting(lambda: moments(self.optimizer))
        self._teacher = places.resting(lambda: list(self.teacher.parameters()))
        self._teacher.send()

    @property
    def source(self) -> TaskSampler:
        """What minibatches are drawn from."""
        source = self.reader.source
        assert isinstance(source, TaskSampler)
        return source

    @contextmanager
    def whole(self, *, changed: bool) -> Iterator[None]:
        """Teacher and momentum are in memory inside the block, which may change them."""
        with self._teacher.here(changed=changed), self._momentum.here(changed=changed):
            yield

    def run(self, steps: int, streams: Streams = _leave) -> float:
        """Do some of the steps and return their mean loss, of those that were not left out.

        Args:
            steps: to do.
            streams: sets the global random streams by numbers.

        Raises:
            DivergedError: too many losses in a row are not finite.
            DataError: images cannot be used.
        """
        with self._momentum.here():
            losses = [self._step(streams) for _ in range(steps)]
        good = [loss for loss in losses if np.isfinite(loss)]
        return float(np.mean(good)) if good else float("nan")

    def _step(self, streams: Streams) -> float:
        """One step; returns the loss of the whole minibatch, of all ranks."""
        config, net = self.config, self.net
        weights = net.weights()
        parts = self._parts()
        if self._to_ask:
            with self._teacher.here(changed=False):
                self._taught, self._to_ask = self._asked(), False
        with ranks.all_ready("minibatch"):
            batches = [self._next() for _ in parts]
        one = config.weight_parts == 1  # shared by all ranks
        whole = torch.zeros((), dtype=wide(weights[0]), device=net.device)
        totals = [] if one else [torch.zeros_like(p, dtype=wide(p)) for p in weights]
        bad: list[str] = []
        self.optimizer.zero_grad()
        net.model.train()
        for (number, mask), (images, labels, taught) in zip(parts, batches, strict=True):
            streams(self.done, 2, number)
            with frozen_statistics(net.model):
                with self._shared() if one else nullcontext():
                    loss = self._loss(images, labels, taught, mask)
                    loss = loss * (len(labels) / config.weight_batch)
                    loss.backward()  # type: ignore[no-untyped-call]
                if not torch.isfinite(loss.detach()):
                    bad.append(first_not_finite(net, images, mask))
            whole += loss.detach()
            if one:
                totals = [p.grad for p in weights if p.grad is not None]
            else:
                add_gradients_(totals, weights)
        ranks.sum_([*totals, whole])
        if torch.isfinite(whole) and finite(totals):
            if not one:
                use_gradients_(weights, totals)
            for group in self.optimizer.param_groups:
                group["lr"] = config.weight_lr * warm_cosine(self.done / self.total, _WARM_UP)
            self.optimizer.step()
            self.skips.good()
        else:
            where = f"{(*bad, 'the gradient')[0]}, under masks at step {self.done}"
            self.skips.bad(where, hopeless=not finite(weights))
        self.optimizer.zero_grad()
        self.done += 1
        return float(whole)

    @contextmanager
    def _shared(self) -> Iterator[None]:
        """Batch norms are those of all ranks' images; such layers are not for compilers."""
        eager = self.net.compiled(False) if ranks.count() > 1 else nullcontext()
        with eager, shared_batch(self.net.model):
            yield

    def _parts(self) -> list[tuple[int, Tensor | None]]:
        """Numbers and masks of this rank's parts of a minibatch.

        Masks are drawn for those of all ranks.
        """
        number = self.config.weight_parts
        places = range(self.done * number, (self.done + 1) * number)
        masks = [None if place % _WHOLE_EVERY == 0 else self._mask() for place in places]
        masks = [None if mask is None else mask.to(self.net.device) for mask in masks]
        return [(k, masks[k if number > 1 else 0]) for k, _ in self._rows()]

    def _rows(self) -> list[tuple[int, slice]]:
        """Numbers and rows of this rank's parts of a minibatch."""
        number, size = self.config.weight_parts, self.config.weight_batch
        if number == 1:
            return [(ranks.own(), ranks.part(size))]
        ends = [round(size * part / number) for part in range(number + 1)]
        return [(k, slice(ends[k], ends[k + 1])) for k in ranks.mine(number)]

    def _loss(
        self, images: Tensor, labels: Tensor, taught: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        taught = self._answer(images) if taught is None else taught
        with self.net.masked(mask, by_weight=True) as model:
            logits = objective.forward(model, images, self.config).float()
        return 0.5 * F.cross_entropy(logits, labels) + 0.5 * distillation(logits, taught)

    def _answer(self, images: Tensor) -> Tensor:
        """The teacher's logits."""
        with self._teacher.here(changed=False), torch.no_grad(), running_statistics(self.teacher):
            return objective.forward(self.teacher, images.to(self.net.device), self.config).float()

    def _asked(self) -> Taught:
        """The teacher's logits of all images of the reference."""
        positions = np.sort(np.concatenate(list(self.source.by_class.values())))
        count = itertools.count()

        def read(groups: Sequence[IntArray]) -> Iterator[Tensor]:
            pieces = (Piece((next(count), 4), methodcaller("images_at", g)) for g in groups)
            return self.reader.stream(pieces, "images of the reference")

        return Taught(self._answer, read, positions, self.config.weight_batch)

    def _next(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """This rank's part of a minibatch, and the teacher's logits if known, on the device."""
        if self._batches is None:
            size, steps = self.config.weight_batch, range(self.done, self.total)
            pieces = (
                Piece((step, 3, number), methodcaller("minibatch", step, size, rows))
                for step in steps
                for number, rows in self._rows()
            )
            self._batches = self.reader.stream(pieces, "a minibatch of the reference")
        images, labels = next(self._batches)
        device, taught = self.net.device, None if self._taught is None else self._taught(images)
        return images.to(device), labels.to(device), None if taught is None else taught.to(device)

    def _mask(self) -> Tensor:
        """The mask of a random task under a random budget."""
        budget = self.chooser.draw(self.config.budget_range, self.random)
        with torch.no_grad():
            prior = self.net.posterior.keep_probability().cpu().double().numpy()
        own = self.keep[self.random.integers(len(self.keep))]
        weight = self.random.uniform()
        plan = self.chooser.choose((1 - weight) * prior + weight * own, budget)
        return torch.from_numpy(plan.keep.astype(np.float32))


def distillation(logits: Tensor, taught: Tensor, temperature: float = _TEMPERATURE) -> Tensor:
    """``T^2 KL(softmax(taught / T) || softmax(logits / T))``, mean over ``(B, classes)``'s rows."""
    soft = F.kl_div(
        (logits / temperature).log_softmax(1),
        (taught / temperature).log_softmax(1),
        reduction="batchmean",
        log_target=True,
    )
    return soft * temperature**2
