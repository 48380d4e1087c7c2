"""Network slimming: channels that their batch norm scales down go first."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from stamppruner.baselines._base import ChannelBaseline
from stamppruner.baselines._filters import Gathered
from stamppruner.channels import ChannelGraph, FloatArray
from stamppruner.errors import UnsupportedModelError
from stamppruner.target import Target


class BNScale(ChannelBaseline):
    """``|gamma|`` of the batch norms a channel passes, compared over all layers (Liu et al. 2017).

    Network slimming trains with an L1 penalty on ``gamma`` before; a model that was trained without
    has less to tell. The mean counts where a channel passes several batch norms. Groups of channels
    that pass none are ranked by nothing and keep as large a share as the others on average.

    Raises:
        UnsupportedModelError: on pruning, a model in which no channel passes a batch norm with
            weights.
    """

    name = "BN scale"

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """Mean of ``|gamma|``, ``(num_channels,)``."""
        scales = Gathered(graph)
        for layer in graph.layers.values():
            module = model.get_submodule(layer.name)
            if isinstance(module, _BatchNorm) and isinstance(module.weight, torch.Tensor):
                scales.add(layer, module.weight.abs())
        seen = scales.seen
        if not seen.any():
            raise UnsupportedModelError(
                f"{type(model).__name__} has no batch norm with weights on a removable channel: "
                "rank its channels by Magnitude"
            )
        values = scales.mean()
        spread = np.random.default_rng(self.seed).permutation(int((~seen).sum()))
        even = (spread + 0.5) / max(1, len(spread))
        values[~seen] = np.quantile(values[seen], even) if len(spread) else 0.0
        return values
