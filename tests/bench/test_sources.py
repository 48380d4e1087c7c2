"""Data sets by name: known ones, folders, what is made here, and noise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from stamppruner.bench import Sources
from stamppruner.errors import ConfigError, DataError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(3):
                Image.new("RGB", (32, 32), (40 * i,) * 3).save(folder / f"{i}.png")
    return tmp_path


def test_folders_stand_for_any_name(tree: Path) -> None:
    sources = Sources(folders={"pets": tree})
    train, test = sources.pair("pets")
    assert train.classes == test.classes == ("cat", "dog")
    assert sources.pair("pets")[0] is train
    assert sources.size("pets") == 6
    assert sources.mirrored("pets")
    few, same = sources.target("pets", 2, seed=1)
    assert sorted(few.targets.tolist()) == [0, 1]
    assert same is test


def test_a_folder_of_a_known_set_has_its_statistics(tree: Path) -> None:
    found = Sources(folders={"svhn": tree, "pets": tree})
    assert not torch.equal(found.pair("svhn")[0].mean, found.pair("pets")[0].mean)
    assert not found.mirrored("svhn")


def test_digits_come_with_a_package() -> None:
    train, test = Sources().pair("digits")
    assert (len(train), len(train) + len(test)) == (1000, 1797)
    assert not Sources().mirrored("digits")


def test_noise_stands_in_for_sets_that_are_not_there() -> None:
    sources = Sources("/nowhere", stand_in=40)
    train, test = sources.pair("cifar100")
    assert train.num_classes == 100
    assert train.image_shape == (3, 32, 32)
    assert len(train) == 100  # one image a class at least
    assert not torch.equal(train.images, test.images)
    small, _ = sources.target("cifar10", 5000, seed=0)
    assert len(small) == 40
    assert sources.size("cifar10") == 50_000
    assert sources.size("svhn") == 73_257


def test_what_is_not_known_is_named_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no data set 'birds'.*--images birds=DIR"):
        Sources(tmp_path / "missing").check(("cifar10", "birds"))
    with pytest.raises(DataError, match="no image folders"):
        Sources(folders={"birds": tmp_path}).pair("birds")
