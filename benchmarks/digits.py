"""The demo over several seeds: characters as reference, handwritten digits as target.

    python benchmarks/digits.py --seeds 0 1 2 --arch resnet

Writes ``benchmarks/results/digits-ARCH.json`` and prints the table that is made from it.
Expected with the default sizes: STAMP keeps 15% of the MACs, lies within a point of the full
network, and above L1 magnitude and random pruning; about two minutes a seed on two cores.
"""

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import torch

from stamppruner.demo import DemoConfig, run_demo
from stamppruner.files import atomic_write
from stamppruner.report.format import markdown_table

RESULTS = Path(__file__).parent / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description="the demo over several seeds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--arch", choices=("resnet", "vgg"), default="resnet")
    args = parser.parse_args()
    runs = []
    for seed in args.seeds:
        runs.append(run_demo(None, DemoConfig(arch=args.arch, seed=seed), say=print).to_json())
        path = RESULTS / f"digits-{args.arch}.json"
        machine = {"processor": platform.processor(), "threads": torch.get_num_threads()}
        atomic_write(path, json.dumps({"machine": machine, "runs": runs}, indent=1).encode())
    print(table(runs))


def table(runs: list[dict]) -> str:
    """Mean and standard deviation over seeds, a row a method."""
    rows = []
    for i, first in enumerate(runs[0]["rows"]):
        of = {k: np.array([run["rows"][i][k] for run in runs]) for k in first if k != "method"}
        full = {k: np.array([run["rows"][0][k] for run in runs]) for k in ("macs", "params")}
        total = of["prune_seconds"] + of["finetune_seconds"]
        rows.append(
            [
                first["method"],
                f"{100 * of['accuracy_before'].mean():.1f}",
                f"{100 * of['accuracy'].mean():.1f} ± {100 * of['accuracy'].std():.1f}",
                f"{100 * (of['macs'] / full['macs']).mean():.1f}",
                f"{100 * (of['params'] / full['params']).mean():.1f}",
                f"{of['latency_ms'].mean():.1f}",
                f"{total.mean():.1f}",
            ]
        )
    headers = [
        "method",
        "accuracy before training, %",
        "after, %",
        "MACs, %",
        "parameters, %",
        "latency of 32 images, ms",
        "prune + fine-tune, s",
    ]
    return markdown_table(headers, rows)


if __name__ == "__main__":
    main()
