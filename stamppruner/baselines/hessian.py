"""Optimal brain damage: channels whose weights the loss curves little around go first."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner.baselines._base import ChannelBaseline
from stamppruner.baselines._filters import Gathered, rows, writers
from stamppruner.baselines._learn import only_these_learn
from stamppruner.channels import ChannelGraph, FloatArray
from stamppruner.evidence import running_statistics
from stamppruner.layers import first_floating
from stamppruner.target import Target, check_fits
from stamppruner.taylor import relative_to_group


class Hessian(ChannelBaseline):
    """``sum_j w_j^2 h_jj`` over the weights that write a channel (LeCun, Denker and Solla 1989).

    The diagonal of the Hessian is that of the empirical Fisher information, ``h_jj`` = mean over
    samples of ``(dL/dw_j)^2`` of one sample's loss, on running statistics. Scores are relative to
    their group, as for :class:`Taylor`; of several writers, the mean counts.

    The importance of this name in torch-pruning keeps the gradients of the last sample only.

    Args:
        images: of the target, each with a backward pass of its own.
        settings: see :class:`~stamppruner.baselines.ChannelBaseline`.

    Raises:
        ConfigError: a value is outside its range.
    """

    name = "Hessian diagonal"
    any_task = False

    def __init__(self, *, images: int = 256, **settings: Any) -> None:
        super().__init__(**settings)
        self.images = images
        self._require(isinstance(images, int) and images >= 1, "images", "a whole number from 1")

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """Scores relative to the root mean square of their group."""
        found = self.raw_scores(model, graph, target)
        return np.asarray(relative_to_group(torch.from_numpy(found), graph).numpy())

    def raw_scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """``sum_j w_j^2 h_jj``, ``(num_channels,)``."""
        device = first_floating(model).device
        check_fits(model, target.images[:1].to(device), target.num_classes)
        pairs = list(writers(model, graph))
        weights = [cast(Tensor, module.weight) for _, module in pairs]
        squares = [torch.zeros_like(weight) for weight in weights]
        images, labels = (t[: self.images].to(device) for t in (target.images, target.labels))
        with running_statistics(model), only_these_learn(model, weights), torch.enable_grad():
            for x, y in zip(images.split(1), labels.split(1), strict=True):
                gradients = torch.autograd.grad(
                    F.cross_entropy(model(x).float(), y), weights, allow_unused=True
                )
                for square, gradient in zip(squares, gradients, strict=True):
                    if gradient is not None:
                        square += gradient.square()
        damage = Gathered(graph)
        for (layer, module), square in zip(pairs, squares, strict=True):
            curvature = rows(module, square) / len(images)
            damage.add(layer, (rows(module).square() * curvature).sum(1))
        return damage.mean()
