"""Training on the target, inside a method."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stamppruner.errors import DataError
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


@dataclass(frozen=True, eq=False)
class Batches:
    """Images and labels of a target, in an order that is drawn before; has a length."""

    target: Target
    order: tuple[Tensor, ...]
    device: torch.device

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in self.order:
            images, labels = self.target.images[chosen], self.target.labels[chosen]
            yield images.to(self.device), labels.to(self.device)


def epochs(
    target: Target, size: int, count: int, generator: torch.Generator, device: torch.device
) -> Batches:
    """Passes over the sample in new orders; what fills no batch is left to another pass."""
    whole = len(target.labels)
    size = min(size, whole)
    orders = [torch.randperm(whole, generator=generator).split(size) for _ in range(count)]
    return Batches(target, tuple(o for parts in orders for o in parts if len(o) == size), device)


def draws(
    target: Target, size: int, steps: int, generator: torch.Generator, device: torch.device
) -> Iterator[tuple[Tensor, Tensor]]:
    """Images and labels of batches that are each drawn from the whole sample, when asked for."""
    for _ in range(steps):
        chosen = torch.randperm(len(target.labels), generator=generator)[:size]
        yield target.images[chosen].to(device), target.labels[chosen].to(device)


def check_finite(loss: Tensor, method: str, **rates: float) -> None:
    """Raise DataError, naming the rates, unless the loss is finite."""
    if not torch.isfinite(loss):
        named = ", ".join(f"{name}={rate}" for name, rate in rates.items())
        raise DataError(f"{method} diverged (loss {float(loss.detach())}): lower {named}")
