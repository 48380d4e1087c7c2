"""Run a benchmark cell by cell; what is done is kept, and not done again."""

from __future__ import annotations

import copy
import json
import os
import platform
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from stamppruner.bench.cells import Cell
from stamppruner.bench.grid import grid
from stamppruner.bench.presets import Preset, Training
from stamppruner.bench.rows import PAPERS, ROWS, rows_of
from stamppruner.bench.sources import Sources
from stamppruner.config import STAMPConfig
from stamppruner.data import ArrayDataset, BatchLoader, CropFlip
from stamppruner.errors import CheckpointError, ConfigError
from stamppruner.files import PathLike, atomic_write, check_folder
from stamppruner.finetune import evaluate, finetune
from stamppruner.heads import with_classes
from stamppruner.io import parse_json, read_safetensors, write_safetensors
from stamppruner.latency import latencies_ms, train_steps_ms
from stamppruner.models import resnet18, vgg19
from stamppruner.progress import bar
from stamppruner.pruner import STAMPPruner
from stamppruner.result import PruneResult
from stamppruner.state_dicts import load_state_
from stamppruner.summary import versions
from stamppruner.tasks import TaskSampler

RECORD = "bench.json"
"""Name of the record in the folder of a benchmark."""

_BACKBONE = "backbone.safetensors"
_FORMAT = 1
_NETS = {"vgg19": vgg19, "resnet18": resnet18}
_EVALUATE = 500
"""Images a batch in evaluation, whose accuracy does not depend on it."""

_CURVE, _CURVE_IMAGES = 10, 2000
"""Points of a curve of accuracy over time, and test images for each."""

_MEASURED_SECONDS = 0.5
"""Time that a figure of speed may take, for each network."""

Say = Callable[[str], None]


