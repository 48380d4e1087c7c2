"""``stamppruner demo``: the whole job on data that comes with the install."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """The command and its arguments."""
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
    demo.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train, meta-fit, prune, compare."""
    import torch

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
