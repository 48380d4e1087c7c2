"""Fill the tables of README.md, and write the pages of docs/ that hold figures, from JSON.

python benchmarks/tables.py
"""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import meta_fit_page
from budgets import tables as budget_tables
from digits import table
from networks import FAMILIES, NETWORKS
from small_data import tables as small_data_tables

from stamppruner.bench import DOLLARS_PER_HOUR, Figures, markdown
from stamppruner.files import atomic_write
from stamppruner.report.format import markdown_table

ROOT = Path(__file__).parent.parent
MARK = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
COVERAGE = """\
# Which networks can be cut

Stock networks with random weights, {gone}% of every group of channels cut at random, on one core.
Each is traced, cut, compared with the masked full network in double precision at every layer,
trained for a step, saved, and loaded with the same bits; *ok* means all of it. `protected` is the
share of output channels of inner layers that are left whole; seconds are those of tracing and the
cut, and in brackets with the proof of every group; memory is what that and the certificate of
this cut took beside the model.
torch-pruning {tp} with its defaults and the same output layers left whole ran on the same
network; what it cut is not compared with the full network, *ok* there means that it ran within
{tp_seconds} s and that the result runs and keeps the shape of its outputs.

A detector is cut as a whole, through a view of it that runs all its layers on fixed boxes
(`DetectorView` in `benchmarks/networks.py`); MACs count the view, with two boxes an image.
{left_out}
This page is made by `python benchmarks/tables.py` from `benchmarks/results/coverage.json`, which
`python benchmarks/coverage.py` wrote with {versions}.

"""


SMALL_DATA_TITLE = """\
# Small targets of real images

The reference is 100 classes of Tiny-ImageNet at 32x32. Targets are 1,000 images of CIFAR-10 (or as
many as the name says), the same with inverted colours and as animals against vehicles, 1,000 images
of Fashion-MNIST, 500 handwritten digits and 500 rendered Greek capitals, tested on all their test
images; a cell is the mean over seeds, with the standard deviation where there are several. Every
method of a section has the same backbone, the same head start (a ridge head, batch norms of the
target), epochs and schedule, in bfloat16 autocast. STAMP alone re-solves its weights by least
squares and trains them under masks when it is meta-fitted; the other methods cut the backbone as it
is. *K = 3* learns gates and weights on the target for three epochs of the full network before the
cut, which takes longer than all the rest of pruning; STAMP without it has K = 0, the default.
*STAMP-Structure* is STAMP's network with random weights, *full, from scratch* the full one with
random weights. The swap test prunes for every target, and uses and trains every network on every
target (`swap_test`): *own minus other* is what the network that was pruned for a target gains on it
over those of the others, IoU the channels that two networks share, of those that either keeps.
Differences are means over the cells (a seed of a target) that a method was run on, with 95%
intervals of the bootstrap; seconds are medians of pruning and of fine-tuning, on one core of a
machine that had other work.

This page is made by `python benchmarks/tables.py` from JSON that `python benchmarks/small_data.py`
wrote.
"""
SMALL_DATA = """
## {arch} at a width of {width}{how}

{backbone:.1f}% of the reference's held-out images; seeds {seeds}{fewer}; {epochs} epochs at lr
{lr}, gradients clipped to {clip}; meta-fitted for {iterations} iterations with {weight_steps} steps
under masks in each. From `benchmarks/results/{name}`{note}.
"""


def small_data_page() -> str:
    """docs/small-data.md, from the records of benchmarks/small_data.py."""
    paths = sorted((ROOT / "benchmarks/results").glob("small-data-*.json"), reverse=True)
    return SMALL_DATA_TITLE + "".join(_net(p.name, json.loads(p.read_text())) for p in paths)


