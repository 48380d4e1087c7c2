"""Small targets of real images: STAMP against the full network and other ways to choose channels.

    python benchmarks/small_data.py --cifar DIR --reference DIR --fashion DIR --cache DIR
    python benchmarks/small_data.py ... --swap          # the swap test over the same targets
    python benchmarks/small_data.py --table             # the tables, from the JSON

``--reference`` is a tree of image folders (100 classes of Tiny-ImageNet at 32x32 for the figures in
the repository), ``--cifar`` one of CIFAR-10, ``--fashion`` torchvision's folder of Fashion-MNIST.
The backbone is trained once, the pruner is meta-fitted once, and both are kept in ``--cache``.
Every method gets the same backbone, head start (ridge head, batch norms of the target), epochs and
schedule. Every run is written to ``benchmarks/results/small-data-ARCH.json`` when it is done, and
not run again.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import platform
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from targets import Pair, Targets
from torch import nn

from stamppruner import (
    Budget,
    PruneResult,
    STAMPConfig,
    STAMPPruner,
    TaskSampler,
    evaluate,
    finetune,
    reinitialise_,
    swap_test,
)
from stamppruner.baselines import BBDropout, Full, Magnitude, Random, Taylor
from stamppruner.data import ArrayDataset, BatchLoader, CropFlip, cifar100, load_dataset
from stamppruner.files import atomic_write
from stamppruner.models import resnet18, vgg19
from stamppruner.report.format import markdown_table
from stamppruner.swap import SwapTest, iou, mean_interval

RESULTS = Path(__file__).parent / "results"
NETS = {"vgg19": vgg19, "resnet18": resnet18}
TARGETS = ("cifar10", "inverted", "animals-vehicles", "fashion", "digits", "greek")
SWAPPED = ("cifar10", "fashion", "digits", "greek")
CONFIG = {"iterations": 150, "weight_steps": 60, "weight_lr": 0.05}
FINETUNE = {"epochs": 20, "lr": 0.05, "batch_size": 64, "clip": 5.0}
MIRRORED = ("cifar10", "animals-vehicles", "inverted")
"""Targets whose classes survive a flip."""

BACKBONE = {"epochs": 24, "lr": 0.1, "batch_size": 128}
STAGES = ("prune", "finetune")
Record = dict[str, Any]


class Bench:
    """One backbone and what is pruned from it."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.targets = Targets(args.cifar, args.fashion, args.cache)
        self.backbone = self._backbone()
        self.pruner = self._pruner()

    def methods(self) -> dict[str, Callable[[ArrayDataset, float, int], PruneResult]]:
        """What prunes a data set to a share of the MACs, with a seed."""

        def stamp(train: ArrayDataset, macs: float, _seed: int) -> PruneResult:
            return self.pruner.prune(train, Budget(macs=macs), progress=False)

        def stepped(train: ArrayDataset, macs: float, _seed: int) -> PruneResult:
            pruner = copy.copy(self.pruner)
            pruner.config = dataclasses.replace(pruner.config, prune_epochs=3.0)
            return pruner.prune(train, Budget(macs=macs), progress=False)

        def unfitted(train: ArrayDataset, macs: float, _seed: int) -> PruneResult:
            pruner = STAMPPruner(self.backbone, config=STAMPConfig(measure_latency=False))
            return pruner.prune(train, Budget(macs=macs), progress=False)

        def reference(train: ArrayDataset, macs: float, _seed: int) -> PruneResult:
            return self.warm.prune(train, Budget(macs=macs), progress=False)

        def structure(train: ArrayDataset, macs: float, seed: int) -> PruneResult:
            result = stamp(train, macs, seed)
            reinitialise_(result.model, seed)
            return result

        def scratch(train: ArrayDataset, _macs: float, seed: int) -> PruneResult:
            result = Full(measure_latency=False).prune(self.backbone, train)
            reinitialise_(result.model, seed)
            return result

        return {
            "full": lambda train, macs, seed: Full(measure_latency=False).prune(
                self.backbone, train
            ),
            "full, from scratch": scratch,
            "STAMP": stamp,
            "STAMP, K = 3": stepped,
            "STAMP, not meta-fitted": unfitted,
            "STAMP-Structure": structure,
            "Taylor on the reference": reference,
            "Taylor on the target": self._baseline(Taylor),
            "BBDropout": self._baseline(BBDropout),
            "L1": self._baseline(Magnitude),
            "random": self._baseline(Random),
        }

    def _baseline(self, kind: Any) -> Callable[[ArrayDataset, float, int], PruneResult]:
        return lambda train, macs, seed: kind(measure_latency=False, seed=seed).prune(
            self.backbone, train, Budget(macs=macs), graph=self.pruner.graph
        )

    def run(self, method: str, target: str, macs: float, seed: int) -> Record:
        """Prune, fine-tune and test."""
        train, test = self.targets.get(target, seed, held_out=self.args.held_out)
        start = time.perf_counter()
        result = self.methods()[method](train, macs, seed)
        prune_seconds = time.perf_counter() - start
        before = evaluate(result.model, test)
        start = time.perf_counter()
        torch.manual_seed(seed)
        finetune(
            result.model, self.loader(target, train, seed), epochs=FINETUNE["epochs"],
            lr=FINETUNE["lr"], clip=FINETUNE["clip"], amp=True, progress=False,
        )  # fmt: skip
        reached = result.report.reached
        return {
            "method": method, "target": target, "macs": macs, "seed": seed, "before": before,
            "after": evaluate(result.model, test), "prune_seconds": prune_seconds,
            "finetune_seconds": time.perf_counter() - start, "reached": dict(reached or {}),
        }  # fmt: skip

    def loader(self, target: str, train: ArrayDataset, seed: int) -> BatchLoader:
        """Batches for fine-tuning."""
        augment = CropFlip() if target.startswith(MIRRORED) else None
        return BatchLoader(train, FINETUNE["batch_size"], seed=seed, augment=augment)

    def swap(self, names: list[str], macs: float, seed: int) -> Record:
        """The swap test over some targets."""
        pairs = {n: self.targets.get(n, seed, held_out=self.args.held_out) for n in names}
        of = {id(train): name for name, (train, _) in pairs.items()}
        found = swap_test(
            self.pruner, pairs, Budget(macs=macs), epochs=FINETUNE["epochs"], lr=FINETUNE["lr"],
            amp=True, progress=False,
            train_loader=lambda train: self.loader(of[id(train)], train, seed),
        )  # fmt: skip
        print(found, flush=True)
        resampled = [
            self.pruner.prune(self.targets.get(n, seed + 100)[0], Budget(macs=macs), progress=False)
            for n in names
        ]
        own = [self.pruner.prune(pairs[n][0], Budget(macs=macs), progress=False) for n in names]
        same = [iou(a.plan.keep, b.plan.keep) for a, b in zip(own, resampled, strict=True)]
        return {"macs": macs, "seed": seed, "iou_resampled": same, **found.to_json()}

    def _reference(self) -> Pair:
        return load_dataset(cifar100, self.args.reference, cache=self.args.cache)

    def _backbone(self) -> nn.Module:
        args = self.args
        make = NETS[args.arch]
        path = args.cache / f"{args.arch}-w{args.width}-e{BACKBONE['epochs']}.safetensors"
        reference, held_out = self._reference()
        torch.manual_seed(0)
        model = make(reference.num_classes, width=args.width)
        if path.exists():
            model.load_state_dict(load_file(path))
        else:
            loader = BatchLoader(reference, BACKBONE["batch_size"], seed=0, augment=CropFlip())
            finetune(model, loader, epochs=BACKBONE["epochs"], lr=BACKBONE["lr"], amp=True)
            save_file(model.state_dict(), path)
        self.backbone_accuracy = evaluate(model, held_out)
        print(f"backbone: {100 * self.backbone_accuracy:.1f}% of the reference", flush=True)
        return model.eval()

    def _pruner(self) -> STAMPPruner:
        args = self.args
        reference, _ = self._reference()
        images = torch.zeros(1, 3, 32, 32)
        warm = STAMPConfig(
            iterations=1, weights_lr=0, pi_lr=0, theta_lr=0, target_evidence=0,
            measure_latency=False, reconstruct=False, seed=0,
        )  # fmt: skip
        sampler = TaskSampler(reference, 10, 16, seed=0)
        self.warm = STAMPPruner(self.backbone, images, config=warm)
        self.warm.meta_fit(sampler, progress=False)
        path = args.cache / f"{args.arch}-w{args.width}-{args.pruner}.stamp.safetensors"
        if path.exists():
            return STAMPPruner.load(path, self.backbone)
        config = STAMPConfig(amp=True, measure_latency=False, seed=0, **args.config)
        pruner = STAMPPruner(self.backbone, images, config=config)
        pruner.meta_fit(TaskSampler(reference, 10, config.shots, seed=0))
        pruner.save(path)
        return pruner


