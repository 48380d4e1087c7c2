"""Synthetic images that a tiny network learns in a second, and the tiny networks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from stamppruner.models import VGG, ResNet

CLASSES = 6
SIZE = 8


def stripes(
    per_class: int = 16, classes: int = CLASSES, *, seed: int = 0, channels: int = 3
) -> tuple[Tensor, Tensor]:
    """Noisy images ``(N, channels, 8, 8)``: a class is a direction and width of its stripes."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    waves = [(x // 2) % 2, (y // 2) % 2, (x // 4) % 2, (y // 4) % 2, (x // 2 + y // 2) % 2, x * 0]
    patterns = torch.stack(waves).float()[:classes]
    labels = torch.arange(classes).repeat(per_class)
    tint = 0.5 + torch.rand(len(labels), channels, 1, 1, generator=generator)
    noise = 0.2 * torch.randn(len(labels), channels, SIZE, SIZE, generator=generator)
    return patterns[labels][:, None] * tint + noise, labels


def dataset(
    per_class: int = 16, classes: int = CLASSES, *, seed: int = 0, channels: int = 3
) -> TensorDataset:
    return TensorDataset(*stripes(per_class, classes, seed=seed, channels=channels))


def loader(per_class: int = 16, classes: int = CLASSES, *, seed: int = 0) -> DataLoader:
    """Batches of 16 in a fixed order, classes mixed."""
    return DataLoader(dataset(per_class, classes, seed=seed), batch_size=16)


def vgg(classes: int = CLASSES, *, seed: int = 0, channels: int = 3) -> VGG:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return VGG(((8,), (12, 12)), classes, in_channels=channels)


def resnet(classes: int = CLASSES, *, seed: int = 0) -> ResNet:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return ResNet((1, 1), (8, 12), classes)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A copy of everything that the model remembers."""
    return copy.deepcopy(model.state_dict())


def same_state(model: nn.Module, before: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    after = model.state_dict()
    return after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in after)


def hooks(model: nn.Module) -> int:
    """Hooks and forwards of its own on any module."""
    return sum(
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        + ("forward" in m.__dict__)
        for m in model.modules()
    )  # fmt: skip
