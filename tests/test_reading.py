"""Pieces of a source come in order and the same, whoever reads them; no reader is left behind."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stripes import dataset, vgg
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from stamppruner import LoaderTasks, STAMPConfig, STAMPPruner, TaskSampler
from stamppruner.errors import ConfigError, DataError, LoaderTimeoutError
from stamppruner.reading import Draws, Reader
from stamppruner.workers import Piece

CONFIG = dataclasses.replace(runs.CONFIG, iterations=4)
SHORT = dataclasses.replace(CONFIG, iterations=1)
LONG = dataclasses.replace(CONFIG, iterations=10_000)


def children() -> set[int]:
    """Processes of this one, but for Python's tracker of shared memory."""
    found = set()
    for listed in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, listed.read_text().split()):
            if running(pid) and b"tracker" not in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(pid)
    return found


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def until(holds: Callable[[], bool], seconds: float = 20) -> bool:
    limit = time.perf_counter() + seconds
    while not holds() and time.perf_counter() < limit:
        time.sleep(0.05)
    return holds()


@pytest.fixture(autouse=True)
def _no_reader_is_left_behind() -> Iterator[None]:
    before = children()
    yield
    assert until(lambda: children() <= before)


class OneByOne(Dataset):
    """Images that are augmented by the global streams, and what may happen to their reader."""

    def __init__(self, bad: Callable[[], None] | None = None, at: int = 40) -> None:
        self.data, self.bad, self.left = dataset(16), bad, at
        self.targets = self.data.tensors[1]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        image, label = self.data[index]
        self.left -= 1
        if self.bad is not None and self.left < 0:
            self.bad()
        return image + 0.1 * torch.randn_like(image), label