def cells(args: argparse.Namespace, methods: list[str]) -> Iterator[tuple[str, str, float, int]]:
    """All runs; a full network is run once, whatever the budgets."""
    for seed in args.seeds:
        for target in args.targets:
            for method in methods:
                whole = method.startswith("full")
                for macs in [1.0] if whole else args.macs:
                    yield method, target, macs, seed


def tables(record: Record) -> str:
    """Accuracies and paired differences, a table a budget, and the swap tests."""
    names = dict.fromkeys(r["target"] for r in record["runs"])
    sized = [name for name in names if re.fullmatch(r".*-\d+", name)]
    text = ""
    for targets in ([name for name in names if name not in sized], *([name] for name in sized)):
        text += _accuracies([r for r in record["runs"] if r["target"] in targets], targets)
    return text + _swaps(record.get("swaps", []))


def _accuracies(runs: list[Record], targets: list[str]) -> str:
    """A table a budget."""
    text = ""
    of = {(r["method"], r["target"], r["macs"], r["seed"]): r for r in runs}
    for macs in sorted({r["macs"] for r in runs} - {1.0}, reverse=True):
        methods = list(dict.fromkeys(r["method"] for r in runs if r["macs"] in (macs, 1.0)))
        rows = []
        for method in methods:
            share = 1.0 if method.startswith("full") else macs
            row, gaps = [method], []
            for target in targets:
                found = [
                    r for (m, t, b, _), r in of.items() if (m, t, b) == (method, target, share)
                ]
                row.append(_cell(found))
                gaps += [
                    of["STAMP", target, macs, r["seed"]]["after"] - r["after"]
                    for r in found
                    if ("STAMP", target, macs, r["seed"]) in of
                ]
            mean, low, high = (100 * x for x in mean_interval(np.array(gaps or [np.nan])))
            own = [r for (m, _, b, _), r in of.items() if (m, b) == (method, share)]
            seconds = [np.median([r[f"{kind}_seconds"] for r in own]) for kind in STAGES]
            rows.append(
                [
                    *row,
                    f"{mean:+.1f} ({low:+.1f} to {high:+.1f})",
                    f"{seconds[0]:.1f} / {seconds[1]:.1f}",
                ]
            )
        text += f"\n{100 * macs:.0f}% of the MACs; accuracy before / after fine-tuning, %:\n\n"
        text += (
            markdown_table(["method", *targets, "STAMP minus it, after", "seconds"], rows) + "\n"
        )
    return text