class Bench:
    """One preset in one folder.

    Args:
        preset: what to run.
        folder: keeps the record, the backbone and the pruners; a folder that holds those of
            another preset is refused.
        sources: of images.
        rows: names of rows; None takes all.
        device: that networks are on; by default CUDA where there is any.
        say: is told what happens, line by line.
        progress: show bars where the output is a terminal.
        speed: measure the speed of every network beside the full one.

    Attributes:
        record: JSON-able: ``preset``, ``machine``, ``reference`` (what the training on it gave),
            and ``cells``.

    Raises:
        ConfigError: an unknown row or data set.
        CheckpointError: the folder cannot be used, or is that of another benchmark.
    """

    def __init__(
        self,
        preset: Preset,
        folder: PathLike,
        sources: Sources,
        *,
        rows: Sequence[str] | None = None,
        device: str | torch.device | None = None,
        say: Say = lambda _line: None,
        progress: bool = True,
        speed: bool = True,
    ) -> None:
        known = rows_of(preset)
        self.rows = known if rows is None else list(rows)
        if unknown := [name for name in self.rows if name not in ROWS]:
            raise ConfigError(f"no row {unknown[0]!r}: there are {', '.join(ROWS)}")
        sources.check((preset.reference, *preset.targets))
        self.preset, self.sources, self.say, self.progress = preset, sources, say, progress
        self.speed = speed
        cuda = torch.cuda.is_available()
        self.device = torch.device(device or ("cuda" if cuda else "cpu"))
        self.folder = check_folder(folder, [RECORD])
        self.record = self._read()

    def _read(self) -> dict[str, Any]:
        path = self.folder / RECORD
        fresh: dict[str, Any] = {
            "format": _FORMAT, "preset": self.preset.to_json(), "machine": _machine(self.device),
            "reference": {}, "cells": [],
        }  # fmt: skip
        if not path.exists():
            return fresh
        try:
            found = parse_json(path.read_text())
            known = {name: found[name] for name in fresh}
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} cannot be read as the record of a benchmark ({error}): remove it, or "
                "choose another folder"
            ) from error
        for name in ("format", "preset"):
            if known[name] != fresh[name]:
                raise CheckpointError(
                    f"{path} is of another {name}: {_differing(known[name], fresh[name])}; choose "
                    "another folder, or the same preset"
                )
        return known

    @property
    def cells(self) -> list[Cell]:
        """All of the grid, done or not."""
        return grid(self.preset, self.rows)

    def run(self, cells: Sequence[Cell] | None = None) -> None:
        """Do what is left, and write the record after every cell.

        Args:
            cells: of the grid; None does all.
        """
        done = {Cell.of(found) for found in self.record["cells"]}
        wanted = self.cells if cells is None else list(cells)
        left = [cell for cell in wanted if cell not in done]
        self.say(f"{len(wanted) - len(left)} of {len(wanted)} cells are done")
        if not left:
            return
        self.backbone  # noqa: B018, trained before the clock of the grid starts
        self.pruner  # noqa: B018
        if PAPERS in {cell.row for cell in left}:
            self.paper_pruner  # noqa: B018
        for cell in (shown := bar(left, description="cells", shown=self.progress)):
            shown.set_postfix_str(str(cell))
            self.record["cells"].append(self._run(cell))
            self._write()
            last = self.record["cells"][-1]
            self.say(
                f"{cell}: {100 * last['accuracy']:.1f}% with {100 * last['params']:.1f}% of the "
                f"parameters, {last['search_seconds'] + last['finetune_seconds']:.0f} s"
            )

    def _run(self, cell: Cell) -> dict[str, Any]:
        """Prune, fine-tune, test, and measure the speed beside the full network."""
        row, preset = ROWS[cell.row], self.preset
        train, test = self.sources.target(cell.target, cell.images, cell.seed)
        start = perf_counter()
        result = row.prune(self, cell, train)
        searched = perf_counter() - start
        model = result.model
        before = evaluate(model, BatchLoader(test, _EVALUATE, shuffle=False))
        training = preset.finetune
        if cell.row in preset.rates:
            training = Training(training.epochs, preset.rates[cell.row], training.batch_size)
        curve = _Curve(model, test, training.epochs, searched, before)
        if row.finetuned:
            torch.manual_seed(cell.seed)
            self._train(model, train, training, cell.target, cell.seed, curve)
        costs = result.report.before, result.report.after
        return {
            **cell.to_json(),
            "accuracy": evaluate(model, BatchLoader(test, _EVALUATE, shuffle=False)),
            "accuracy_before": before,
            "params": costs[1]["params"] / costs[0]["params"],
            "macs": costs[1]["macs"] / costs[0]["macs"],
            "search_seconds": searched,
            "finetune_seconds": curve.seconds,
            "curve": curve.points,
            "test_images": len(test),
            "kept": result.plan.record() if cell.row == "STAMP" else None,
            **(
                self._speed(model, result, train.num_classes, training.batch_size)
                if self.speed
                else {}
            ),
        }

    def _train(
        self,
        model: nn.Module,
        data: ArrayDataset,
        training: Training,
        name: str,
        seed: int,
        callback: Callable[..., None] | None = None,
    ) -> None:
        augment = CropFlip(flip=self.sources.mirrored(name))
        loader = BatchLoader(data, training.batch_size, seed=seed, augment=augment)
        finetune(
            model, loader, epochs=training.epochs, lr=training.lr, amp=self.preset.amp,
            progress=self.progress and callback is None, callback=callback,
        )  # fmt: skip

    def _speed(
        self, model: nn.Module, result: PruneResult, classes: int, batch: int
    ) -> dict[str, list[float]]:
        """Milliseconds a batch, of the full network and of this one, measured in turns."""
        example = result.plan.graph.example
        assert example is not None  # graphs that are traced have one
        full, _ = with_classes(self.backbone, self.pruner.graph, classes)
        pair = [full, model]
        seconds = _MEASURED_SECONDS
        return {
            "inference_ms": latencies_ms(pair, example, samples=batch, seconds=seconds),
            "train_step_ms": train_steps_ms(pair, example, samples=batch, seconds=seconds),
        }

    @cached_property
    def backbone(self) -> nn.Module:
        """The network trained on the reference, in evaluation mode."""
        preset = self.preset
        train, test = self.sources.pair(preset.reference)
        model = new_network(preset, train.num_classes, self.device)
        path = self.folder / _BACKBONE
        if path.exists():
            tensors, _ = read_safetensors(path)
            load_state_(model, tensors, path, "Remove it, or choose another folder")
            return model.eval()
        self.say(f"training the backbone on {len(train)} images of {preset.reference}")
        start = perf_counter()
        self._train(model, train, preset.backbone, preset.reference, seed=0)
        self._note("backbone_seconds", perf_counter() - start)
        accuracy = evaluate(model, BatchLoader(test, _EVALUATE, shuffle=False))
        self._note("backbone_accuracy", accuracy)
        write_safetensors(path, model.state_dict())
        self.say(f"the backbone tells {100 * accuracy:.1f}% of the reference's test images right")
        return model.eval()

    @cached_property
    def pruner(self) -> STAMPPruner:
        """Meta-fitted with the preset's settings."""
        return self._pruner("pruner", self.preset.stamp_config())

    @cached_property
    def paper_pruner(self) -> STAMPPruner:
        """Meta-fitted with the paper's settings."""
        return self._pruner("paper_pruner", self.preset.stamp_paper_config())

    def _pruner(self, name: str, config: STAMPConfig) -> STAMPPruner:
        path = self.folder / f"{name}.stamp.safetensors"
        if path.exists():
            return STAMPPruner.load(path, copy.deepcopy(self.backbone))
        reference, _ = self.sources.pair(self.preset.reference)
        self.say(f"meta-fitting the {name.replace('_', ' ')}: {config.iterations} iterations")
        start = perf_counter()
        example = torch.zeros(1, *reference.image_shape, device=self.device)
        pruner = STAMPPruner(self.backbone, example, config=config)
        sampler = TaskSampler(reference, config.ways, config.shots, seed=config.seed)
        pruner.meta_fit(
            sampler, progress=self.progress, checkpoint_dir=self.folder / f"{name}-checkpoints"
        )
        self._note(f"{name}_seconds", perf_counter() - start)
        pruner.save(path)
        return pruner

    def _note(self, name: str, value: float) -> None:
        self.record["reference"][name] = value
        self._write()

    def _write(self) -> None:
        atomic_write(self.folder / RECORD, (json.dumps(self.record, indent=1) + "\n").encode())


