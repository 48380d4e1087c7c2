"""Models as ``torch.export`` programs: one ``.pt2`` file that runs without the model's code.

Source: https://docs.pytorch.org/docs/stable/export.html
"""

from __future__ import annotations

import io
import os
import warnings
from typing import Any

import torch
from torch import nn

from stamppruner.calls import evaluating
from stamppruner.export._base import (
    REMEDY,
    TOLERANCE,
    ExportReport,
    Subject,
    check_difference,
    naming,
    tensors_in,
)
from stamppruner.files import PathLike, atomic_write, check_writable


def export_program(
    model: nn.Module,
    path: PathLike,
    example_inputs: Any,
    *,
    dynamic_batch: bool = True,
    tolerance: float = TOLERANCE,
) -> ExportReport:
    """Write a model as a ``torch.export`` program, and compare the file with the model.

    The program is in evaluation mode, in the model's dtype and for its device. Places in the
    source code and the example inputs are not stored in it.

    Args:
        model: any module; it is not changed.
        path: usually ``*.pt2``; replaced atomically, and only by a program that was compared.
        example_inputs: give the shapes, as for :func:`~stamppruner.trace_channels`.
        dynamic_batch: let the first axis have any length; otherwise that of the examples.
        tolerance: largest difference allowed, relative to the largest output.

    Raises:
        CheckpointError: the path cannot be written.
        DataError: the example inputs hold no batch.
        ExportError: the model cannot be traced, or the program computes something else.
        UnsupportedModelError: the model cannot be copied.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     net, images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.zeros(1, 3, 8, 8)
        ...     report = export_program(net, f"{folder}/net.pt2", images)
        >>> report.max_relative_difference
        0.0
    """
    check_writable(path)
    subject = Subject.of(model, example_inputs, dynamic_batch)
    name = type(model).__name__
    with naming(f"torch.export of {name}", REMEDY):
        blob = _program(subject)
    with naming(f"reading the program of {name} back", REMEDY):
        program = torch.export.load(io.BytesIO(blob))
        loaded, names = program.module(), program.graph_signature.user_inputs
        worst = subject.worst_difference(lambda inputs: tensors_in(inputs.call(loaded)))
    check_difference(worst, subject, "the torch.export program", tolerance)
    atomic_write(path, blob)
    return ExportReport(
        path=os.fspath(path),
        kind="torch.export program",
        size_bytes=len(blob),
        inputs=subject.shapes(map(str, names)),
        batch_sizes=subject.batch_sizes,
        max_relative_difference=worst,
    )


def _program(subject: Subject) -> bytes:
    """The bytes of a ``.pt2`` file."""
    traced, buffer = subject.traced, io.BytesIO()
    with evaluating(subject.model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            subject.model,
            traced.args,
            dict(traced.kwargs),
            dynamic_shapes=subject.dynamic_shapes(),
            strict=False,
        )
        for module in program.graph_module.modules():
            for node in getattr(module, "graph", torch.fx.Graph()).nodes:
                node.meta.pop("stack_trace", None)  # paths of this machine
        torch.export.save(program, buffer)
    return buffer.getvalue()
