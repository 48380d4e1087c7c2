"""``stamppruner finetune``: train a slim network on a folder of images."""

from __future__ import annotations

import argparse
from typing import Any

from stamppruner.cli import _group, _shared


def add_to(commands: Any) -> None:
    """The command and its arguments."""
    finetune = commands.add_parser(
        "finetune",
        help="train a slim network on a folder of images",
        description="SGD with a cosine schedule, on images normalised as the file says.",
        epilog="example: stamppruner finetune slim.safetensors --data photos --epochs 30 "
        "--test other-photos --out tuned.safetensors",
    )
    add = finetune.add_argument
    add("slim", metavar="SLIM", help="file of prune or pareto")
    _shared.add_folders(finetune)
    add("--epochs", required=True, type=int, metavar="N", help="passes over the images")
    add("--out", required=True, metavar="FILE", help="the trained network, *.safetensors")
    add("--lr", type=float, default=0.02, help="largest learning rate (default 0.02)")
    add("--label-smoothing", type=float, default=0.0, metavar="X", help="of the cross-entropy")
    add("--augment", action="store_true", help="shift and mirror the images at random")
    add("--amp", action="store_true", help="bfloat16 autocast")
    add("--seed", type=int, default=0, help="of the order and of --augment (default 0)")
    _shared.add_model(finetune, required=False)
    _shared.add_statistics(finetune, "as the file says")
    _shared.add_output(finetune, "the accuracies")
    finetune.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Train, measure, write."""
    import torch

    from stamppruner.files import check_writable
    from stamppruner.finetune import evaluate, finetune
    from stamppruner.slim import describe, save_slim

    check_writable(arguments.out)
    record, test = describe(arguments.slim), None
    data = _shared.labelled_for(record, arguments.data, arguments)
    if arguments.test is not None:
        test = _shared.labelled_for(record, arguments.test, arguments)
    model = _shared.loaded_slim(arguments)
    before = None if test is None else evaluate(model, test)
    if arguments.augment:
        data.augment = _shared.shifted_and_mirrored(data.images.shape[-1])
    torch.manual_seed(arguments.seed)
    history = finetune(
        model,
        _group.own_part(data),
        epochs=arguments.epochs,
        lr=arguments.lr,
        label_smoothing=arguments.label_smoothing,
        amp=arguments.amp,
        progress=not arguments.quiet,
    )
    found = {"epochs": arguments.epochs, "history": history.rows, "file": arguments.out}
    lines = [f"{len(history)} epochs, {len(data)} images"]
    if len(history):
        lines.append(f"accuracy on the images while training: {history['accuracy'][-1]:.1%}")
    if test is not None:
        after = evaluate(model, test)
        found |= {"accuracy_before": before, "accuracy_after": after}
        lines.append(f"accuracy on {arguments.test}: {before:.1%} -> {after:.1%}")
    if _group.first():
        save_slim(arguments.out, model, {**record, "finetuned": history.rows[-1:]})
    _shared.show(arguments, "\n".join(lines), found)
    _shared.say(arguments, f"wrote {arguments.out}")
