"""Pieces of a source of tasks, read in the order of their use: here, or ahead of it by workers.

Workers are processes of Python's ``concurrent.futures``, each with a copy of the source. Before a
piece is read, the global random streams are set by its numbers, wherever that is, so the images are
the same for any number of workers.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from itertools import islice
from multiprocessing import parent_process
from types import TracebackType
from typing import Any

import torch
from torch import multiprocessing

from stamppruner.errors import ConfigError, DataError
from stamppruner.guards import late, within
from stamppruner.randomness import set_streams
from stamppruner.tasks import DrawnTask, TaskSource, draw

_AHEAD = 2
"""Pieces a worker that are read before they are used, as in torch's DataLoader."""


@dataclass(frozen=True, eq=False)
class Piece:
    """What is read in one go.

    Attributes:
        numbers: set the global random streams.
        read: gives it from the source; can be pickled.
    """

    numbers: tuple[int, ...]
    read: Callable[[Any], Any]


class Reader:
    """Reads pieces of a source; a context manager that ends its workers.

    Args:
        source: of tasks.
        seed: of the global random streams, with a piece's numbers.
        workers: processes that read ahead; 0 reads when a piece is used.
        timeout: most seconds to wait for a piece; None waits for ever.

    Raises:
        ConfigError: workers for a source that draws and reads tasks at once.
    """

    def __init__(
        self, source: TaskSource, seed: int, *, workers: int = 0, timeout: float | None = None
    ) -> None:
        if workers and not callable(getattr(source, "draw", None)):
            raise ConfigError(
                f"num_workers={workers}: {type(source).__name__} has no draw(n), to choose tasks "
                "without reading them: give it one, or pass num_workers=0"
            )
        self.source, self.seed, self.timeout = source, seed, timeout
        self._ahead = _AHEAD * workers
        self._pool: ProcessPoolExecutor | None = None
        if workers:
            self._pool = ProcessPoolExecutor(
                workers, multiprocessing.get_context(), _begin, (source, seed)
            )

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._pool is None:
            return
        processes = list((self._pool._processes or {}).values())
        self._pool.shutdown(wait=kind is None, cancel_futures=True)
        if kind is not None:  # some may hang, and Python would wait for them at its end
            for process in processes:
                process.kill()

    def stream(self, pieces: Iterable[Piece], what: str) -> Iterator[Any]:
        """Yield what each piece holds; with workers, later ones are under way by then.

        Args:
            pieces: are asked for as they are needed, on this thread.
            what: they are; begins the message of a time-out.

        Raises:
            LoaderTimeoutError: a piece did not come in time.
            DataError: a worker ended, or whatever the source raises.
        """
        if self._pool is None:
            for piece in pieces:
                yield within(self.timeout, partial(self._read, piece), what)
            return
        rest, waiting = iter(pieces), deque[Future[Any]]()
        while True:
            for piece in islice(rest, 1 + self._ahead - len(waiting)):
                waiting.append(self._submitted(self._pool, piece))
            if not waiting:
                return
            yield self._result(waiting.popleft(), what)

    def _read(self, piece: Piece) -> Any:
        set_streams(self.seed, *piece.numbers)
        return piece.read(self.source)

    def _submitted(self, pool: ProcessPoolExecutor, piece: Piece) -> Future[Any]:
        try:
            return pool.submit(_read, piece)
        except BrokenProcessPool as error:
            raise _ended() from error
        except (pickle.PicklingError, AttributeError, TypeError, AssertionError, OSError) as error:
            raise ConfigError(
                f"num_workers: no worker can be started with the reference ({error}); make it one "
                "that can be pickled, call this from no daemon, or pass num_workers=0"
            ) from error

    def _result(self, future: Future[Any], what: str) -> Any:
        try:
            return future.result(self.timeout)
        except BrokenProcessPool as error:
            raise _ended() from error
        except FutureTimeoutError:
            if future.done():  # it is the source's own
                raise
            raise late(what, self.timeout or 0.0) from None


class Draws:
    """The tasks of numbered iterations, drawn in order, as far ahead as they are asked for.

    A context manager that puts the source where it is after the last iteration that is over.

    Args:
        reader: of the source.
        number: of tasks an iteration.
        first: iteration to be drawn.

    Attributes:
        state: of the source, as it is after the last iteration that is over.
    """

    def __init__(self, reader: Reader, number: int, first: int) -> None:
        self._reader, self._number, self._next = reader, number, first
        self._drawn: dict[int, tuple[list[DrawnTask], dict[str, Any]]] = {}
        self.state = dict(reader.source.state_dict())

    def __enter__(self) -> Draws:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._drawn:
            self._reader.source.load_state_dict(self.state)
            self._next -= len(self._drawn)
            self._drawn.clear()

    def of(self, iteration: int) -> list[DrawnTask]:
        """Tasks of an iteration that is not over. Sets the global random streams to draw."""
        source = self._reader.source
        while self._next <= iteration:
            set_streams(self._reader.seed, self._next, 0)
            drawn = within(
                self._reader.timeout, lambda: draw(source, self._number), "the images of a task"
            )
            self._drawn[self._next] = drawn, dict(source.state_dict())
            self._next += 1
        return self._drawn[iteration][0]

    def over(self, iteration: int) -> None:
        """The iteration will not be asked for again."""
        _, self.state = self._drawn.pop(iteration)


def _ended() -> DataError:
    return DataError(
        "a worker that reads images ended at once (killed, perhaps as memory or /dev/shm ran out, "
        "or crashed): lower num_workers, or pass num_workers=0"
    )


_source: Any = None
_seed = 0


def _begin(source: Any, seed: int) -> None:
    """A worker's beginning: it ends with its parent, which alone heeds signals."""
    global _source, _seed
    _source, _seed = source, seed
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


def _read(piece: Piece) -> Any:
    """In a worker: what a piece holds."""
    set_streams(_seed, *piece.numbers)
    try:
        return piece.read(_source)
    except Exception as error:
        if _can_be_sent(error):
            raise
        raise DataError(f"{type(error).__name__}: {error}") from error


def _can_be_sent(error: Exception) -> bool:
    try:
        return type(pickle.loads(pickle.dumps(error))) is type(error)
    except Exception:  # noqa: BLE001 (whatever its class does)
        return False