class Numbers:
    """A source whose pieces tell who read them."""

    num_classes = num_images = 10

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def draw(self, n: int) -> list[int]:
        self.position += n
        return list(range(self.position - n, self.position))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Told(Exception):
    """An error that needs two arguments, so that no other process can make it anew."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


@dataclasses.dataclass
class Read:
    """What a piece of Numbers is read by."""

    number: int
    bad: str = ""

    def __call__(self, _source: Numbers) -> tuple[int, int, float]:
        match self.bad:
            case "told":
                raise Told("this", "that")
            case "late":
                raise TimeoutError("the server is slow")
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "hangs":
                time.sleep(600)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
        return self.number, os.getpid(), float(torch.rand(()))


def pieces(number: int, asked: list[int] | None = None) -> Iterator[Piece]:
    for k in range(number):
        if asked is not None:
            asked.append(k)
        yield Piece((k,), Read(k))


def found(workers: int, number: int) -> list[tuple[int, int, float]]:
    with torch.random.fork_rng([]), Reader(Numbers(), 3, workers=workers) as reader:
        return list(reader.stream(pieces(number), "numbers"))


@settings(max_examples=5, deadline=None)
@given(st.integers(1, 3), st.integers(0, 12))
def test_pieces_come_in_order_and_the_same_from_any_number_of_workers(
    workers: int, number: int
) -> None:
    here, there = found(0, number), found(workers, number)
    assert [one[0] for one in there] == list(range(number))
    assert [one[2] for one in there] == [one[2] for one in here]
    assert {one[1] for one in here} <= {os.getpid()}
    assert os.getpid() not in {one[1] for one in there}


@pytest.mark.parametrize(("workers", "ahead"), [(0, 0), (1, 2), (3, 6)])
def test_so_many_pieces_are_read_ahead(workers: int, ahead: int) -> None:
    asked: list[int] = []
    with torch.random.fork_rng([]), Reader(Numbers(), 0, workers=workers) as reader:
        stream = reader.stream(pieces(20, asked), "numbers")
        for k in range(10):
            assert next(stream)[0] == k
            assert len(asked) == k + 1 + ahead
        other = list(reader.stream(pieces(3), "others"))
        assert [k for k, *_ in other] == [0, 1, 2]
        assert [k for k, *_ in stream] == list(range(10, 20))


def fitted(
    data: Any = None, config: STAMPConfig = CONFIG, source: Any = None, **given_: Any
) -> STAMPPruner:
    source = source or TaskSampler(data or OneByOne(), 3, 8, seed=1)
    model = torch.nn.Sequential(torch.nn.Dropout(0.1), vgg())
    pruner = STAMPPruner(model, torch.zeros(1, 3, 8, 8), config=config)
    return pruner.meta_fit(source, progress=False, **given_)


def shuffled() -> list[Any]:
    """Tasks as data sets and loaders, in one of which the order is random."""
    return [
        DataLoader(OneByOne(), batch_size=8, shuffle=True),
        dataset(8),
        [dataset(12).tensors],
    ]


def squares(outputs: Any, targets: Any) -> Tensor:
    return (outputs - F.one_hot(targets, 6)).square().mean()


KINDS: dict[str, Callable[..., STAMPPruner]] = {
    "items": fitted,
    "parts": lambda **given_: fitted(config=dataclasses.replace(CONFIG, weight_parts=3), **given_),
    "taught": lambda **given_: fitted(
        dataset(16), dataclasses.replace(CONFIG, weight_batch=24), **given_
    ),
    "transform": lambda **given_: fitted(source=runs.sampler(), **given_),
    "loaders": lambda **given_: fitted(source=LoaderTasks(shuffled(), 8), **given_),
    "samples": lambda **given_: STAMPPruner(
        vgg(), torch.zeros(1, 3, 8, 8), config=CONFIG, loss_fn=squares
    ).meta_fit([OneByOne(), dataset(12)], progress=False, **given_),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_learned_does_not_depend_on_workers(kind: str) -> None:
    states = [runs.state(KINDS[kind](num_workers=n)) for n in (0, 2)]
    assert runs.same(*states)


def test_a_run_goes_on_with_other_workers_and_the_source_stands_where_it_would(
    tmp_path: Path,
) -> None:
    class Stop(Exception):
        pass

    def stop(iteration: int, _figures: dict[str, float]) -> None:
        if iteration == 1:
            raise Stop

    sources = [TaskSampler(OneByOne(), 3, 8, seed=1) for _ in range(3)]
    wanted = runs.state(fitted(source=sources[0]))
    often = {"checkpoint_dir": tmp_path, "checkpoint_minutes": 0}
    with pytest.raises(Stop):
        fitted(source=sources[1], num_workers=2, callback=stop, **often)
    assert sources[1].iteration == 2
    assert runs.same(runs.state(fitted(source=sources[2], num_workers=1, **often)), wanted)
    assert [source.iteration for source in sources] == [5, 2, 5]  # with one to recalibrate


def test_the_source_stays_where_it_is_while_tasks_are_drawn_ahead() -> None:
    reader = Reader(Numbers(4), 0)
    with torch.random.fork_rng([]):
        draws = Draws(reader, 3, 7)
        assert draws.of(8) == [7, 8, 9]
        assert draws.of(7) == [4, 5, 6]
        assert reader.source.state_dict() == {"position": 4}
        draws.over(7)
        assert reader.source.state_dict() == {"position": 7}
        assert draws.of(9) == [10, 11, 12]
        assert reader.source.state_dict() == {"position": 7}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_callback_sees_the_source_after_its_iteration(workers: int) -> None:
    source = TaskSampler(OneByOne(), 3, 8, seed=1)
    seen: list[int] = []
    fitted(source=source, num_workers=workers, callback=lambda *_: seen.append(source.iteration))
    assert seen == [1, 2, 3, 4]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_callers_random_streams_go_on(workers: int) -> None:
    def states() -> list[Any]:
        return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002

    data = OneByOne(lambda: (random.random(), np.random.rand()))  # noqa: NPY002
    before = states()
    fitted(data, num_workers=workers)
    assert states() == before


def raised(bad: str, timeout: float | None = None, workers: int = 1) -> Any:
    """The error that a piece in the middle ends with."""
    numbers = [Piece((k,), Read(k, bad if k == 2 else "")) for k in range(5)]
    seen = []
    try:
        with (
            torch.random.fork_rng([]),
            Reader(Numbers(), 0, workers=workers, timeout=timeout) as reader,
        ):
            for number, *_ in reader.stream(numbers, "numbers"):
                seen.append(number)
    except Exception as error:
        assert seen == [0, 1] or bad == "killed"  # which may take others with it
        return error
    raise AssertionError("there was no error")


def test_errors_of_the_source_pass_through() -> None:
    error = raised("late", timeout=60)
    assert type(error) is TimeoutError
    assert "the server is slow" in str(error)
    assert type(raised("told", workers=0)) is Told
    error = raised("told")
    assert type(error) is DataError
    assert str(error) == "Told: this and that"


@pytest.mark.parametrize(
    ("bad", "kind", "text"),
    [
        ("killed", DataError, "a worker that reads images ended at once: .*lower num_workers"),
        ("hangs", LoaderTimeoutError, "numbers did not come within 1 seconds"),
    ],
)
def test_workers_that_end_or_hang(bad: str, kind: type[Exception], text: str) -> None:
    error = raised(bad, timeout=1 if bad == "hangs" else None)
    assert type(error) is kind
    with pytest.raises(kind, match=text):
        raise error


def test_a_killed_worker_ends_a_meta_fit_and_nothing_is_changed() -> None:
    data = OneByOne(lambda: os.kill(os.getpid(), signal.SIGKILL), at=400)
    source = TaskSampler(data, 3, 8, seed=1)
    model = vgg()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    pruner = STAMPPruner(model, torch.zeros(1, 3, 8, 8), config=CONFIG)
    with pytest.raises(DataError, match="worker"):
        pruner.meta_fit(source, progress=False, num_workers=2)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not pruner.meta_fitted


def test_workers_leave_sigterm_to_their_parent() -> None:
    with torch.random.fork_rng([]), Reader(Numbers(), 0, workers=1) as reader:
        stream = reader.stream([Piece((k,), Read(k, "term")) for k in range(3)], "numbers")
        assert [k for k, *_ in stream] == [0, 1, 2]


ORPHANS = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from test_reading import Numbers, Piece, Read, Reader
reader = Reader(Numbers(), 0, workers=2)
stream = reader.stream([Piece((k,), Read(k)) for k in range(9)], "numbers")
workers = {next(stream)[1] for _ in range(9)}
print(*workers, flush=True)
if sys.argv[2] == "killed":
    time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux for processes")
@pytest.mark.parametrize("end", ["killed", "left"])
def test_workers_end_with_their_parent(end: str) -> None:
    run = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, str(Path(__file__).parent), end],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    workers = [int(pid) for pid in run.stdout.readline().split()]
    assert workers
    if end == "killed":
        assert all(running(pid) for pid in workers)
        run.kill()
    assert run.wait(60) == (-signal.SIGKILL if end == "killed" else 0)
    assert until(lambda: not any(running(pid) for pid in workers))


class OneBuffer(OneByOne):
    """All images that it gives lie in the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.buffer = torch.empty(96, 3, 8, 8)

    def fetch(self, indices: Any) -> Tensor:
        place = self.buffer[: len(indices)]
        return place.copy_(self.data.tensors[0][torch.as_tensor(indices)])


