"""Progress bars that stay quiet where nobody watches."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def bar(iterable: Any = None, *, description: str, shown: bool, total: int | None = None) -> Any:
    """A tqdm bar, drawn only if ``shown`` and the output is a terminal."""
    disable = None if shown else True
    return tqdm(iterable, desc=description, total=total, disable=disable, leave=False)