def new_network(preset: Preset, classes: int, device: torch.device) -> nn.Module:
    """The preset's network with random weights."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return _NETS[preset.net](classes, width=preset.width).to(device)


class _Curve:
    """Callback of fine-tuning: accuracy over seconds of search and training alone.

    Attributes:
        points: pairs of seconds and accuracy.
        seconds: of training so far.
    """

    def __init__(
        self, model: nn.Module, test: ArrayDataset, epochs: int, searched: float, before: float
    ) -> None:
        some = torch.randperm(len(test), generator=torch.Generator().manual_seed(0))
        self._some = BatchLoader(test.subset(some[:_CURVE_IMAGES]), _EVALUATE, shuffle=False)
        self._model, self._searched = model, searched
        self._at = {round(epochs * (k + 1) / _CURVE) for k in range(_CURVE)}
        self.points = [[searched, before]]
        self.seconds = 0.0
        self._start = perf_counter()

    def __call__(self, epoch: int, _figures: dict[str, float]) -> None:
        self.seconds += perf_counter() - self._start
        if epoch + 1 in self._at:
            point = [self._searched + self.seconds, evaluate(self._model, self._some)]
            self.points.append(point)
        self._start = perf_counter()


def _differing(found: Any, wanted: Any) -> str:
    if not (isinstance(found, dict) and isinstance(wanted, dict)):
        return f"{found!r}, not {wanted!r}"
    name = next(n for n in {**wanted, **found} if found.get(n) != wanted.get(n))
    return f"{name} is {found.get(name)!r}, not {wanted.get(name)!r}"


def _machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return {
        "device": f"{device.type} ({name})",
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        **versions(),
    }


def read_record(folder: PathLike) -> dict[str, Any]:
    """The record of a folder.

    Raises:
        CheckpointError: there is none that can be read.
    """
    path = Path(folder) / RECORD
    try:
        return parse_json(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): run the benchmark") from error
