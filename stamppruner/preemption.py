"""SIGTERM, by which schedulers take machines back: noted, so that work can end in good order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Preemption:
    """Whether SIGTERM has come.

    Example:
        >>> with sigterm_noted() as preemption:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     preemption.came
        True
    """

    def __init__(self) -> None:
        self.came = False

    def _note(self, _number: int, _frame: FrameType | None) -> None:
        self.came = True


@contextmanager
def sigterm_noted() -> Iterator[Preemption]:
    """SIGTERM is noted inside the block instead of ending the process; then all is as before.

    Outside the main thread, where no handler can be set, nothing is noted.
    """
    preemption = Preemption()
    if threading.current_thread() is not threading.main_thread():
        yield preemption
        return
    previous = signal.signal(signal.SIGTERM, preemption._note)
    try:
        yield preemption
    finally:
        signal.signal(signal.SIGTERM, previous if previous is not None else signal.SIG_DFL)
