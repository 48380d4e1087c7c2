"""Weights alone, for those who keep the class of their network: a plain safetensors state dict.

:func:`~stamppruner.export.recipe` gives the lines of Python that narrow the class to these weights.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import torch
from torch import nn

from stamppruner.errors import ExportError
from stamppruner.export._base import ExportReport
from stamppruner.files import PathLike, atomic_write, check_writable
from stamppruner.io import read_safetensors, write_safetensors


def export_state_dict(model: nn.Module, path: PathLike) -> ExportReport:
    """Write ``model.state_dict()`` as safetensors, and read it back.

    Any safetensors reader opens the file: ``safetensors.torch.load_file``, for one.

    Args:
        model: any module, in any dtype and on any device; it is not changed.
        path: usually ``*.safetensors``; replaced atomically.

    Raises:
        CheckpointError: the path cannot be written, or a tensor cannot be stored.
        ExportError: the file does not hold the same bits.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import load_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report = export_state_dict(nn.Linear(2, 3), f"{folder}/net.safetensors")
        ...     sorted(load_file(report.path))
        ['bias', 'weight']
    """
    check_writable(path)
    state = model.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "state.safetensors"
        write_safetensors(made, state, {"format": "pt"})
        found, _ = read_safetensors(made)
        blob = made.read_bytes()
    wrong = [name for name in state.keys() | found.keys() if not _same(state, found, name)]
    if wrong:
        raise ExportError(
            f"{sorted(wrong)[0]} of {type(model).__name__} does not come back from the file as it "
            "was, so it is not written: store the network with save_slim"
        )
    atomic_write(path, blob)
    return ExportReport(
        path=os.fspath(path),
        kind="state dict",
        size_bytes=len(blob),
        inputs={},
        batch_sizes=(),
        max_relative_difference=0.0,
    )


def _same(state: dict[str, torch.Tensor], found: dict[str, torch.Tensor], name: str) -> bool:
    """Bit for bit, so that NaN equals itself."""
    one, two = state.get(name), found.get(name)
    if one is None or two is None or one.shape != two.shape or one.dtype != two.dtype:
        return False
    raw = [x.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for x in (one, two)]
    return torch.equal(*raw)
