"""``stamppruner inspect``: what is in a file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from stamppruner.cli import _shared


def add_to(commands: Any) -> None:
    """The command and its arguments."""
    inspect = commands.add_parser(
        "inspect",
        help="what is in a file of this package",
        description="Reads the header of a slim network or a pruner; no weights, no model.",
        epilog="example: stamppruner inspect slim.safetensors",
    )
    inspect.add_argument("file", metavar="FILE", help="slim network or pruner, *.safetensors")
    _shared.add_output(inspect, "the summary")
    inspect.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Describe the file."""
    from stamppruner import pruner_file, slim
    from stamppruner.io import parse_record, read_metadata

    metadata = read_metadata(arguments.file)
    if pruner_file.FORMAT in metadata:
        kind = (pruner_file.FORMAT, pruner_file.VERSION)
        record = parse_record(metadata, *kind, arguments.file, noun="pruner")
        text = _pruner(record)
    else:
        record = slim.describe(arguments.file)
        text = _slim(record)
    _shared.show(arguments, text, record)


def _slim(record: Mapping[str, Any]) -> str:
    images, reached = record.get("images") or {}, record.get("reached") or {}
    budget = record.get("budget") or {}
    kept = record.get("kept") or {}
    return _table(
        {
            "slim network": record.get("model_class"),
            "made by": _factory(record),
            "images": _shape(record.get("input_shape")),
            "normalised": _shared.normalisation(record),
            "classes": _shared.shortened(images.get("classes", []), 8),
            "budget asked": ", ".join(f"{name} {value:g}" for name, value in budget.items()),
            "reached": ", ".join(f"{name} {value:.4g}" for name, value in reached.items()),
            "channel groups": len(kept) if isinstance(kept, dict | list) else "",
            "projected shortcuts": len(record.get("projections") or []) or "",
        }
    )


def _pruner(record: Mapping[str, Any]) -> str:
    groups = record.get("groups") or []
    return _table(
        {
            "pruner of": record.get("model_class"),
            "made by": _factory(record),
            "images": _shape(record.get("image_shape")),
            "channel groups": len(groups),
            "channels": sum(group[1] for group in groups),
            "meta-fitted": "yes" if record.get("meta_fitted") else "no",
            "iterations": len(record.get("history") or []),
            "shortcuts": record.get("shortcuts"),
        }
    )


def _factory(record: Mapping[str, Any]) -> str:
    factory = record.get("factory")
    if not factory:
        return "a class of yours: pass it in Python, or --model if it is one of that list"
    given = ", ".join(f"{key}={value}" for key, value in factory["arguments"].items())
    return f"{factory['name']}({given})"


def _shape(shape: Any) -> str:
    return " x ".join(map(str, shape)) if shape else ""


def _table(rows: Mapping[str, Any]) -> str:
    shown = {name: str(value) for name, value in rows.items() if value not in (None, "")}
    width = max(map(len, shown))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in shown.items())
