"""How long forward passes take, here and now."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import torch
from torch import nn

from stamppruner.evidence import running_statistics
from stamppruner.inputs import Inputs
from stamppruner.layers import first_floating

BATCH = 32
"""Most samples a measured pass."""

_MACS = 2e9  # most multiply-adds a measured pass of the full network, above one sample
_SECONDS = 0.1  # a network
_FEWEST, _MOST = 3, 50  # passes a network


def batch_size(macs: float) -> int:
    """Samples a pass: :data:`BATCH`, fewer for networks of many multiply-adds a sample.

    >>> batch_size(1e6), batch_size(2e8), batch_size(4e9)
    (32, 10, 1)
    """
    return max(1, min(BATCH, int(_MACS / max(1.0, macs))))


def latencies_ms(models: Sequence[nn.Module], inputs: Inputs, *, samples: int) -> list[float]:
    """Median milliseconds of a forward pass of each model, in evaluation mode on its device.

    The models take turns, so that a busy machine slows all of them.

    Args:
        models: left in their modes.
        inputs: give the shapes of the noise that is passed.
        samples: a pass.
    """
    batch = inputs.random(samples, seed=0)
    taken: list[list[float]] = [[] for _ in models]
    for model in models:
        _pass_ms(model, batch)  # allocates, chooses algorithms
    start = perf_counter()
    for done in range(_MOST):
        if done >= _FEWEST and perf_counter() - start > _SECONDS * len(models):
            break
        for model, times in zip(models, taken, strict=True):
            times.append(_pass_ms(model, batch))
    return [median(times) for times in taken]


def did_not_fall(before_ms: float, after_ms: float, *, left: float, where: str) -> str | None:
    """A warning if a network with a share ``left`` < 1 of the multiply-adds is not faster.

    >>> did_not_fall(4.0, 3.9, left=0.5, where="cpu, 32 samples")
    >>> did_not_fall(4.0, 4.5, left=0.5, where="cpu, 32 samples")[:64]
    'latency did not fall (4 ms before, 4.5 ms after; cpu, 32 samples'
    """
    if left >= 1 or after_ms < before_ms:
        return None
    return (
        f"latency did not fall ({before_ms:.3g} ms before, {after_ms:.3g} ms after; {where}) "
        f"although multiply-adds fell to {left:.0%}: overhead or memory, not arithmetic, takes the "
        "time here. Measure with the batch size and on the machine that the network is for; a "
        "larger round_to may help"
    )


def _pass_ms(model: nn.Module, batch: Inputs) -> float:
    device = first_floating(model).device
    with running_statistics(model), torch.no_grad():
        _wait_for(device)
        start = perf_counter()
        batch.call(model)
        _wait_for(device)
        return 1e3 * (perf_counter() - start)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
