"""LAMP: magnitudes made comparable over layers."""

from __future__ import annotations

import numpy as np
from torch import nn

from stamppruner.baselines._base import ChannelBaseline
from stamppruner.baselines._filters import Gathered, rows, writers
from stamppruner.channels import ChannelGraph, FloatArray
from stamppruner.target import Target


class LAMP(ChannelBaseline):
    """Layer-adaptive magnitude of channels (Lee et al. 2021), compared over all layers.

    ``score(u) = w_u^2 / sum_{v: w_v^2 >= w_u^2} w_v^2`` (their eq. 2, of single weights): the share
    of a value in what would be left if all smaller ones of its layer were gone. Here ``w_u^2`` is
    the mean square of a filter, over the layers that write the channel, and a layer is a group of
    channels. The largest of every group scores 1, so none is emptied.
    """

    name = "LAMP"

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """Scores in [0, 1], comparable over groups."""
        squares = Gathered(graph)
        for layer, module in writers(model, graph):
            squares.add(layer, rows(module).square().mean(1))
        values, scores = squares.mean(), np.empty(graph.num_channels)
        for group in graph.groups:
            scores[group.channels] = lamp(values[group.channels])
        return scores


def lamp(squares: FloatArray) -> FloatArray:
    """Each value over the sum of all that are not smaller, ``(n,)``; equal ones in their order.

    >>> lamp(np.array([4.0, 1.0, 3.0])).tolist()
    [1.0, 0.125, 0.42857142857142855]
    """
    rising = squares.argsort(kind="stable")
    left = np.cumsum(squares[rising][::-1])[::-1]
    scores = np.empty_like(squares)
    scores[rising] = squares[rising] / np.maximum(left, 1e-300)
    return scores
