"""``stamppruner pareto``: networks of several sizes for a folder of images."""

from __future__ import annotations

import argparse
from typing import Any

from stamppruner.cli import _shared


def add_to(commands: Any) -> None:
    """The command and its arguments."""
    pareto = commands.add_parser(
        "pareto",
        help="networks of several sizes for a folder of images",
        description="Scores the channels for the images once, and writes a network a budget, "
        "pareto.json and the page pareto.html.",
        epilog="example: stamppruner pareto backbone.stamp.safetensors "
        "--data birds/train --test birds/test --macs 0.5 0.25 0.1 --finetune 20 --out nets",
    )
    add = pareto.add_argument
    add("pruner", metavar="PRUNER", help="*.stamp.safetensors file of meta-fit")
    _shared.add_folders(pareto)
    add("--macs", required=True, nargs="+", type=float, metavar="SHARE",
        help="of the full network's multiply-adds, one a network")  # fmt: skip
    add("--out", required=True, metavar="DIR", help="folder for the files; made if missing")
    add("--finetune", type=int, metavar="EPOCHS", help="train every network on the images")
    _shared.add_model(pareto, required=False)
    _shared.add_statistics(pareto, "as the pruner says")
    _shared.add_output(pareto, "the table")
    pareto.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prune for every budget."""
    from stamppruner.files import check_folder
    from stamppruner.pareto import PAGE, RECORD, as_budgets

    budgets = as_budgets(arguments.macs)
    pruner, shape = _shared.loaded_pruner(arguments)
    data, test = _shared.pair_of_folders(arguments, shape, pruner)
    folder = check_folder(arguments.out, [RECORD])
    with _shared.known_warnings():
        found = pruner.pareto(
            data,
            budgets,
            evaluate_on=test,
            finetune=None if arguments.finetune is None else {"epochs": arguments.finetune},
            progress=not arguments.quiet,
        )
    found.save(folder)
    _shared.show(arguments, found.table(), found.to_json())
    for note in found.warnings:
        _shared.say(arguments, f"warning: {note}")
    files = f"{len(found.points)} networks, {PAGE} and {RECORD}"
    _shared.say(arguments, f"wrote {files} to {folder}")
