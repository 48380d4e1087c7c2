"""Slim networks for other programs: every file is compared with the model before it is written."""

from stamppruner.export._base import ExportReport, Quantization
from stamppruner.export.onnx import export_onnx
from stamppruner.export.program import export_program

__all__ = [
    "ExportReport",
    "Quantization",
    "export_onnx",
    "export_program",
]
