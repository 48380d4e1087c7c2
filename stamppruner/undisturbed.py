"""Work that the caller's modes of PyTorch do not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def undisturbed() -> Iterator[None]:
    """Gradients as always, and no autocast, whatever the caller is in; it also decorates functions.

    Under an ambient autocast, scores, fitted weights and reported accuracies would be those of
    another precision than the network's.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", *_accelerator()):
            if torch.is_autocast_enabled(kind):  # within it, cast weights would be kept for ever
                stack.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        yield


def _accelerator() -> list[str]:
    """The kind of accelerator at hand, if autocast knows it."""
    found = torch.accelerator.current_accelerator()
    known = found is not None and torch.amp.is_autocast_available(found.type)
    return [found.type] if found is not None and known else []
