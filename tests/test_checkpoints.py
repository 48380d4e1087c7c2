"""Checkpoints: the right one is picked up, and a run goes on from it bit for bit."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from stripes import dataset

import stamppruner
from stamppruner import STAMPPruner, TaskSampler, files
from stamppruner.checkpoints import Checkpoints, digest
from stamppruner.encoders import DeepSets
from stamppruner.errors import CheckpointError, ConfigError, PreemptedError
from stamppruner.io import read_safetensors, write_safetensors

EVERY = {"checkpoint_minutes": 0}


class Stop(Exception):
    pass


def stopping(at: int) -> Callable[[int, dict[str, float]], None]:
    def callback(iteration: int, _figures: dict[str, float]) -> None:
        if iteration == at:
            raise Stop

    return callback


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    """The uninterrupted run."""
    return runs.state(runs.fitted())


def stopped(folder: Path, at: int = 3, **settings: Any) -> Path:
    with pytest.raises(Stop):
        runs.fitted(checkpoint_dir=folder, callback=stopping(at), **EVERY, **settings)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a run that was stopped."""
    return stopped(tmp_path_factory.mktemp("begun"))


@pytest.fixture
def points(begun: Path, tmp_path: Path) -> Path:
    """A copy of them."""
    return Path(shutil.copytree(begun, tmp_path / "points"))


@pytest.mark.parametrize("at", [1, 3, 5])
def test_a_run_goes_on_bit_for_bit(at: int, tmp_path: Path, whole: Any) -> None:
    stopped(tmp_path, at)
    assert names(tmp_path)[-1] == f"meta-fit-{at:08d}.safetensors"
    seen: list[int] = []
    pruner = runs.fitted(checkpoint_dir=tmp_path, callback=lambda i, _: seen.append(i))
    assert seen == list(range(at, 6))
    assert runs.same(runs.state(pruner), whole)


def test_checkpoints_change_nothing_and_the_last_three_stay(tmp_path: Path, whole: Any) -> None:
    assert runs.same(runs.state(runs.fitted(checkpoint_dir=tmp_path, **EVERY)), whole)
    assert names(tmp_path) == [f"meta-fit-{n:08d}.safetensors" for n in (4, 5, 6)]


def test_a_finished_run_is_finished(tmp_path: Path, whole: Any) -> None:
    runs.fitted(checkpoint_dir=tmp_path, keep=1)
    assert names(tmp_path) == ["meta-fit-00000006.safetensors"]
    pruner = runs.fitted(checkpoint_dir=tmp_path, callback=stopping(0))
    assert runs.same(runs.state(pruner), whole)


def test_the_same_pruner_goes_on(tmp_path: Path, whole: Any) -> None:
    pruner = STAMPPruner(runs.model(), torch.zeros(1, 3, 8, 8), config=runs.CONFIG)
    source = runs.sampler()
    with pytest.raises(Stop):
        pruner.meta_fit(
            source, progress=False, callback=stopping(2), checkpoint_dir=tmp_path, **EVERY
        )
    pruner.meta_fit(source, progress=False, checkpoint_dir=tmp_path)
    assert runs.same(runs.state(pruner), whole)


def test_global_random_streams_are_left_as_they_were(whole: Any) -> None:
    before = torch.get_rng_state()
    torch.rand(3)
    found = runs.state(runs.fitted())
    assert runs.same(found, whole)  # whatever the streams were
    after = torch.get_rng_state()
    torch.set_rng_state(before)
    torch.rand(3)
    assert torch.equal(torch.get_rng_state(), after)


def test_a_folder_with_checkpoints_is_refused_where_a_run_begins_anew(points: Path) -> None:
    before = {path.name: path.read_bytes() for path in points.iterdir()}
    with pytest.raises(CheckpointError, match=r"the last is meta-fit-00000003.*resume=True"):
        runs.fitted(checkpoint_dir=points, resume=False)
    assert before == {path.name: path.read_bytes() for path in points.iterdir()}
    with pytest.raises(Stop):
        runs.fitted(checkpoint_dir=points / "other", resume=False, callback=stopping(0))