def test_a_data_set_may_use_its_memory_again() -> None:
    assert runs.same(*(runs.state(fitted(OneBuffer(), num_workers=n)) for n in (0, 2)))


def ends_by_itself() -> None:
    process = subprocess.Popen(["sleep", "300"])
    process.terminate()
    assert process.wait(10) == -signal.SIGTERM


def test_programs_that_a_data_set_starts_hear_signals() -> None:
    fitted(OneByOne(ends_by_itself, at=300), num_workers=1, config=SHORT)


def test_loaders_whose_workers_stay_are_refused() -> None:
    loader = DataLoader(dataset(8), batch_size=8, num_workers=1, persistent_workers=True)
    with pytest.raises(ConfigError, match=r"source 1 is a DataLoader.*persistent_workers=False"):
        fitted(source=LoaderTasks([dataset(8), loader], 8), num_workers=2)


NESTED = """
import sys, time
sys.path.insert(0, sys.argv[1])
from stripes import dataset
from torch.utils.data import DataLoader
from test_reading import Numbers, Piece, Reader
from stamppruner.errors import LoaderTimeoutError

class Hangs:
    def __len__(self): return 8
    def __getitem__(self, index): time.sleep(600)

class Nested(Numbers):
    def _read(self): return next(iter(DataLoader(Hangs(), num_workers=1)))

from operator import methodcaller
try:
    with Reader(Nested(), 0, workers=1, timeout=3) as reader:
        next(reader.stream([Piece((0,), methodcaller("_read"))], "numbers"))
except LoaderTimeoutError:
    print("late")
"""


