"""Parameters and buffers that no layer owns, and that follow channels: layer scales, means, masks.

A module of the user's may hold ``self.gamma = nn.Parameter(torch.ones(C, 1, 1))`` and multiply by
it. Which axis of such a tensor runs over channels, and over which, is found as for layers: NaN
goes into slices of the tensor, and every layer reports which of its input positions turn NaN.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

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
    hidden = np.isin(np.arange(asker.positions), silent)
    rounds: list[list[_Reached]] = []  # every tensor at most once in each
    for name, tensor, axis in _candidates(asker):
        bit = islice(codes.spelling(tensor.shape[axis]), 2)
        halves = [_ask(asker, [(tensor, axis, marked)]) & ~hidden for marked in bit]
        positions = np.flatnonzero(halves[0] | halves[1])
        if len(positions) and not (halves[0] & halves[1]).any():
            free = [r for r in rounds if all(name != other for other, *_ in r)] or [[]]
            rounds += [] if free[0] else free
            free[0].append((name, tensor, axis, positions))
    return [axis for together in rounds for axis in _axes_of(asker, together)]


_Reached = tuple[str, Tensor, int, IntArray]
"""A tensor, an axis, and the positions that it reaches."""


def _axes_of(asker: Probe, together: Sequence[_Reached]) -> Iterator[FreeAxis]:
    """Ask about the axes of different tensors at once, then alone where several arrive."""
    lengths = [tensor.shape[axis] for _, tensor, axis, _ in together]
    bits = codes.bits_for(max(lengths))
    spelled = zip(*(codes.spelling(length, bits) for length in lengths), strict=True)
    questions = [
        [(tensor, axis, marked) for (_, tensor, axis, _), marked in zip(together, row, strict=True)]
        for row in spelled
    ]
    common = np.stack([_ask(asker, question) for question in questions])
    for (name, tensor, axis, positions), length in zip(together, lengths, strict=True):
        index, sure = codes.decode(common[:, positions])
        own = index if sure.all() else _own_index(asker, tensor, axis, positions)
        if own is not None and (own < length).all():
            yield FreeAxis(name, axis, length, own, positions)


def _own_index(asker: Probe, tensor: Tensor, axis: int, positions: IntArray) -> IntArray | None:
    """Index along the axis that reaches each position; None as soon as one has several."""
    answers: list[BoolArray] = []
    for marked in codes.spelling(tensor.shape[axis]):
        answers.append(_ask(asker, [(tensor, axis, marked)])[positions])
        if len(answers) % 2 == 0 and (answers[-2] == answers[-1]).any():
            return None
    return codes.decode(np.stack(answers))[0]


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


def _ask(asker: Probe, question: Question) -> BoolArray:
    """``(positions,)``: which positions turn NaN."""
    with _poisoned(question):
        return asker.ask([{}])[0][0]


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
