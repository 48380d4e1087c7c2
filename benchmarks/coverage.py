"""How much of the networks in use can be cut, whether every cut is exact, and what it costs.

Takes stock networks of torchvision and timm (random weights, one core), each in a process of its
own: traces it, cuts a random half of every group, compares the slim network with the masked dense
one in double precision, trains the slim one for a step, saves it and loads it again. Another
process runs torch-pruning alone on the same network.

    python benchmarks/coverage.py                                   # all, some hours
    python benchmarks/coverage.py torchvision/resnet18 'video/*'    # some
    python benchmarks/coverage.py --list
    python benchmarks/tables.py                                     # makes docs/coverage.md of it

Results are written to ``benchmarks/results/coverage.json`` after every network; those that are
there already are run again only when named.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from networks import LEFT_OUT, MOST_PARAMETERS, NETWORKS, Network, tensors
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stamppruner import ChannelGraph, ChannelPlan, check_equivalence, shrink, trace_channels
from stamppruner.errors import StampError
from stamppruner.files import atomic_write
from stamppruner.slim import load_slim, save_slim

RESULTS = Path(__file__).parent / "results" / "coverage.json"
KEEP = 0.5
SECONDS = {"stamppruner": 400, "torch_pruning": 60}
MEMORY_GIB = 12
SETTING = {
    "record": 3,
    "keep": KEEP,
    "weights": "random",
    "threads": 1,
    "limit_seconds": SECONDS,
    "limit_gib": MEMORY_GIB,
    "most_parameters": MOST_PARAMETERS,
}

Record = dict[str, Any]
Note = Callable[..., None]


def measure(network: Network, note: Note) -> None:
    """Trace, cut, compare, train, save and load one network; ``note`` what is known by then."""
    note(stage="make")
    model = network.make().eval()
    view, shape = network.view(model), network.shape(model)
    sizes = [x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers())]
    note(input=list(shape), model_mib=round(sum(sizes) / 2**20, 1))
    if view is not model:
        note(through=type(view).__name__)
    before = _resident_mib()

    note(stage="trace")
    _, seconds = _timed(lambda: trace_channels(view, torch.zeros(shape), certify=False))
    note(probe_seconds=seconds)
    graph, seconds = _timed(lambda: trace_channels(view, torch.zeros(shape)))
    note(trace_seconds=seconds, **_facts(graph), output_layers=graph.output_layers, stage="shrink")
    plan = ChannelPlan.random(graph, KEEP)
    slim, seconds = _timed(lambda: shrink(view, plan, certify=False))
    note(shrink_seconds=seconds, stage="certificate")
    verdict, seconds = _timed(lambda: check_equivalence(view, plan, slim=slim))
    note(certified=verdict.passed, max_rel=verdict.max_rel, certificate_seconds=seconds)
    if not verdict:
        note(verdict=str(verdict))
    note(peak_mib=_peak_mib(before), stage="count")
    x = torch.zeros(shape)
    dense = macs(view, x)
    note(macs_full=dense, macs_left=round(macs(slim, x) / dense, 4))
    note(params_left=round(_count(slim) / _count(view), 4), stage="train")
    user_slim = slim if view is model else slim.get_submodule("detector")
    note(trained=_trains(network, user_slim, shape), stage="reload")
    note(reloaded=_reloads(network, slim, user_slim, plan, torch.rand(shape)), stage="done")


def measure_torch_pruning(network: Network, note: Note, outputs: list[str]) -> None:
    """Run torch-pruning with its defaults, the layers that write the output left whole."""
    import torch_pruning as tp

    view = network.view(model := network.make().eval())
    x = torch.zeros(network.shape(model))
    dense = macs(view, x)
    with torch.no_grad():
        shapes = [y.shape for y in tensors(view.eval()(x))]
    modules = dict(view.named_modules())
    mixing = [n for n, m in modules.items() if isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d)]
    start = time.perf_counter()
    pruner = tp.pruner.BasePruner(
        view,
        x,
        importance=tp.importance.MagnitudeImportance(),
        pruning_ratio=1 - KEEP,
        ignored_layers=[modules[name] for name in outputs or mixing[-1:]],
    )
    pruner.step()
    note(seconds=round(time.perf_counter() - start, 2))
    with torch.no_grad():
        same = shapes == [y.shape for y in tensors(view.eval()(x))]
    note(macs_left=round(macs(view, x) / dense, 4), ok=same)
    if not same:
        note(error="the shape of the output changed")


def macs(model: nn.Module, x: Tensor) -> float:
    """Multiply-adds, counted by PyTorch."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval()(x)
    return counter.get_total_flops() / 2


def _facts(graph: ChannelGraph) -> Record:
    """Sizes of the graph, and what is left whole and why."""
    writers = [layer for layer in graph.layers.values() if layer.kind == "mixing"]
    inner = [layer for layer in writers if layer.name not in graph.output_layers]
    outputs = sum(len(layer.outputs) for layer in inner)
    fixed = sum(int((layer.outputs < 0).sum()) for layer in inner)
    reasons: dict[str, Record] = {}
    for name, why in graph.protected.items():
        if name in graph.output_layers:
            continue
        example = f"{name}: {why}"[:300]
        reasons.setdefault(_short(why), {"layers": 0, "example": example})["layers"] += 1
    return {
        "groups": len(graph.groups),
        "channels": graph.num_channels,
        "protected_share": round(fixed / max(1, outputs), 4),
        "reasons": dict(sorted(reasons.items(), key=lambda item: -item[1]["layers"])),
    }


