"""Models as ONNX: one file for ONNX Runtime on servers, in browsers and on phones.

Source: https://docs.pytorch.org/docs/stable/onnx_export.html
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stamppruner.calls import evaluating
from stamppruner.errors import ConfigError, ExportError
from stamppruner.export._base import (
    REMEDY,
    TOLERANCE,
    ExportReport,
    Subject,
    check_difference,
    naming,
    tensors_in,
)
from stamppruner.export._int8 import calibration_images, quantize
from stamppruner.export._session import Session
from stamppruner.files import PathLike, atomic_write, check_writable
from stamppruner.inputs import Inputs
from stamppruner.optional import require

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
_LARGEST = 2**31 - 2**24
"""Bytes of weights that fit into one protocol buffer, with room for the graph."""


def export_onnx(
    model: nn.Module,
    path: PathLike,
    example_inputs: Any,
    *,
    dynamic_batch: bool = True,
    int8: bool = False,
    calibration: Tensor | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset: int | None = None,
    tolerance: float = TOLERANCE,
) -> ExportReport:
    """Write a model as ONNX, and compare the file with the model in ONNX Runtime.

    The file holds everything, weights included, and no paths of the machine that wrote it. It is
    in evaluation mode and float32.

    Args:
        model: any float32 module on any device; it is not changed.
        path: usually ``*.onnx``; replaced atomically, and only by a file that was compared.
        example_inputs: give the shapes, as for :func:`~stamppruner.trace_channels`.
        dynamic_batch: let the first axis have any length; otherwise that of the examples.
        int8: static quantisation of weights (a scale a channel) and activations to 8 bits. The
            float network is compared as always; what quantisation adds is reported, not bounded.
        calibration: images ``(N, C, H, W)`` of the target, preprocessed as in training, that give
            the ranges of activations; without them noise does, with a warning.
        input_names: one a tensor. A single one is ``images``; else forward's names.
        output_names: one a tensor. A single one is ``logits``; else ``output_0`` and so on.
        opset: of the file; by default the exporter's own.
        tolerance: largest difference allowed, relative to the largest output.

    Raises:
        MissingExtraError: onnx, onnxscript or onnxruntime is not installed.
        CheckpointError: the path cannot be written.
        ConfigError: ``calibration`` without ``int8``.
        DataError: the example inputs hold no batch, or the calibration images do not fit.
        ExportError: the model is not in float32 or too large for one file, cannot be exported, or
            the file computes something else.
        UnsupportedModelError: the model cannot be copied.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     net, images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.zeros(1, 3, 8, 8)
        ...     report = export_onnx(net, f"{folder}/net.onnx", images)
        >>> report.inputs
        {'images': ('batch', 3, 8, 8)}
    """
    for package in _PACKAGES:
        require(package, "ONNX export", 'pip install "stamppruner[onnx]"')
    if calibration is not None and not int8:
        raise ConfigError("calibration images are for int8=True: pass it, or leave them out")
    check_writable(path)
    _check_storable(model)
    subject = Subject.of(model, example_inputs, dynamic_batch, device="cpu")
    images = calibration_images(calibration, subject.inputs) if int8 else None
    name = type(model).__name__
    with naming(f"ONNX export of {name}", REMEDY):
        blob = _exported(subject, input_names, output_names, opset)
    with naming(f"running {name} in ONNX Runtime", REMEDY):
        session = Session(blob)
        worst = subject.worst_difference(session)
    check_difference(worst, subject, "the ONNX file", tolerance)
    quantization = None
    if images is not None:
        with naming(f"quantisation of {name}", "export it with int8=False"):
            blob, quantization = quantize(blob, images, subject)
    atomic_write(path, blob)
    return ExportReport(
        path=os.fspath(path),
        kind="ONNX, int8" if int8 else "ONNX",
        size_bytes=len(blob),
        inputs=session.inputs,
        batch_sizes=subject.batch_sizes,
        max_relative_difference=worst,
        quantization=quantization,
    )


def _check_storable(model: nn.Module) -> None:
    """Raise ExportError for other dtypes than float32, and for more bytes than a file holds."""
    named = (*model.named_parameters(), *model.named_buffers())
    for name, tensor in named:
        if tensor.is_floating_point() and tensor.dtype != torch.float32:
            raise ExportError(
                f"{name} is {tensor.dtype}: convolutions of ONNX Runtime run in float32 on CPUs. "
                "Pass copy.deepcopy(model).float()"
            )
        if tensor.is_complex() or tensor.is_quantized or tensor.is_meta:
            raise ExportError(
                f"{name} ({tensor.dtype}, on {tensor.device}) cannot be stored as ONNX: pass a "
                "float32 model with weights"
            )
    size = sum(tensor.numel() * tensor.element_size() for _, tensor in named)
    if size > _LARGEST:
        raise ExportError(
            f"the weights of {type(model).__name__} take {size} bytes, one ONNX file holds "
            f"{_LARGEST}: use export_program, or a smaller budget"
        )


def _exported(
    subject: Subject,
    input_names: Sequence[str] | None,
    output_names: Sequence[str] | None,
    opset: int | None,
) -> bytes:
    """The bytes of an ONNX file."""
    traced = subject.traced
    with evaluating(subject.model), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            subject.model,
            traced.args,
            kwargs=dict(traced.kwargs),
            dynamo=True,
            input_names=input_names or _input_names(traced),
            output_names=output_names or _output_names(subject),
            dynamic_shapes=subject.dynamic_shapes(),
            opset_version=opset,
            verbose=False,
        )
    if program is None:
        raise ExportError("the exporter gave nothing: use a newer torch")
    proto = program.model_proto
    made = next(x.version for x in proto.opset_import if not x.domain)
    if opset not in (None, made):
        raise ExportError(f"the exporter gave opset {made}, not {opset}: leave opset out")
    _strip(proto)
    return bytes(proto.SerializeToString())


def _input_names(inputs: Inputs) -> list[str] | None:
    single = len(inputs.args) == 1 and not inputs.kwargs and isinstance(inputs.args[0], Tensor)
    return ["images"] if single else None


def _output_names(subject: Subject) -> list[str]:
    count = len(tensors_in(subject.traced.call(subject.model)))
    return ["logits"] if count == 1 else [f"output_{number}" for number in range(count)]


def _strip(proto: Any) -> None:
    """Remove notes of the exporter: traces with paths of this machine, a fifth of a small file."""
    graph = proto.graph
    noted: Iterable[Any] = (
        proto, graph, *graph.node, *graph.value_info, *graph.input, *graph.output,
        *graph.initializer, *proto.functions, *(n for f in proto.functions for n in f.node),
    )  # fmt: skip
    for part in noted:
        del part.metadata_props[:]
        part.ClearField("doc_string")
