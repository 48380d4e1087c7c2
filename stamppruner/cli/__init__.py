"""The command line: one file a command."""

from __future__ import annotations

import argparse
import os
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
from stamppruner.cli._group import group
from stamppruner.errors import PreemptedError, StampError

PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h
_PIPE = 141  # 128 + SIGPIPE, as shells say

_COMMANDS = (demo, meta_fit, prune, pareto, finetune, evaluate, inspect, export, bench)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    It is 0, 1 for an error of ours, 2 for bad usage, 75 (try again) where SIGTERM ended
    meta-fitting with a checkpoint, 130 when interrupted.
    """
    arguments = _parser().parse_args(argv)
    try:
        with group(arguments):
            code = int(arguments.run(arguments) or 0)
            sys.stdout.flush()
            return code
    except PreemptedError as error:
        print(f"stamppruner: {_one_line(error)}", file=sys.stderr)
        return PREEMPTED
    except StampError as error:
        print(f"stamppruner: {type(error).__name__}: {_one_line(error)}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # who reads our output has enough, as in "... | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nothing fails at exit
        return _PIPE
    except KeyboardInterrupt:
        print("stamppruner: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stamppruner",
        description="Train a backbone once, give every new data set its own small network.",
        epilog="Every command has --help with an example; exit codes: 0, 1 for an error that is "
        "named in one line, 2 for bad usage, 75 when SIGTERM ended it with a checkpoint, 130 when "
        "interrupted.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


def _one_line(error: StampError) -> str:
    return " ".join(str(error).split())
