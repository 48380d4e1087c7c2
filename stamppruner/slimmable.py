"""Weights that work under every mask: the small networks are trained before they are cut.

One set of weights learns, on the reference data, to serve the full network and those that the
masks of many tasks and budgets leave of it, with the backbone as their teacher (compare slimmable
networks, Yu et al. 2019, and once-for-all networks, Cai et al. 2020; there the small networks are
the same for all data).
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from stamppruner import objective
from stamppruner.batchnorm import frozen_statistics
from stamppruner.budget import Chooser
from stamppruner.config import STAMPConfig
from stamppruner.errors import DataError
from stamppruner.evidence import running_statistics
from stamppruner.finetune import warm_cosine
from stamppruner.gated import GatedNet
from stamppruner.tasks import TaskSampler

_WHOLE_EVERY = 4
"""Every so many steps train the full network."""

_TEMPERATURE = 2.0
"""Of the distillation (Hinton et al. 2015)."""

_WARM_UP = 0.05


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
    """

    def __init__(
        self,
        net: GatedNet,
        source: TaskSampler,
        chooser: Chooser,
        keep: Tensor,
        config: STAMPConfig,
    ) -> None:
        self.net, self.source, self.chooser, self.config = net, source, chooser, config
        self.keep = keep.cpu().double().numpy()
        self.total = config.iterations * config.weight_steps
        self.done = 0
        self._random = np.random.default_rng([config.seed, 1])
        self._teacher = copy.deepcopy(net.model)
        self._optimizer = torch.optim.SGD(
            net.weights(), config.weight_lr, momentum=0.9, nesterov=True, weight_decay=5e-4
        )

    def run(self, steps: int) -> float:
        """Do some of the steps and return their mean loss.

        Raises:
            DataError: the loss is not finite, or images cannot be used.
        """
        losses = [self._step() for _ in range(steps)]
        return float(np.mean(losses))

    def _step(self) -> float:
        config, model = self.config, self.net.model
        images, labels = self.source.minibatch(self.done, config.weight_batch)
        images, labels = images.to(self.net.device), labels.to(self.net.device)
        with torch.no_grad(), running_statistics(self._teacher):
            taught = objective.forward(self._teacher, images, config).float()
        mask = None if self.done % _WHOLE_EVERY == 0 else self._mask().to(self.net.device)
        model.train()
        with self.net.masked(mask), frozen_statistics(model):
            logits = objective.forward(model, images, config).float()
        loss = 0.5 * F.cross_entropy(logits, labels) + 0.5 * distillation(logits, taught)
        if not torch.isfinite(loss.detach()):
            raise DataError(
                f"training under masks diverged at step {self.done} (loss {float(loss.detach())}): "
                f"lower weight_lr={config.weight_lr}"
            )
        for group in self._optimizer.param_groups:
            group["lr"] = config.weight_lr * warm_cosine(self.done / self.total, _WARM_UP)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.done += 1
        return float(loss.detach())

    def _mask(self) -> Tensor:
        """The mask of a random task under a random budget."""
        budget = self.chooser.draw(self.config.budget_range, self._random)
        with torch.no_grad():
            prior = self.net.posterior.keep_probability().cpu().double().numpy()
        own = self.keep[self._random.integers(len(self.keep))]
        weight = self._random.uniform()
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
