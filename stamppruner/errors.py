"""Every error that the package raises on purpose.

All derive from :class:`StampError`, so one ``except StampError`` catches them. A message
names the module or file, the value that was seen, and what to do about it.
"""

from __future__ import annotations

import reprlib


class StampError(Exception):
    """Base of all errors of this package.

    Example:
        >>> from stamppruner import Budget
        >>> try:
        ...     Budget(macs=-1)
        ... except StampError as error:
        ...     print(error)
        Budget(macs=-1): pass a share in (0, 1] or a number
    """


class UnsupportedModelError(StampError):
    """The model cannot be traced, masked or cut; the message lists every reason."""


class EquivalenceError(StampError):
    """The slim network does not compute what the masked dense network computes."""


class PlanError(StampError):
    """A channel plan does not fit the model or the graph it is used with."""


class BudgetError(StampError):
    """The budget is malformed, or below the least cost that the model can reach."""


class DataError(StampError):
    """Images, labels, tasks or loaders that cannot be used as given."""


class DivergedError(DataError):
    """Losses that are not finite, step after step; the message names what went first."""


class LoaderTimeoutError(DataError):
    """Data that did not come in time."""


class MemoryLimitError(StampError):
    """The device has not enough memory; the message names the settings that need less."""


class PreemptedError(StampError):
    """SIGTERM came, and work stopped after a checkpoint."""


class CheckpointError(StampError):
    """A file that cannot be written, or read, or does not fit the model."""


class ConfigError(StampError):
    """A setting outside its range."""


class RankError(StampError):
    """Ranks of a distributed job disagree, or another one of them failed."""


class MissingExtraError(StampError):
    """An optional dependency is needed and not installed."""


class ExportError(StampError):
    """A model cannot be exported, or its exported form computes something else."""


def shown(value: object, length: int = 120) -> str:
    """The value as text for a message: on one line, cut short, and safe to print.

    Example:
        >>> shown("a" * 10_000, 12)
        "'aaa...aaaa'"
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = length
    short.maxlevel, short.maxdict, short.maxlist = 3, 8, 8
    text = short.repr(value)
    return text if len(text) <= 4 * length else f"{text[: 4 * length]}..."


def reason(error: Exception) -> str:
    """What an error says, in the words of the system where it has them."""
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
