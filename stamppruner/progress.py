"""Progress bars that stay quiet where nobody watches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Tick = Callable[[], object]
"""Called once a step."""


def bar(
    iterable: Any = None,
    *,
    description: str,
    shown: bool,
    total: int | None = None,
    delay: float = 0.0,
    initial: int = 0,
) -> Any:
    """A tqdm bar, drawn only if ``shown`` and the output is a terminal, after ``delay`` seconds.

    ``initial`` steps were done before, and do not count in the rate.
    """
    from tqdm import tqdm  # late, so that slim files load without it

    disable = None if shown else True
    return tqdm(
        iterable,
        desc=description,
        total=total,
        disable=disable,
        leave=False,
        delay=delay,
        initial=initial,
    )
