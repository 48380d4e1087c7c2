"""What kind of number a setting is; True and False are none."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def is_real(value: Any) -> bool:
    """Whether it is a real number, infinities and NaN included."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_whole(value: Any, least: int, most: float = math.inf) -> bool:
    """Whether it is a whole number in a range, of Python, NumPy or another library."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and least <= int(value) <= most


def is_int(value: Any, least: int, most: float = math.inf) -> bool:
    """The same, and one that goes into a record as it is."""
    return isinstance(value, int) and is_whole(value, least, most)
