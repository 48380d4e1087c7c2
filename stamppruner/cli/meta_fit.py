"""``stamppruner meta-fit``: a pruner from a backbone and a reference folder."""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stamppruner.cli import _group, _shared
from stamppruner.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from stamppruner.data import ArrayDataset


def add_to(commands: Any) -> None:
    """The command and its arguments."""
    fit = commands.add_parser(
        "meta-fit",
        usage="stamppruner meta-fit --model FACTORY --data FOLDER --out FILE [options]",
        help="a pruner, once, from a backbone and labelled reference images",
        description="Reads a trained backbone (or trains one), gives it a head of the reference's "
        "classes where it has another, learns the gates over tasks of the reference, and writes "
        "the pruner.",
        epilog="example: stamppruner meta-fit --model torchvision:resnet18 --pretrained --data "
        "reference --size 64 --out backbone.stamp.safetensors; on 8 GPUs: torchrun "
        "--nproc-per-node 8 -m stamppruner meta-fit ... (docs/meta-fitting.md)",
    )
    add = fit.add_argument
    add("--data", required=True, metavar="FOLDER", help="reference, one sub-folder a class")
    add("--out", required=True, metavar="FILE", help="the pruner, *.stamp.safetensors")
    _shared.add_model(fit, required=True)
    add("--weights", metavar="FILE", help="state dict of the backbone, *.safetensors")
    add("--pretrained", action="store_true", help="fetch the library's own weights")
    add("--train", type=int, default=0, metavar="EPOCHS", help="train the backbone first")
    add("--augment", action="store_true", help="shift and mirror the images at random in --train")
    add("--size", type=int, default=64, metavar="PIXELS", help="side of the images (default 64)")
    add("--ways", type=int, metavar="N", help="classes a task (default 10, or all if fewer)")
    add("--shots", type=int, metavar="N", help="images a class (default 16, or all if fewer)")
    add("--iterations", type=int, metavar="N", help="of meta-fitting (default 100)")
    add("--tasks", type=int, metavar="N", help="tasks an iteration (default 4)")
    add("--weight-steps", type=int, metavar="N", help="steps under random masks an iteration, on "
        "batches of 128 (default 20; 0 is much faster, and weaker)")  # fmt: skip
    add("--protect", nargs="+", default=[], metavar="LAYER", help="names or patterns of layers "
        "that stay whole")  # fmt: skip
    add("--shortcuts", choices=("couple", "project"), default="couple")
    add("--seed", type=int, default=0, help="of everything random (default 0)")
    add("--checkpoint-dir", metavar="FOLDER", help="checkpoints of this run; SIGTERM then ends it "
        "with one, and exit code 75")  # fmt: skip
    add("--checkpoint-minutes", type=float, default=10, metavar="N", help="between two of them "
        "(default 10)")  # fmt: skip
    add("--keep", type=int, default=3, metavar="N", help="checkpoints that stay (default 3)")
    add("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    add("--log-dir", metavar="FOLDER", help="figures as CSV, and for TensorBoard if installed")
    add("--deterministic", action="store_true", help="deterministic algorithms alone")
    add("--loader-timeout", type=float, metavar="SECONDS", help="most to wait for images")
    add("--offload", metavar="PLACE", help="where what rests between steps lies: a folder "
        "on a disk, or cpu, for a model on a GPU; less memory, more time")  # fmt: skip
    add("--compile", action="store_true", help="run steps through torch.compile")
    add("--amp", action="store_true", help="bfloat16 autocast")
    add("--device", metavar="NAME", help="cpu, cuda, cuda:1 (default: a GPU if there is one)")
    _shared.add_statistics(fit, "that of photographs")
    _shared.add_output(fit, "the summary")
    fit.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Read or train the backbone, meta-fit, write."""
    import torch

    from stamppruner.config import STAMPConfig
    from stamppruner.files import check_writable
    from stamppruner.finetune import evaluate, finetune
    from stamppruner.fitting import RunSettings
    from stamppruner.offload import Offload
    from stamppruner.pruner import STAMPPruner
    from stamppruner.tasks import TaskSampler

    if not (arguments.weights or arguments.pretrained or arguments.train):
        raise ConfigError(
            "the backbone has no weights: pass --weights FILE, --pretrained, or --train EPOCHS"
        )
    _shared.check_apart(weights=arguments.weights, out=arguments.out)
    check_writable(arguments.out)
    settings = {
        name: getattr(arguments, name)
        for name in (
            "checkpoint_dir", "checkpoint_minutes", "keep", "resume", "log_dir", "deterministic",
            "loader_timeout", "offload", "compile",
        )
    }  # fmt: skip
    RunSettings(**settings)
    device = _group.device_of(arguments)
    Offload(arguments.offload, device)
    shape = (3, arguments.size, arguments.size)
    data = _shared.images_in(arguments.data, shape, arguments.mean, arguments.std)
    ways = arguments.ways or min(10, len(data.classes))
    shots = arguments.shots or min(16, int(data.targets.bincount().min()))
    given = {
        name: value
        for name, value in (
            ("iterations", arguments.iterations),
            ("tasks_per_iteration", arguments.tasks),
            ("weight_steps", arguments.weight_steps),
        )
        if value is not None
    }
    config = STAMPConfig(ways=ways, shots=shots, seed=arguments.seed, amp=arguments.amp, **given)
    sampler = TaskSampler(data, ways, shots, seed=arguments.seed)
    torch.manual_seed(arguments.seed)
    model = _backbone(arguments, data).to(device)
    progress = not arguments.quiet

    def gated() -> STAMPPruner:
        return STAMPPruner(
            model.eval(),
            torch.zeros(1, *shape, device=device),
            config=config,
            protect=arguments.protect,
            shortcuts=arguments.shortcuts,
        )

    if arguments.train:
        gated()  # what cannot be pruned is told before it is trained
        augment = _shared.shifted_and_mirrored(arguments.size) if arguments.augment else None
        images = _group.own_part(data.with_augment(augment, seed=arguments.seed))
        finetune(model, images, epochs=arguments.train, lr=0.05, progress=progress)
    accuracy = evaluate(model, data)
    _shared.say(arguments, f"backbone: {accuracy:.1%} of the reference images told right")
    if accuracy < 2 / len(data.classes):
        _shared.say(
            arguments,
            "warning: that is little more than guessing, and networks pruned from it will be no "
            "better: train longer, or pass --weights",
        )
    pruner = gated()
    marks: list[float] = []

    def estimate(_iteration: int, _figures: dict[str, float]) -> None:
        """After the second iteration of this call; the first one has what is done once as well."""
        marks.append(perf_counter())
        if len(marks) == 2 and config.iterations > 2:
            minutes = (marks[1] - marks[0]) * config.iterations / 60
            text = f"meta-fitting: {config.iterations} iterations, about {minutes:.1f} minutes"
            _shared.say(arguments, f"{text} (fewer --weight-steps and --tasks are faster)")

    pruner.meta_fit(
        sampler,
        progress=progress,
        callback=estimate,
        **settings,
    )
    if _group.first():
        pruner.save(arguments.out)
    groups = pruner.graph.groups
    record = {
        "file": arguments.out,
        "backbone_accuracy": accuracy,
        "groups": len(groups),
        "channels": pruner.graph.num_channels,
        "protected": dict(pruner.graph.protected),
        "history": pruner.history.rows,
    }
    text = (
        f"meta-fitted {len(pruner.history)} iterations on {len(data)} images of "
        f"{len(data.classes)} classes: {pruner.graph.num_channels} channels in {len(groups)} groups"
    )
    _shared.show(arguments, text, record)
    _shared.say(arguments, f"wrote {arguments.out}")


def _backbone(arguments: argparse.Namespace, data: ArrayDataset) -> nn.Module:
    """The network with the weights asked for, and a head of the classes of the reference."""
    from stamppruner.io import read_safetensors
    from stamppruner.named import fresh_model, named_model, pretrained_model

    name, given = arguments.model, dict(arguments.model_args)
    if arguments.pretrained:
        return _with_head(pretrained_model(name, given), data)
    if arguments.weights:
        tensors, _ = read_safetensors(arguments.weights)
        model = named_model(name, given, tensors)
        model.load_state_dict(tensors)
        return _with_head(model, data)
    if "num_classes" in given:
        return _with_head(fresh_model(name, given), data)
    return fresh_model(name, {"num_classes": len(data.classes), **given})


def _with_head(model: nn.Module, data: ArrayDataset) -> nn.Module:
    """The network with a head of the classes of the reference; a new one is fitted by ridges."""
    import torch

    from stamppruner.heads import find_head, num_outputs, with_classes
    from stamppruner.result import fit_head_
    from stamppruner.target import SAMPLE, sample_target
    from stamppruner.trace import trace_channels

    graph = trace_channels(model, torch.zeros(1, *data[0][0].shape), certify=False, progress=False)
    if num_outputs(model, find_head(model, graph)) in (None, len(data.classes)):
        return model
    model, graph = with_classes(model, graph, len(data.classes))
    head = find_head(model, graph)
    assert head is not None
    fit_head_(model, head, sample_target(data, SAMPLE))
    return model
