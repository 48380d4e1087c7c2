"""What meta-fitting costs beside plain training, how that grows, and what the paper's would take.

    python benchmarks/meta_fit.py steps         # gated steps against plain ones
    python benchmarks/meta_fit.py compiled      # the same through torch.compile
    python benchmarks/meta_fit.py throughput    # images a second of meta_fit against plain training
    python benchmarks/meta_fit.py memory        # peak memory of both, in processes of their own
    python benchmarks/meta_fit.py growth        # over tasks, images, width, depth and image size
    python benchmarks/meta_fit.py reading       # photographs that workers read ahead
    python benchmarks/meta_fit.py ranks         # one process against two, one thread each
    python benchmarks/meta_fit.py paper         # 2,000 iterations x 10 tasks x 5 minibatches of 128
    python benchmarks/meta_fit.py all [--quick] [--device cuda]

Random weights and images, one thread. Kinds of steps take turns, and the least of their times
counts; on the CPU these are seconds of the process, which other programs hardly change, except in
``reading`` and ``ranks``, which need a quiet machine. The plain step has the same optimizer. Every
section is written to ``benchmarks/results/meta-fit.json`` when it is done;
``python benchmarks/tables.py`` makes the page and the picture from it. ``--quick`` is for trying
it out.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset
from torchvision.io import decode_jpeg, encode_jpeg
from torchvision.transforms import v2

from stamppruner import STAMPConfig, STAMPPruner, TaskSampler, objective
from stamppruner.batchnorm import frozen_statistics
from stamppruner.budget import Budget, Chooser
from stamppruner.encoders import SetEncoder, SetTransformer
from stamppruner.files import atomic_write
from stamppruner.heap import memory_kept
from stamppruner.models import VGG, resnet18, vgg19

RESULTS = Path(__file__).parent / "results" / "meta-fit.json"
NETS: dict[str, Callable[..., nn.Module]] = {"vgg19": vgg19, "resnet18": resnet18}
CLASSES = 100
Record = dict[str, Any]


class Bench:
    """Device, number of repeats, and the clock."""

    def __init__(self, device: str, quick: bool) -> None:
        self.device, self.quick = torch.device(device), quick
        self.repeats = 2 if quick else 8

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def in_turns(self, steps: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Least seconds of each, after one that does not count."""
        times: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(self.repeats + 1):
            for name, step in steps.items():
                start = self.now()
                step()
                if turn:
                    times[name].append(self.now() - start)
        return {name: min(found) for name, found in times.items()}


