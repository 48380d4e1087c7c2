"""Are the gates alive, and do they listen to the data set?"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np

from stamppruner.budget import Budget, Chooser
from stamppruner.channels import FloatArray
from stamppruner.errors import ConfigError, DataError
from stamppruner.swap import iou
from stamppruner.target import SAMPLE, sample_target

if TYPE_CHECKING:
    from stamppruner.pruner import STAMPPruner

_BINS = 10
_DEAD = 0.01
"""Share of live gates below which they count as dead."""

_IGNORED = 1.1
"""The set is ignored unless unlike sets move the gates this much farther than a new draw does."""


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """How the gates behave over some data sets.

    Attributes:
        names: of the sets.
        live: share of gates with E[m] of at least the threshold, one a set.
        expected_macs: MACs of the expected widths, as a share of the full network's, one a set.
        histogram: channels with E[pi] in each tenth of [0, 1].
        moved: mean absolute difference of E[m] between sets, over all pairs.
        moved_resampled: the same between two halves of one set.
        overlap: IoU of the channels kept under the budget between sets, over all pairs.
        overlap_resampled: the same between two halves of one set.
        warnings: what is wrong, with the remedy.

    Example:
        >>> found = Diagnosis(("a", "b"), (1, 1), (0.4, 0.4), (0,) * 10, 0.1, 0.01, 0.7, 0.9, ())
        >>> found.moved / found.moved_resampled  # sets move gates more than halves of one do
        10.0
    """

    names: tuple[str, ...]
    live: tuple[float, ...]
    expected_macs: tuple[float, ...]
    histogram: tuple[int, ...]
    moved: float
    moved_resampled: float
    overlap: float
    overlap_resampled: float
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [
            f"live gates: {_range(self.live)}; expected MACs: {_range(self.expected_macs)}",
            f"E[pi] in tenths of [0, 1]: {' '.join(map(str, self.histogram))}",
            f"E[m] moves by {self.moved:.3f} between sets, {self.moved_resampled:.3f} between "
            f"halves of one; kept channels overlap by {self.overlap:.2f} and "
            f"{self.overlap_resampled:.2f} (IoU)",
            *(f"warning: {text}" for text in self.warnings),
        ]
        return "\n".join(lines)


def diagnose(pruner: STAMPPruner, sets: Mapping[str, Any], budget: Budget) -> Diagnosis:
    """Compare the gates of several data sets with those of two halves of each.

    Args:
        pruner: meta-fitted; not changed.
        sets: at least two, by name; loaders or data sets as for ``prune``.
        budget: under which the kept channels are compared.

    Raises:
        ConfigError: fewer than two sets.
        DataError: a set cannot be used, or its halves cannot.
        BudgetError: the budget cannot be met.

    Example:
        >>> import torch, warnings
        >>> from stamppruner import STAMPConfig, STAMPPruner
        >>> from stamppruner.models import ResNet
        >>> pruner = STAMPPruner(ResNet((1, 1), (8, 8), 3), config=STAMPConfig())
        >>> a, b = ([(torch.randn(24, 3, 8, 8), torch.arange(24) % 3)] for _ in "ab")
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # it is not meta-fitted
        ...     diagnose(pruner, {"a": a, "b": b}, Budget(macs=0.5)).names
        ('a', 'b')
    """
    if not isinstance(sets, Mapping):
        raise ConfigError(
            f"diagnose: sets are a {type(sets).__name__}: pass a dict from names to data"
        )
    if len(sets) < 2:
        raise ConfigError(f"diagnose compares data sets: pass at least two, not {len(sets)}")
    scores, keeps = {}, {}
    for name, data in sets.items():
        target = sample_target(data, SAMPLE, seed=pruner.config.seed)
        middle = len(target.labels) // 2
        for half, part in enumerate((slice(0, middle), slice(middle, None))):
            images, labels = target.images[part], target.labels[part]
            if len(labels.unique()) < 2:
                raise DataError(f"half of set {name!r} has a single class: give more images")
            plan, scores[name, half] = pruner.choose([(images, labels)], budget, progress=False)
            keeps[name, half] = plan.keep
    pairs = [((a, i), (b, i)) for a, b in combinations(sets, 2) for i in (0, 1)]
    halves = [((name, 0), (name, 1)) for name in sets]
    moved, resampled = (
        float(np.mean([_distance(scores[a], scores[b]) for a, b in found]))
        for found in (pairs, halves)
    )
    first = [scores[name, 0] for name in sets]
    live = [float((one >= pruner.config.threshold).mean()) for one in first]
    chooser = Chooser(pruner.network, pruner.graph)
    return Diagnosis(
        names=tuple(sets),
        live=tuple(live),
        expected_macs=tuple(chooser.expected_share(one) for one in first),
        histogram=tuple(np.histogram(pruner.keep_probability(), _BINS, (0, 1))[0].tolist()),
        moved=moved,
        moved_resampled=resampled,
        overlap=float(np.mean([iou(keeps[a], keeps[b]) for a, b in pairs])),
        overlap_resampled=float(np.mean([iou(keeps[a], keeps[b]) for a, b in halves])),
        warnings=tuple(_warnings(live, moved, resampled)),
    )


def _warnings(live: list[float], moved: float, resampled: float) -> list[str]:
    found = []
    if min(live) < _DEAD:
        found.append(f"only {min(live):.1%} of the gates are live: lower kl_scale")
    if moved < _IGNORED * resampled or moved < 1e-3:
        found.append(
            f"the data set is ignored: unlike sets move E[m] by {moved:.4f}, halves of one set by "
            f"{resampled:.4f}; raise target_evidence, or meta-fit on tasks that differ more"
        )
    return found


def _distance(a: FloatArray, b: FloatArray) -> float:
    return float(np.abs(a - b).mean())


def _range(shares: tuple[float, ...]) -> str:
    low, high = min(shares), max(shares)
    return f"{low:.1%}" if low == high else f"{low:.1%} to {high:.1%}"
