"""Static 8-bit quantisation of an ONNX file: weights a channel, activations a tensor.

The file keeps float inputs and outputs; pairs of quantise and dequantise nodes (QDQ) tell any
runtime where to compute in 8 bits.

Source: https://onnxruntime.ai/docs/performance/model-optimizations/quantization.html
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stamppruner.errors import DataError, ExportError
from stamppruner.export._base import Quantization, Subject, difference
from stamppruner.export._session import Session
from stamppruner.inputs import Inputs
from stamppruner.optional import require

_REMEDY = 'pip install "stamppruner[onnx]"'
_NOISE = 64
_BATCH = 32


class NoiseCalibrationWarning(UserWarning):
    """An int8 file was calibrated on noise, for want of images."""


def calibration_images(images: Tensor | None, inputs: Inputs) -> tuple[Tensor, bool]:
    """Images ``(N, C, H, W)`` that give the ranges of activations, and whether they are noise.

    Raises:
        DataError: the model takes more than one tensor, or the images do not fit it.
    """
    shape = inputs.sample_shape
    if shape is None:
        raise DataError(
            f"int8 needs a model of one image tensor, example_inputs hold {inputs.describe()}: "
            "export it with int8=False"
        )
    if images is None:
        warnings.warn(
            "int8 without calibration images: ranges of activations come from noise, and the file "
            "may be far off on images. Pass calibration=images of the target",
            NoiseCalibrationWarning,
            stacklevel=3,
        )
        noise = inputs.random(_NOISE, seed=0)
        return next(x for x in (*noise.args, *noise.kwargs.values())), True
    if not isinstance(images, Tensor) or tuple(images.shape[1:]) != shape or not len(images):
        found = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise DataError(f"calibration is {found}: pass a tensor of images (N, {shape})")
    if not images.is_floating_point() or not bool(torch.isfinite(images).all()):
        raise DataError(
            f"calibration images are {images.dtype} with values that are not finite floats: pass "
            "them as they go into the model"
        )
    return images.detach().cpu().float(), False


def quantize(
    blob: bytes, calibration: tuple[Tensor, bool], subject: Subject
) -> tuple[bytes, Quantization]:
    """An int8 file of a float one, and how far it is from it on the calibration images.

    Raises:
        ExportError: the file does not run, or gives values that are not finite.
    """
    images, noise = calibration
    size = _BATCH if subject.dynamic_batch else subject.batch_sizes[0]
    batches = [batch for batch in images.split(size) if subject.dynamic_batch or len(batch) == size]
    if not batches:
        raise DataError(
            f"{len(images)} calibration images make no batch of {size}, which is fixed: pass more, "
            "or dynamic_batch=True"
        )
    name = next(iter(Session(blob).inputs))
    quantized = _static(blob, [{name: batch.numpy()} for batch in batches])
    before, after = Session(blob), Session(quantized)
    for inputs in subject.trials():
        if not all(bool(torch.isfinite(y).all()) for y in after(inputs) if y.is_floating_point()):
            raise ExportError("the int8 file gives values that are not finite")
    one, two = (_joined(session, batches) for session in (before, after))
    logits = len(one) == 1 and one[0].dim() == 2
    return quantized, Quantization(
        size_bytes_float=len(blob),
        images=sum(map(len, batches)),
        noise=noise,
        max_relative_difference=difference(one, two),
        agreement=float((one[0].argmax(1) == two[0].argmax(1)).float().mean()) if logits else None,
    )


def _joined(session: Session, batches: Sequence[Tensor]) -> list[Tensor]:
    """The outputs for all batches."""
    return [torch.cat(ys) for ys in zip(*(session.run([b]) for b in batches), strict=True)]


def _static(blob: bytes, feeds: list[dict[str, Any]]) -> bytes:
    """Quantise with ranges of activations from some feeds."""
    tool = require("onnxruntime.quantization", "int8", _REMEDY)
    shape = require("onnxruntime.quantization.shape_inference", "int8", _REMEDY)

    class Reader(tool.CalibrationDataReader):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self._left = iter(feeds)

        def get_next(self) -> dict[str, Any] | None:
            return next(self._left, None)

    with tempfile.TemporaryDirectory() as folder, _quiet():
        given, prepared, made = (Path(folder) / f"{name}.onnx" for name in ("in", "pre", "out"))
        given.write_bytes(blob)
        shape.quant_pre_process(given, prepared, skip_symbolic_shape=True)
        tool.quantize_static(
            prepared,
            made,
            Reader(),
            quant_format=tool.QuantFormat.QDQ,
            per_channel=True,
            activation_type=tool.QuantType.QInt8,
            weight_type=tool.QuantType.QInt8,
        )
        return made.read_bytes()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that the quantiser gives through the root logger."""
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        root.setLevel(level)