def images(number: int, size: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(number, 3, size, size, generator=generator)
    return x, torch.arange(number) % CLASSES


def pruner_of(
    model: nn.Module, config: STAMPConfig, size: int = 32, encoder: SetEncoder | None = None
) -> STAMPPruner:
    example = torch.zeros(1, 3, size, size, device=next(model.parameters()).device)
    return STAMPPruner(model, example, config=config, encoder=encoder)


def plain_step(model: nn.Module, x: Tensor, y: Tensor, config: STAMPConfig) -> Callable[[], None]:
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    model.train()

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(objective.forward(model, x, config).float(), y).backward()
        optimizer.step()

    return step


def gated_steps(
    pruner: STAMPPruner, whole: Tensor, x: Tensor, y: Tensor, config: STAMPConfig
) -> dict[str, Callable[[], None]]:
    """A step of the inner loop for both kinds of masks: set path, mask, network, KL, Adam."""
    net = pruner._gated()
    net.model.train()
    optimizer, evidence_of = objective.adam(net, config), net.evidence_of(whole)
    chooser = Chooser(net.model, net.graph, floor=config.floor, round_to=config.round_to)
    kinds = {
        "relaxed": objective.Relaxed(net, config.temperature, torch.Generator().manual_seed(0)),
        "budgeted": objective.Budgeted(net, chooser, Budget(macs=0.3)),
    }

    def step(kind: str) -> Callable[[], None]:
        def run() -> None:
            optimizer.zero_grad()
            with frozen_statistics(net.model):
                with net.masked(kinds[kind].of(evidence_of()), by_weight=True) as model:
                    logits = objective.forward(model, x, config)
                objective.loss(logits, y, net, 1e-5).backward()
            optimizer.step()

        return run

    return {kind: step(kind) for kind in kinds}


class StepCase:
    """A network, a set of images, and the minibatch that steps are timed on."""

    def __init__(
        self, bench: Bench, name: str, width: float, batch: int, number: int, amp: int
    ) -> None:
        self.config = STAMPConfig(amp=bool(amp))
        self.model = NETS[name](CLASSES, width=width).to(bench.device)
        self.whole, labels = (part.to(bench.device) for part in images(number))
        self.x, self.y = self.whole[:batch], labels[:batch]
        self.facts: Record = {
            "net": name, "width": width, "batch": batch, "amp": bool(amp), "set": number,
        }  # fmt: skip

    def plain(self, model: nn.Module) -> Callable[[], None]:
        return plain_step(model, self.x, self.y, self.config)

    def pruner(self) -> STAMPPruner:
        return pruner_of(self.model, self.config)

    def gated(self, pruner: STAMPPruner) -> dict[str, Callable[[], None]]:
        return gated_steps(pruner, self.whole, self.x, self.y, self.config)


def steps(bench: Bench) -> Iterator[Record]:
    """Seconds of a plain step, and of gated ones as multiples of it, on either heap."""
    sizes = [(128, 640), (32, 160), (32, 640)]  # the paper's, the defaults, both
    cases = [(n, w, *s, a) for w in (1.0, 0.25) for n in NETS for a in (0, 1) for s in sizes]
    for place in cases[-3:] if bench.quick else cases:
        case = StepCase(bench, *place)
        kinds = {"plain": case.plain(copy.deepcopy(case.model)), **case.gated(case.pruner())}
        for heap in ("default", "kept") if bench.device.type == "cpu" else ("default",):
            with memory_kept() if heap == "kept" else nullcontext():
                found = bench.in_turns(kinds)
            yield {
                **case.facts, "heap": heap, "plain_seconds": found["plain"],
                "relaxed": found["relaxed"] / found["plain"],
                "budgeted": found["budgeted"] / found["plain"],
            }  # fmt: skip


def compiled(bench: Bench) -> Iterator[Record]:
    """Seconds of plain and gated steps without torch.compile and with it; compiling not counted."""
    sizes = [(128, 640), (32, 160)]
    cases = [(n, w, *s, a) for w in (1.0, 0.25) for n in NETS for a in (0, 1) for s in sizes]
    for place in cases[-2:] if bench.quick else cases:
        case, kinds = StepCase(bench, *place), {}
        with ExitStack() as stack:
            for kind in ("plain", "compiled"):
                own, pruner = copy.deepcopy(case.model), case.pruner()
                if kind == "compiled":
                    stack.enter_context(pruner._gated().compiled(True))
                    own = cast(nn.Module, torch.compile(own, dynamic=False))
                kinds[kind] = case.plain(own)
                kinds[f"{kind}_gated"] = case.gated(pruner)["relaxed"]
            stack.enter_context(memory_kept(bench.device))
            found = bench.in_turns(kinds)
        torch.compiler.reset()
        yield case.facts | {f"{kind}_seconds": seconds for kind, seconds in found.items()}


def reference(shots: int, size: int = 32, seed: int = 0) -> TaskSampler:
    return TaskSampler(TensorDataset(*images(CLASSES * shots, size)), 10, shots, seed=seed)


def fit_config(bench: Bench, **changes: Any) -> STAMPConfig:
    """Tasks as in the paper, but fewer."""
    few: Record = {
        "iterations": 2, "tasks_per_iteration": 2, "ways": 10, "shots": 64,
        "minibatch_size": 128, "weight_steps": 0, "warm_start": False,
    }  # fmt: skip
    if bench.quick:
        few |= {"shots": 16, "minibatch_size": 32, "tasks_per_iteration": 1}
    return STAMPConfig(**(few | changes))


def fit_seconds(
    bench: Bench, pruner: STAMPPruner, source: TaskSampler | None = None
) -> tuple[float, int]:
    """Seconds of the iterations after the first, and the images that they train on."""
    config, marks = pruner.config, []
    pruner.meta_fit(
        source or reference(config.shots), progress=False,
        callback=lambda *_: marks.append(bench.now()),
    )  # fmt: skip
    number = config.tasks_per_iteration * config.ways * config.shots
    number += config.weight_steps * config.weight_batch
    return marks[-1] - marks[0], number * (len(marks) - 1)


def throughput(bench: Bench) -> Iterator[Record]:
    """Images a second, as a share of those of plain training in minibatches of the same size.

    Of the iterations after the first; so what is done once a run does not count.
    """
    for width, name in [(w, n) for w in (0.25, 1.0) for n in NETS]:
        if bench.quick and width == 1:
            continue
        for weight_steps in (0, 20):
            config = fit_config(bench, weight_steps=weight_steps, iterations=3)
            model = NETS[name](CLASSES, width=width).to(bench.device)
            x, y = (part.to(bench.device) for part in images(config.minibatch_size))
            plain = bench.in_turns({"plain": plain_step(copy.deepcopy(model), x, y, config)})
            seconds, number = fit_seconds(bench, pruner_of(model, config))
            own = number / seconds
            rate = config.minibatch_size / plain["plain"]
            yield {
                "net": name, "width": width, "minibatch": config.minibatch_size,
                "weight_steps": weight_steps, "images_per_second": own,
                "plain_images_per_second": rate, "share": own / rate,
            }  # fmt: skip


def peak(
    kind: str, bench: Bench, name: str, width: float, config: STAMPConfig
) -> tuple[float, float, float]:
    """Peak bytes that training takes beyond what this process had before, and with that.

    And seconds of the second iteration, by the wall clock, as files are written in some.
    """
    model = NETS[name](CLASSES, width=width).to(bench.device)
    pruner, source = pruner_of(copy.deepcopy(model), config), reference(config.shots)
    x, y = (part.to(bench.device) for part in images(config.minibatch_size))
    marks: list[float] = []
    before = _memory(bench, reset=True)
    if kind == "plain":
        step = plain_step(model, x, y, config)
        for _ in range(5):
            step()
        marks = [0.0, 0.0]
    else:
        with tempfile.TemporaryDirectory() as folder:
            place = "cpu" if bench.device.type == "cuda" else folder
            pruner.meta_fit(
                source, progress=False, offload=place if kind == "offload" else None,
                callback=lambda *_: marks.append(time.perf_counter()),
            )  # fmt: skip
    whole = _memory(bench)
    return whole - before, whole, marks[1] - marks[0]


def _memory(bench: Bench, *, reset: bool = False) -> float:
    """Bytes at the peak since the last reset, or, after a reset, now; Linux's on the CPU."""
    if bench.device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return float(torch.cuda.max_memory_allocated())
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return 1024.0 * int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0])