def test_a_loader_that_hangs_in_a_worker_does_not_keep_python_waiting() -> None:
    run = subprocess.run(
        [sys.executable, "-c", NESTED, str(Path(__file__).parent)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (run.stdout, run.returncode) == ("late\n", 0), run.stderr


PREEMPTED = """
import sys
sys.path.insert(0, sys.argv[1])
import test_reading, torch
from stamppruner.errors import PreemptedError

if __name__ == "__main__":
    torch.multiprocessing.set_start_method(sys.argv[2])
    print("begun", flush=True)
    try:
        test_reading.fitted(
            config=test_reading.LONG, num_workers=2, checkpoint_dir=sys.argv[3],
            callback=lambda i, _: print(i, flush=True),
        )
    except PreemptedError:
        print("preempted")
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="asks Linux for processes")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_sigterm_to_all_processes_ends_with_a_checkpoint(method: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(PREEMPTED)
    run = subprocess.Popen(
        [sys.executable, str(script), str(Path(__file__).parent), method, str(tmp_path / "points")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert run.stdout is not None
    while run.stdout.readline() != "1\n":
        assert run.poll() is None
    for pid in [*descendants(run.pid), run.pid]:
        os.kill(pid, signal.SIGTERM)
    printed, errors = run.communicate(timeout=60)
    assert printed.endswith("preempted\n"), errors
    assert len(list((tmp_path / "points").iterdir())) == 1


def descendants(pid: int) -> list[int]:
    found = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, listed.read_text().split()):
            if b"tracker" not in Path(f"/proc/{child}/cmdline").read_bytes():
                found += [child, *descendants(child)]
    return found


class AtOnce:
    """A source that draws and reads at once."""

    num_classes, num_images = 6, 96

    def __init__(self) -> None:
        self.inner = TaskSampler(dataset(16), 3, 8, seed=1)
        self.tasks = self.inner.tasks
        self.state_dict, self.load_state_dict = self.inner.state_dict, self.inner.load_state_dict


def test_a_source_that_draws_and_reads_at_once_is_read_here() -> None:
    config = dataclasses.replace(CONFIG, warm_start=False, weight_steps=0)
    with pytest.raises(ConfigError, match=r"num_workers=2: AtOnce has no draw\(n\)"):
        fitted(config=config, source=AtOnce(), num_workers=2)
    wanted = fitted(config=config, source=TaskSampler(dataset(16), 3, 8, seed=1))
    assert runs.same(runs.state(fitted(config=config, source=AtOnce())), runs.state(wanted))


@pytest.mark.parametrize("number", [-1, 1.0, True, "2", None])
def test_bad_numbers_of_workers(number: Any) -> None:
    with pytest.raises(ConfigError, match=f"num_workers={number!r}.*whole number from 0"):
        fitted(num_workers=number)


def test_workers_of_another_thread() -> None:
    there: list[Any] = []
    thread = threading.Thread(target=lambda: there.extend(found(1, 3)))
    thread.start()
    thread.join()
    assert [one[2] for one in there] == [one[2] for one in found(0, 3)]


def in_daemon(folder: str) -> None:
    try:
        found(1, 3)
    except ConfigError as error:
        Path(folder, "error").write_text(str(error))


def test_a_daemon_which_may_have_no_children_is_told(tmp_path: Path) -> None:
    process = torch.multiprocessing.get_context().Process(
        target=in_daemon, args=(str(tmp_path),), daemon=True
    )
    process.start()
    process.join(60)
    assert "call this from no daemon" in (tmp_path / "error").read_text()


def spawning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers begin as on systems that cannot fork."""
    own = torch.multiprocessing.get_context
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda: own("spawn"))


def test_workers_that_are_sent_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = found(0, 4)
    spawning(monkeypatch)
    assert [one[2] for one in found(1, 4)] == [one[2] for one in wanted]


def test_a_source_that_cannot_be_sent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spawning(monkeypatch)
    source = TaskSampler(
        TensorDataset(*dataset(16).tensors), 3, 8, transform=lambda images, _generator: images
    )
    with pytest.raises(ConfigError, match="no worker can be started with the reference"):
        fitted(source=source, num_workers=1)
