"""Taylor pruning on the target: channels whose removal changes the loss least go first."""

from __future__ import annotations

import numpy as np
from torch import nn

from stamppruner.baselines._base import ChannelBaseline
from stamppruner.channels import ChannelGraph, FloatArray
from stamppruner.layers import first_floating
from stamppruner.target import Target, check_fits
from stamppruner.taylor import relative_to_group, taylor_scores


class Taylor(ChannelBaseline):
    """First-order Taylor scores on the target (Molchanov et al. 2017), normalised in each group."""

    name = "Taylor on the target"

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """Scores relative to the root mean square of their group."""
        device = first_floating(model).device
        task = target.task
        check_fits(model, target.images[:1].to(device), target.num_classes, task)
        batches = target.batches(50, device)
        scores = taylor_scores(model, graph, batches, task.each, task.outputs)
        return np.asarray(relative_to_group(scores, graph).cpu().numpy())
