"""Channel numbers spelled in bits: ``2 * ceil(log2 C)`` questions name any one of C channels.

Every bit is asked twice, once for the channels that have it and once for those that do not. Where
both answers are yes, several channels arrive.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from stamppruner.channels import BoolArray, IntArray


def bits_for(width: int) -> int:
    """Number of bits that tell ``width`` channels apart."""
    return max(1, math.ceil(math.log2(max(2, width))))


def spelling(width: int, bits: int | None = None) -> Iterator[BoolArray]:
    """The questions: ``(width,)`` vectors that mark the channels without, then with, each bit."""
    for bit in range(bits_for(width) if bits is None else bits):
        for value in (0, 1):
            yield (np.arange(width) >> bit & 1) == value


def reflected(width: int) -> Iterator[BoolArray]:
    """The questions of :func:`spelling` about Gray codes.

    Two channels that differ in every bit of their numbers share all but one bit of these.
    """
    gray = np.arange(width) ^ (np.arange(width) >> 1)
    for bit in range(bits_for(width)):
        for value in (0, 1):
            yield (gray >> bit & 1) == value


def decode(answers: BoolArray) -> tuple[IntArray, BoolArray]:
    """Channel spelled at each place, and whether it is the only one.

    Args:
        answers: ``(2 * bits, places)``.
    """
    zeros, ones = answers[0::2], answers[1::2]
    weights = (1 << np.arange(len(zeros), dtype=np.int64))[:, None]
    return (ones * weights).sum(axis=0), (zeros != ones).all(axis=0)


def allowed(answers: BoolArray, width: int) -> tuple[IntArray, IntArray]:
    """All (channel, place) that the arrived bits allow."""
    zeros, ones = answers[0::2], answers[1::2]
    bits = (np.arange(width)[:, None] >> np.arange(len(zeros)) & 1).astype(bool)  # (C, bits)
    possible = np.ones((width, answers.shape[1]), dtype=bool)
    for bit in range(len(zeros)):
        possible &= np.where(bits[:, bit, None], ones[bit], zeros[bit])
    channel, place = np.nonzero(possible)
    return channel, place