def _short(why: str) -> str:
    """A reason without the names in it, so that equal ones are counted together."""
    why = re.sub(r" \((equal|DIFFERENT|the slim network)\b.*", "", why, flags=re.DOTALL)
    why = re.sub(r"^like '[^']*': ", "", why)
    why = re.sub(r"(shares its parameters with) .*", r"\1 another layer", why)
    return re.sub(r"'[^']*'", "a layer", why)[:100]


def _trains(network: Network, slim: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a step of gradient descent leaves a finite loss and finite weights."""
    slim.train()
    optimizer = torch.optim.SGD(slim.parameters(), lr=1e-4)
    loss = network.loss(slim, shape)
    loss.backward()
    optimizer.step()
    finite = all(bool(p.isfinite().all()) for p in slim.parameters())
    return finite and bool(loss.isfinite()) and any(p.grad is not None for p in slim.parameters())


def _reloads(
    network: Network, slim: nn.Module, user_slim: nn.Module, plan: ChannelPlan, x: Tensor
) -> bool:
    """Whether the saved and loaded slim network gives the same bits."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        save_slim(path := Path(folder) / "slim.safetensors", user_slim, {"kept": plan.record()})
        loaded = network.view(load_slim(path, network.make)).eval()
        pairs = zip(tensors(slim.eval()(x)), tensors(loaded(x)), strict=True)
        return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in pairs)


def _timed(function: Callable[[], Any]) -> tuple[Any, float]:
    start = time.perf_counter()
    return function(), round(time.perf_counter() - start, 2)


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def _peak_mib(before: float) -> int:
    """The most memory that this process held so far, above what it held with the model made."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 - before)


def child(tool: str, key: str, path: Path, outputs: list[str]) -> None:
    """Measure one network in this process, and write what is known after every step."""
    limit = MEMORY_GIB * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    found: Record = {}

    def note(**facts: Any) -> None:
        found.update(facts)
        atomic_write(path, json.dumps(found).encode())

    try:
        if tool == "stamppruner":
            measure(NETWORKS[key], note)
        else:
            measure_torch_pruning(NETWORKS[key], note, outputs)
    except StampError as error:
        note(error=f"{type(error).__name__}: {error}"[:400])
    except Exception as error:  # noqa: BLE001 - a crash is a result
        first = (str(error).splitlines() or [""])[0]
        note(error=f"{type(error).__name__}: {first}"[:200], crash=_where(error))


def _where(error: Exception) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{Path(last.filename).name}:{last.lineno} {last.name}"


def attempt(tool: str, key: str, outputs: list[str]) -> Record:
    """What a process of its own found, also if it was ended."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        command = [sys.executable, __file__, "--child", tool, key, str(path), *outputs]
        start = time.perf_counter()
        try:
            quiet = subprocess.DEVNULL
            done = subprocess.run(command, timeout=SECONDS[tool], stdout=quiet, stderr=quiet)
            end = f"ended with status {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            end = f"not done after {SECONDS[tool]} s"
        found: Record = json.loads(path.read_text()) if path.exists() else {}
    if found.get("stage") == "done":
        del found["stage"]
    if end:
        found["error"] = end
    if tool == "stamppruner":
        found["all_seconds"] = round(time.perf_counter() - start, 1)
        steps = ("certified", "trained", "reloaded")
        return {"ok": "error" not in found and all(found.get(step) for step in steps), **found}
    return {"ok": False, **found}


def select(patterns: list[str]) -> list[str]:
    """Keys that a pattern matches, in order.

    Raises:
        ValueError: a pattern matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatchcase(key, pattern) for key in NETWORKS):
            raise ValueError(f"{pattern!r} matches no network: see --list")
    return [key for key in NETWORKS if any(fnmatchcase(key, p) for p in patterns)]


def main() -> None:
    parser = argparse.ArgumentParser(description="how much of stock networks can be cut")
    parser.add_argument("networks", nargs="*", help="names or shell patterns; by default, new ones")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    try:
        named = select(args.networks)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        print("\n".join(named or NETWORKS))
        return
    record = json.loads(args.out.read_text()) if args.out.exists() else {}
    found = record.get("networks", {}) if record.get("setting") == SETTING else {}
    for key in named or [key for key in NETWORKS if key not in found]:
        found[key] = attempt("stamppruner", key, [])
        outputs = found[key].pop("output_layers", [])
        found[key]["torch_pruning"] = attempt("torch_pruning", key, outputs)
        print(key, json.dumps(found[key]), flush=True)
        record = {
            "versions": {"torch": torch.__version__, "torchvision": torchvision.__version__,
                         "timm": timm.__version__, "torch_pruning": version("torch-pruning"),
                         "python": platform.python_version()},
            "machine": {"processor": platform.processor(), "cores": os.cpu_count()},
            "setting": SETTING,
            "left_out": LEFT_OUT,
            "networks": {k: found[k] for k in NETWORKS if k in found},
        }  # fmt: skip
        args.out.parent.mkdir(exist_ok=True)
        atomic_write(args.out, (json.dumps(record, indent=1) + "\n").encode())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
    else:
        main()
