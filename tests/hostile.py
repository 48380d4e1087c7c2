"""Files that somebody made to do harm: values, mutations, and what reading one takes."""

from __future__ import annotations

import gc
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from stamppruner import io

CODE = "import builtins;builtins\\x2ehostile_code_ran=1"  # no dots: these part names
DEEP: list[Any] = []
for _ in range(400):
    DEEP = [DEEP]

TEXTS = (
    "", "x" * 5000, "../../outside", "/etc/passwd", "a\0b", "C:\\x", "..", "\x1b[2J", "é", "\ud800",
    "__class__", "__dict__", "__init__", "weight.data", "weight", "forward", "training", ".",
    "T_destination",
    "_parameters", "_modules", "_buffers", "state_dict", "class", "None", "stamppruner.sha256",
    "1.__class__", "1.forward", "1._is_full_backward_hook", "1.body", "1.body.0.1.momentum",
    f'x") or exec("{CODE}") or ("', f'1.x" if exec("{CODE}") else "body',
    f"__import__('os');{CODE}",
)  # fmt: skip
NUMBERS = (
    -1, 0, 1, 2, 3, 7, 2**14, 2**24 - 1, 2**31, 2**53, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308,
    math.nan, math.inf, -math.inf,
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    *TEXTS, *NUMBERS, None, True, False, [], {}, [[]], [None], {"": 0}, DEEP, [0] * 5000,
    [2**40] * 2, {"name": "x"}, {"version": 1},
)  # fmt: skip


def encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def unpack(blob: bytes) -> tuple[dict[str, Any], bytes]:
    """Header, without its digest, and data of a file that is whole."""
    start = 8 + int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8:start])
    header["__metadata__"].pop(io._DIGEST, None)
    return header, blob[start:]


def packed(header: Any, data: bytes, *, digest: bool = False) -> bytes:
    """A file; with a digest that is right, so that whatever it holds is read."""
    if digest and isinstance(header, dict) and isinstance(header.get("__metadata__", {}), dict):
        known = {io._DIGEST: io._digest(header, memoryview(data))}
        header = header | {"__metadata__": header.get("__metadata__", {}) | known}
    text = encoded(header)
    return len(text).to_bytes(8, "little") + text + data


def mutated(value: Any, draw: random.Random) -> Any:
    """A copy with one place of a tree of JSON changed."""
    whole = [json.loads(json.dumps(value))]
    places: list[tuple[Any, Any]] = [(whole, 0)]
    for owner, key in places:  # grows: outer places first
        inner = owner[key]
        if isinstance(inner, dict | list):
            places += [
                (inner, k) for k in (inner if isinstance(inner, dict) else range(len(inner)))
            ]
    outer = draw.choice((len(places) // 4, len(places)))
    owner, key = places[draw.randrange(max(1, outer))]
    old, kind = owner[key], draw.randrange(6)
    if kind == 0 and isinstance(owner, dict):
        del owner[key]
    elif kind == 1 and isinstance(owner, dict):
        owner[draw.choice(TEXTS)] = owner.pop(key)
    elif kind == 2 and isinstance(owner, list):
        owner.append(json.loads(json.dumps(old)))
    elif kind == 3 and isinstance(old, int):
        owner[key] = draw.choice((old + 1, old - 1, 2 * old, -old, float(old), str(old), [old]))
    elif kind == 4:
        other, at = draw.choice(places)
        owner[key] = json.loads(json.dumps(other[at]))
    else:
        owner[key] = draw.choice(VALUES)
    return whole[0]


def damaged(blob: bytes, draw: random.Random) -> bytes:
    """Bytes of a file that are cut, flipped, doubled or blanked."""
    start = 8 + int.from_bytes(blob[:8], "little")
    kind, at = draw.randrange(6), draw.randrange(draw.choice((8, start, len(blob))))
    new = bytearray(blob)
    if kind == 0:
        return blob[:at]
    if kind == 1:
        new[at] ^= 1 << draw.randrange(8)
    elif kind == 2:
        new[at:at] = draw.choice((b"\0", b" ", b"{", b"]", b'"', b"\xff" * 9, blob[:at]))
    elif kind == 3:
        del new[at : at + draw.randrange(1, 64)]
    elif kind == 4:
        new[at : at + 16] = draw.choice((bytes(16), b"\xff" * 16, draw.randbytes(16)))
    else:
        new[:8] = draw.choice((0, 1, start - 9, start - 7, 2**31, 2**63, 2**64 - 1)).to_bytes(
            8, "little"
        )
    return bytes(new)


class Meter:
    """The slowest reading and the one that took most memory, of all that it measured."""

    def __init__(self) -> None:
        self.seconds, self.mebibytes, self.count = 0.0, 0.0, 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        gc.freeze()  # what earlier tests left is no work of the reader's
        before, start = _reset_peak(), time.process_time()
        try:
            yield
        finally:
            self.seconds = max(self.seconds, time.process_time() - start)
            gc.unfreeze()
            self.mebibytes = max(self.mebibytes, _peak() - before)
            self.count += 1


def _reset_peak() -> float:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return math.inf  # not Linux: memory is not measured
    return _peak()


def _peak() -> float:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


Read = Callable[[Path], Any]
