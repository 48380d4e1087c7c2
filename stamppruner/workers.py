"""Processes that read pieces of a source ahead of their use, each with a copy of it.

They are those of Python's ``concurrent.futures``. Signals are left to the process that they work
for, and they end with it, with all that they started.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor, multiprocessing

from stamppruner.errors import ConfigError, DataError
from stamppruner.guards import late
from stamppruner.randomness import set_streams
from stamppruner.tasks import Task

_LEFT = (signal.SIGTERM, signal.SIGINT)
"""Signals that are the parent's."""


@dataclass(frozen=True, eq=False)
class Piece:
    """What is read in one go.

    Attributes:
        numbers: set the global random streams.
        read: gives it from the source; can be pickled.
    """

    numbers: tuple[int, ...]
    read: Callable[[Any], Any]

    def of(self, source: Any, seed: int) -> Any:
        """Set the streams and read."""
        set_streams(seed, *self.numbers)
        return self.read(source)


class Workers:
    """So many processes.

    Args:
        source: that pieces are read from.
        seed: of the global random streams, with a piece's numbers.
        number: of processes; they start with the first piece.
    """

    def __init__(self, source: Any, seed: int, number: int) -> None:
        self._context = multiprocessing.get_context()
        self._pool = ProcessPoolExecutor(number, self._context, _begin, (source, seed))

    def submit(self, piece: Piece) -> Future[Any]:
        """Have a piece read; :meth:`result` waits for it.

        Raises:
            DataError: a worker ended. ConfigError: none can be started.
        """
        try:
            with self._signals_wait():
                return self._pool.submit(_read, piece)
        except BrokenProcessPool as error:
            raise _ended() from error
        except Exception as error:
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise ConfigError(
                f"num_workers: no worker can be started with the reference ({text}); make it one "
                "that can be pickled, call this from no daemon, or pass num_workers=0"
            ) from error

    def result(self, future: Future[Any], timeout: float | None, what: str) -> Any:
        """What was read; ``what`` begins the message of a time-out.

        Raises:
            LoaderTimeoutError: it did not come in time.
            DataError: a worker ended, or whatever the source raises.
        """
        try:
            return future.result(timeout)
        except BrokenProcessPool as error:
            raise _ended() from error
        except FutureTimeoutError:
            if future.done():  # it is the source's own
                raise
            raise late(what, timeout or 0.0) from None

    def end(self, *, at_once: bool) -> None:
        """End them, at once or after what they read."""
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=not at_once, cancel_futures=True)
        if at_once:  # some may hang, and Python would wait for them at its end
            for process in processes:
                _kill(process)

    @contextmanager
    def _signals_wait(self) -> Iterator[None]:
        """Processes that start in the block do not hear signals before they are ready for them.

        Nor does the server that forks them, if there is one, ever: it would end, and they with it.
        """
        if not hasattr(signal, "pthread_sigmask"):
            yield
            return
        if self._context.get_start_method() != "fork":
            resource_tracker.ensure_running()  # which lets signals through when it starts
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended() -> DataError:
    """The error of a worker that ended before its time."""
    return DataError(
        "a worker that reads images ended at once: it crashed (its own error may stand above), or "
        "was killed, perhaps as memory or /dev/shm ran out: lower num_workers, or pass "
        "num_workers=0"
    )


def _kill(process: BaseProcess) -> None:
    """With all that it started, which may keep Python waiting for it, too."""
    try:
        assert process.pid  # a group of 0 would be that of this process
        os.killpg(process.pid, signal.SIGKILL)
    except (AttributeError, OSError):  # no such groups here, or not yet
        process.kill()


_source: Any = None
_seed = 0


def _begin(source: Any, seed: int) -> None:
    """A worker's beginning."""
    global _source, _seed
    _source, _seed = source, seed
    for number in _LEFT:  # SIG_IGN would be left to programs that a data set starts
        signal.signal(number, lambda *_: None)
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _read(piece: Piece) -> Any:
    """In a worker: what a piece holds."""
    try:
        return _own(piece.of(_source, _seed))
    except Exception as error:
        if _can_be_sent(error):
            raise
        raise DataError(f"{type(error).__name__}: {error}") from error


def _own(value: Any) -> Any:
    """A copy: tensors that are sent share their memory, which the source may use again."""
    if isinstance(value, Task):
        return Task(value.images.clone(), value.labels.clone(), value.classes)
    if isinstance(value, tuple):
        return tuple(map(_own, value))
    return value.clone() if isinstance(value, Tensor) else value


def _can_be_sent(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # noqa: BLE001 (whatever its class does)
        return False
