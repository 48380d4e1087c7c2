"""Taylor pruning on the target: channels whose removal changes the loss least go first."""

from __future__ import annotations

import numpy as np
from torch import nn
from torch.nn import functional as F

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
        check_fits(model, target.images[:1].to(device), target.num_classes)
        scores = taylor_scores(
            model,
            graph,
            target.batches(50, device),
            lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
        )
        return np.asarray(relative_to_group(scores, graph).cpu().numpy())
