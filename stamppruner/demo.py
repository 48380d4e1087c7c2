"""The whole job on data that comes with the install: characters as reference, digits as target."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from stamppruner.baselines import Full, Magnitude, Random
from stamppruner.budget import Budget
from stamppruner.config import STAMPConfig
from stamppruner.data import (
    CHARACTERS,
    ArrayDataset,
    BatchLoader,
    CropFlip,
    digits,
    render_characters,
)
from stamppruner.errors import EquivalenceError, StampError
from stamppruner.files import atomic_write, check_folder
from stamppruner.finetune import finetune
from stamppruner.models import VGG, ResNet
from stamppruner.pruner import STAMPPruner
from stamppruner.report.format import cost, seconds, text_table
from stamppruner.report.svg import kept_channels_svg
from stamppruner.result import PruneResult
from stamppruner.slim import load_slim
from stamppruner.tasks import TaskSampler

Arch = Literal["resnet", "vgg"]


FILES = ("slim.safetensors", "report.html", "kept_channels.svg", "demo.json")
"""What :func:`run_demo` writes into its folder."""


@dataclass(frozen=True)
class DemoConfig:
    """Sizes of the demo; the defaults take about two minutes on two cores.

    Attributes:
        arch: ``"resnet"`` or ``"vgg"``, both small.
        macs: share of the MACs that pruned networks may use.
        classes: characters of the reference; per_class: images of each.
        backbone_epochs: epochs of training the backbone on the characters.
        iterations: of meta-fitting.
        train_per_class: digits of each class to prune and fine-tune on.
        finetune_epochs: the same for every method.
        size: side of the images, in pixels.
        seed: of everything random.
    """

    arch: Arch = "resnet"
    macs: float = 0.15
    classes: int = len(CHARACTERS)
    per_class: int = 60
    backbone_epochs: int = 6
    iterations: int = 20
    train_per_class: int = 20
    finetune_epochs: int = 40
    size: int = 24
    seed: int = 0

    @classmethod
    def fast(cls, **changes: Any) -> DemoConfig:
        """A version that is over in half a minute; its accuracies are those of a weak backbone."""
        small: dict[str, Any] = {
            "classes": 60,
            "per_class": 20,
            "backbone_epochs": 2,
            "iterations": 3,
            "finetune_epochs": 5,
        }
        return cls(**(small | changes))


@dataclass
class DemoRow:
    """One method on the digits: accuracies in [0, 1], times in seconds."""

    method: str
    accuracy_before: float
    accuracy: float
    params: float
    macs: float
    size_bytes: float
    latency_ms: float
    prune_seconds: float
    finetune_seconds: float


@dataclass
class Demo:
    """Everything that the demo measured.

    Attributes:
        config: its sizes.
        rows: one a method, STAMP's second after the full network's.
        seconds: of each step.
        result: STAMP's slim network.
        equal: whether the reloaded file gave exactly the outputs of the network that was saved.
    """

    config: DemoConfig
    rows: list[DemoRow]
    result: PruneResult
    seconds: dict[str, float] = field(default_factory=dict)
    equal: bool = False

    def table(self) -> str:
        """The comparison, for a terminal."""
        full = self.rows[0]
        headers = ["method", "accuracy", "params", "MACs", "size", "latency", "prune", "fine-tune"]
        return text_table(
            headers,
            [
                [
                    row.method,
                    f"{100 * row.accuracy:.1f}%",
                    f"{cost('params', row.params)} ({100 * row.params / full.params:.0f}%)",
                    f"{cost('macs', row.macs)} ({100 * row.macs / full.macs:.0f}%)",
                    cost("size_bytes", row.size_bytes),
                    cost("latency_ms", row.latency_ms),
                    seconds(row.prune_seconds) if row is not full else "-",
                    seconds(row.finetune_seconds),
                ]
                for row in self.rows
            ],
        )

    def to_json(self) -> dict[str, Any]:
        """Figures alone."""
        return {
            "config": vars(self.config),
            "rows": [vars(row) for row in self.rows],
            "seconds": self.seconds,
            "reloaded_equal": self.equal,
            "versions": self.result.report.settings["versions"],
        }


def make_backbone(arch: Arch, classes: int) -> nn.Module:
    """A small network for 24x24 images."""
    if arch == "vgg":
        return VGG(((16,), (32, 32), (64, 64), (128, 128)), classes)
    return ResNet((1, 1, 1, 1), (16, 32, 64, 128), classes)


def run_demo(
    out: str | Path | None = None,
    config: DemoConfig | None = None,
    *,
    say: Callable[[str], None] = lambda _line: None,
    progress: bool = True,
) -> Demo:
    """Train a backbone, meta-fit, prune for the digits, fine-tune, compare, save, reload.

    Args:
        out: folder for ``slim.safetensors``, ``report.html``, ``kept_channels.svg`` and
            ``demo.json``; None writes nothing.
        config: sizes.
        say: is told what happens, line by line.
        progress: show bars where the output is a terminal.

    Raises:
        MissingExtraError: the extra ``demo`` is not installed.
        ConfigError: a size out of range.
        CheckpointError: the folder cannot be written.
        EquivalenceError: the reloaded network differs from the saved one.
    """
    config = config or DemoConfig()
    if config.arch not in ("resnet", "vgg"):
        raise StampError(f"arch is {config.arch!r}: choose 'resnet' or 'vgg'")
    settings = STAMPConfig(
        iterations=config.iterations, weight_steps=10, weight_batch=64, amp=True, seed=config.seed
    )
    folder = Path(out) if out is not None else None
    if folder is not None:
        check_folder(folder, FILES)
    clock = _Clock()
    seed = config.seed
    say("1/5  drawing characters of many alphabets, and reading handwritten digits")
    reference = render_characters(
        config.per_class, size=config.size, seed=seed, classes=CHARACTERS[: config.classes]
    )
    train, test = digits(config.train_per_class, seed=seed, size=config.size)
    clock.stop("data")

    say(f"2/5  training a small {config.arch} on {reference.num_classes} characters")
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = make_backbone(config.arch, reference.num_classes)
    augment = CropFlip(padding=2, flip=False)
    finetune(
        model,
        BatchLoader(reference, 64, seed=seed, augment=augment),
        epochs=config.backbone_epochs,
        lr=0.1,
        amp=True,
        progress=progress,
    )
    clock.stop("train_backbone")

    say("3/5  meta-fitting the pruner on tasks of ten characters")
    pruner = STAMPPruner(model, config=settings)
    pruner.meta_fit(TaskSampler(reference, 10, 16, seed=seed), progress=progress)
    clock.stop("meta_fit")

    say(f"4/5  pruning for {len(train)} digits, fine-tuning, and the same for other methods")
    budget = Budget(macs=config.macs)
    graph = pruner.graph
    methods: dict[str, Callable[[], PruneResult]] = {
        "full network": lambda: Full(seed=seed).prune(model, train, graph=graph),
        "STAMP": lambda: pruner.prune(train, budget, progress=progress),
        "L1 magnitude": lambda: Magnitude(seed=seed).prune(model, train, budget, graph=graph),
        "random": lambda: Random(seed=seed).prune(model, train, budget, graph=graph),
    }
    rows: list[DemoRow] = []
    results: dict[str, PruneResult] = {}
    for name, prune in methods.items():
        loader = BatchLoader(train, 32, seed=seed, augment=augment)
        rows.append(_measure(name, prune, loader, test, config, progress, results))
    clock.stop("compare")

    result = results["STAMP"]
    demo = Demo(config, rows, result, clock.seconds)
    if folder is not None:
        say("5/5  writing the slim network, reading it back")
        _write(demo, folder, make_backbone(config.arch, reference.num_classes), test)
        clock.stop("write")
    return demo


def _measure(
    name: str,
    prune: Callable[[], PruneResult],
    loader: BatchLoader,
    test: ArrayDataset,
    config: DemoConfig,
    progress: bool,
    results: dict[str, PruneResult],
) -> DemoRow:
    """Prune, fine-tune and measure one method; its result goes into ``results``."""
    start = time.perf_counter()
    result = results[name] = prune()
    prune_seconds = time.perf_counter() - start
    before = result.evaluate(test)
    start = time.perf_counter()
    result.finetune(loader, epochs=config.finetune_epochs, amp=True, progress=progress)
    finetune_seconds = time.perf_counter() - start
    return DemoRow(
        method=name,
        accuracy_before=before,
        accuracy=result.evaluate(test),
        prune_seconds=prune_seconds,
        finetune_seconds=finetune_seconds,
        **result.report.after,
    )


def _write(demo: Demo, folder: Path, fresh: nn.Module, test: ArrayDataset) -> None:
    result, (slim, page, picture, record) = demo.result, (folder / name for name in FILES)
    result.save(slim)
    images = test.tensors()[0][:256]
    reloaded = load_slim(slim, fresh)
    with torch.no_grad():
        demo.equal = torch.equal(reloaded(images), result.model.eval()(images))
    if not demo.equal:
        raise EquivalenceError(f"{slim}: the reloaded network differs from the saved one")
    result.report.to_html(page)
    atomic_write(picture, kept_channels_svg(result.report.groups).encode())
    atomic_write(record, json.dumps(demo.to_json(), indent=2).encode())


class _Clock:
    """Seconds between stops."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def stop(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[name], self._last = now - self._last, now
