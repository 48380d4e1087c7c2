"""Weights that work under every mask: the small networks are trained before they are cut.

One set of weights learns, on the reference data, to serve the full network and those that the
masks of many tasks and budgets leave of it, with the backbone as their teacher (compare slimmable
networks, Yu et al. 2019, and once-for-all networks, Cai et al. 2020; there the small networks are
the same for all data).
"""

from __future__ import annotations

import copy
from collections.abc import Callable

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
from stamppruner.guards import Skips, finite, first_not_finite, within
from stamppruner.shared_batch import shared_batch
from stamppruner.tasks import TaskSampler

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
        source: labels are the model's outputs.
        chooser: of the network.
        keep: ``(T, num_channels)`` keep probabilities by the evidence of T reference tasks; masks
            mix them with the posterior's prior in any proportion.
        config: settings.
        max_skipped: steps in a row that may be left out because their loss is not finite.
        loader_timeout: most seconds to wait for images; None waits for ever.

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
        source: TaskSampler,
        chooser: Chooser,
        keep: Tensor,
        config: STAMPConfig,
        *,
        max_skipped: int = 10,
        loader_timeout: float | None = None,
    ) -> None:
        self.net, self.source, self.chooser, self.config = net, source, chooser, config
        self.keep = keep.cpu().double().numpy()
        self.total = config.iterations * config.weight_steps
        self.done = 0
        self.skips = Skips(
            min(max_skipped, max(1, self.total)), f"lower weight_lr={config.weight_lr}"
        )
        self._loader_timeout = loader_timeout
        self.random = np.random.default_rng([config.seed, 1])
        self.teacher = copy.deepcopy(net.model)
        self.optimizer = torch.optim.SGD(
            net.weights(), config.weight_lr, momentum=0.9, nesterov=True, weight_decay=5e-4
        )

    def run(self, steps: int, streams: Streams = _leave) -> float:
        """Do some of the steps and return their mean loss, of those that were not left out.

        Args:
            steps: to do.
            streams: sets the global random streams by numbers.

        Raises:
            DivergedError: too many losses in a row are not finite.
            DataError: images cannot be used.
        """
        losses = []
        for _ in range(steps):
            streams(self.done, 2)
            losses.append(self._step())
        good = [loss for loss in losses if np.isfinite(loss)]
        return float(np.mean(good)) if good else float("nan")

    def _step(self) -> float:
        """One step over this rank's part of a minibatch; returns the loss of the whole."""
        config, model, size = self.config, self.net.model, self.config.weight_batch
        images, labels = self._minibatch()
        with torch.no_grad(), running_statistics(self.teacher):
            taught = objective.forward(self.teacher, images, config).float()
        mask = None if self.done % _WHOLE_EVERY == 0 else self._mask().to(self.net.device)
        model.train()
        self.optimizer.zero_grad()
        with shared_batch(model), frozen_statistics(model):
            with self.net.masked(mask):
                logits = objective.forward(model, images, config).float()
            loss = 0.5 * F.cross_entropy(logits, labels) + 0.5 * distillation(logits, taught)
            loss = loss * (len(labels) / size)
            loss.backward()  # type: ignore[no-untyped-call]
        whole = loss.detach().clone()
        gradients = [p.grad for p in self.net.weights() if p.grad is not None]
        ranks.sum_([*gradients, whole])
        if torch.isfinite(whole) and finite(gradients):
            for group in self.optimizer.param_groups:
                group["lr"] = config.weight_lr * warm_cosine(self.done / self.total, _WARM_UP)
            self.optimizer.step()
            self.skips.good()
        else:
            with frozen_statistics(model):
                where = first_not_finite(self.net, images, mask)
            hopeless = not finite(self.net.weights())
            self.skips.bad(f"{where}, under masks at step {self.done}", hopeless=hopeless)
        self.optimizer.zero_grad()
        self.done += 1
        return float(whole)

    def _minibatch(self) -> tuple[Tensor, Tensor]:
        """This rank's part of the next one, on the network's device."""
        size, device = self.config.weight_batch, self.net.device
        with ranks.all_ready("minibatch"):
            images, labels = within(
                self._loader_timeout,
                lambda: self.source.minibatch(self.done, size, ranks.part(size)),
                "a minibatch of the reference",
            )
        return images.to(device), labels.to(device)

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