def _net(name: str, record: dict[str, Any]) -> str:
    setting = record["setting"]
    seeds = sorted({run["seed"] for run in record["runs"]})
    clip = setting["finetune"].get("clip")
    how = ""
    if any(run["method"] == "STAMP, K = 3" for run in record["runs"]):
        how += ", with K = 3"
    text = SMALL_DATA.format(
        arch=setting["arch"],
        width=setting["width"],
        backbone=100 * setting["backbone_accuracy"],
        seeds=", ".join(map(str, seeds)),
        fewer=_fewer_seeds(record["runs"], seeds),
        epochs=setting["finetune"]["epochs"],
        lr=setting["finetune"]["lr"],
        how=how,
        clip=clip,
        name=name,
        iterations=setting["config"]["iterations"],
        weight_steps=setting["config"]["weight_steps"],
        note=", on held-out training images" if setting["held_out"] else "",
    )
    return text + small_data_tables(record)


def _fewer_seeds(runs: list[dict[str, Any]], seeds: list[int]) -> str:
    """Which methods were not run with all seeds everywhere, in brackets."""
    of: dict[str, dict[tuple[str, float], set[int]]] = {}
    for run in runs:
        cell = run["target"], run["macs"]
        of.setdefault(run["method"], {}).setdefault(cell, set()).add(run["seed"])
    found: dict[str, str] = {}
    for method, cells in of.items():
        numbers = {len(own) for own in cells.values()}
        if numbers != {len(seeds)}:
            least, most = min(numbers), max(numbers)
            found[method] = str(most) if least == most else f"{least} to {most}"
    text = "; ".join(f"{method}: {number}" for method, number in found.items())
    return text and f" (seeds a cell of {text})"


def fill(text: str) -> str:
    """The text with every marked table made anew."""

    def made(match: re.Match[str]) -> str:
        record = json.loads((ROOT / match[2]).read_text())
        return f"{match[1]}{_table_of(record)}\n{match[3]}"

    return MARK.sub(made, text)


def _table_of(record: dict[str, Any]) -> str:
    """The table of a record of digits.py, budgets.py or ``stamppruner bench``."""
    if "preset" in record:
        return markdown(record, DOLLARS_PER_HOUR)
    if "estimates" in record:
        return _estimates(record["estimates"])
    return budget_tables(record) if "exact" in record else table(record["runs"])


def _estimates(found: dict[str, Any]) -> str:
    """Hours of presets, from what ``stamppruner bench --estimate --json`` printed."""
    headers = ["preset", "backbone", "meta-fitting", "with the paper's settings", "cells",
               "all cells", "in all"]  # fmt: skip
    rows = [
        [
            f"`{name}`",
            *(f"{seconds / 3600:,.0f}" for seconds in one["steps"].values()),
            str(one["number"]),
            f"{one['cells'] / 3600:,.0f}",
            f"{one['hours']:,.0f}",
        ]
        for name, one in found.items()
    ]
    return markdown_table(headers, rows)


def draw(folder: Path) -> None:
    """Pictures of every record of ``stamppruner bench``, a folder each."""
    for path in (ROOT / "benchmarks/results").glob("bench-*.json"):
        Figures(json.loads(path.read_text())).save(folder / path.stem)


def coverage_page(record: dict[str, Any]) -> str:
    """docs/coverage.md, from the record of benchmarks/coverage.py."""
    networks, setting = record["networks"], record["setting"]
    members = _by_family(networks)
    left = [f"{key} ({count / 1e6:.0f}M)" for key, count in record["left_out"].items()]
    most = f"{setting['most_parameters'] / 1e6:.0f}M"
    page = COVERAGE.format(
        gone=round(100 * (1 - setting["keep"])),
        tp=record["versions"]["torch_pruning"],
        tp_seconds=setting["limit_seconds"]["torch_pruning"],
        left_out=f"Left out, for more than {most} parameters: {', '.join(left)}.\n" if left else "",
        versions=", ".join(f"{name} {v}" for name, v in record["versions"].items()),
    )
    page += _summary({"all": networks, **members}) + "\n"
    for family, found in members.items():
        page += f"\n## {FAMILIES[family]}\n\n{_networks(found)}\n"
    return page


