"""Slim networks for other programs: files are compared with the model before they are written."""

from stamppruner.export._base import ExportReport, Quantization
from stamppruner.export.hub import from_pretrained, push_to_hub, save_pretrained
from stamppruner.export.onnx import export_onnx
from stamppruner.export.program import export_program
from stamppruner.export.recipe import recipe
from stamppruner.export.state_dict import export_state_dict

__all__ = [
    "ExportReport",
    "Quantization",
    "export_onnx",
    "export_program",
    "export_state_dict",
    "from_pretrained",
    "push_to_hub",
    "recipe",
    "save_pretrained",
]
