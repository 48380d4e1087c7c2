"""The page and the picture of what meta-fitting costs, from the record of ``meta_fit.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from stamppruner.files import atomic_write
from stamppruner.report.format import markdown_table

Row = dict[str, Any]
Section = tuple[str, str, list[str], list[list[str]]]
"""Title, text, and headers and cells of a table."""

PAGE = """\
# What meta-fitting costs

Beside plain training of the same network with the same optimizer, on random images of 32x32 pixels
and random weights. Times are seconds of the process. A width of 1 is the network itself.
{devices}
This page is made by `python benchmarks/tables.py` from `benchmarks/results/meta-fit.json`, which
`python benchmarks/meta_fit.py all` wrote.
"""
NETS = {"vgg19": "VGG-19", "resnet18": "ResNet-18"}
COLOURS, MARKERS, DASHES = ("#0072B2", "#D55E00"), "os", ("-", "--")
AXES = {
    "tasks": "tasks an iteration, N",
    "images": "images of the set, B",
    "width": "width",
    "depth": "layers a stage",
    "size": "side of the images, pixels",
}
INDUCED = "images, induced points"


def page(record: dict[str, Any]) -> str:
    """docs/meta-fitting-cost.md."""
    parts = [PAGE.format(devices=_devices(record))]
    for section, make in SECTIONS.items():
        for name in record:
            if name.partition(" (")[0] == section and not record[name]["quick"]:
                device = "" if len(_of_section(record, section)) == 1 else f", {_device(name)}"
                title, text, headers, cells = make(record[name]["rows"])
                parts.append(f"## {title}{device}\n\n{text}\n\n{markdown_table(headers, cells)}")
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _of_section(record: dict[str, Any], section: str) -> list[str]:
    return [name for name in record if name.partition(" (")[0] == section]


def _device(name: str) -> str:
    return name.partition(" (")[2].rstrip(")").upper()


def _devices(record: dict[str, Any]) -> str:
    found = {_device(name): (e["device"], e["torch"]) for name, e in record.items()}
    return "".join(f"{kind}: {device}; torch {torch}.\n" for kind, (device, torch) in found.items())


def _net(row: Row) -> list[str]:
    return [NETS[row["net"]], f"{row['width']:g}"]


def _steps(rows: list[Row]) -> Section:
    headers = ["network", "width", "minibatch", "images of the set", "dtype", "heap",
               "plain step, ms", "relaxed masks", "masks under budgets"]  # fmt: skip
    cells = [
        [*_net(r), str(r["batch"]), str(r["set"]), "bfloat16" if r["amp"] else "float32",
         r["heap"], f"{1000 * r['plain_seconds']:.0f}", f"{r['relaxed']:.2f}",
         f"{r['budgeted']:.2f}"]
        for r in rows
    ]  # fmt: skip
    text = (
        "The set encoder, the pseudo image's pass, the mask, the masked network, KL and Adam, as "
        "multiples of a plain step. The paper's settings are minibatches of 128 of a set of 640, "
        "the defaults here 32 of 160. What the set costs does not depend on the minibatch, and "
        "hardly on the network, so a small network in small minibatches pays most. A heap is kept "
        "where freed memory stays with the process, as [meta-fitting](meta-fitting.md) has it."
    )
    return "A step", text, headers, cells


def _compiled(rows: list[Row]) -> Section:
    headers = ["network", "width", "minibatch", "images of the set", "dtype", "plain, ms",
               "compiled", "under masks, ms", "compiled"]  # fmt: skip
    cells = [
        [*_net(r), str(r["batch"]), str(r["set"]), "bfloat16" if r["amp"] else "float32",
         f"{1000 * r['plain_seconds']:.0f}", f"{r['compiled_seconds'] / r['plain_seconds']:.2f}",
         f"{1000 * r['plain_gated_seconds']:.0f}",
         f"{r['compiled_gated_seconds'] / r['plain_gated_seconds']:.2f}"]
        for r in rows
    ]  # fmt: skip
    text = (
        "`meta_fit(compile=True)`: a plain step and one under relaxed masks, and the time of each "
        "through `torch.compile` as a multiple of that without. The set encoder and the pseudo "
        "image's pass are not compiled; compiling takes about half a minute and does not count. A "
        "heap is kept."
    )
    return "Compiled", text, headers, cells


def _throughput(rows: list[Row]) -> Section:
    headers = ["network", "width", "minibatch", "steps under masks", "images/s",
               "plain, images/s", "share, %"]  # fmt: skip
    cells = [
        [*_net(r), str(r["minibatch"]), str(r["weight_steps"]), f"{r['images_per_second']:.1f}",
         f"{r['plain_images_per_second']:.1f}", f"{100 * r['share']:.0f}"]
        for r in rows
    ]  # fmt: skip
    text = (
        "Iterations of 2 tasks of 640 images, with so many steps that train W under masks in "
        "minibatches of 128 (`weight_steps`); the teacher of these is asked once an image, in the "
        "first iteration, which does not count here. Plain steps are taken on the default heap, as "
        "loops of one's own are; meta-fitting keeps memory, which is why it can be the faster one."
    )
    return "Images a second", text, headers, cells


def _memory(rows: list[Row]) -> Section:
    headers = ["network", "width", "steps under masks", "offload", "plain, MiB", "meta-fit, MiB",
               "ratio", "ratio of the whole process", "time"]  # fmt: skip
    cells = [
        [*_net(r), str(r["weight_steps"]), "yes" if r["offload"] else "no",
         f"{r['plain_bytes'] / 2**20:.0f}", f"{r['bytes'] / 2**20:.0f}", f"{r['ratio']:.2f}",
         f"{r['whole_ratio']:.2f}", f"{r['seconds_ratio']:.2f}"]
        for r in rows
    ]  # fmt: skip
    text = (
        "Peak memory in minibatches of 128, beyond what the process had with the network and the "
        "images, and of the whole process. Plain training holds gradients and Adam's two "
        "averages. Meta-fitting holds as well, in sizes of the parameters: the parameters an "
        "iteration began with (1), the outer gradient in float64 (2), the outer Adam's averages "
        "(2), and with steps under masks their momentum (1) and the teacher (1). These do not "
        "grow with images or minibatches, so large images bring the ratio down. The rest is the "
        "images of a task and what the kept heap holds between its blocks. With `offload` all "
        "these lie in a file while nothing needs them, and the heap is not kept; the last column "
        "is the time of an iteration as a multiple of that without."
    )
    return "Memory", text, headers, cells


def _growth(rows: list[Row]) -> Section:
    headers = ["over", "value", "s an iteration", "slope", "MiB", "slope"]
    slope = partial(_number, form=".2f")
    cells = [
        [r["over"], f"{r['value']:g}", f"{r['seconds']:.2f}", slope(r["slope_of_seconds"]),
         f"{r['bytes'] / 2**20:.0f}", slope(r["slope_of_bytes"])]
        for r in rows
    ]  # fmt: skip
    text = (
        "A VGG of three stages at a quarter of the width; one task of 160 images in five "
        "minibatches, unless it says otherwise. A slope of 1 is linear, of 2 quadratic, from the "
        "value before. Layers have width times width weights, and images side times side pixels, "
        "so 2 is the slope of plain training there, too. Attention among images is quadratic; "
        "beyond about 1,000 pass `encoder=SetTransformer(3, induced=64)`, with which it is linear."
    )
    image = (
        "```{image} pictures/meta-fit/growth.svg\n"
        ":alt: Seconds and peak memory of an iteration over tasks, images, width, depth and size\n"
        ":width: 100%\n```"
    )
    return "Growth", f"{text}\n\n{image}", headers, cells


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _reading(rows: list[Row]) -> Section:
    headers = ["network", "width", "images", "`num_workers`", "s an iteration", "ratio"]
    cells = [
        [*_net(r), r["images"], str(r["workers"]), f"{r['seconds']:.2f}", f"{r['ratio']:.2f}"]
        for r in rows
    ]
    text = (
        "Iterations of two tasks and ten steps under masks, by the wall clock, on a machine with "
        "two cores. Pictures are mirrored at random; those in JPEG of 256x256 pixels are decoded "
        "and cropped to 32x32 before, one by one. The ratio is to pictures that are decoded."
    )
    return "Reading ahead", text, headers, cells


def _ranks(rows: list[Row]) -> Section:
    headers = ["network", "width", "steps under masks", "`weight_parts`", "s on one", "s on two",
               "speed-up"]  # fmt: skip
    cells = [
        [*_net(r), str(r["weight_steps"]), str(r.get("weight_parts", 1)), f"{r['seconds']:.1f}",
         f"{r['seconds_on_two']:.1f}", f"{r['speedup']:.2f}"]
        for r in rows
    ]  # fmt: skip
    text = (
        "Iterations of four tasks in processes of one thread, by the wall clock: two at a quarter "
        "of the width, else one."
    )
    return "Two processes", text, headers, cells


def _paper(rows: list[Row]) -> Section:
    headers = ["width", "dtype", "s a task", "hours"]
    cells = [
        [f"{r['width']:g}", "bfloat16" if r["amp"] else "float32", f"{r['seconds_per_task']:.2f}",
         f"{r['hours']:.1f}"]
        for r in rows
    ]  # fmt: skip
    text = (
        "VGG-19 in 2,000 iterations of 10 tasks of 5 minibatches of 128, projected from measured "
        "tasks; the paper names 15 hours on a GPU."
    )
    return "The paper's meta-fit", text, headers, cells


SECTIONS: dict[str, Callable[[list[Row]], Section]] = {
    "steps": _steps,
    "compiled": _compiled,
    "throughput": _throughput,
    "memory": _memory,
    "growth": _growth,
    "reading": _reading,
    "ranks": _ranks,
    "paper": _paper,
}


def draw(rows: list[Row], path: Path) -> None:
    """Seconds and memory over what grows; lines differ in marker and dashes, too."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "growth", "font.size": 9}):
        figure = Figure(figsize=(13, 5.2), layout="constrained")
        grid = figure.subplots(2, len(AXES), sharex="col")
        for column, (over, label) in enumerate(AXES.items()):
            for row, (name, unit) in enumerate({"seconds": 1, "bytes": 2**20}.items()):
                axes = grid[row][column]
                _lines(axes, rows, over, name, unit)
                axes.set_xlabel(label if row else "")
        grid[0][0].set_ylabel("s an iteration")
        grid[1][0].set_ylabel("peak memory, MiB")
        atomic_write(path, partial(figure.savefig, format="svg", metadata={"Date": None}))


def _lines(axes: Any, rows: list[Row], over: str, name: str, unit: float) -> None:
    kinds = [over, INDUCED] if over == "images" else [over]
    for kind, colour, marker, dash in zip(kinds, COLOURS, MARKERS, DASHES, strict=False):
        points = [(r["value"], r[name] / unit) for r in rows if r["over"] == kind]
        if not points:
            continue
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, color=colour, marker=marker, linestyle=dash, label=kind)
        if kind == over:
            line = [ys[0] * x / xs[0] for x in xs]
            axes.plot(xs, line, color="#777777", linestyle=":", label="linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    values = [r["value"] for r in rows if r["over"] == over]
    axes.set_xticks(values, [f"{v:g}" for v in values])
    axes.yaxis.set_major_formatter(lambda v, _: f"{v:.4g}")
    axes.grid(alpha=0.25)
    if over == "images":
        axes.legend(fontsize=7, frameon=False)
