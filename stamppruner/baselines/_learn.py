"""Training on the target, inside a method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from stamppruner.target import Target


@contextmanager
def training(model: nn.Module, seed: int) -> Iterator[None]:
    """The model in training mode, with gradients; modes and random states return on exit.

    Args:
        model: as it says.
        seed: of what the model itself draws, such as dropout.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device for p in model.parameters() if p.device.type == "cuda"}
    model.train()
    try:
        with torch.random.fork_rng(sorted(devices, key=str)), torch.enable_grad():
            torch.manual_seed(seed)
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def only_these_learn(model: nn.Module, tensors: Iterable[Tensor]) -> Iterator[None]:
    """Gradients for these tensors, and for no other parameter of the model; as before on exit."""
    chosen = list(tensors)
    before = [(p, p.requires_grad) for p in (*model.parameters(), *chosen)]
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for tensor in chosen:
        tensor.requires_grad_(True)
    try:
        yield
    finally:
        for tensor, needed in before:
            tensor.requires_grad_(needed)


def minibatches(
    target: Target, size: int, steps: int, generator: torch.Generator, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Random images and labels of the sample, without replacement inside a batch."""
    count = len(target.labels)
    for _ in range(steps):
        chosen = torch.randperm(count, generator=generator)[: min(size, count)]
        yield target.images[chosen].to(device), target.labels[chosen].to(device)
