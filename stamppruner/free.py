"""Parameters and buffers that no layer owns, and that follow channels: layer scales, means, masks.

A module of the user's may hold ``self.gamma = nn.Parameter(torch.ones(C, 1, 1))`` and multiply by
it. Which axis of such a tensor runs over channels, and over which, is found as for layers: NaN
goes into slices of the tensor, and every layer reports which of its input positions turn NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stamppruner import codes
from stamppruner.channels import BoolArray, IntArray
from stamppruner.probe import Probe


@dataclass(frozen=True)
class FreeAxis:
    """An axis of a tensor that follows channels.

    Attributes:
        name: qualified name of the parameter or buffer.
        axis: that runs over channels.
        length: of the axis.
        indices: ``(K,)`` indices along the axis, and
        positions: ``(K,)`` the positions (as in :class:`~stamppruner.reach.Reach`) they reach.
    """

    name: str
    axis: int
    length: int
    indices: IntArray
    positions: IntArray


def find_free_axes(asker: Probe, silent: IntArray) -> list[FreeAxis]:
    """The axes along which free tensors follow channels.

    Args:
        asker: the probe of the model.
        silent: positions that are NaN anyway.
    """
    axes = list(_candidates(asker))
    if not axes:
        return []
    bits = codes.bits_for(max(tensor.shape[axis] for _, tensor, axis in axes))
    arrives = _ask(asker, [[(t, axis, np.ones(t.shape[axis], dtype=bool))] for _, t, axis in axes])
    arrives[:, silent] = False
    names = [name for name, _, _ in axes]
    plain = [i for i, name in enumerate(names) if names.count(name) == 1 and arrives[i].any()]
    spelled = zip(*(codes.spelling(axes[i][1].shape[axes[i][2]], bits) for i in plain), strict=True)
    together = [
        [(axes[i][1], axes[i][2], marked) for i, marked in zip(plain, row, strict=True)]
        for row in spelled
    ]
    common = _ask(asker, together)
    found = []
    for i, (name, tensor, axis) in enumerate(axes):
        positions = np.flatnonzero(arrives[i])
        if not len(positions):
            continue
        length = tensor.shape[axis]
        answers = common[:, positions] if i in plain else None
        if answers is None or not codes.decode(answers)[1].all():  # others arrive there as well
            own = [[(tensor, axis, marked)] for marked in codes.spelling(length)]
            answers = _ask(asker, own)[:, positions]
        index, sure = codes.decode(answers)
        if sure.all() and (index < length).all():
            found.append(FreeAxis(name, axis, length, index, positions))
    return found


def _candidates(asker: Probe) -> Iterator[tuple[str, Tensor, int]]:
    """Axes of floating tensors, outside the layers that are watched, as long as some layer."""
    lengths = {*asker.widths.values(), *asker.readers.values()} - {1}
    owners = tuple(name + "." if name else "" for name in asker.readers)
    for name, tensor in (*asker.model.named_parameters(), *asker.model.named_buffers()):
        if name.startswith(owners) or not tensor.is_floating_point():
            continue
        for axis, length in enumerate(tensor.shape):
            if length in lengths:
                yield name, tensor, axis


Question = Sequence[tuple[Tensor, int, BoolArray]]
"""Tensors, their axes, and the marked slices that are NaN."""


def _ask(asker: Probe, questions: Sequence[Question]) -> BoolArray:
    """``(questions, positions)``: which positions turn NaN. One forward pass a question."""
    hits = np.zeros((len(questions), asker.positions), dtype=bool)
    for i, question in enumerate(questions):
        with _poisoned(question):
            hits[i] = asker.ask([{}])[0][0]
    return hits


@contextmanager
def _poisoned(question: Question) -> Iterator[None]:
    before = [tensor.detach().clone() for tensor, _, _ in question]
    try:
        for tensor, axis, marked in question:
            index = torch.from_numpy(np.flatnonzero(marked)).to(tensor.device)
            tensor.detach().index_fill_(axis, index, torch.nan)
        yield
    finally:
        for (tensor, _, _), values in zip(question, before, strict=True):
            tensor.detach().copy_(values)
