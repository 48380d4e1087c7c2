"""A teacher is asked once an image, and only where that is the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runs
import torch
from stripes import dataset, vgg
from torch import Tensor, nn
from torch.utils.data import Dataset

from stamppruner import STAMPConfig, STAMPPruner, TaskSampler
from stamppruner.slimmable import SlimmableTraining
from stamppruner.taught import Taught, digests

CONFIG = STAMPConfig(
    iterations=6, tasks_per_iteration=1, ways=3, shots=8, minibatch_size=8,
    weight_steps=2, weight_batch=24, seed=3,
)  # fmt: skip


class Augmented(Dataset):
    """Other images every time."""

    def __init__(self) -> None:
        self.data = dataset(16)
        self.targets = self.data.tensors[1]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        image, label = self.data[index]
        return image + 0.1 * torch.randn_like(image), label


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of images that a teacher was asked about."""
    found: list[int] = []
    answer = SlimmableTraining._answer
    monkeypatch.setattr(
        SlimmableTraining,
        "_answer",
        lambda self, images: found.append(len(images)) or answer(self, images),
    )
    return found


def fitted(config: STAMPConfig = CONFIG, data: Any = None, **settings: Any) -> dict[str, Tensor]:
    pruner = STAMPPruner(vgg(), torch.zeros(1, 3, 8, 8), config=config)
    source = TaskSampler(data or dataset(16), 3, 8, seed=1)
    return runs.state(pruner.meta_fit(source, progress=False, **settings))


def test_a_teacher_is_asked_once_an_image(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = fitted()
    assert asked == [1, 24, 24, 24, 24]  # 96 images; steps take 288
    monkeypatch.setattr(Taught, "__call__", lambda *_: None)
    wanted = fitted(dataclasses.replace(CONFIG))
    assert asked[5:] == [1, *[24] * 16]
    for name, tensor in wanted.items():
        if name.startswith("model"):  # the encoder takes rounding for a step
            assert torch.allclose(found[name], tensor, atol=1e-4), name


def test_where_images_come_once_or_anew_it_is_asked_every_time(asked: list[int]) -> None:
    fitted(dataclasses.replace(CONFIG, iterations=1))  # 48 of the 96
    assert asked == [24] * 2
    asked.clear()
    fitted(data=Augmented())
    assert asked == [1, *[24] * 12]
    asked.clear()
    runs.fitted(dataclasses.replace(runs.CONFIG, weight_batch=48))  # TaskSampler(transform=...)
    assert set(asked) == {48}


def test_a_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    def stop(iteration: int, _figures: dict[str, float]) -> None:
        if iteration == 2:
            raise Stop

    with pytest.raises(Stop):
        fitted(checkpoint_dir=tmp_path, checkpoint_minutes=0, callback=stop)
    assert runs.same(fitted(checkpoint_dir=tmp_path), fitted())


def test_answers_that_take_too_much_are_not_kept() -> None:
    images = torch.randn(10, 3, 4, 4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(48, 5))

    def made(limit: int) -> Taught:
        return Taught(
            net, lambda groups: (images[g] for g in groups), np.arange(10), 4, limit=limit
        )

    with torch.no_grad():
        assert made(199)(images) is None
        found = made(200)(images[[3, 8]])
        assert found is not None
        assert torch.allclose(found, net(images[[3, 8]]), atol=1e-6)
        assert made(200)(images + 1) is None


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16])
def test_digests_follow_from_the_bits_of_each_image(kind: torch.dtype) -> None:
    images = torch.randn(6, 3, 4, 4).to(kind)
    found = digests(images)
    assert len(set(found)) == 6
    assert digests(images.flip(0)) == found[::-1]
    assert digests(images.contiguous(memory_format=torch.channels_last)) == found
    images[2, 1, 0, 0] = (
        images[2, 1, 0, 0].nextafter(torch.tensor(9, dtype=kind)) if kind != torch.float16 else 7
    )
    assert [a == b for a, b in zip(digests(images), found, strict=True)] == [
        True,
        True,
        False,
        *[True] * 3,
    ]
