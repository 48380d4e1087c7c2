"""Parameters and buffers that no layer owns, and that follow channels: layer scales, means, masks.

A module of the user's may hold ``self.gamma = nn.Parameter(torch.ones(C, 1, 1))`` and multiply by
it. Which axis of such a tensor runs over channels, and over which, is found as for layers: NaN
goes into slices of the tensor, and every layer reports which of its input positions turn NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy as np
from torch import Tensor

from stamppruner import codes
from stamppruner.channels import BoolArray, IntArray
from stamppruner.probe import Probe, Question


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
    found: list[FreeAxis] = []
    for together in _rounds(_candidates(asker)):
        apart = []
        for (name, tensor, axis), reached in zip(together, _halves(asker, together), strict=True):
            even, odd = reached & ~hidden
            if (even | odd).any() and not (even & odd).any():
                apart.append((name, tensor, axis, np.flatnonzero(even | odd)))
        if apart:
            found += _axes_of(asker, apart)
    return found


_Candidate = tuple[str, Tensor, int]
"""A tensor, by name, and an axis."""


def _rounds(candidates: Iterable[_Candidate]) -> list[list[_Candidate]]:
    """Every tensor at most once in each."""
    rounds: list[list[_Candidate]] = []
    seen: dict[str, int] = {}
    for candidate in candidates:
        number = seen[candidate[0]] = seen.get(candidate[0], -1) + 1
        rounds += [[]] if number == len(rounds) else []
        rounds[number].append(candidate)
    return rounds


def _halves(asker: Probe, together: Sequence[_Candidate]) -> BoolArray:
    """The positions that the even and the odd slices of each candidate reach.

    All halves are numbered, and questions spell their numbers as Gray codes: those of neighbours,
    which often meet, have most bits in common. Where several arrive, those are asked again that
    may have; at once if they cannot meet.

    Returns:
        ``(candidates, 2, positions)``.
    """
    count = len(together)
    parts = [list(islice(codes.spelling(t.shape[axis]), 2)) for _, t, axis in together]

    def ask(chosen: Iterable[int], marks: Callable[[int], BoolArray]) -> BoolArray:
        return _ask(asker, [(*together[k][1:], marks(k)) for k in chosen])

    def spelled(marks: BoolArray, k: int) -> BoolArray:
        return parts[k][0] & marks[2 * k] | parts[k][1] & marks[2 * k + 1]

    questions = codes.reflected(2 * count)
    common = np.stack([ask(range(count), partial(spelled, marks)) for marks in questions])
    code, sure = codes.decode(common)
    numbers = np.arange(2 * count)
    halves = (numbers ^ numbers >> 1)[:, None]
    reached: BoolArray = (sure & (code == halves)).reshape(count, 2, -1)
    unsure = np.flatnonzero(common.any(axis=0) & ~sure)
    half, place = codes.allowed(common[:, unsure], 4 * count)
    possible = np.zeros((4 * count, asker.positions), dtype=bool)
    possible[half, unsure[place]] = True
    possible = possible[halves[:, 0]].reshape(count, 2, -1).any(axis=1)
    for members in _disjoint(possible):
        for odd in (0, 1):
            answer = ask(members, lambda k, odd=odd: parts[k][odd])  # type: ignore[misc]
            reached[members, odd] |= answer & possible[members]
    return reached


def _disjoint(sets: BoolArray) -> list[list[int]]:
    """Rows that are not empty, in batches that have nothing in common."""
    batches: list[tuple[list[int], BoolArray]] = []
    for k in np.flatnonzero(sets.any(axis=1)).tolist():
        for members, covered in batches:
            if not (covered & sets[k]).any():
                members.append(k)
                covered |= sets[k]
                break
        else:
            batches.append(([k], sets[k].copy()))
    return [members for members, _ in batches]


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


def _candidates(asker: Probe) -> Iterator[_Candidate]:
    """Axes of floating tensors, outside the layers that are watched, as long as some layer."""
    lengths = {*asker.widths.values(), *asker.readers.values()} - {1}
    owners = tuple(name + "." if name else "" for name in asker.readers)
    for name, tensor in (*asker.model.named_parameters(), *asker.model.named_buffers()):
        if name.startswith(owners) or not tensor.is_floating_point():
            continue
        for axis, length in enumerate(tensor.shape):
            if length in lengths:
                yield name, tensor, axis


def _ask(asker: Probe, question: Question) -> BoolArray:
    """``(positions,)``: which positions turn NaN."""
    with asker.poisoned(question):
        return asker.ask([{}])[0][0]
