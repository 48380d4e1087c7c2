"""SNIP: single weights, chosen before training by what a batch says of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner.baselines._learn import only_these_learn, training
from stamppruner.baselines._unstructured import Masks, WeightBaseline, top
from stamppruner.batchnorm import frozen_statistics
from stamppruner.layers import first_floating
from stamppruner.reinitialise import reinitialise_
from stamppruner.target import Target


class SNIP(WeightBaseline):
    """Connection sensitivity, "Single-shot network pruning" (Lee, Ajanthan and Torr 2019).

    Every weight gets a factor ``c_j = 1``; its saliency is ``s_j = |g_j| / sum_k |g_k|`` with
    ``g_j = dL/dc_j = w_j dL/dw_j`` of one batch of the target (their eqs. 4 and 5), and the largest
    saliencies of all layers together stay. The network is then trained, by ``result.finetune``.

    SNIP starts from random weights and is trained from scratch. With ``pretrained`` (SNIP (P) in
    STAMP's tables) it keeps the model's weights. The settings of STAMP's section A.2 are the
    defaults for VGG; for its ResNet-18 pass ``skip_1x1=True``.

    Where it differs: random weights are PyTorch's own (:func:`~stamppruner.reinitialise_`), where
    the paper has Glorot's; a batch norm uses the batch's statistics, as in training; with
    ``pretrained`` the head is fitted to the target first, as for all methods.

    Args:
        pretrained: keep the model's weights.
        skip_1x1: leave 1x1 convolutions whole.
        skip_linear: leave linear layers whole.
        batch_size: images in the batch (the paper's for CIFAR).
        settings: see :class:`~stamppruner.baselines.Baseline`.

    Raises:
        ConfigError: a value is outside its range.
    """

    name = "SNIP"

    def __init__(
        self,
        *,
        pretrained: bool = False,
        skip_1x1: bool = False,
        skip_linear: bool = True,
        batch_size: int = 128,
        **settings: Any,
    ) -> None:
        super().__init__(
            pretrained=pretrained, skip_1x1=skip_1x1, skip_linear=skip_linear, **settings
        )
        self.batch_size = batch_size
        self._require(
            isinstance(batch_size, int) and batch_size >= 1, "batch_size", "a whole number from 1"
        )
        if pretrained:
            self.name = "SNIP (P)"

    def draw_(self, model: nn.Module) -> None:
        """As every layer draws its own."""
        reinitialise_(model, self.seed)

    def choose_(
        self, model: nn.Module, layers: Mapping[str, nn.Module], target: Target, count: int
    ) -> Masks:
        """The weights with the largest saliencies of the network."""
        return top(self.saliencies(model, layers, target), count)

    def saliencies(
        self, model: nn.Module, layers: Mapping[str, nn.Module], target: Target
    ) -> dict[str, Tensor]:
        """``|w dL/dw|`` of every weight of the layers, summing to 1 over all of them."""
        device = first_floating(model).device
        images = target.images[: self.batch_size].to(device)
        labels = target.labels[: self.batch_size].to(device)
        weights = [cast(Tensor, layer.weight) for layer in layers.values()]
        with (
            training(model, self.seed),
            frozen_statistics(model),
            only_these_learn(model, weights),
        ):
            loss = F.cross_entropy(model(images).float(), labels)
            gradients = torch.autograd.grad(loss, weights, allow_unused=True)
        found = [
            torch.zeros_like(w) if g is None else (w.detach() * g).abs()
            for w, g in zip(weights, gradients, strict=True)
        ]
        total = sum(float(s.double().sum()) for s in found)
        return {name: s / max(total, 1e-30) for name, s in zip(layers, found, strict=True)}
