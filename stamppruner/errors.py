"""Every error that the package raises on purpose.

All derive from :class:`StampError`, so one ``except StampError`` catches them. A message
names the module or file, the value that was seen, and what to do about it.
"""


class StampError(Exception):
    """Base of all errors of this package."""


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
