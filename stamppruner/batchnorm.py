"""Batch-norm statistics of a network on new data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stamppruner.evidence import running_statistics


def recalibrate_(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Re-estimate the running statistics of every batch norm as plain averages over batches.

    After a cut they describe sums over channels that are gone. Modes and momenta are left as found;
    nothing happens without batch norms or batches.

    Args:
        model: changed in place.
        batches: images ``(B, C, H, W)``, B at least 2.
    """
    todo = list(batches)
    if not todo:
        return
    with reestimated_statistics(model), torch.no_grad():
        for images in todo:
            model(images)


@contextmanager
def reestimated_statistics(model: nn.Module) -> Iterator[None]:
    """Forward passes inside the block give the running statistics anew, as plain averages.

    All else runs in evaluation mode; modes and momenta are restored on exit.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    momenta = [norm.momentum for norm in norms]
    with running_statistics(model):
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum, norm.training = None, True  # None: cumulative average
        try:
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum, norm.training = momentum, False


@contextmanager
def frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Batch norms in training mode leave their running statistics alone inside the block.

    Statistics taken under masks are not those of the whole network.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
    for norm in norms:
        norm.track_running_stats = False  # with a momentum of 0, a batch with NaN would spoil them
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
