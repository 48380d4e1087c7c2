"""The command line: one file a command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from stamppruner.cli import (
    bench,
    demo,
    evaluate,
    export,
    finetune,
    inspect,
    meta_fit,
    pareto,
    prune,
)
from stamppruner.errors import StampError

_COMMANDS = (demo, meta_fit, prune, pareto, finetune, evaluate, inspect, export, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for an error of ours, 2 for bad usage."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments) or 0)
    except StampError as error:
        print(f"stamppruner: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stamppruner: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stamppruner",
        description="Train a backbone once, give every new data set its own small network.",
        epilog="Every command has --help with an example; exit codes: 0, 1 for an error that is "
        "named in one line, 2 for bad usage, 130 when interrupted.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


def _one_line(error: StampError) -> str:
    return " ".join(str(error).split())
