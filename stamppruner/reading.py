"""Pieces of a source of tasks, read in the order of their use: here, or ahead of it by workers.

Before a piece is read, the global random streams are set by its numbers, wherever that is, so the
images do not depend on the number of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from itertools import islice
from types import TracebackType
from typing import Any

from torch.utils.data import DataLoader

from stamppruner.errors import ConfigError
from stamppruner.guards import within
from stamppruner.randomness import set_streams
from stamppruner.tasks import DrawnTask, TaskSource, draw
from stamppruner.workers import Piece, Workers

_AHEAD = 2
"""Pieces a worker that are read before they are used, as in torch's DataLoader."""


class Reader:
    """Reads pieces of a source; a context manager that ends its workers.

    Args:
        source: of tasks.
        seed: of the global random streams, with a piece's numbers.
        workers: processes that read ahead; 0 reads when a piece is used.
        timeout: most seconds to wait for a piece; None waits for ever.

    Raises:
        ConfigError: workers for a source that cannot be read by copies of it.
    """

    def __init__(
        self, source: TaskSource, seed: int, *, workers: int = 0, timeout: float | None = None
    ) -> None:
        if workers:
            _check_can_be_copied(source, workers)
        self.source, self.seed, self.timeout = source, seed, timeout
        self._ahead = _AHEAD * workers
        self._workers = Workers(source, seed, workers) if workers else None

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._workers is not None:
            self._workers.end(at_once=kind is not None)

    def stream(self, pieces: Iterable[Piece], what: str) -> Iterator[Any]:
        """Yield what each piece holds; with workers, later ones are under way by then.

        Args:
            pieces: are asked for as they are needed, on this thread.
            what: they are; begins the message of a time-out.

        Raises:
            LoaderTimeoutError: a piece did not come in time.
            DataError: a worker ended, or whatever the source raises.
            ConfigError: no worker can be started.
        """
        if self._workers is None:
            for piece in pieces:
                yield within(self.timeout, partial(piece.of, self.source, self.seed), what)
            return
        rest, waiting = iter(pieces), deque[Future[Any]]()
        while True:
            for piece in islice(rest, 1 + self._ahead - len(waiting)):
                waiting.append(self._workers.submit(piece))
            if not waiting:
                return
            yield self._workers.result(waiting.popleft(), self.timeout, what)


class Draws:
    """The tasks of numbered iterations, drawn in order, as far ahead as they are asked for.

    The source itself stays where it is after the last iteration that is over.

    Args:
        reader: of the source.
        number: of tasks an iteration.
        first: iteration to be drawn.
    """

    def __init__(self, reader: Reader, number: int, first: int) -> None:
        self._reader, self._number, self._next = reader, number, first
        self._drawn: dict[int, tuple[list[DrawnTask], dict[str, Any]]] = {}
        self._ahead = dict(reader.source.state_dict())

    def of(self, iteration: int) -> list[DrawnTask]:
        """Tasks of an iteration that is not over. Sets the global random streams to draw."""
        while self._next <= iteration:
            self._draw()
        return self._drawn[iteration][0]

    def over(self, iteration: int) -> None:
        """The iteration will not be asked for again."""
        _, state = self._drawn.pop(iteration)
        self._reader.source.load_state_dict(state)

    def _draw(self) -> None:
        source, timeout = self._reader.source, self._reader.timeout
        before = dict(source.state_dict())
        source.load_state_dict(self._ahead)
        try:
            set_streams(self._reader.seed, self._next, 0)
            drawn = within(timeout, lambda: draw(source, self._number), "the images of a task")
            self._ahead = dict(source.state_dict())
        finally:
            source.load_state_dict(before)
        self._drawn[self._next] = drawn, self._ahead
        self._next += 1


def _check_can_be_copied(source: TaskSource, workers: int) -> None:
    """Raise ConfigError unless workers can read from copies of the source."""
    if not callable(getattr(source, "draw", None)):
        raise ConfigError(
            f"num_workers={workers}: {type(source).__name__} has no draw(n), to choose tasks "
            "without reading them: give it one, or pass num_workers=0"
        )
    for number, one in enumerate(getattr(source, "sources", [])):
        if isinstance(one, DataLoader) and one.persistent_workers:
            raise ConfigError(
                f"num_workers={workers}: source {number} is a DataLoader whose own workers are "
                "persistent, and copies of it would share them: make it with "
                "persistent_workers=False, or pass num_workers=0"
            )
