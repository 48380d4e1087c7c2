"""Whether budgets hold: costs met from below, measured latency in a fresh process, speed-up.

    python benchmarks/budgets.py exact       # MACs, parameters, size, activations on nine networks
    python benchmarks/budgets.py latency     # budgets in milliseconds, checked by another process
    python benchmarks/budgets.py speed       # speed-up at 27% of the MACs, beside torch-pruning
    python benchmarks/budgets.py table       # the tables, from the JSON

Random weights, L1 scores, one thread. Every run is written to ``benchmarks/results/budgets.json``
when it is done. Latencies are ratios to the full network, which takes turns with the slim one.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_pruning
import torchvision
from coverage import macs
from torch import Tensor, nn
from torch.fx.experimental.optimization import fuse

from stamppruner import Budget, ChannelGraph, ChannelPlan, check_equivalence, trace_channels
from stamppruner.baselines import Magnitude
from stamppruner.budget import Chooser
from stamppruner.files import atomic_write
from stamppruner.inputs import Inputs
from stamppruner.latency import in_turns_ms, latencies_ms
from stamppruner.meet import meet
from stamppruner.models import resnet18, vgg19
from stamppruner.report.format import markdown_table
from stamppruner.surgery import cut

RESULTS = Path(__file__).parent / "results" / "budgets.json"
SHARES = (0.75, 0.5, 0.25, 0.1)
LATENCY_SHARES = (0.75, 0.5, 0.35)
PROCESSES = 3
COSTS = ("macs", "params", "size_bytes", "activation_bytes")
SPEED_NETS: dict[str, Callable[[int], nn.Module]] = {"resnet18": resnet18, "vgg19": vgg19}
LAYOUTS = {"channels first": torch.contiguous_format, "channels last": torch.channels_last}
Record = dict[str, Any]


class UNet(nn.Module):
    """Three levels with skip connections (Ronneberger et al. 2015)."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(
            _double(i, o) for i, o in zip([3, *sizes[:-1]], sizes, strict=True)
        )
        self.bottom = _double(sizes[-1], 2 * sizes[-1])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * s, s, 2, 2) for s in reversed(sizes))
        self.merge = nn.ModuleList(_double(2 * s, s) for s in reversed(sizes))
        self.out = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits a pixel, ``(B, 2, H, W)``."""
        skips = []
        for down in self.down:
            skips.append(down(x))
            x = nn.functional.max_pool2d(skips[-1], 2)
        x = self.bottom(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = merge(torch.cat([skip, up(x)], 1))
        return self.out(x)


def _double(i: int, o: int) -> nn.Sequential:
    layers = [(nn.Conv2d(a, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()) for a in (i, o)]
    return nn.Sequential(*layers[0], *layers[1])


_TV = torchvision.models
NETS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": _TV.resnet18,
    "resnet50": _TV.resnet50,
    "vgg19": _TV.vgg19_bn,
    "mobilenet_v2": _TV.mobilenet_v2,
    "mobilenet_v3_large": _TV.mobilenet_v3_large,
    "efficientnet_b0": _TV.efficientnet_b0,
    "densenet121": _TV.densenet121,
    "regnet_y_400mf": _TV.regnet_y_400mf,
    "unet": UNet,
}


def prepared(name: str) -> tuple[nn.Module, ChannelGraph, np.ndarray]:
    """A network, its channels, and L1 scores that are relative within each group."""
    torch.manual_seed(0)
    model = NETS[name]().eval()
    graph = trace_channels(model, torch.zeros(1, 3, 224, 224))
    return model, graph, Magnitude().scores(model, graph, None)


def exact() -> Iterator[Record]:
    """Every cost at every share, as a share of the budget that was used."""
    for name in NETS:
        model, graph, scores = prepared(name)
        for round_to in (1, 8):
            chooser = Chooser(model, graph, round_to=round_to)
            for cost in COSTS:
                for share in SHARES:
                    budget = Budget(**{cost: share})
                    chooser.costs_of(budget)
                    start = time.perf_counter()
                    try:
                        plan = chooser.choose(scores, budget)
                    except Exception as error:  # noqa: BLE001 - noted
                        yield {"net": name, "cost": cost, "share": share, "round_to": round_to,
                               "error": str(error)[:200]}  # fmt: skip
                        continue
                    seconds = time.perf_counter() - start
                    (measured,) = chooser.costs_of(budget)
                    used = float(measured(chooser.widths(plan))) / (share * measured.full)
                    yield {"net": name, "cost": cost, "share": share, "round_to": round_to,
                           "used": used, "seconds": seconds}  # fmt: skip


def latency() -> Iterator[Record]:
    """Budgets in milliseconds; every search, and every check of it, has a process of its own."""
    for name in ("resnet18", "mobilenet_v2", "efficientnet_b0"):
        for batch in (1, 32):
            for share in LATENCY_SHARES:
                with tempfile.TemporaryDirectory() as folder:
                    keep = Path(folder) / "keep.npy"
                    found = afresh("search", name, batch, share, keep)
                    new = [afresh("again", name, batch, keep) for _ in range(PROCESSES)]
                yield {"net": name, "batch_size": batch, "share": share, **found,
                       "fresh": [shares["ours"] for shares in new],
                       "default_heap": [shares["default_heap"] for shares in new]}  # fmt: skip


def afresh(*argv: object) -> Record:
    """What a command of this file finds in a new process."""
    command = [sys.executable, __file__, *map(str, argv)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def search(name: str, batch: int, share: float, keep: Path) -> Record:
    """Meet a budget in milliseconds, write down the channels that are kept."""
    model, graph, scores = prepared(name)
    chooser = Chooser(model, graph, round_to=8)
    start = time.perf_counter()
    met = meet(model, chooser, scores, Budget(latency_ms=share, batch_size=batch, threads=1))
    seconds, times = time.perf_counter() - start, met.times["latency_ms"]
    np.save(keep, met.plan.keep)
    return {"seconds": seconds, "predicted": times.predicted / times.before,
            "measured": times.after / times.before, "full_ms": times.before}  # fmt: skip


def again(name: str, batch: int, keep: Path) -> Record:
    """Shares of the full network's time: as the package measures, and with glibc's default heap."""
    model, graph, _ = prepared(name)
    slim = cut(model, ChannelPlan(graph, np.load(keep)))
    inputs = Inputs.of(torch.zeros(1, 3, 224, 224), model)
    defaults = [default_heap_ms(m, inputs.random(batch, seed=0)) for m in (model, slim)]
    full, left = latencies_ms([model, slim], inputs, samples=batch, seconds=3.0)
    return {"ours": left / full, "default_heap": defaults[1] / defaults[0]}


def default_heap_ms(model: nn.Module, batch: Inputs) -> float:
    """Median of a pass in a process whose heap nobody has touched."""
    taken, start = [], time.perf_counter()
    with torch.no_grad():
        while len(taken) < 4 or time.perf_counter() - start < 3.0:
            begun = time.perf_counter()
            batch.call(model)
            taken.append(1e3 * (time.perf_counter() - begun))
    return float(np.median(taken[1:]))


def speed() -> Iterator[Record]:
    """Speed-up at 27% of the MACs with batches of 64, full width, beside torch-pruning."""
    example = torch.zeros(1, 3, 32, 32)
    for (name, make), (layout, order) in itertools.product(SPEED_NETS.items(), LAYOUTS.items()):
        torch.manual_seed(0)
        model = make(10).eval().to(memory_format=order)
        graph = trace_channels(model, example)
        scores = Magnitude().scores(model, graph, None)
        others = {
            f"torch-pruning, round_to={round_to}": global_ranking(model, example, round_to)
            for round_to in (8, None)
        }
        others["half of every width"] = cut(model, halves(graph))
        full = macs(model, example)
        for dtype in (torch.float32, torch.bfloat16):
            slims = {}
            budget = Budget(macs=0.27, batch_size=64, amp=dtype == torch.bfloat16)
            for round_to in (8, None):
                plan = meet(model, Chooser(model, graph, round_to=round_to), scores, budget).plan
                assert check_equivalence(model, plan)
                slims[f"stamppruner, round_to={round_to}"] = cut(model, plan)
            slims |= others
            for mode in ("inference", "inference, folded", "training"):
                calls = [passes(m, dtype, mode, order) for m in (model, *slims.values())]
                whole, *left = in_turns_ms(calls, 4.0)
                for tool, slim, ms in zip(slims, slims.values(), left, strict=True):
                    fewer = full / macs(slim, example)
                    yield {"net": name, "layout": layout, "dtype": str(dtype), "mode": mode,
                           "tool": tool, "macs_ratio": fewer, "full_ms": whole,
                           "speed_up": whole / ms,
                           "share_of_macs_ratio": whole / ms / fewer}  # fmt: skip


def halves(graph: ChannelGraph) -> ChannelPlan:
    """The first half of every group: all widths stay powers of two, as the full network's are."""
    keep = np.zeros(graph.num_channels, dtype=bool)
    for group in graph.groups:
        keep[group.start : group.start + group.size // 2] = True
    return ChannelPlan(graph, keep)


def global_ranking(model: nn.Module, example: Tensor, round_to: int | None) -> nn.Module:
    """torch-pruning's global L1 ranking, cut to about 27% of the MACs by bisection."""
    full, low, high = macs(model, example), 0.0, 1.0
    found = copy.deepcopy(model)
    for _ in range(8):
        ratio = (low + high) / 2
        slim = copy.deepcopy(model)
        head = [m for m in slim.modules() if isinstance(m, nn.Linear)][-1:]
        torch_pruning.pruner.MagnitudePruner(
            slim, example, torch_pruning.importance.MagnitudeImportance(p=1),
            pruning_ratio=ratio, global_pruning=True, ignored_layers=head, round_to=round_to,
            max_pruning_ratio=0.95,
        ).step()  # fmt: skip
        if macs(slim, example) > 0.27 * full:
            low = ratio
        else:
            high, found = ratio, slim
    return found


def passes(
    model: nn.Module, dtype: torch.dtype, mode: str, order: torch.memory_format
) -> Callable[[], float]:
    """Milliseconds of a pass or a training step under autocast; folded: without batch norms."""
    x, y = torch.randn(64, 3, 32, 32).to(memory_format=order), torch.randint(10, (64,))
    model = copy.deepcopy(model).train(mode == "training")
    model = (fuse(model) if mode == "inference, folded" else model).to(memory_format=order)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def once() -> float:
        start = time.perf_counter()
        with (
            torch.set_grad_enabled(mode == "training"),
            torch.autocast("cpu", dtype, enabled=dtype != torch.float32),
        ):
            logits = model(x)
        if mode == "training":
            sgd.zero_grad()
            nn.functional.cross_entropy(logits.float(), y).backward()
            sgd.step()
        return 1e3 * (time.perf_counter() - start)

    return once


def tables(record: Record) -> str:
    """What the JSON says, as markdown."""
    text = ""
    if found := record.get("exact"):
        rows = []
        for cost in COSTS:
            for round_to in (1, 8):
                own = [r for r in found if (r["cost"], r["round_to"]) == (cost, round_to)]
                used = [r["used"] for r in own if "used" in r]
                refused = sum("error" in r for r in own)
                near = sum(0.98 <= u <= 1 for u in used)
                rows.append([cost, round_to, f"{near} of {len(used)}", f"{min(used):.3f}",
                             f"{max(used):.3f}", refused,
                             f"{max(r['seconds'] for r in own if 'used' in r):.2f}"])  # fmt: skip
        head = ["budget", "round_to", "98 to 100% used", "least", "most", "refused", "s, at most"]
        text += "\nNine networks at 75, 50, 25 and 10%:\n\n" + markdown_table(head, rows) + "\n"
    if found := record.get("latency"):
        head = ["network", "batch", "asked", "predicted", "measured", "in new processes",
                "median", "with glibc's default heap", "s"]  # fmt: skip
        rows = [
            [r["net"], r["batch_size"], f"{r['share']:.0%}", f"{r['predicted']:.1%}",
             f"{r['measured']:.1%}", ", ".join(f"{share:.1%}" for share in r["fresh"]),
             f"{np.median(r['fresh']):.1%}", f"{np.median(r['default_heap']):.1%}",
             f"{r['seconds']:.0f}"]
            for r in found
        ]  # fmt: skip
        used = [[share / r["share"] for share in r["fresh"]] for r in found]
        tries, medians = [u for row in used for u in row], [float(np.median(row)) for row in used]
        text += (
            f"\nLatency, of the full network's. Within 5% of the budget in a new process: "
            f"{_near(tries)} tries, {_near(medians)} medians of {PROCESSES}; at most 5% above it: "
            f"{sum(u <= 1.05 for u in tries)} tries:"
        )
        text += "\n\n" + markdown_table(head, rows) + "\n"
    if found := record.get("speed"):
        tools = list(dict.fromkeys(r["tool"] for r in found))
        settings = ("net", "layout", "dtype", "mode", "full_ms")
        of: dict[tuple[Any, ...], list[str]] = {}
        for r in found:
            cell = f"{r['speed_up']:.2f} ({r['share_of_macs_ratio']:.0%})"
            of.setdefault(tuple(r[name] for name in settings), []).append(cell)
        rows = [
            [net, layout, dtype.removeprefix("torch."), mode, f"{ms:.0f}", *cells]
            for (net, layout, dtype, mode, ms), cells in of.items()
        ]
        head = ["network", "layout", "type", "mode", "full, ms", *tools]
        text += (
            "\nSpeed-up at 27% of the MACs, batches of 64 at 32x32, and its share of the ratio of "
            "MACs:\n\n" + markdown_table(head, rows) + "\n"
        )
    return text


def _near(used: list[float]) -> str:
    return f"{sum(abs(u - 1) <= 0.05 for u in used)} of {len(used)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="whether budgets hold")
    parser.add_argument("what", choices=["exact", "latency", "speed", "table", "search", "again"])
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "search":
        name, batch, share, keep = args.rest
        print(json.dumps(search(name, int(batch), float(share), Path(keep))))
        return
    if args.what == "again":
        name, batch, keep = args.rest
        print(json.dumps(again(name, int(batch), Path(keep))))
        return
    record: Record = json.loads(args.out.read_text()) if args.out.exists() else {}
    if args.what == "table":
        print(tables(record))
        return
    record["setting"] = {"threads": 1, "cores": os.cpu_count(), "torch": torch.__version__}
    runs = {"exact": exact, "latency": latency, "speed": speed}[args.what]
    record[args.what] = []
    for run in runs():
        record[args.what].append(run)
        print(json.dumps(run), flush=True)
        atomic_write(args.out, (json.dumps(record, indent=1) + "\n").encode())
    print(tables(record))


if __name__ == "__main__":
    main()
