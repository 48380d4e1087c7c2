"""Sums of gradients, their averages in optimizers, and parameters set to values, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


def wide(p: Tensor) -> torch.dtype:
    """For sums of gradients: in float64 the order of the summands makes no difference.

    It would grow into one, as fresh Adams start with steps by the sign of a gradient alone.
    """
    return p.dtype if p.device.type == "mps" else torch.float64


@torch.no_grad()
def add_gradients_(totals: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Add the gradients of parameters, where there are some, and let go of them."""
    for total, p in zip(totals, parameters, strict=True):
        if p.grad is not None:
            total.add_(p.grad)
            p.grad = None


def use_gradients_(parameters: Sequence[nn.Parameter], totals: Sequence[Tensor]) -> None:
    """Give parameters these gradients."""
    for p, total in zip(parameters, totals, strict=True):
        p.grad = total.to(p.dtype)


def moments(optimizer: Optimizer) -> list[Tensor]:
    """The averages of gradients that an optimizer keeps, of all sizes but single numbers."""
    found = [value for entry in optimizer.state.values() for value in entry.values()]
    return [value for value in found if isinstance(value, Tensor) and value.dim()]


@torch.no_grad()
def set_(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Give parameters other values."""
    torch._foreach_copy_(list(parameters), list(values))