def other_model() -> STAMPPruner:
    net = runs.model()
    with torch.no_grad():
        next(net.parameters())[0, 0, 0, 0] += 1e-3
    return STAMPPruner(net, torch.zeros(1, 3, 8, 8), config=runs.CONFIG)


def pruner_of(**changes: Any) -> STAMPPruner:
    config = dataclasses.replace(runs.CONFIG, **changes)
    return STAMPPruner(runs.model(), torch.zeros(1, 3, 8, 8), config=config)


OTHERS: dict[str, tuple[Callable[[], STAMPPruner], Callable[[], TaskSampler], str]] = {
    "config": (
        lambda: pruner_of(pi_lr=0.5),
        runs.sampler,
        r"config.pi_lr was 0.01 there and .*0.5",
    ),
    "iterations": (lambda: pruner_of(iterations=7), runs.sampler, r"config.iterations was 6"),
    "weights": (other_model, runs.sampler, r"weights of the model was"),
    "graph": (
        lambda: STAMPPruner(
            runs.model(), torch.zeros(1, 3, 8, 8), config=runs.CONFIG, protect=["1.features.0"]
        ),
        runs.sampler,
        r"channel groups was '3, ",
    ),
    "encoder": (
        lambda: STAMPPruner(
            runs.model(), torch.zeros(1, 3, 8, 8), config=runs.CONFIG, encoder=DeepSets(3)
        ),
        runs.sampler,
        r"encoder was 'SetTransformer' there and is 'DeepSets'",
    ),
    "images": (pruner_of, lambda: TaskSampler(dataset(17), 3, 8, seed=1), r"reference images was"),
    "sampler": (pruner_of, lambda: TaskSampler(dataset(16), 3, 8, seed=2), r"reference seed was 1"),
}


@pytest.mark.parametrize("what", OTHERS)
def test_checkpoints_of_another_run_are_refused(what: str, begun: Path) -> None:
    make, source, text = OTHERS[what]
    pruner = make()
    before = runs.state(pruner)
    with pytest.raises(CheckpointError, match=f"is of another run: {text}.*another folder"):
        pruner.meta_fit(source(), progress=False, checkpoint_dir=begun)
    assert runs.same(runs.state(pruner), before)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "empty": lambda path: path.write_bytes(b""),
    "flipped": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x55"),
    "other": lambda path: write_safetensors(path, {}, {"format": "pt"}),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_left_out_for_the_one_before(
    kind: str, points: Path, whole: Any, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGE[kind](points / "meta-fit-00000003.safetensors")
    seen: list[int] = []
    with caplog.at_level(logging.WARNING, "stamppruner"):
        pruner = runs.fitted(checkpoint_dir=points, callback=lambda i, _: seen.append(i))
    assert "left out a checkpoint" in caplog.text
    assert "meta-fit-00000003" in caplog.text
    assert seen[0] == 2
    assert runs.same(runs.state(pruner), whole)


def test_no_file_that_can_be_read_is_an_error(points: Path) -> None:
    for path in points.iterdir():
        path.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"none of the 3 checkpoints.*begin anew"):
        runs.fitted(checkpoint_dir=points)


def edited(folder: Path, edit: Callable[[dict[str, Any], dict[str, Any]], object]) -> None:
    path = folder / "meta-fit-00000003.safetensors"
    tensors, metadata = read_safetensors(path)
    record = json.loads(metadata["stamppruner.checkpoint"])
    edit(tensors, record)
    write_safetensors(path, tensors, {"stamppruner.checkpoint": json.dumps(record)})


