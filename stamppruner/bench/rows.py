"""The rows of the paper's tables: what prunes a target, by the name that the paper prints."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import nn

from stamppruner.baselines import (
    FPGM,
    LAMP,
    SNIP,
    Baseline,
    BBDropout,
    BNScale,
    EdgePopup,
    Full,
    Hessian,
    Magnitude,
    MetaPruning,
    RandomWidths,
    Taylor,
)
from stamppruner.bench.cells import Cell
from stamppruner.bench.presets import Preset
from stamppruner.budget import Budget
from stamppruner.data import ArrayDataset
from stamppruner.pruner import STAMPPruner
from stamppruner.reinitialise import reinitialise_
from stamppruner.result import PruneResult

PAPERS = "STAMP, paper's settings"
"""A row of a pruner of its own."""

Kind = Literal["full", "unstructured", "structured"]


class Trained(Protocol):
    """What is trained once, on the reference, and used by all rows."""

    @property
    def preset(self) -> Preset:
        """Its settings."""

    @property
    def backbone(self) -> nn.Module:
        """The network to prune."""

    @property
    def pruner(self) -> STAMPPruner:
        """Meta-fitted with the preset's settings."""

    @property
    def paper_pruner(self) -> STAMPPruner:
        """Meta-fitted with the paper's settings."""


Prune = Callable[[Trained, Cell, ArrayDataset], PruneResult]


@dataclass(frozen=True)
class Row:
    """One way to get a network for a target.

    Attributes:
        name: as in the paper's tables.
        kind: what gets smaller.
        prune: makes the network.
        finetuned: it is trained afterwards; not where the search is the training.
        learns: the search is a training on the target, whose time grows with its images.
        swept: it is in the pictures over parameters and sizes.
        printed: the paper's tables have it, or a preset runs it besides.
    """

    name: str
    kind: Kind
    prune: Prune
    finetuned: bool = True
    learns: bool = False
    swept: bool = False
    printed: bool = True


Make = Callable[[Preset, int, int], Baseline]
"""Preset, seed and number of training images to a method."""


def _macs(share: float) -> Budget:
    return Budget(macs=share)


def _params(share: float) -> Budget:
    return Budget(params=share)


def _baseline(make: Make, bound: Callable[[float], Budget] = _macs) -> Prune:
    def prune(trained: Trained, cell: Cell, train: ArrayDataset) -> PruneResult:
        budget = None if cell.share is None or cell.share == 1 else bound(cell.share)
        method = make(trained.preset, cell.seed, len(train))
        return method.prune(trained.backbone, train, budget, graph=trained.pruner.graph)

    return prune


def _stamp(trained: Trained, cell: Cell, train: ArrayDataset) -> PruneResult:
    pruner = trained.pruner
    if cell.prune_epochs is not None and cell.kl_scale is not None:
        pruner = copy.copy(pruner)
        pruner.config = dataclasses.replace(
            pruner.config, prune_epochs=cell.prune_epochs, kl_scale=cell.kl_scale
        )
    budget = None if cell.share is None else _macs(cell.share)
    return pruner.prune(train, budget, progress=False)


def _stamp_paper(trained: Trained, cell: Cell, train: ArrayDataset) -> PruneResult:
    budget = None if cell.share is None else _macs(cell.share)
    return trained.paper_pruner.prune(train, budget, progress=False)


def _fresh_weights(prune: Prune) -> Prune:
    """The same network with random weights."""

    def structure(trained: Trained, cell: Cell, train: ArrayDataset) -> PruneResult:
        result = prune(trained, cell, train)
        reinitialise_(result.model, cell.seed)
        return result

    return structure


_QUIET: dict[str, Any] = {"measure_latency": False}


def _plain(kind: type[Baseline]) -> Make:
    """A method with its defaults."""
    return lambda _preset, seed, _images: kind(seed=seed, **_QUIET)


def _learned(kind: Callable[..., Baseline]) -> Make:
    """A method that trains on all images of the target, as long as the fine-tuning does."""
    return lambda preset, seed, images: kind(
        epochs=preset.finetune.epochs,
        minibatch_size=preset.finetune.batch_size,
        sample=images,
        seed=seed,
        **_QUIET,
    )


def _snip(*, pretrained: bool) -> Make:
    return lambda preset, seed, _images: SNIP(
        pretrained=pretrained, skip_1x1=preset.skip_1x1, seed=seed, **_QUIET
    )


_full = _baseline(_plain(Full))
_OTHERS = (Magnitude, FPGM, LAMP, BNScale, Hessian, Taylor)

ROWS = {
    row.name: row
    for row in (
        Row("Full", "full", _full),
        Row("Full, from scratch", "full", _fresh_weights(_full)),
        Row("Edge-Popup", "unstructured", _baseline(_learned(EdgePopup), _params),
            finetuned=False, learns=True),
        Row("SNIP (P)", "unstructured", _baseline(_snip(pretrained=True), _params)),
        Row("SNIP", "unstructured", _baseline(_snip(pretrained=False), _params), swept=True),
        Row("Random Pruning", "structured", _baseline(_plain(RandomWidths))),
        Row("MetaPruning", "structured", _baseline(_learned(MetaPruning)), learns=True),
        Row("BBDropout", "structured", _baseline(_learned(BBDropout)), learns=True, swept=True),
        Row("STAMP-Structure", "structured", _fresh_weights(_stamp)),
        Row("STAMP", "structured", _stamp, swept=True),
        Row(PAPERS, "structured", _stamp_paper),
        *(Row(k.__name__, "structured", _baseline(_plain(k)), printed=False) for k in _OTHERS),
    )
}  # fmt: skip
"""In the order of the tables; the last ones are not in the paper."""


def rows_of(preset: Preset) -> list[str]:
    """Names of the rows that a preset has unless others are asked for."""
    printed = [name for name, row in ROWS.items() if row.printed]
    return [name for name in printed if preset.paper_config is not None or name != PAPERS]
