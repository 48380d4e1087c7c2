"""Lazy imports of packages that the data functions need and the core does not."""

from __future__ import annotations

import importlib
from typing import Any

from stamppruner.errors import MissingExtraError

DEMO_REMEDY = 'pip install "stamppruner[demo]"'


def require(module: str, purpose: str, remedy: str = DEMO_REMEDY) -> Any:
    """The imported module.

    Raises:
        MissingExtraError: it is not installed; the message names the purpose and the remedy.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(f"{purpose} needs {module} ({error}); run: {remedy}") from error