def _swaps(swaps: list[Record]) -> str:
    """A sentence a budget."""
    text = ""
    for macs in sorted({s["macs"] for s in swaps}, reverse=True):
        found = [s for s in swaps if s["macs"] == macs]
        tests = [SwapTest.from_json(s) for s in found]
        text += f"\nSwap test at {100 * macs:.0f}% of the MACs, own minus other, points: "
        for stage in ("before", "after"):
            own = np.concatenate([test.differences(stage) for test in tests])
            mean, low, high = (100 * x for x in mean_interval(own))
            text += f"{stage} fine-tuning {mean:+.1f} ({low:+.1f} to {high:+.1f}); "
        others = np.mean([test.overlap for test in tests])
        same = np.mean([s["iou_resampled"] for s in found])
        text += f"IoU {others:.2f}, of the same target resampled {same:.2f}.\n"
    return text


def _cell(found: list[Record]) -> str:
    if not found:
        return "-"
    before = 100 * np.mean([r["before"] for r in found])
    after = 100 * np.array([r["after"] for r in found])
    deviation = f" ± {after.std():.1f}" if len(found) > 1 else ""
    return f"{before:.1f} / {after.mean():.1f}{deviation}"


def main() -> None:
    parser = argparse.ArgumentParser(description="small targets of real images")
    parser.add_argument("--cifar", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--reference", type=Path, default=Path("data/tiny-imagenet-32-100"))
    parser.add_argument("--fashion", type=Path, default=None)
    parser.add_argument("--cache", type=Path, default=Path("data/cache"))
    parser.add_argument("--arch", choices=list(NETS), default="vgg19")
    parser.add_argument("--width", type=float, default=0.25)
    parser.add_argument("--targets", nargs="+", default=None)
    parser.add_argument("--methods", nargs="+", default=None)
    parser.add_argument("--macs", type=float, nargs="+", default=[0.27, 0.1])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--swap", action="store_true", help="the swap test in place of the runs")
    parser.add_argument("--held-out", action="store_true", help="test on held-out training images")
    parser.add_argument("--pruner", default="stamp", help="name of the meta-fit in the cache")
    parser.add_argument("--config", type=json.loads, default=CONFIG, help="settings of it, as JSON")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--table", action="store_true", help="print the tables and end")
    args = parser.parse_args()
    args.targets = args.targets or list(SWAPPED if args.swap else TARGETS)
    path = args.out or RESULTS / f"small-data-{args.arch}.json"
    record: Record = json.loads(path.read_text()) if path.exists() else {"runs": [], "swaps": []}
    if args.table:
        print(tables(record))
        return
    args.cache.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    record["setting"] = {
        "arch": args.arch, "width": args.width, "backbone": BACKBONE, "finetune": FINETUNE,
        "backbone_accuracy": bench.backbone_accuracy, "config": bench.pruner.config.to_dict(),
        "held_out": args.held_out, "threads": torch.get_num_threads(),
        "processor": platform.processor(), "torch": torch.__version__,
    }  # fmt: skip

    def write() -> None:
        atomic_write(path, (json.dumps(record, indent=1) + "\n").encode())

    if args.swap:
        done = {(s["macs"], s["seed"]) for s in record["swaps"]}
        for seed in args.seeds:
            for macs in args.macs:
                if (macs, seed) not in done:
                    record["swaps"].append(bench.swap(args.targets, macs, seed))
                    write()
    else:
        done = {(r["method"], r["target"], r["macs"], r["seed"]) for r in record["runs"]}
        for cell in cells(args, args.methods or list(bench.methods())):
            if cell not in done:
                record["runs"].append(bench.run(*cell))
                print(json.dumps(record["runs"][-1]), flush=True)
                write()
    print(tables(record))


if __name__ == "__main__":
    main()
