"""``stamppruner prune``: a small network for a folder of images."""

from __future__ import annotations

import argparse
from typing import Any

from stamppruner.cli import _group, _shared
from stamppruner.errors import BudgetError

_BOUNDS = {
    "macs": "multiply-adds",
    "params": "parameters",
    "size-bytes": "bytes of the slim file",
    "activation-bytes": "peak of the activations",
    "train-bytes": "peak of a training step",
    "latency-ms": "milliseconds of a forward pass",
    "train-step-ms": "milliseconds of a training step",
}


def add_to(commands: Any) -> None:
    """The command and its arguments."""
    prune = commands.add_parser(
        "prune",
        help="a small network for a folder of images",
        description="Chooses the channels for the images under the bounds, cuts with proof, fits "
        "the remaining weights to the images, and writes the network. Bounds up to 1 are shares of "
        "the full network's cost.",
        epilog="example: stamppruner prune backbone.stamp.safetensors --data photos --macs 0.25 "
        "--finetune 20 --out slim.safetensors --report slim.html",
    )
    add = prune.add_argument
    add("pruner", metavar="PRUNER", help="*.stamp.safetensors file of meta-fit")
    _shared.add_folders(prune)
    add("--out", required=True, metavar="FILE", help="slim network, *.safetensors")
    for bound, text in _BOUNDS.items():
        add(f"--{bound}", type=float, metavar="N", help=text)
    add("--device", help="where the network is to run, for times and memory")
    add("--batch-size", type=int, default=1, metavar="N", help="samples a pass (default 1)")
    add("--threads", type=int, metavar="N", help="of PyTorch on the CPU, for times")
    add("--amp", action="store_true", help="bfloat16 autocast, for times and --finetune")
    add("--finetune", type=int, metavar="EPOCHS", help="train the network on the images")
    add("--report", metavar="FILE", help="page of what was done, *.html")
    _shared.add_model(prune, required=False)
    _shared.add_statistics(prune, "as the pruner says")
    _shared.add_output(prune, "the report")
    prune.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prune, train if asked, measure, write."""
    from stamppruner.budget import Budget
    from stamppruner.files import check_writable
    from stamppruner.training import check_settings

    bounds = {name: getattr(arguments, name) for name in (b.replace("-", "_") for b in _BOUNDS)}
    if all(value is None for value in bounds.values()):
        raise BudgetError("no bound: pass --macs 0.25, say, or another of those in --help")
    budget = Budget(
        **bounds,
        device=arguments.device,
        batch_size=arguments.batch_size,
        threads=arguments.threads,
        amp=arguments.amp,
    )
    _shared.check_apart(PRUNER=arguments.pruner, out=arguments.out, report=arguments.report)
    for file in (arguments.out, arguments.report):
        if file is not None:
            check_writable(file)
    check_settings({"epochs": arguments.finetune or 0})
    pruner, shape = _shared.loaded_pruner(arguments)
    data, test = _shared.pair_of_folders(arguments, shape, pruner)
    data, progress = _group.own_part(data), not arguments.quiet
    with _shared.known_warnings():
        result = pruner.prune(data, budget, progress=progress)
    if test is not None:
        result.evaluate(test)
    if arguments.finetune:
        result.finetune(data, arguments.finetune, amp=arguments.amp, progress=progress)
        if test is not None:
            result.evaluate(test)
    if _group.first():
        result.save(arguments.out)
        if arguments.report is not None:
            result.report.to_html(arguments.report)
    _shared.show(arguments, str(result.report), result.report.to_json())
    _shared.say(arguments, f"wrote {arguments.out}")
