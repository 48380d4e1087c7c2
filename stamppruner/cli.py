"""The command line."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from stamppruner.errors import ConfigError, DataError, StampError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code: 0, 1 for an error of ours, 2 for bad usage."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
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
    _add_pareto(commands)
    return parser


def _add_pareto(commands: Any) -> None:
    pareto = commands.add_parser(
        "pareto",
        help="networks of several sizes for a folder of images",
        description="Scores the channels for the images once, and writes a network a budget, "
        "pareto.json and the page pareto.html.",
        epilog="example: stamppruner pareto backbone.stamp.safetensors --model resnet18 "
        "--data birds/train --test birds/test --macs 0.5 0.25 0.1 --finetune 20 --out nets",
    )
    add = pareto.add_argument
    add("pruner", metavar="PRUNER", help="*.stamp.safetensors file of STAMPPruner.save")
    add("--model", required=True, metavar="FACTORY", help="what the pruner was made for: vgg19, "
        "resnet18 (of stamppruner.models), torchvision:NAME or timm:NAME")  # fmt: skip
    add("--model-args", type=_arguments, default={}, metavar="JSON", help="arguments of the "
        "factory; by default sizes are those in the file")  # fmt: skip
    add("--data", required=True, metavar="FOLDER", help="one sub-folder of images a class")
    add("--test", metavar="FOLDER", help="other images, of the same classes, to measure on")
    add("--macs", required=True, nargs="+", type=float, metavar="SHARE",
        help="of the full network's multiply-adds, one a network")  # fmt: skip
    add("--mean", nargs=3, type=float, metavar=("R", "G", "B"), help="subtracted from images in "
        "[0, 1], as for the reference (default: that of photographs)")  # fmt: skip
    add("--std", nargs=3, type=float, metavar=("R", "G", "B"), help="what they are divided by")
    add("--finetune", type=int, metavar="EPOCHS", help="train every network on the images")
    add("--out", required=True, metavar="DIR", help="folder for the files; made if missing")
    add("--json", action="store_true", help="print the record instead of the table")
    add("--quiet", action="store_true", help="print the table or the record alone")
    pareto.set_defaults(run=_pareto)


def _arguments(text: str) -> dict[str, Any]:
    """A JSON object; anything else is bad usage."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object such as '{{\"width\": 0.5}}'")
    return found


def _one_line(error: StampError) -> str:
    return " ".join(str(error).split())


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


def _pareto(arguments: argparse.Namespace) -> int:
    from stamppruner.io import check_folder
    from stamppruner.named import named_model
    from stamppruner.pareto import PAGE, RECORD, as_budgets
    from stamppruner.pruner import NotMetaFittedWarning, STAMPPruner, UnlikeImagesWarning
    from stamppruner.pruner_file import model_in

    budgets = as_budgets(arguments.macs)
    tensors, shape = model_in(arguments.pruner)
    model = named_model(arguments.model, arguments.model_args, tensors)
    pruner = STAMPPruner.load(arguments.pruner, model)
    data, test = _folders(arguments, shape)
    folder = check_folder(arguments.out, [RECORD])
    with warnings.catch_warnings():
        for kind in (NotMetaFittedWarning, UnlikeImagesWarning):  # the record has them too
            warnings.simplefilter("ignore", kind)
        found = pruner.pareto(
            data,
            budgets,
            evaluate_on=test,
            finetune=None if arguments.finetune is None else {"epochs": arguments.finetune},
            progress=not arguments.quiet,
        )
    found.save(folder)
    print(json.dumps(found.to_json(), indent=2) if arguments.json else found.table())
    if not arguments.quiet:
        for note in found.warnings:
            print(f"warning: {note}", file=sys.stderr)
        files = f"{len(found.points)} networks, {PAGE} and {RECORD}"
        print(f"wrote {files} to {folder}", file=sys.stderr)
    return 0


def _folders(arguments: argparse.Namespace, shape: tuple[int, ...]) -> tuple[Any, Any]:
    """The images to prune for and, where there are some, those to measure on."""
    from stamppruner.data import image_folder
    from stamppruner.data.folders import PHOTO_MEAN, PHOTO_STD

    if shape[0] != 3 or shape[1] != shape[2]:
        raise ConfigError(
            f"the pruner is for images of {shape}, folders are read as RGB squares: call "
            "STAMPPruner.pareto with a loader of yours"
        )
    mean, std = arguments.mean or PHOTO_MEAN, arguments.std or PHOTO_STD
    data = image_folder(arguments.data, shape[1], mean=mean, std=std)
    if arguments.test is None:
        return data, None
    test = image_folder(arguments.test, shape[1], mean=mean, std=std)
    if test.classes != data.classes:
        raise DataError(
            f"{arguments.test} has classes {list(test.classes)[:5]} and {arguments.data} "
            f"{list(data.classes)[:5]}: give both the same sub-folders"
        )
    return data, test
