"""Norms that take statistics over channels, and the same norms over the kept channels only.

A layer norm over channels or a group norm mixes the channels it normalises, so a masked network
equals a smaller one only if the mask also weighs the statistics:

    mean = Σ m x / Σ m,    variance = Σ m (x - mean)² / Σ m,

over the channels of a norm group and, for a group norm, over the positions. Norms are recognised
by what they compute, not by their class, so channels-last, channels-first and hand-written ones
are all found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stamppruner import layers

_TOLERANCE = 1e-3
"""Recognition compares in the module's own precision; other candidates are off by about 1."""


@dataclass(frozen=True)
class Norm:
    """What a norm takes its statistics over.

    Attributes:
        axis: of the channels: 1 or -1.
        groups: number of equal consecutive runs of channels with statistics of their own.
        positions: whether the statistics also run over all axes but the batch.
        centred: whether the mean is subtracted (layer and group norm) or not (RMS norm).
    """

    axis: int
    groups: int
    positions: bool
    centred: bool

    def __call__(self, module: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
        """What the module computes, with statistics over the channels that ``mask`` leaves.

        Args:
            module: the norm, for its ``eps``, affine parameters and activation.
            x: ``(B, ..., C, ...)``.
            mask: ``(C,)``, or ``(B, C)`` with one a sample.
        """
        moved = x.movedim(self.axis, 1)
        y = moved.reshape(len(x), self.groups, moved.shape[1] // self.groups, -1)
        m = mask.to(x.dtype).reshape(-1, *y.shape[1:3], 1)
        over = (2, 3) if self.positions else (2,)
        total = m.sum(2, keepdim=True) * (y.shape[3] if self.positions else 1)
        total = total.clamp_min(torch.finfo(x.dtype).tiny)
        if self.centred:
            y = y - (m * y).sum(over, keepdim=True) / total
        variance = (m * y * y).sum(over, keepdim=True) / total
        y = (y * torch.rsqrt(variance + _eps(module, x))).reshape(moved.shape)
        y = _affine(module, y.movedim(1, self.axis), self.axis)
        for child in module.children():  # the activation of a fused norm
            y = child(y)
        return y


def recognise(module: nn.Module, x: Tensor) -> Norm | None:
    """The norm that a module computes on inputs of the shape of ``x``, or None.

    Batch and instance norms are none: they treat channels apart.
    """
    if not (hasattr(module, "eps") and x.dim() > 1 and x.is_floating_point()):
        return None
    if isinstance(module, nn.modules.batchnorm._NormBase) or layers.has_deep_state(module):
        return None
    generator = torch.Generator().manual_seed(0)
    noise = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x) + 0.5
    try:
        target = module.forward(noise)
    except (RuntimeError, TypeError, ValueError):
        return None
    for norm in _candidates(module, noise):
        try:
            found = norm(module, noise, noise.new_ones(noise.shape[norm.axis]))
        except (RuntimeError, TypeError, ValueError):
            continue
        scale = float(target.abs().max()) or 1.0
        if found.shape == target.shape and float((found - target).abs().max()) < _TOLERANCE * scale:
            return norm
    return None


def _candidates(module: nn.Module, x: Tensor) -> Iterator[Norm]:
    groups = getattr(module, "num_groups", 1)
    for axis in (1, -1):
        if x.shape[axis] % groups or x.shape[axis] == groups:
            continue
        for positions in (False, True):
            for centred in (True, False):
                yield Norm(axis, groups, positions, centred)


def _eps(module: nn.Module, x: Tensor) -> float:
    eps = getattr(module, "eps", None)
    return float(torch.finfo(x.dtype).eps if eps is None else eps)


def _affine(module: nn.Module, y: Tensor, axis: int) -> Tensor:
    for name in ("weight", "bias"):
        value = getattr(module, name, None)
        if value is None:
            continue
        if value.shape != y.shape[1:]:  # one value a channel
            value = value.reshape(-1, *[1] * (y.dim() - 2 if axis == 1 else 0))
        y = y * value if name == "weight" else y + value
    return y
