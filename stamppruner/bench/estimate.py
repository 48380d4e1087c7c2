"""What a benchmark will cost, from one epoch of every row on noise of the right shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from stamppruner.bench.cells import Cell
from stamppruner.bench.grid import grid, table_cells
from stamppruner.bench.presets import Preset, Training
from stamppruner.bench.rows import ROWS
from stamppruner.bench.run import Bench, new_network
from stamppruner.bench.sources import Sources
from stamppruner.config import STAMPConfig
from stamppruner.pruner import STAMPPruner
from stamppruner.report.format import seconds as shown
from stamppruner.report.format import text_table
from stamppruner.tasks import TaskSampler

_BATCHES = 2
"""Of the batch size of fine-tuning: images that stand in for a target."""

_EPOCHS = 4
"""Of the longer run of what learns on a target: one epoch is little beside a search."""

_WEIGHT_STEPS = 2


@dataclass(frozen=True)
class Estimate:
    """Expected seconds.

    Attributes:
        steps: of the backbone and of meta-fitting, once each.
        rows: of one cell of the table, by row.
        cells: of all cells of the grid, how many they are in ``number``.
    """

    steps: dict[str, float]
    rows: dict[str, float]
    cells: float
    number: int

    @property
    def hours(self) -> float:
        """Of everything."""
        return (sum(self.steps.values()) + self.cells) / 3600

    def table(self, dollars_per_hour: float) -> str:
        """For a terminal."""
        rows = [
            *((name, shown(value)) for name, value in self.steps.items()),
            *((f"a cell of {name}", shown(value)) for name, value in self.rows.items()),
            (f"all {self.number} cells", shown(self.cells)),
            ("in all", f"{self.hours:.2f} h, {self.hours * dollars_per_hour:.2f} $"),
        ]
        return text_table(["step", "expected"], rows)


def brief(preset: Preset, epochs: int = 1) -> Preset:
    """The preset with few epochs, one seed, no pictures, and rates at which noise does no harm."""

    def few(training: Training) -> Training:
        return dataclasses.replace(training, epochs=epochs, lr=training.lr / 1000)

    return dataclasses.replace(
        preset, backbone=few(preset.backbone), finetune=few(preset.finetune), rates={},
        seeds=preset.seeds[:1], budgets=(), weight_shares=(), sizes=(), prune_epochs=(),
        kl_scales=(),
    )  # fmt: skip


def estimate(
    preset: Preset,
    sources: Sources,
    *,
    rows: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    say: Callable[[str], None] = lambda _line: None,
) -> Estimate:
    """Run every row for one epoch of a few batches, an iteration of meta-fitting, and multiply.

    Methods that learn on the target run for some epochs as well, which tells what of their search
    is done once.

    Args:
        preset: to be estimated.
        sources: that it would read; of known data sets nothing is read.
        rows: as for :class:`~stamppruner.bench.Bench`.
        device: likewise.
        say: is told what happens, line by line.

    Raises:
        ConfigError: an unknown row or data set.
    """
    images = _BATCHES * preset.finetune.batch_size
    config = preset.stamp_config()
    noise = Sources(folders=sources.folders, stand_in=images)
    settings: dict[str, Any] = {"device": device, "say": say, "progress": False, "speed": False}
    with TemporaryDirectory() as folder, TemporaryDirectory() as other:
        bench = Bench(brief(preset), folder, noise, rows=rows, **settings)
        classes = noise.pair(preset.reference)[0].num_classes
        bench.backbone = new_network(preset, classes, bench.device).eval()
        steps = {"meta-fitting": _meta_fit(bench, config, say)}
        if preset.paper_config is not None:
            paper = preset.stamp_paper_config()
            steps["meta-fitting, paper's settings"] = _meta_fit(bench, paper, say, paper=True)
        found = _found(bench)
        learning = [name for name in bench.rows if ROWS[name].learns]
        again = Bench(brief(preset, _EPOCHS), other, noise, rows=learning, **settings)
        again.backbone, again.pruner = bench.backbone, bench.pruner
        longer = _found(again)
    epochs = preset.finetune.epochs
    full = found.get("Full") or next(iter(found.values()))

    def search(row: str, share: float) -> float:
        """Grows with the images if it learns, and what it does in every epoch with these."""
        once = found[row]["search_seconds"]
        if row not in longer:
            return once
        epoch = (longer[row]["search_seconds"] - once) / (_EPOCHS - 1)
        epoch = min(once, max(0.0, epoch))
        return share * (once + (epochs - 1) * epoch)

    def seconds(cell: Cell) -> float:
        share = (cell.images or sources.size(cell.target)) / images
        gates = (cell.prune_epochs or 0) * full["finetune_seconds"] * share
        training = found[cell.row]["finetune_seconds"] * epochs * share
        return search(cell.row, share) + gates + training

    passes = preset.backbone.epochs * sources.size(preset.reference) / images
    cells = grid(preset, bench.rows)
    one = {cell.row: cell for cell in reversed(table_cells(preset, bench.rows))}
    return Estimate(
        steps={"backbone": full["finetune_seconds"] * passes, **steps},
        rows={name: seconds(one[name]) for name in bench.rows},
        cells=sum(map(seconds, cells)),
        number=len(cells),
    )


def _found(bench: Bench) -> dict[str, dict[str, Any]]:
    """The records of its cells, by row."""
    bench.run()
    return {cell["row"]: cell for cell in bench.record["cells"]}


def _meta_fit(
    bench: Bench, config: STAMPConfig, say: Callable[[str], None], *, paper: bool = False
) -> float:
    """Expected seconds, from iterations of one task with and without steps under masks."""
    say("meta-fitting: two iterations of one task")
    reference, _ = bench.sources.pair(bench.preset.reference)
    shots = min(config.shots, len(reference) // reference.num_classes)
    taken = []
    for weight_steps in (0, min(_WEIGHT_STEPS, config.weight_steps)):
        few = dataclasses.replace(
            config, iterations=2, tasks_per_iteration=1, shots=shots, weight_steps=weight_steps,
            warm_start=False, budget_share=1.0,
        )  # fmt: skip
        pruner = STAMPPruner(
            bench.backbone, torch.zeros(1, *reference.image_shape, device=bench.device), config=few
        )
        moments: list[float] = []
        sampler = TaskSampler(reference, config.ways, shots, seed=0)
        pruner.meta_fit(
            sampler, progress=False, callback=lambda *_, at=moments: at.append(perf_counter())
        )
        taken.append(moments[1] - moments[0])
    pruner.config = dataclasses.replace(config, warm_start=False)
    if paper:
        bench.paper_pruner = pruner
    else:
        bench.pruner = pruner
    task = taken[0] * config.shots / shots
    step = (taken[1] - taken[0]) / _WEIGHT_STEPS if config.weight_steps else 0.0
    return config.iterations * (
        config.tasks_per_iteration * task + config.weight_steps * max(0.0, step)
    )