EDITS: dict[str, Callable[[dict[str, Any], dict[str, Any]], object]] = {
    "no history": lambda _, record: record.pop("history"),
    "no generator": lambda tensors, _: tensors.pop("generator"),
    "short generator": lambda tensors, _: tensors.update(generator=torch.zeros(3).byte()),
    "no weight": lambda tensors, _: tensors.pop("model.1.features.0.weight"),
    "no source": lambda _, record: record.update(source=3),
    "random": lambda _, record: record.update(random={"bit_generator": "PCG64"}),
    "optimizer": lambda tensors, _: tensors.update({"outer.0.exp_avg": torch.zeros(2)}),
    "number": lambda tensors, _: tensors.update({"outer.999.exp_avg": torch.zeros(2)}),
    "no slimmable": lambda _, record: record.pop("slimmable"),
    "skips": lambda _, record: record.update(skips=["a"]),
    "row": lambda _, record: record.update(history=[3]),
}


@pytest.mark.parametrize("name", EDITS)
def test_files_that_do_not_fit_are_refused(name: str, points: Path) -> None:
    edited(points, EDITS[name])
    with pytest.raises(CheckpointError, match=r"00000003.*does not fit this run.*the one before"):
        runs.fitted(checkpoint_dir=points)


def test_files_that_do_not_say_of_which_run_they_are_are_refused(points: Path) -> None:
    edited(points, lambda _, record: record.pop("identity"))
    with pytest.raises(CheckpointError, match="of which run"):
        runs.fitted(checkpoint_dir=points)


def test_another_version_of_torch_is_told(points: Path, caplog: pytest.LogCaptureFixture) -> None:
    edited(points, lambda _, record: record.update(torch="1.0"))
    with caplog.at_level(logging.WARNING, "stamppruner"), pytest.raises(Stop):
        runs.fitted(checkpoint_dir=points, callback=stopping(3))
    assert "torch '1.0'" in caplog.text


def test_what_killed_writers_left_is_removed_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / ".stamppruner-0123.tmp").write_bytes(b"half")
    (tmp_path / "notes.txt").write_text("mine")
    Checkpoints(tmp_path, 1, {}).write(3, {}, {})
    assert names(tmp_path) == ["meta-fit-00000003.safetensors", "notes.txt"]


def test_a_folder_that_cannot_be_written_to_is_refused_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        runs.fitted(checkpoint_dir=file / "inside", callback=stopping(0))


