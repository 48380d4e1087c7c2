"""How long forward passes and training steps take, here and now."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from random import Random
from time import perf_counter

import torch
from torch import nn

from stamppruner.calls import floating_tensors
from stamppruner.evidence import running_statistics
from stamppruner.heap import memory_kept
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


def latencies_ms(
    models: Sequence[nn.Module], inputs: Inputs, *, samples: int, seconds: float = _SECONDS
) -> list[float]:
    """Milliseconds of a forward pass of each model, in evaluation mode on its device.

    The models take turns, so that a busy machine slows all of them.

    Args:
        models: left in their modes.
        inputs: give the shapes of the noise that is passed.
        samples: a pass.
        seconds: a model.
    """
    batch = inputs.random(samples, seed=0)
    return in_turns_ms([_passes(model, batch) for model in models], seconds)


def train_steps_ms(
    models: Sequence[nn.Module], inputs: Inputs, *, samples: int, seconds: float = _SECONDS
) -> list[float]:
    """The same of a training step: forward pass, backward pass, a step of SGD with momentum.

    The loss is the sum of all floating outputs. Copies are trained.
    """
    batch = inputs.random(samples, seed=0)
    return in_turns_ms([_steps(copy.deepcopy(model), batch) for model in models], seconds)


def in_turns_ms(calls: Sequence[Callable[[], float]], seconds: float) -> list[float]:
    """Lower quartile of what each call returns, over as many rounds as fit into ``seconds`` each.

    That is what a pass takes where nothing interrupts it: on a busy machine up to half of short
    passes wait for a core, and medians of equal networks differ by factors. A round is in random
    order: in a fixed one, a machine that takes the core away at regular times would take it from
    the same call again and again. Meanwhile memory stays with the process
    (:func:`~stamppruner.heap.memory_kept`).
    """
    taken: list[list[float]] = [[] for _ in calls]
    order, random = list(range(len(calls))), Random(0)
    careful = seconds > _SECONDS
    with memory_kept():
        for call in calls:
            call()  # allocates, chooses algorithms
        start = perf_counter()
        for done in range(10 * _MOST if careful else _MOST):
            if done >= _FEWEST + 2 * careful and perf_counter() - start > seconds * len(calls):
                break
            random.shuffle(order)
            for i in order:
                taken[i].append(calls[i]())
    return [sorted(times)[len(times) // 4] for times in taken]


@contextmanager
def running_with(
    threads: int | None, *, amp: bool = False, device: str | torch.device = "cpu"
) -> Iterator[None]:
    """So many threads of PyTorch on the CPU (None leaves them), and bfloat16 autocast or none.

    Weights are cast in every pass, as where each pass enters autocast.
    """
    before, kind = torch.get_num_threads(), torch.device(device).type
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        with torch.autocast(kind, torch.bfloat16, cache_enabled=False) if amp else nullcontext():
            yield
    finally:
        torch.set_num_threads(before)


def did_not_fall(
    before_ms: float, after_ms: float, *, left: float, where: str, layers: Sequence[str] = ()
) -> str | None:
    """A warning if a network with a share ``left`` < 1 of the multiply-adds is not faster.

    >>> did_not_fall(4.0, 3.9, left=0.5, where="cpu, 32 samples")
    >>> did_not_fall(4.0, 4.5, left=0.5, where="cpu, 32 samples")[:64]
    'latency did not fall (4 ms before, 4.5 ms after; cpu, 32 samples'
    """
    if left >= 1 or after_ms < before_ms:
        return None
    named = f"; layers that are not faster: {', '.join(layers)}" if layers else ""
    return (
        f"latency did not fall ({before_ms:.3g} ms before, {after_ms:.3g} ms after; {where}) "
        f"although multiply-adds fell to {left:.0%}{named}: overhead or memory, not arithmetic, "
        "takes the time here. Measure with the batch size and on the machine that the network is "
        "for; a larger round_to may help"
    )


def _passes(model: nn.Module, batch: Inputs) -> Callable[[], float]:
    device = first_floating(model).device

    def once() -> float:
        with running_statistics(model), torch.no_grad():
            _wait_for(device)
            start = perf_counter()
            batch.call(model)
            _wait_for(device)
            return 1e3 * (perf_counter() - start)

    return once


def _steps(model: nn.Module, batch: Inputs) -> Callable[[], float]:
    device = first_floating(model).device
    model.train().requires_grad_(True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    def once() -> float:
        with torch.enable_grad():
            _wait_for(device)
            start = perf_counter()
            sgd.zero_grad()
            outputs = floating_tensors(batch.call(model))
            torch.stack([x.float().sum() for x in outputs]).sum().backward()
            sgd.step()
            _wait_for(device)
            return 1e3 * (perf_counter() - start)

    return once


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
