"""Guards of long runs: losses that are not finite, memory that is not there, data that hang."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from stamppruner.errors import ConfigError, DivergedError, LoaderTimeoutError, MemoryLimitError
from stamppruner.gated import GatedNet

T = TypeVar("T")

_EXHAUSTED = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate")


class Skips:
    """Steps that were left out, for their loss or gradient was not finite.

    Attributes:
        total: how many there were.
        row: how many there were since the last good one.
    """

    def __init__(self, limit: int, remedy: str) -> None:
        self.total = self.row = 0
        self._limit, self._remedy = limit, remedy
        self._first = ""

    def good(self) -> None:
        """A step was made."""
        self.row = 0

    def bad(self, where: str, *, hopeless: bool = False) -> None:
        """A step was left out.

        Args:
            where: what was not finite, and when.
            hopeless: so will be all that follow.

        Raises:
            DivergedError: as were too many in a row.
        """
        self._first = where if self.row == 0 else self._first
        self.row += 1
        self.total += 1
        if hopeless or self.row >= self._limit:
            raise DivergedError(
                f"diverged: {self.row} step{'s' * (self.row > 1)} in a row not finite, first "
                f"{self._first}; {self._remedy}. Parameters are those of the last good step"
            )


def finite(tensors: Iterable[Tensor | None]) -> bool:
    """Whether all numbers in all tensors are finite."""
    found = [tensor.detach() for tensor in tensors if tensor is not None]
    if not found:
        return True
    return bool(torch.isfinite(nn.utils.get_total_norm(found, norm_type=float("inf"))))


@contextmanager
def compiling_named() -> Iterator[None]:
    """What torch.compile raises in the block is a ConfigError.

    Raises:
        ConfigError: the model cannot be compiled here.
    """
    try:
        yield
    except RuntimeError as error:
        if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise
        text = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"compile=True: torch.compile fails ({type(error).__name__}: {text}): it needs a C++ "
            "compiler and Python's headers on a CPU, Triton on a GPU; or pass compile=False"
        ) from error


@torch.no_grad()
def first_not_finite(net: GatedNet, images: Tensor, mask: Tensor | None) -> str:
    """What is the first to be not finite on the way to the loss: a layer, a gate, or the images.

    Args:
        net: as it was when the loss was computed.
        images: ``(B, C, H, W)`` of the minibatch.
        mask: ``(num_channels,)`` that it was computed under.
    """
    if not finite([images]):
        return "the images"
    for kind, module in (("layer", net.model), ("gates", net.posterior), ("encoder", net.encoder)):
        for name, parameter in module.named_parameters():
            if not finite([parameter]):
                where = name.rpartition(".")[0]
                return f"{kind} {where!r} (its {name!r})" if where else f"{kind} {name!r}"
    if mask is not None and not finite([mask]):
        channel = int((~mask.isfinite()).nonzero()[0])
        group = net.graph.groups[int(net.graph.group_of[channel])]
        return f"gate {channel} (of {group.name!r})"
    return _first_layer(net, images, mask) or "the gradient"


def _first_layer(net: GatedNet, images: Tensor, mask: Tensor | None) -> str | None:
    """The first layer to give numbers that are not finite."""
    found: list[str] = []

    def note(name: str, module: nn.Module) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: object, output: object) -> None:
            if not found and isinstance(output, Tensor) and not finite([output]):
                found.append(f"layer {name!r} ({type(module).__name__})")

        return hook

    leaves = [(n, m) for n, m in net.model.named_modules() if not list(m.children())]
    handles = [module.register_forward_hook(note(name, module)) for name, module in leaves]
    try:
        with net.masked(mask) as model:
            model(images)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


@contextmanager
def memory_named(remedy: str) -> Iterator[None]:
    """What runs out of memory in the block raises an error that says what needs less.

    Raises:
        MemoryLimitError: the device has no more.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryError) or any(t in str(error).lower() for t in _EXHAUSTED):
            first = str(error).strip().split("\n")[0][:200]
            raise MemoryLimitError(f"out of memory ({first}): {remedy}") from error
        raise


def within(seconds: float | None, read: Callable[[], T], what: str) -> T:
    """What ``read`` gives, if that takes no longer.

    Args:
        seconds: most seconds to wait; None waits for ever.
        read: called in a thread of its own where there is a limit.
        what: is read; begins the message.

    Raises:
        LoaderTimeoutError: it took longer. The thread is left behind, as none can be stopped.
    """
    if seconds is None:
        return read()
    found: list[T] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            found.append(read())
        except BaseException as error:  # noqa: BLE001 (raised in the thread that waits)
            failed.append(error)

    thread = threading.Thread(target=work, name="stamppruner-reader", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise late(what, seconds)
    if failed:
        raise failed[0]
    return found[0]


def late(what: str, seconds: float) -> LoaderTimeoutError:
    """The error of something that did not come in time; ``what`` begins the message."""
    return LoaderTimeoutError(
        f"{what} did not come within {seconds:g} seconds: see whether the disk or the loader's "
        "workers hang, or raise loader_timeout"
    )
