"""Find out by experiment which output channels reach which input positions.

The questions of one batch of rows, see probe.py:

* one row a producer, all its channels NaN: does anything of it arrive here?
* ``2 * ceil(log2 C)`` rows that spell the channel's own number in bits and complemented bits,
  for all producers at once: which channel arrives here?

A position where a bit and its complement both arrive is read by several channels, or by channels
of different numbers; it is asked again with rows of its producers' own, and where that is not
enough, with a row a channel (unless most bits arrive both ways: then those channels are mixed).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from stamppruner import codes
from stamppruner.channels import BoolArray, IntArray
from stamppruner.probe import Probe, Row

_MAX_ELEMENTS = 2**26
"""Elements of the largest activation, over all rows, up to which a row a channel is asked; the
ambiguous channels of a producer that needs more are tied together."""


_MAX_OPEN_BITS = 4
"""Bits of a channel's number that may be open for a row a channel to be asked; where more are
(all channels of an attention head, say), everything that the bits allow is tied together."""


@dataclass
class Reach:
    """What the probe found.

    Attributes:
        widths: output width of each producer (mixing layer), by name, in call order.
        depthwise: channel multiplier of each depthwise layer, by name.
        readers: number of input positions of each layer that is watched, by name.
        pairs: ``(K, 3)`` rows: producer number, its channel, position number; positions are
            numbered over all readers in order.
        ties: ``(K, 3)`` rows like ``pairs``: channels that must stay together, with the positions
            that they share, because the probe cannot tell which of them arrives there.
        input_positions: positions that something of the model's own input reaches.
        silent: positions that are NaN whatever is asked.
        output_producers: producers that reach the model's output.
    """

    widths: dict[str, int]
    depthwise: dict[str, int]
    readers: dict[str, int]
    pairs: IntArray
    ties: IntArray
    input_positions: IntArray
    silent: IntArray
    output_producers: tuple[str, ...]


def probe(asker: Probe) -> Reach:
    """Find the reach of every output channel.

    Raises:
        UnsupportedModelError: the forward pass fails when layers answer with constants.
    """
    widths = list(asker.widths.values())
    bits = codes.bits_for(max(widths, default=2))
    everything: list[Row] = [{p: np.ones(w, dtype=bool)} for p, w in enumerate(widths)]
    spelled = zip(*(codes.spelling(w, bits) for w in widths), strict=True)
    rows = [{}, *everything, *(dict(enumerate(row)) for row in spelled), None]
    hits, outputs = asker.ask(rows)
    if hits[0].any() and (hits[0] != asker.ask([{}])[0][0]).any():
        # rows leak into others (a mean over the batch, say)
        asker.rows = 1
        hits, outputs = asker.ask(rows)

    silent, arrives, code = hits[0], hits[1 : 1 + len(widths)], hits[1 + len(widths) : -1]
    producer, position = np.nonzero(arrives & ~silent)
    channel, sure = codes.decode(code[:, position])
    pairs = [np.stack([producer, channel, position], axis=1)[sure]]
    unsure = np.stack([producer, position], axis=1)[~sure]
    found, ties = _ask_again(asker, arrives, unsure)
    reached = outputs[1 : 1 + len(widths)]
    if asker.whole:
        reached = np.concatenate([asker.ask([row])[1] for row in everything])
    return Reach(
        widths=asker.widths,
        depthwise=asker.depthwise,
        readers=asker.readers,
        pairs=np.concatenate([*pairs, *found]),
        ties=np.concatenate([np.empty((0, 3), dtype=np.int64), *ties]),
        input_positions=np.flatnonzero(hits[-1] | silent),
        silent=np.flatnonzero(silent),
        output_producers=tuple(n for n, r in zip(asker.widths, reached, strict=True) if r),
    )


def _ask_again(
    asker: Probe, arrives: BoolArray, unsure: IntArray
) -> tuple[list[IntArray], list[IntArray]]:
    """Pairs and ties of the (producer, position) that common rows leave open."""
    pairs: list[IntArray] = []
    ties: list[IntArray] = []
    wide: list[IntArray] = []
    widths = list(asker.widths.values())
    bits = {p: list(_questions(widths[p])) for p in np.unique(unsure[:, 0]).tolist()}
    for p, positions, own in _own_answers(asker, arrives, unsure, bits):
        spelled = own[: 2 * codes.bits_for(widths[p])]
        channel, sure = codes.decode(spelled)
        pairs.append(_rows(p, channel[sure], positions[sure]))
        open_bits = (spelled[0::2] & spelled[1::2]).sum(axis=0)
        mixed = own.all(axis=0) | (open_bits > _MAX_OPEN_BITS)
        mixed |= widths[p] * asker.calls.peak > _MAX_ELEMENTS
        ties.append(_tied(p, spelled[:, mixed & ~sure], positions[mixed & ~sure], widths[p]))
        rest = positions[~mixed & ~sure]
        wide.append(np.stack([np.full_like(rest, p), rest], axis=1))
    open_ = np.concatenate(wide) if wide else unsure
    singles = {p: list(np.eye(widths[p], dtype=bool)) for p in np.unique(open_[:, 0]).tolist()}
    for p, positions, own in _own_answers(asker, arrives, open_, singles):
        channel, where = np.nonzero(own)
        pairs.append(_rows(p, channel, positions[where]))
    return pairs, ties


def _tied(producer: int, spelled: BoolArray, positions: IntArray, width: int) -> IntArray:
    """Rows that tie each position to all channels that its bits allow: of like ones to the first.

    The other positions are tied to the first of these channels, which comes to the same.
    """
    answers, first, like = np.unique(spelled, axis=1, return_index=True, return_inverse=True)
    channel, answer = codes.allowed(answers, width)
    several, start = np.unique(answer, return_index=True)
    leading = np.full(len(first), -1)
    leading[several] = channel[start]
    rest = leading[like.reshape(-1)]
    return np.concatenate(
        [
            _rows(producer, channel, positions[first[answer]]),
            _rows(producer, rest[rest >= 0], positions[rest >= 0]),
        ]
    )


def _questions(width: int) -> Iterator[BoolArray]:
    """Bits; of few channels, where any number of them may be open, those of Gray codes as well."""
    yield from codes.spelling(width)
    if codes.bits_for(width) <= _MAX_OPEN_BITS:
        yield from codes.reflected(width)


def _own_answers(
    asker: Probe, arrives: BoolArray, unsure: IntArray, questions: Mapping[int, Sequence[BoolArray]]
) -> Iterator[tuple[int, IntArray, BoolArray]]:
    """Producer, its open positions, and the answers there to questions about it alone."""
    for batch in _apart(arrives, unsure):
        longest = max(len(questions[p]) for p in batch)
        asked = [
            {p: questions[p][i] for p in batch if i < len(questions[p])} for i in range(longest)
        ]
        hits, _ = asker.ask(asked)
        for p in batch:
            positions = unsure[unsure[:, 0] == p, 1]
            yield p, positions, hits[: len(questions[p]), positions]


def _apart(arrives: BoolArray, unsure: IntArray) -> list[list[int]]:
    """Producers in batches within which none arrives where another's answer is open."""
    open_ = np.zeros_like(arrives)
    open_[unsure[:, 0], unsure[:, 1]] = True
    batches: list[tuple[list[int], BoolArray, BoolArray]] = []
    for p in np.flatnonzero(open_.any(axis=1)).tolist():
        for members, reached, asked in batches:
            if not ((arrives[p] & asked).any() or (open_[p] & reached).any()):
                members.append(p)
                reached |= arrives[p]
                asked |= open_[p]
                break
        else:
            batches.append(([p], arrives[p].copy(), open_[p].copy()))
    return [members for members, _, _ in batches]


def _rows(producer: int, channel: IntArray, position: IntArray) -> IntArray:
    return np.stack([np.full_like(position, producer), channel, position], axis=1)