def _by_family(networks: dict[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for family in FAMILIES:
        keys = [k for k, n in NETWORKS.items() if n.family == family and k in networks]
        if keys:
            found[family] = {key: networks[key] for key in keys}
    return found


def _summary(members: dict[str, dict[str, Any]]) -> str:
    rows = []
    for family, found in members.items():
        runs = list(found.values())
        seconds = [_seconds(run) for run in runs if "shrink_seconds" in run]
        theirs = [run["torch_pruning"]["ok"] for run in runs if "torch_pruning" in run]
        rows.append(
            [
                FAMILIES.get(family, family),
                str(len(runs)),
                str(sum(run.get("certified", False) for run in runs)),
                str(sum(run["ok"] for run in runs)),
                _share(sum(_gone(run) >= 0.6 for run in runs) / len(runs)),
                _share(sum(_gone(run) >= 0.4 for run in runs) / len(runs)),
                f"{median(seconds):.2f}" if seconds else "-",
                f"{max(seconds):.1f}" if seconds else "-",
                f"{sum(theirs)} of {len(theirs)}",
            ]
        )
    headers = ["family", "networks", "certified", "ok", "60% of MACs gone, %", "40% gone, %",
               "trace + cut, median s", "most s", "torch-pruning ok"]  # fmt: skip
    return markdown_table(headers, rows)


def _networks(found: dict[str, Any]) -> str:
    rows = []
    for key, run in found.items():
        rows.append(
            [
                key.partition("/")[2],
                "yes" if run["ok"] else "no",
                _share(run.get("macs_left")),
                _share(run.get("protected_share")),
                _reason(run),
                _both_seconds(run) if "shrink_seconds" in run else "-",
                str(run.get("peak_mib", "-")),
                _theirs(run["torch_pruning"]) if "torch_pruning" in run else "not run",
            ]
        )
    headers = ["network", "ok", "MACs left, %", "protected, %", "main reason", "s", "MiB",
               "torch-pruning: MACs left, %"]  # fmt: skip
    return markdown_table(headers, rows)


def _gone(run: dict[str, Any]) -> float:
    """The share of MACs that is proved to be removable."""
    return 1 - run.get("macs_left", 1) if run.get("certified") else 0.0


def _seconds(run: dict[str, Any]) -> float:
    return run["probe_seconds"] + run["shrink_seconds"]


def _both_seconds(run: dict[str, Any]) -> str:
    """Without and with the proof."""
    return f"{_seconds(run):.1f} ({run['trace_seconds'] + run['shrink_seconds']:.1f})"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}"


def _reason(run: dict[str, Any]) -> str:
    """What keeps the most layers whole, or what went wrong."""
    if "error" in run:
        return _cell(run["error"])
    if not run.get("certified", True):
        return _cell(run["verdict"])
    failed = [step for step in ("trained", "reloaded") if not run.get(step)]
    if failed:
        return f"not {' and not '.join(failed)}"
    return _cell(next(iter(run["reasons"]), ""))


def _theirs(run: dict[str, Any]) -> str:
    return _share(run.get("macs_left")) if run["ok"] else f"fails: {_cell(run['error'])}"


def _cell(text: str) -> str:
    """Text that fits a cell of a table."""
    text = " ".join(text.replace("|", "/").replace("<", "(").replace(">", ")").split())
    return text if len(text) <= 70 else f"{text[:67]}..."


if __name__ == "__main__":
    for filled in (ROOT / "README.md", ROOT / "docs/budgets.md", ROOT / "docs/paper-tables.md"):
        atomic_write(filled, fill(filled.read_text()).encode())
    record = json.loads((ROOT / "benchmarks/results/coverage.json").read_text())
    atomic_write(ROOT / "docs/coverage.md", coverage_page(record).encode())
    atomic_write(ROOT / "docs/small-data.md", small_data_page().encode())
    draw(ROOT / "docs/pictures")
    record = json.loads((ROOT / "benchmarks/results/meta-fit.json").read_text())
    atomic_write(ROOT / "docs/meta-fitting-cost.md", meta_fit_page.page(record).encode())
    growth = record.get("growth (cpu)", {"quick": True})
    if not growth["quick"]:
        meta_fit_page.draw(growth["rows"], ROOT / "docs/pictures/meta-fit/growth.svg")
