"""Batch norms over a batch that is spread over ranks: its statistics are those of the whole batch.

``torch.nn.SyncBatchNorm`` is for GPUs alone and another module; this is a forward that any batch
norm borrows for a while, on any device. Statistics of the parts are joined as in Chan et al. 1979.
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


@contextmanager
def shared_batch(model: nn.Module) -> Iterator[None]:
    """Batch norms in training mode normalise by the images of all ranks inside the block.

    All ranks must run the model forward and backward the same number of times. Running statistics
    are left alone. On a single rank nothing changes.
    """
    norms = [m for m in model.modules() if isinstance(m, _BatchNorm)] if ranks.count() > 1 else []
    for norm in norms:
        norm.forward = _forward_of(norm)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


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
        axes = [axis for axis in range(x.dim()) if axis != 1]
        own_variance, own_mean = (
            part.double() for part in torch.var_mean(x.float(), axes, correction=0)
        )
        number = torch.full_like(own_mean, x.numel() // x.shape[1])
        totals = torch.stack([number, number * own_mean])
        ranks.sum_([totals])
        count, mean = totals[0], totals[1] / totals[0]
        square = (own_variance + (own_mean - mean).square()) * number
        ranks.sum_([square])
        mean, variance = mean.float(), (square / count).float()
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.eps = eps
        with torch.autocast(x.device.type, enabled=False):
            return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        """Gradients of this rank's part; those of weight and bias are to be summed over ranks."""
        x, weight, mean, variance, count = ctx.saved_tensors
        shape = [1, -1] + [1] * (x.dim() - 2)
        axes = [axis for axis in range(x.dim()) if axis != 1]
        scale = (variance + ctx.eps).rsqrt()
        normed = (x.float() - mean.view(shape)) * scale.view(shape)
        wide = grad.float()
        own = torch.stack([wide.sum(axes), (wide * normed).sum(axes)])
        whole = own.clone()
        ranks.sum_([whole])
        by_mean, by_scale = ((part / count).float().view(shape) for part in whole)
        factor = scale if weight is None else scale * weight.float()
        inner = factor.view(shape) * (wide - by_mean - normed * by_scale)
        like = None if weight is None else weight.dtype
        return (
            inner.to(x.dtype),
            None if weight is None else own[1].to(like),
            None if weight is None else own[0].to(like),
            None,
        )
