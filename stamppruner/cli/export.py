"""``stamppruner export``: a slim network for other programs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from stamppruner.cli import _shared
from stamppruner.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

_AGREEMENT = 0.95
"""Share of images below which 8 bits are warned about."""

_CALIBRATION = 256
"""Most images that ranges are found with."""


def add_to(commands: Any) -> None:
    """The command and its arguments."""
    export = commands.add_parser(
        "export",
        help="a slim network as ONNX, torch.export program or state dict",
        description="Writes a slim network for other programs, and compares what they compute.",
        epilog="example: stamppruner export slim.safetensors --onnx slim.onnx --int8 "
        "--calibration photos",
    )
    add = export.add_argument
    add("slim", metavar="SLIM", help="file of prune, pareto or finetune")
    kind = export.add_mutually_exclusive_group(required=True)
    kind.add_argument("--onnx", metavar="FILE", help="checked against ONNX Runtime")
    kind.add_argument("--program", metavar="FILE", help="torch.export program, *.pt2")
    kind.add_argument("--state-dict", metavar="FILE", help="plain weights, *.safetensors")
    add("--int8", action="store_true", help="8-bit weights and activations in the ONNX file")
    add("--calibration", metavar="FOLDER", help="images that --int8 finds ranges with: it needs "
        "some")  # fmt: skip
    _shared.add_model(export, required=False)
    _shared.add_output(export, "the summary")
    export.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Load, write, compare."""
    import torch

    from stamppruner.export import export_onnx, export_program, export_state_dict
    from stamppruner.slim import describe

    record = describe(arguments.slim)
    if (arguments.int8 or arguments.calibration) and arguments.onnx is None:
        raise ConfigError("--int8 and --calibration are for --onnx: leave them out")
    if arguments.int8 and arguments.calibration is None:
        raise ConfigError("--int8 finds the ranges of activations on images: pass --calibration")
    model = _shared.loaded_slim(arguments)
    if arguments.state_dict is not None:
        report = export_state_dict(model, arguments.state_dict)
    else:
        example = torch.zeros(1, *_input_shape(record, arguments.slim))
        if arguments.program is not None:
            report = export_program(model, arguments.program, example)
        else:
            calibration = _calibration(arguments, record)
            report = export_onnx(
                model, arguments.onnx, example, int8=arguments.int8, calibration=calibration
            )
    text, inputs = str(report), _shared.normalisation(record)
    _shared.show(
        arguments, f"{text}\ninputs: {inputs}" if inputs else text,
        asdict(report) | ({"inputs": inputs} if inputs else {}),
    )  # fmt: skip
    agreement = report.quantization.agreement if report.quantization else None
    if agreement is not None and agreement < _AGREEMENT:
        _shared.say(arguments, "warning: 8 bits change the answer on too many of these images: "
                    "evaluate the file before you use it")  # fmt: skip


def _input_shape(record: Mapping[str, Any], file: str) -> Sequence[int]:
    shape = record.get("input_shape")
    if not shape:
        raise ConfigError(f"{file} does not say what its inputs are: export it from Python")
    return list(shape)


def _calibration(arguments: argparse.Namespace, record: Mapping[str, Any]) -> Tensor | None:
    """Images of all classes, as the network reads them."""
    if arguments.calibration is None:
        return None
    data = _shared.images_for(record, arguments.calibration, arguments)
    step = max(1, len(data) // _CALIBRATION)
    return data.fetch(range(0, len(data), step))
