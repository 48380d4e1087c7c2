"""``stamppruner bench``: the paper's tables and pictures."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from stamppruner.cli import _shared


def add_to(commands: Any) -> None:
    """The command and its arguments."""
    bench = commands.add_parser(
        "bench",
        help="the paper's tables and pictures, every method on one protocol",
        description="Trains a backbone on the reference, meta-fits, prunes and fine-tunes with "
        "every method, and writes bench.json, table.md, table.csv, table.tex and figures/*.svg. "
        "What is done is not done again: a command that was interrupted goes on.",
        epilog="example: stamppruner bench vgg19-small --reference photos "
        "--images photos=photos birds=birds --targets birds --out bench-birds",
    )
    add = bench.add_argument
    add("preset", metavar="PRESET", help="of the paper's size: vgg19-cifar10, vgg19-svhn, "
        "resnet18-cifar10, resnet18-svhn; vgg19-small, resnet18-small; or FILE.json")  # fmt: skip
    add("--out", metavar="DIR", help="folder of the files (default bench-PRESET)")
    add("--data", default="data", metavar="DIR", help="folder of downloads (default data)")
    add("--images", nargs="+", default=[], metavar="NAME=DIR", type=_named_folder,
        help="folders with train/CLASS and test/CLASS or val/CLASS, for data sets")  # fmt: skip
    add("--reference", metavar="NAME", help="data set in place of the preset's reference")
    add("--targets", nargs="+", metavar="NAME", help="data sets in place of its targets")
    add("--seeds", nargs="+", type=int, metavar="N", help="in place of its seeds")
    add("--rows", nargs="+", metavar="ROW", help="only these rows, such as Full STAMP")
    add("--dollars-per-hour", type=float, default=None, metavar="X",
        help="of the machine, for the Expense (default 1.46, the paper's)")  # fmt: skip
    add("--device", metavar="NAME", help="cpu or cuda (default: cuda where there is one)")
    add("--estimate", action="store_true", help="run an epoch of every row on noise, say what "
        "the whole would cost, and end")  # fmt: skip
    add("--show", action="store_true", help="print the preset as JSON, and end")
    _shared.add_output(bench, "the table")
    bench.set_defaults(run=run)


def _named_folder(text: str) -> tuple[str, str]:
    name, equals, folder = text.partition("=")
    if not (name and equals and folder):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR")
    return name, folder


def run(arguments: argparse.Namespace) -> None:
    """Run what is left of the grid, and write the tables and pictures."""
    from stamppruner import bench
    from stamppruner.files import atomic_write

    preset = bench.find_preset(arguments.preset)
    changes: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name in ("reference", "targets", "seeds")
        if (value := getattr(arguments, name)) is not None
    }
    preset = dataclasses.replace(preset, **changes)
    if arguments.show:
        print(json.dumps(preset.to_json(), indent=2))
        return
    out = Path(arguments.out or f"bench-{preset.name}")
    dollars = arguments.dollars_per_hour
    dollars = bench.DOLLARS_PER_HOUR if dollars is None else dollars
    sources = bench.Sources(arguments.data, dict(arguments.images), cache=out / "images")

    def say(line: str) -> None:
        _shared.say(arguments, line)

    settings: dict[str, Any] = {"rows": arguments.rows, "device": arguments.device, "say": say}
    if arguments.estimate:
        found = bench.estimate(preset, sources, **settings)
        record = {**dataclasses.asdict(found), "hours": found.hours}
        _shared.show(arguments, found.table(dollars), record)
        return
    with _shared.known_warnings():
        one = bench.Bench(preset, out, sources, progress=not arguments.quiet, **settings)
        one.run()
    written = {
        "table.md": bench.markdown(one.record, dollars),
        "table.csv": bench.as_csv(one.record, dollars),
        "table.tex": bench.latex(one.record, dollars),
    }
    for name, text in written.items():
        atomic_write(out / name, text.encode())
    figures = bench.Figures(one.record).save(out / "figures")
    _shared.show(arguments, written["table.md"], one.record)
    say(f"wrote {bench.RECORD}, {', '.join(written)} and {len(figures)} pictures to {out}")
