"""Killing a save leaves the old file or the new one, whole, and at most one stray file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import stamppruner

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")

KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
from stamppruner import io

folder, kills, moment = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
path, draw = folder / "net.safetensors", random.Random(0)
torch.set_num_threads(1)

def save(n):
    io.write_safetensors(path, {"weight": torch.full((300_000,), float(n))}, {"n": str(n)})

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def saves(n, started):
    os.write(started, b"1")
    if moment == "half":  # a part of the bytes is written
        inner = io.atomic_write
        half = lambda file: (file.write(b"half"), file.flush(), die())
        io.atomic_write = lambda path, write: inner(path, half)
    elif moment != "random":
        setattr(os, moment, die)
    for number in range(n, n + 1000):  # it never comes to the end
        save(number)

def whole():
    tensors, metadata = io.read_safetensors(path)
    assert tensors["weight"].eq(float(metadata["n"])).all() and len(tensors["weight"]) == 300_000
    return int(metadata["n"])

save(0)
seen, strays = [], 0
for kill in range(kills):
    wait, started = os.pipe()
    first = whole() + 1
    child = os.fork()
    if child == 0:
        try:
            saves(first, started)
        finally:
            os._exit(1)
    os.close(started)
    os.read(wait, 1)
    os.close(wait)
    if moment == "random":
        time.sleep(draw.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    seen.append(whole())
    left = [p for p in folder.iterdir() if p != path]
    assert len(left) <= 1 and all(p.name.startswith(".stamppruner-") for p in left), left
    strays += len(left)
    for p in left:
        p.unlink()
print(json.dumps({"seen": seen, "strays": strays}))
"""


def killed(folder: Path, kills: int, moment: str) -> tuple[list[int], int]:
    """Numbers of the file that is there after every kill, the first being 0; and stray files."""
    run = subprocess.run(
        [sys.executable, "-c", KILLER, str(folder), str(kills), moment],
        env={**os.environ, "PYTHONPATH": str(Path(stamppruner.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    return found["seen"], found["strays"]


@pytest.mark.parametrize("moment", ["half", "fsync", "replace"])
def test_before_the_new_file_is_in_its_place_the_old_one_is(moment: str, tmp_path: Path) -> None:
    assert killed(tmp_path, 1, moment) == ([0], 1)


@pytest.mark.parametrize("kills", [12, pytest.param(500, marks=pytest.mark.slow)])
def test_at_random_moments(kills: int, tmp_path: Path) -> None:
    seen, strays = killed(tmp_path, kills, "random")
    assert len(seen) == kills
    assert seen == sorted(seen)
    if kills > 100:  # a busy machine may finish all of a few saves, or none
        assert seen[-1] > 0
        assert strays > 0
