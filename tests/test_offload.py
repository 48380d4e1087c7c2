"""What rests elsewhere comes back bit for bit, and a meta-fit learns the same with it."""

from __future__ import annotations

import dataclasses
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from stamppruner import offload
from stamppruner.errors import CheckpointError, ConfigError
from stamppruner.meta import MetaLearner
from stamppruner.offload import Offload

CPU = torch.device("cpu")
ONCE = dataclasses.replace(runs.CONFIG, iterations=2, tasks_per_iteration=2)


def nbytes(tensors: list[Tensor]) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
    part=st.sampled_from([1, 7, 64, 2**20]),
    rounds=st.integers(1, 3),
)
def test_bits_come_back(
    shapes: list[list[int]],
    dtype: torch.dtype,
    part: int,
    rounds: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    tensors.append(tensors[0])
    before = [tensor.clone() for tensor in tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "_PART", part)
        resting = Offload(tmp_path_factory.mktemp("place"), CPU).resting(lambda: tensors)
        for _ in range(rounds):
            resting.send()
            assert nbytes(tensors) == 0
            resting.bring()
            assert all(map(torch.equal, tensors, before))


def test_the_place_of_an_accelerator_is_main_memory() -> None:
    tensors = [torch.randn(3, 4), torch.randn(0), torch.arange(5)]
    before = [tensor.clone() for tensor in tensors]
    resting = offload.Resting(lambda: tensors, offload._Host())
    for _ in range(2):
        resting.send()
        assert nbytes(tensors) == 0
        with resting.here():
            assert all(map(torch.equal, tensors, before))
            tensors[0].add_(1)
            before[0].add_(1)


def test_what_was_not_changed_is_not_written_again(tmp_path: Path) -> None:
    x = torch.zeros(3)
    resting = Offload(tmp_path, CPU).resting(lambda: [x])
    with resting.here():
        x += 1
        with resting.here(changed=False):  # nested
            x += 1
    assert nbytes([x]) == 0
    with resting.here(changed=False):
        assert x.tolist() == [2, 2, 2]
        x += 1
    with resting.here(changed=False), resting.here():
        assert x.tolist() == [2, 2, 2]
        x += 1
    resting.bring()
    assert x.tolist() == [3, 3, 3]


def test_tensors_of_a_file_can_be_sent(tmp_path: Path) -> None:
    x = torch.frombuffer(bytearray(b"12345678"), dtype=torch.uint8)
    resting = Offload(tmp_path, CPU).resting(lambda: [x])
    resting.send()
    assert nbytes([x]) == 0
    resting.bring()
    assert bytes(x.tolist()) == b"12345678"


def test_without_a_place_tensors_stay() -> None:
    x = torch.ones(2)
    resting = Offload(None, CPU).resting(lambda: [x])
    resting.send()
    with resting.here():
        assert x.tolist() == [1, 1]
    assert nbytes([x]) == 8


@pytest.fixture(scope="module")
def whole() -> dict[str, Tensor]:
    return runs.state(runs.fitted())


def test_a_meta_fit_learns_the_same(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    place = tmp_path / "new" / "place"
    assert runs.same(runs.state(runs.fitted(offload=place)), whole)
    assert not list(place.iterdir())


def test_a_meta_fit_in_parts_learns_the_same(tmp_path: Path) -> None:
    config = dataclasses.replace(ONCE, weight_parts=2)
    one, two = (runs.state(runs.fitted(config, offload=place)) for place in (None, tmp_path))
    assert runs.same(one, two)


def test_checkpoints_hold_what_rests(tmp_path: Path, whole: dict[str, Tensor]) -> None:
    points, place = tmp_path / "points", tmp_path / "place"

    def callback(iteration: int, _figures: dict[str, float]) -> None:
        if iteration == 3:
            raise InterruptedError

    given: dict[str, Any] = {"checkpoint_dir": points, "checkpoint_minutes": 0, "offload": place}
    with pytest.raises(InterruptedError):
        runs.fitted(callback=callback, **given)
    copy = runs.fitted(**{**given, "offload": None})  # a place is no part of what a run is
    assert runs.same(runs.state(copy), whole)
    assert runs.same(runs.state(runs.fitted(**given)), whole)


def test_nothing_but_the_network_is_there_in_steps_on_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    old = MetaLearner._inner

    def spied(self: MetaLearner, *args: Any) -> Any:
        state = [v for s in self.outer.state.values() for v in s.values() if v.dim()]
        assert self.slimmable is not None
        state += [*self.slimmable.teacher.parameters()]
        state += [s["momentum_buffer"] for s in self.slimmable.optimizer.state.values()]
        seen.append((len(state), nbytes(state)))
        return old(self, *args)

    monkeypatch.setattr(MetaLearner, "_inner", spied)
    runs.fitted(ONCE, offload=tmp_path)
    assert [size for _, size in seen] == [0, 0, 0, 0]
    assert seen[-1][0] > 2 * seen[0][0] > 0


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, good: int) -> Iterator[None]:
    """A disk that is full after so many writes."""
    old, left = offload._File.write, [good]

    def write(self: Any, storages: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            with self._named("write to"):
                raise OSError(errno.ENOSPC, "No space left on device")
        old(self, storages)

    with monkeypatch.context() as patch:
        patch.setattr(offload._File, "write", write)
        yield


@pytest.mark.parametrize("good", [0, 1, 2, 3, 4, 6])
def test_a_full_disk_is_named_and_the_network_is_whole(
    good: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pruner = runs.STAMPPruner(runs.model(), torch.zeros(1, 3, 8, 8), config=ONCE)
    with full_disk(monkeypatch, good), pytest.raises(CheckpointError, match=r"place.*No space"):
        pruner.meta_fit(runs.sampler(), progress=False, offload=tmp_path / "place")
    assert not pruner.meta_fitted
    again = pruner.meta_fit(runs.sampler(), progress=False)
    assert all(bool(x.isfinite().all()) for x in again._gated().model.state_dict().values())


@pytest.mark.parametrize("place", ["cpu", "", 3, True])
def test_places_that_are_none(place: Any) -> None:
    with pytest.raises(ConfigError, match="offload="):
        runs.fitted(ONCE, offload=place)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file"):
        runs.fitted(ONCE, offload=tmp_path / "file")


def test_the_users_model_is_left_alone(tmp_path: Path) -> None:
    model: nn.Module = runs.model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    pruner = runs.STAMPPruner(model, torch.zeros(1, 3, 8, 8), config=ONCE)
    pruner.meta_fit(runs.sampler(), progress=False, offload=tmp_path)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
