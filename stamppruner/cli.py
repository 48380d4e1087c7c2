"""The command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from stamppruner.errors import StampError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for an error of ours, 2 for bad usage."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except StampError as error:
        print(f"stamppruner: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stamppruner: interrupted", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="stamppruner",
        description="Train a backbone once, give every new data set its own small network.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo",
        help="the whole job on data that comes with the install",
        description="Trains a small backbone on rendered characters, meta-fits a pruner, prunes "
        "it for handwritten digits, and compares. About two minutes on two cores.",
        epilog="example: stamppruner demo --arch vgg --out demo-out",
    )
    demo.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    demo.add_argument("--out", default="demo-out", help="folder for the files (default demo-out)")
    demo.add_argument("--fast", action="store_true", help="a weaker version in half a minute")
    demo.add_argument("--arch", choices=("resnet", "vgg"), default="resnet")
    demo.add_argument("--quiet", action="store_true", help="print the table alone")
    demo.set_defaults(run=_demo)
    return parser


def _demo(arguments: argparse.Namespace) -> int:
    from stamppruner.demo import DemoConfig, run_demo

    make = DemoConfig.fast if arguments.fast else DemoConfig
    config = make(arch=arguments.arch, seed=arguments.seed)
    quiet = arguments.quiet

    def say(line: str) -> None:
        if not quiet:
            print(line, flush=True)

    say(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    demo = run_demo(arguments.out, config, say=say, progress=not quiet)
    print()
    print(demo.table())
    files = "slim.safetensors, report.html, kept_channels.svg and demo.json"
    say(f"\nwrote {files} to {arguments.out}")
    say("the reloaded slim.safetensors gives exactly the outputs of the network in memory")
    say(f"in all {sum(demo.seconds.values()):.0f} s")
    return 0
