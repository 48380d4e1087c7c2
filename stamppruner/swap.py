"""The swap test: does a network that was pruned for a data set beat one pruned for another?

Every target gets its own network. Then every network is trained on every target, and on each
target its own network is compared with the others: if masks did not depend on the data set, or
not to its good, the mean difference would be zero.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from torch import nn

from stamppruner.batchnorm import recalibrate_
from stamppruner.budget import Budget
from stamppruner.channels import BoolArray, ChannelGraph, FloatArray
from stamppruner.errors import CheckpointError, ConfigError, DataError, StampError
from stamppruner.finetune import checked_settings, evaluate, finetune
from stamppruner.heads import find_head, new_head, set_module
from stamppruner.layers import first_floating
from stamppruner.report.format import markdown_table
from stamppruner.result import PruneResult, fit_head_
from stamppruner.target import SAMPLE, Target, sample_target

_BATCH = 128

_RESAMPLES = 10_000
"""Of the bootstrap."""


class Prunes(Protocol):
    """A :class:`~stamppruner.STAMPPruner`, or anything that prunes like it."""

    def prune(
        self, target_loader: Any, budget: Budget | None = None, *, progress: bool = True
    ) -> PruneResult:
        """The slim network for the data."""


@dataclass(frozen=True, eq=False)
class SwapTest:
    """Accuracies of networks that were pruned for one target and trained on another.

    Attributes:
        names: of the ``T`` targets.
        before: ``(T, T)`` accuracies in [0, 1] before fine-tuning; row: the target that the network
            was pruned for, column: the one that it is used on.
        after: the same after fine-tuning; None if there was none.
        iou: ``(T, T)`` intersection over union of the kept channels of two networks.

    Example:
        >>> test = SwapTest(("a", "b"), np.array([[0.9, 0.6], [0.8, 0.7]]), None, np.eye(2))
        >>> test.differences("before").round(2).tolist()  # own minus other
        [0.1, 0.1]
    """

    names: tuple[str, ...]
    before: FloatArray
    after: FloatArray | None
    iou: FloatArray

    def differences(self, stage: Literal["before", "after"] = "after") -> FloatArray:
        """Own minus other: ``(T * (T - 1),)``, one for every ordered pair of targets.

        Raises:
            StampError: there is no such stage.
        """
        accuracy = self.after if stage == "after" else self.before
        if accuracy is None:
            raise StampError("the swap test was run without fine-tuning: ask for stage='before'")
        gain = np.diag(accuracy)[None, :] - accuracy
        return gain[~np.eye(len(gain), dtype=bool)]

    @property
    def overlap(self) -> float:
        """Mean IoU of the networks of two targets."""
        return float(self.iou[~np.eye(len(self.names), dtype=bool)].mean())

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> SwapTest:
        """Inverse of :meth:`to_json`.

        Raises:
            CheckpointError: the record lacks a part, or has one of another form.
        """
        try:
            names = tuple(record["names"])
            before, after, shared = (
                None if record.get(key) is None else np.array(record[key], dtype=np.float64)
                for key in ("before", "after", "iou")
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"the record is damaged ({error!r}): give what SwapTest.to_json returned"
            ) from error
        square = (len(names), len(names))
        if any(m is not None and m.shape != square for m in (before, after, shared)):
            raise CheckpointError(f"the record is damaged: its matrices are not {square}")
        if before is None or shared is None:
            raise CheckpointError("the record is damaged: it lacks 'before' or 'iou'")
        return cls(names, before, after, shared)

    def to_json(self) -> dict[str, Any]:
        """JSON-able form, with the means and intervals."""
        stages: tuple[Literal["before", "after"], ...] = ("before", "after")
        found: dict[str, Any] = {"names": list(self.names), "iou": self.iou.tolist()}
        for stage in stages if self.after is not None else stages[:1]:
            mean, low, high = mean_interval(self.differences(stage))
            found[stage] = getattr(self, stage).tolist()
            found[f"own_minus_other_{stage}"] = {"mean": mean, "low": low, "high": high}
        return found

    def __str__(self) -> str:
        accuracy = self.before if self.after is None else self.after
        rows = [
            [name, *(f"{100 * value:.1f}" for value in row)]
            for name, row in zip(self.names, accuracy, strict=True)
        ]
        stage: Literal["before", "after"] = "before" if self.after is None else "after"
        mean, low, high = (100 * value for value in mean_interval(self.differences(stage)))
        return (
            markdown_table(["pruned for, used on", *self.names], rows)
            + f"\nown minus other {stage} fine-tuning: {mean:+.1f} points "
            f"(95% interval {low:+.1f} to {high:+.1f}); IoU of kept channels {self.overlap:.2f}"
        )


def swap_test(
    pruner: Prunes,
    targets: Mapping[str, tuple[Any, Any]],
    budget: Budget,
    *,
    epochs: int = 20,
    train_loader: Callable[[Any], Any] | None = None,
    progress: bool = True,
    **settings: Any,
) -> SwapTest:
    """Prune for every target, use and train every network on every target.

    A network that meets another target gets what its own network got as well: a new head by ridge
    regression and batch-norm statistics of that target, and the same fine-tuning.

    Args:
        pruner: meta-fitted.
        targets: by name, the data to prune for (a loader or a data set) and those to test on.
        budget: of every network.
        epochs: of fine-tuning; 0 for none.
        train_loader: makes the loader for fine-tuning of a target's data (augmentation, say); by
            default the data as they are.
        progress: show bars where the output is a terminal.
        settings: of :func:`~stamppruner.finetune`.

    Raises:
        ConfigError: fewer than two targets, one that is no pair, or settings that cannot be used.
        DataError: a target cannot be used.
        StampError: a network has no head that could be replaced.
        BudgetError: the budget cannot be met.

    Example:
        >>> from stamppruner import STAMPConfig, STAMPPruner
        >>> import torch, warnings
        >>> from stamppruner.models import ResNet
        >>> config = STAMPConfig(measure_latency=False)
        >>> pruner = STAMPPruner(ResNet((1, 1), (8, 8), 3), config=config)
        >>> a, b = ([(torch.randn(12, 3, 8, 8), torch.arange(12) % 3)] for _ in "ab")
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # it is not meta-fitted
        ...     found = swap_test(pruner, {"a": (a, a), "b": (b, b)}, Budget(macs=0.5), epochs=0)
        >>> found.before.shape
        (2, 2)
    """
    if not isinstance(targets, Mapping):
        raise ConfigError(
            f"swap_test: targets are a {type(targets).__name__}: pass a dict from names to pairs"
        )
    if len(targets) < 2:
        raise ConfigError(f"swap_test needs at least two targets to swap, not {len(targets)}")
    for name, pair in targets.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(
                f"swap_test: target {name!r} is a {type(pair).__name__}: pass a pair of the data "
                "to prune for and those to test on"
            )
    checked_settings({"epochs": epochs, **settings})
    names = tuple(targets)
    results = [pruner.prune(targets[name][0], budget, progress=progress) for name in names]
    masks = [result.plan.keep for result in results]
    before = np.zeros((len(names), len(names)))
    after = np.zeros_like(before)
    for column, name in enumerate(names):
        train, test = targets[name]
        target = sample_target(train, SAMPLE)
        for row, result in enumerate(results):
            model = copy.deepcopy(result.model)
            if row != column:
                _move_(model, result.plan.graph, target, name)
            before[row, column] = evaluate(model, test)
            if epochs:
                loader = train if train_loader is None else train_loader(train)
                finetune(model, loader, epochs=epochs, progress=progress, **settings)
                after[row, column] = evaluate(model, test)
    return SwapTest(names, before, after if epochs else None, _overlaps(masks))


def mean_interval(values: FloatArray, *, seed: int = 0) -> tuple[float, float, float]:
    """Mean, and the ends of its 95% interval by the bootstrap (percentiles of resampled means)."""
    values = np.asarray(values, dtype=np.float64).ravel()
    if not len(values):
        raise DataError("mean_interval: there are no values")
    rng = np.random.default_rng(seed)
    means = rng.choice(values, (_RESAMPLES, len(values))).mean(axis=1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def iou(a: BoolArray, b: BoolArray) -> float:
    """Intersection over union of two sets of kept channels, given as masks ``(num_channels,)``."""
    union = int((a | b).sum())
    return float((a & b).sum() / union) if union else 1.0


def _overlaps(masks: list[BoolArray]) -> FloatArray:
    return np.array([[iou(a, b) for b in masks] for a in masks])


def _move_(model: nn.Module, graph: ChannelGraph, target: Target, name: str) -> None:
    """Give a slim network the head and the batch norms of another target."""
    head = find_head(model, graph)
    if head is None:
        raise StampError(
            f"the network has no single linear head, so it cannot be moved to target {name!r}"
        )
    old = model.get_submodule(head)
    assert isinstance(old, nn.Linear)
    if old.out_features != target.num_classes:
        set_module(model, head, new_head(old, target.num_classes))
    recalibrate_(model, target.image_batches(_BATCH, first_floating(model).device))
    fit_head_(model, head, target)
