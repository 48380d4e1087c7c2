"""``stamppruner evaluate``: accuracy of a slim network on a folder of images."""

from __future__ import annotations

import argparse
from typing import Any

from stamppruner.cli import _shared


def add_to(commands: Any) -> None:
    """The command and its arguments."""
    evaluate = commands.add_parser(
        "evaluate",
        help="accuracy of a slim network on a folder of images",
        description="Reads the images as the file says and counts those that are told right.",
        epilog="example: stamppruner evaluate slim.safetensors --data photos/test --json",
    )
    add = evaluate.add_argument
    add("slim", metavar="SLIM", help="file of prune, pareto or finetune")
    _shared.add_folders(evaluate, test=False)
    _shared.add_model(evaluate, required=False)
    _shared.add_statistics(evaluate, "as the file says")
    _shared.add_output(evaluate, "the accuracy")
    evaluate.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Measure."""
    from stamppruner.finetune import evaluate
    from stamppruner.slim import describe

    data = _shared.labelled_for(describe(arguments.slim), arguments.data, arguments)
    accuracy = evaluate(_shared.loaded_slim(arguments), data)
    record = {"accuracy": accuracy, "images": len(data), "classes": len(data.classes)}
    _shared.show(arguments, f"accuracy {accuracy:.2%} on {len(data)} images", record)
