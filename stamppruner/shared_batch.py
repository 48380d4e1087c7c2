"""Batch norms over a batch that is spread over ranks: its statistics are those of the whole batch.

``torch.nn.SyncBatchNorm`` is for GPUs alone and another module; this is a forward that any batch
norm borrows for a while, on any device. Statistics of the parts are joined in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from stamppruner import ranks
from stamppruner.calls import patched_forwards


@contextmanager
def shared_batch(model: nn.Module) -> Iterator[None]:
    """Batch norms in training mode normalise by the images of all ranks inside the block.

    All ranks must run the model forward and backward the same number of times. Running statistics
    are left alone. On a single rank nothing changes.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)] if ranks.count() > 1 else []
    with patched_forwards({norm: _forward_of(norm) for norm in norms}):
        yield


def _forward_of(norm: _BatchNorm) -> Callable[[Tensor], Tensor]:
    plain = norm.forward

    def forward(x: Tensor) -> Tensor:
        if not norm.training and norm.running_mean is not None:
            return plain(x)
        y: Tensor = _WholeBatchNorm.apply(x, norm.weight, norm.bias, norm.eps)
        return y

    return forward


class _WholeBatchNorm(torch.autograd.Function):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, statistics of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """Returns what the norm makes of this rank's part ``(B, C, ...)``."""
        with torch.autocast(x.device.type, enabled=False):
            kind = _kind(x)
            mean, variance = (part.double() for part in _statistics(x.to(kind)))
            number = torch.full_like(mean, x.numel() // x.shape[1])
            totals = number * torch.stack([torch.ones_like(mean), mean, variance + mean.square()])
            ranks.sum_([totals])  # in float64, where the difference of squares does no harm
            count, mean = totals[0], totals[1] / totals[0]
            variance = (totals[2] / count - mean.square()).clamp_min(0)
            mean, variance = mean.to(kind), variance.to(kind)
            ctx.save_for_backward(x, weight, mean, variance, count)
            ctx.eps = eps
            scale, shift = (None if p is None else p.to(kind) for p in (weight, bias))
            return F.batch_norm(x, mean, variance, scale, shift, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        """Gradients of this rank's part; those of weight and bias are to be summed over ranks."""
        x, weight, mean, variance, count = ctx.saved_tensors
        scale = torch.ones_like(mean) if weight is None else weight.to(mean.dtype)
        wide = x.to(mean.dtype)
        inner, by_scale, by_mean = torch.ops.aten.native_batch_norm_backward(
            grad.to(mean.dtype), wide, scale, mean, variance, None, None, False, ctx.eps, [True] * 3
        )  # as if statistics were constants
        whole = torch.stack([by_scale, by_mean]).double()
        ranks.sum_([whole])
        deviation = (variance.double() + ctx.eps).rsqrt()
        slope = scale * deviation.square() * whole[0] / count
        shift = scale * deviation * whole[1] / count - slope * mean
        shape = [1, -1] + [1] * (x.dim() - 2)
        slope, shift = (part.to(mean.dtype).view(shape) for part in (slope, shift))
        inner.addcmul_(wide, slope, value=-1).sub_(shift)
        if weight is None:
            return inner.to(x.dtype), None, None, None
        return inner.to(x.dtype), by_scale.to(weight.dtype), by_mean.to(weight.dtype), None


def _kind(x: Tensor) -> torch.dtype:
    """What statistics of these images are kept in."""
    return x.dtype if x.dtype == torch.float64 else torch.float32


def _statistics(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of every channel of ``(B, C, ...)``."""
    if x.device.type == "cpu":  # four times as fast there as ``var_mean``
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
        return mean, variance
    variance, mean = torch.var_mean(x, [a for a in range(x.dim()) if a != 1], correction=0)
    return mean, variance
