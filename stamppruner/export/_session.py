"""ONNX files run with ONNX Runtime on the CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stamppruner.errors import ExportError
from stamppruner.export._base import tensors_in
from stamppruner.inputs import Inputs
from stamppruner.optional import require

_QUIET = 3  # errors alone


class Session:
    """A file as a function of inputs.

    Args:
        blob: the file's bytes.

    Attributes:
        inputs: shape of each input, by name; an axis of any length is a text.
    """

    def __init__(self, blob: bytes) -> None:
        runtime = require("onnxruntime", "ONNX export", 'pip install "stamppruner[onnx]"')
        options = runtime.SessionOptions()
        options.log_severity_level = _QUIET
        options.intra_op_num_threads = torch.get_num_threads()
        self._session = runtime.InferenceSession(blob, options, providers=["CPUExecutionProvider"])
        self.inputs: dict[str, tuple[int | str, ...]] = {
            x.name: tuple(x.shape) for x in self._session.get_inputs()
        }

    def __call__(self, inputs: Inputs) -> list[Tensor]:
        """The file's outputs."""
        return self.run(tensors_in((inputs.args, dict(inputs.kwargs))))

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The file's outputs for its input tensors, in order.

        Raises:
            ExportError: it has another number of inputs.
        """
        if len(tensors) != len(self.inputs):
            raise ExportError(
                f"the ONNX file has inputs {', '.join(self.inputs)}, the model {len(tensors)} "
                "tensors: give input_names, one a tensor that forward uses"
            )
        feed = {name: x.cpu().numpy() for name, x in zip(self.inputs, tensors, strict=True)}
        return [torch.from_numpy(y) for y in self._session.run(None, feed)]
