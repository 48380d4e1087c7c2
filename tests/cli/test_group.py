"""Commands that are stopped, go on, and run in several processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_cli import write_images

import stamppruner
from stamppruner import describe
from stamppruner.cli import main, meta_fit
from stamppruner.io import read_safetensors

MODEL = ["--model", "vgg", "--model-args", '{"widths": [[8], [16, 16]], "num_classes": 4}']
SETTINGS = [
    "--size", "8", "--ways", "2", "--shots", "4", "--iterations", "3", "--train", "1",
    "--weight-steps", "2", "--tasks", "2", "--quiet", "--device", "cpu",
]  # fmt: skip


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "images", classes=4, per_class=8)


def command(images: Path, out: Path, *more: object) -> list[str]:
    return ["meta-fit", *MODEL, "--data", str(images), "--out", str(out), *SETTINGS,
            *map(str, more)]  # fmt: skip


def test_sigterm_ends_a_command_with_code_75_and_resume_goes_on(
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole, out, points = (tmp_path / name for name in ("whole", "out", "points"))
    logs = ["--log-dir", tmp_path / "logs"]
    assert main(command(images, whole)) == 0
    capsys.readouterr()
    say, said = meta_fit.perf_counter, [False]

    def once() -> float:
        if not said[0]:
            said[0] = True
            signal.raise_signal(signal.SIGTERM)
        return say()

    monkeypatch.setattr(meta_fit, "perf_counter", once)
    assert main(command(images, out, "--checkpoint-dir", points, *logs)) == 75
    shown = capsys.readouterr()
    assert "SIGTERM came: meta-fitting stopped after 1 of 3 iterations" in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""
    assert not out.exists()
    assert main(command(images, out, "--checkpoint-dir", points)) == 1
    assert "pass resume=True" in capsys.readouterr().err
    assert main(command(images, out, "--checkpoint-dir", points, "--resume", *logs)) == 0
    assert read_safetensors(out)[1] == read_safetensors(whole)[1]
    for name, tensor in read_safetensors(whole)[0].items():
        assert tensor.equal(read_safetensors(out)[0][name]), name
    lines = (tmp_path / "logs" / "meta-fit.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["iteration", "0", "1", "2"]


def test_devices_that_are_not_there_are_named(
    images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(images, tmp_path / "out", "--device", "nowhere")) == 1
    assert "--device nowhere" in capsys.readouterr().err


def test_commands_for_one_process_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["inspect", "file"]) == 1
    assert "inspect runs in one process, not in WORLD_SIZE=2" in capsys.readouterr().err


def torchrun(*argv: str, program: Sequence[str] = ("-m", "stamppruner"), number: int = 2) -> Any:
    return subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
            str(number), *program, *argv,
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(stamppruner.__file__).parents[1]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
    )  # fmt: skip


def test_torchrun_meta_fits_prunes_and_finetunes(images: Path, tmp_path: Path) -> None:
    pruner, slim, tuned = (str(tmp_path / name) for name in ("pruner", "slim", "tuned"))
    run = torchrun(*command(images, Path(pruner), "--checkpoint-dir", tmp_path / "points"))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("meta-fitted 3 iterations") == 1
    assert len(list((tmp_path / "points").iterdir())) == 1
    more = ["--data", str(images), "--quiet", "--json"]
    run = torchrun("prune", pruner, "--macs", "0.5", *more, "--out", slim)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["settings"]["ranks"] == 2
    run = torchrun("finetune", slim, "--epochs", "2", *more, "--out", tuned)
    assert run.returncode == 0, run.stderr
    assert len(json.loads(run.stdout)["history"]) == 2
    assert describe(tuned)["kept"] == describe(slim)["kept"]


THREADS_LEFT = """
import sys
from pathlib import Path
from stamppruner.cli import main

assert main(sys.argv[1:]) == 0
names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
assert not [name for name in names if "gloo" in name], names
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are named by Linux")
def test_the_threads_of_the_process_group_end_with_it(images: Path, tmp_path: Path) -> None:
    """Else they can abort the process at its end."""
    program = tmp_path / "program.py"
    program.write_text(THREADS_LEFT)
    run = torchrun(*command(images, tmp_path / "out"), program=[str(program)])
    assert run.returncode == 0, run.stderr