def in_process(function: str, bench: Bench, *arguments: Any) -> Any:
    """What a function of this file finds in a process of its own."""
    asked = json.dumps([function, bench.device.type, bench.quick, *arguments])
    run = subprocess.run(
        [sys.executable, __file__, "one", asked], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(run.stdout)


def one(function: str, device: str, quick: bool, *arguments: Any) -> Any:
    bench = Bench(device, quick)
    if function == "grown":
        return grown(bench, *arguments)
    kind, name, width, changes = arguments
    return peak(kind, bench, name, width, fit_config(bench, **changes))


def memory(bench: Bench) -> Iterator[Record]:
    """Peak memory of meta-fitting as a multiple of plain training's, also with ``offload``.

    ``ratio`` is of what training takes, ``whole_ratio`` of all that the process has: on the CPU
    with Python, torch and the images. ``seconds_ratio`` is of an iteration with ``offload`` to one
    without.
    """
    widths = (0.25,) if bench.quick else (0.25, 1.0)
    for name, width in [(n, w) for n in NETS for w in widths]:
        for weight_steps in (0, 2):
            found = {
                kind: in_process("peak", bench, kind, name, width, {"weight_steps": weight_steps})
                for kind in ("plain", "meta_fit", "offload")
            }
            plain, plain_whole, _ = found["plain"]
            for kind in ("meta_fit", "offload"):
                own, whole, seconds = found[kind]
                yield {
                    "net": name, "width": width, "weight_steps": weight_steps,
                    "offload": kind == "offload", "plain_bytes": plain, "bytes": own,
                    "ratio": own / plain, "whole_ratio": whole / plain_whole,
                    "seconds_ratio": seconds / found["meta_fit"][2],
                }  # fmt: skip


def growth(bench: Bench) -> Iterator[Record]:
    """Seconds of an iteration and peak memory; slopes of their logarithms from the value before.

    Images of the set come in five minibatches, whatever their number, as in the paper.
    """
    sets = (160, 320, 640, 1280, 2560)
    cases: dict[str, list[tuple[float, Record, Record]]] = {
        "tasks": [(n, {}, {"tasks_per_iteration": n}) for n in (1, 2, 4, 8)],
        "images": [(n, {}, _of_set(n)) for n in sets],
        "images, induced points": [(n, {"induced": 64}, _of_set(n)) for n in sets],
        "width": [(w, {"width": w}, {}) for w in (0.25, 0.5, 1.0)],
        "depth": [(d, {"depth": d}, {}) for d in (1, 2, 4)],
        "size": [(s, {"size": s}, {}) for s in (16, 32, 64)],
    }
    for what, points in cases.items():
        last: Record | None = None
        for value, made, changes in points[:2] if bench.quick else points:
            seconds, bytes_ = in_process("grown", bench, made, changes)
            row = {"over": what, "value": value, "seconds": seconds, "bytes": bytes_}
            for name in ("seconds", "bytes"):
                before = None if last is None else (last["value"], last[name])
                row[f"slope_of_{name}"] = before and _slope(before, (value, row[name]))
            last = row
            yield row


def _of_set(images_: int) -> Record:
    return {"shots": images_ // 10, "minibatch_size": images_ // 5}


def grown(bench: Bench, made: Record, changes: Record) -> tuple[float, float]:
    """Seconds of an iteration and peak bytes of a meta-fit of a small VGG."""
    size, width, depth = made.get("size", 32), made.get("width", 0.25), made.get("depth", 2)
    stages = [[round(width * channels)] * depth for channels in (64, 128, 256)]
    net = VGG(stages, CLASSES).to(bench.device)
    small = {"tasks_per_iteration": 1, "shots": 16, "minibatch_size": 32}
    encoder = SetTransformer(3, induced=made.get("induced", 0))
    pruner = pruner_of(net, fit_config(bench, **(small | changes)), size, encoder)
    source = reference(pruner.config.shots, size)
    before = _memory(bench, reset=True)
    return fit_seconds(bench, pruner, source)[0], _memory(bench) - before


def _slope(one: tuple[float, float], two: tuple[float, float]) -> float:
    """1 is linear, 2 quadratic."""
    logs = [torch.tensor(pair, dtype=torch.float64).log() for pair in (one, two)]
    x, y = (logs[1] - logs[0]).tolist()
    return y / x


class Photographs(Dataset[tuple[Tensor, int]]):
    """Random pictures of 256x256 pixels, cropped to 32x32 and mirrored at random.

    As JPEG, which is decoded when they are read, or small and in memory, and then mirrored alone.
    """

    def __init__(self, number: int, *, jpeg: bool) -> None:
        self.number = number
        pictures = torch.rand(500, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        large = F.interpolate(pictures, (256, 256), mode="bicubic").clamp(0, 1)
        self.files = [encode_jpeg(picture) for picture in (255 * large).byte()] if jpeg else []
        self.pictures = pictures
        self.targets = torch.arange(number) % CLASSES
        self.crop = v2.Compose([v2.RandomResizedCrop(32), v2.ToDtype(torch.float32, scale=True)])
        self.mirror = v2.RandomHorizontalFlip()

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        place = index % len(self.pictures)
        image = self.pictures[place]
        if self.files:
            image = self.crop(decode_jpeg(self.files[place]))
        return self.mirror(image), int(self.targets[index])


def reading(bench: Bench) -> Iterator[Record]:
    """Seconds of an iteration where images are decoded one by one, by the wall clock.

    As multiples of those with decoded images.
    """
    config = fit_config(bench, iterations=2 if bench.quick else 4, weight_steps=10)
    decoded = 0.0
    for jpeg, workers in ((False, 0), (True, 0), (True, 1), (True, 2)):
        data = Photographs(CLASSES * config.shots, jpeg=jpeg)
        marks: list[float] = []
        pruner_of(vgg19(CLASSES, width=0.25).to(bench.device), config).meta_fit(
            TaskSampler(data, 10, config.shots), progress=False, num_workers=workers,
            callback=lambda *_, marks=marks: marks.append(time.perf_counter()),
        )  # fmt: skip
        seconds = min(b - a for a, b in itertools.pairwise(marks))
        decoded = decoded or seconds
        yield {
            "net": "vgg19", "width": 0.25, "images": "JPEG" if jpeg else "decoded",
            "workers": workers, "seconds": seconds, "ratio": seconds / decoded,
        }  # fmt: skip


def ranks(bench: Bench) -> Iterator[Record]:
    """Iterations a second of two processes against one, by the wall clock.

    With ten steps under masks for four tasks; without any; and with parts of their own.
    """
    masks = {"weight_steps": 10}
    cases = [("vgg19", 0.25, {"weight_steps": 0}), ("vgg19", 0.25, masks)]
    cases += [("vgg19", 0.25, {**masks, "weight_parts": 2})]
    cases += [] if bench.quick else [("vgg19", 1.0, masks), ("resnet18", 1.0, masks)]
    for name, width, changes in cases:
        made = {"name": name, "width": width, "iterations": 3 if width < 1 else 2}
        seconds = {number: _spawned(number, bench.quick, made | changes) for number in (1, 2)}
        yield {
            "net": name, "width": width, **changes, "seconds": seconds[1],
            "seconds_on_two": seconds[2], "speedup": seconds[1] / seconds[2],
        }  # fmt: skip


def _spawned(number: int, quick: bool, made: Record) -> float:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (number, folder, quick, made), nprocs=number)
        return float(Path(folder, "seconds").read_text())


def _rank(rank: int, number: int, folder: str, quick: bool, made: Record) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=number
    )
    name, width = made.pop("name"), made.pop("width")
    config = fit_config(Bench("cpu", quick), **{"tasks_per_iteration": 4, **made})
    marks: list[float] = []
    pruner_of(NETS[name](CLASSES, width=width), config).meta_fit(
        reference(config.shots), progress=False,
        callback=lambda *_: marks.append(time.perf_counter()),
    )  # fmt: skip
    if rank == 0:
        Path(folder, "seconds").write_text(str(marks[-1] - marks[0]))
    distributed.destroy_process_group()


def paper(bench: Bench) -> Iterator[Record]:
    """Hours of the paper's meta-fit of VGG-19, from measured iterations of one of its tasks."""
    config = STAMPConfig.paper(iterations=2, tasks_per_iteration=1)
    width = 0.25 if bench.quick else 1.0
    for amp in (False, True):
        config = STAMPConfig(**{**config.to_dict(), "budget_range": (0.1, 0.6), "amp": amp})
        model = vgg19(CLASSES, width=width).to(bench.device)
        seconds, _ = fit_seconds(bench, pruner_of(model, config))
        hours = seconds * 10 * 2000 / 3600
        yield {"width": width, "amp": amp, "seconds_per_task": seconds, "hours": hours}


SECTIONS = {
    "steps": steps,
    "compiled": compiled,
    "throughput": throughput,
    "memory": memory,
    "growth": growth,
    "reading": reading,
    "ranks": ranks,
    "paper": paper,
}


def save(name: str, rows: list[Record], bench: Bench) -> None:
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    device = torch.cuda.get_device_name() if bench.device.type == "cuda" else _cpu()
    entry = {"device": device, "torch": torch.__version__, "quick": bench.quick, "rows": rows}
    found[f"{name} ({bench.device.type})"] = entry
    atomic_write(RESULTS, (json.dumps(found, indent=1) + "\n").encode())


def _cpu() -> str:
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(names or ['CPU'])[0]}, one thread"


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=[*SECTIONS, "all", "one"])
    parser.add_argument("asked", nargs="?", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    if arguments.section == "one":
        print(json.dumps(one(*json.loads(arguments.asked))))
        return
    bench = Bench(arguments.device, arguments.quick)
    for name in SECTIONS if arguments.section == "all" else [arguments.section]:
        rows = []
        for row in SECTIONS[name](bench):
            print(name, json.dumps(row), flush=True)
            rows.append(row)
        save(name, rows, bench)


if __name__ == "__main__":
    main()