def test_a_disk_that_is_full_leaves_the_older_files(
    points: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(points)

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    def callback(iteration: int, _figures: dict[str, float]) -> None:
        if iteration == 4:
            monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(CheckpointError, match="No space left"):
        runs.fitted(checkpoint_dir=points, callback=callback, **EVERY)
    monkeypatch.undo()
    assert names(points)[-1] == "meta-fit-00000004.safetensors"
    assert set(before[1:]) <= set(names(points))


@pytest.mark.parametrize(
    "settings",
    [
        {"checkpoint_minutes": -1},
        {"checkpoint_minutes": float("nan")},
        {"keep": 0},
        {"keep": True},
        {"max_skipped": 0},
        {"loader_timeout": 0},
        {"loader_timeout": "5"},
        {"checkpoint_minutes": None},
    ],
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(ConfigError, match=rf"meta_fit\({name}="):
        runs.fitted(**settings)


def test_the_digest_is_of_values_names_and_shapes() -> None:
    net = runs.model()
    first = digest(net)
    assert first == digest(runs.model())
    with torch.no_grad():
        next(net.parameters())[0, 0, 0, 0] += 1e-3
    assert digest(net) != first
    assert digest(torch.nn.Linear(0, 0)) != digest(torch.nn.Linear(0, 0, bias=False))


def terminating(at: int) -> Callable[[int, dict[str, float]], None]:
    def callback(iteration: int, _figures: dict[str, float]) -> None:
        if iteration == at:
            signal.raise_signal(signal.SIGTERM)

    return callback


def test_sigterm_ends_the_run_with_a_checkpoint(tmp_path: Path, whole: Any) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(PreemptedError, match=r"after 3 of 6 iterations.*resume=True"):
        runs.fitted(checkpoint_dir=tmp_path, callback=terminating(2))
    assert names(tmp_path) == ["meta-fit-00000003.safetensors"]
    assert signal.getsignal(signal.SIGTERM) is before
    assert runs.same(runs.state(runs.fitted(checkpoint_dir=tmp_path)), whole)


def test_sigterm_in_the_last_iteration_changes_nothing(tmp_path: Path, whole: Any) -> None:
    assert runs.same(
        runs.state(runs.fitted(checkpoint_dir=tmp_path, callback=terminating(5))), whole
    )


def test_without_checkpoints_sigterm_does_what_it_did() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    try:
        runs.fitted(callback=terminating(2))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert came == [signal.SIGTERM]


def test_other_threads_leave_signals_alone(tmp_path: Path, whole: Any) -> None:
    found: list[Any] = []

    def work() -> None:
        found.append(runs.state(runs.fitted(checkpoint_dir=tmp_path)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert runs.same(found[0], whole)


KILLER = """
import json, os, random, signal, sys, time
from pathlib import Path
import torch
torch.set_num_threads(1)
import runs
from stamppruner.errors import PreemptedError

folder, kills, workers, wait = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), 2.0
draw = random.Random(kills)
wanted = runs.state(runs.fitted())
torch.save(wanted, folder / "wanted.pt")
ends, starts, round_ = [], [], 0

def child(place):
    def first(i, _):
        (place / f"first-{os.getpid()}").touch()
    try:
        found = runs.state(
            runs.fitted(
                checkpoint_dir=place / "points", checkpoint_minutes=0, num_workers=workers,
                callback=first,
            )
        )
        torch.save(found, place / "found.pt")
        os._exit(0)
    except PreemptedError:
        os._exit(75)
    except BaseException as error:
        print(repr(error), file=sys.stderr)
        os._exit(1)

def start():
    place = folder / str(round_)
    place.mkdir(exist_ok=True)
    pid = os.fork()
    if pid == 0:
        child(place)
    return pid, place

def check(place):
    global round_
    assert runs.same(torch.load(place / "found.pt"), wanted)
    round_ += 1

done = 0
while done < kills:
    pid, place = start()
    number = draw.choice([signal.SIGKILL, signal.SIGTERM])
    time.sleep(draw.uniform(0, wait))
    if (place / "points").exists() and number == signal.SIGTERM:
        while not (place / f"first-{pid}").exists() and os.waitpid(pid, os.WNOHANG)[0] == 0:
            time.sleep(0.01)  # it listens to SIGTERM from then on
    try:
        os.kill(pid, number)
        status = os.waitpid(pid, 0)[1]
    except (ProcessLookupError, ChildProcessError):
        status = 0
    if status == 0:
        check(place)  # it was faster
        continue
    code = os.waitstatus_to_exitcode(status)
    assert code in (75, -signal.SIGKILL, -signal.SIGTERM), code
    ends.append(code)
    done += 1
while True:
    pid, place = start()
    assert os.waitpid(pid, 0)[1] == 0
    check(place)
    break
print(json.dumps(ends))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kills", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_kills_at_random_moments(kills: int, workers: int, tmp_path: Path) -> None:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(Path(stamppruner.__file__).parents[1])])
    run = subprocess.run(
        [sys.executable, "-c", KILLER, str(tmp_path), str(kills), str(workers)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    ends = json.loads(run.stdout)
    assert len(ends) == kills
    if kills > 20:
        assert {75, -signal.SIGKILL} <= set(ends)
    assert not list(tmp_path.rglob("*.tmp"))


def test_the_prefix_of_strays_is_that_of_the_writer(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        files.atomic_write(tmp_path / "file", lambda _: 1 // 0)
    assert names(tmp_path) == []
    _, stray = files._open_temporary(tmp_path / "file")
    assert stray.exists()
    files.remove_strays(tmp_path)
    assert names(tmp_path) == []
