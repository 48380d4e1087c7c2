"""Image folders: order, fitting, cache, and files that cannot be used."""

import os

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder

from stamppruner.data import image_folder
from stamppruner.errors import DataError


def write(path, colour, size=(32, 32), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


@pytest.fixture
def tree(tmp_path):
    root = tmp_path / "tree"
    for shade, name in enumerate(["wolf", "ape", "bee"]):
        for index in range(3):
            write(root / name / f"{index}.png", (shade * 40, index * 10, 7))
    write(root / "bee" / "deeper" / "x.PNG", (200, 0, 0))
    (root / "bee" / "notes.txt").write_text("not an image")
    (root / ".hidden").mkdir()
    return root


def test_order_and_pixels_are_those_of_torchvision(tree):
    (tree / ".hidden").rmdir()  # torchvision takes it for a class
    ours, theirs = image_folder(tree), ImageFolder(str(tree))
    assert list(ours.classes) == theirs.classes
    assert ours.targets.tolist() == theirs.targets
    expected = np.stack([np.asarray(image) for image, _ in theirs]).transpose(0, 3, 1, 2)
    assert np.array_equal(ours.images.numpy(), expected)


def test_hidden_folders_and_other_files_do_not_count(tree):
    data = image_folder(tree)
    assert data.classes == ("ape", "bee", "wolf")
    assert data.targets.bincount().tolist() == [3, 4, 3]


def test_images_are_fitted_to_the_square_in_rgb(tree):
    wide = Image.new("L", (90, 30), 0)
    wide.paste(255, (30, 0, 60, 30))
    wide.save(tree / "ape" / "0.png")
    data = image_folder(tree, size=8)
    assert data.images.shape == (10, 3, 8, 8)
    assert data.images[0].float().mean() > 230  # the centre, not the whole squeezed


def test_limit_takes_the_first_files_of_each_class(tree):
    whole, part = image_folder(tree), image_folder(tree, limit_per_class=2)
    assert part.targets.tolist() == [0, 0, 1, 1, 2, 2]
    assert torch.equal(part.images[:2], whole.images[:2])


def test_statistics_are_passed_on(tree):
    data = image_folder(tree, mean=(0.1, 0.2, 0.3), std=(1, 2, 3))
    assert data.mean.flatten().tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert data.std.flatten().tolist() == [1, 2, 3]


def test_cache_is_read_and_goes_stale(tree, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first = image_folder(tree, cache=cache)
    (file,) = cache.iterdir()
    assert np.load(file, allow_pickle=False).shape == (10, 32, 32, 3)
    with monkeypatch.context() as patch:
        patch.setattr("stamppruner.data.folders._decode", None)  # decoding would now fail
        assert torch.equal(image_folder(tree, cache=cache).images, first.images)
    write(tree / "ape" / "0.png", (255, 255, 255))
    os.utime(tree / "ape" / "0.png", ns=(1, 1))
    assert image_folder(tree, cache=cache).images[0].min() == 255
    assert image_folder(tree, size=16, cache=cache).image_shape == (3, 16, 16)


@pytest.mark.parametrize("rubbish", [b"", b"\x93NUMPY rubbish", b"PK\x03\x04"])
def test_broken_cache_is_decoded_again(tree, tmp_path, caplog, rubbish):
    first = image_folder(tree, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache").iterdir()
    file.write_bytes(rubbish)
    assert torch.equal(image_folder(tree, cache=tmp_path / "cache").images, first.images)
    assert file.name in caplog.text
    assert np.load(file, allow_pickle=False).shape == (10, 32, 32, 3)


def test_missing_path_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere: no such folder"):
        image_folder(tmp_path / "nowhere")


def test_no_classes_and_one_class(tmp_path):
    write(tmp_path / "0.png", (0, 0, 0))
    with pytest.raises(DataError, match="no class folders"):
        image_folder(tmp_path)
    write(tmp_path / "only" / "0.png", (0, 0, 0))
    with pytest.raises(DataError, match="only one class, 'only'"):
        image_folder(tmp_path)


def test_class_without_images_is_named(tree):
    (tree / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no images in this class"):
        image_folder(tree)


@pytest.mark.parametrize("broken", ["text", "truncated", "nothing"])
def test_unreadable_image_is_named(tree, broken):
    file = tree / "bee" / "1.png"
    content = {"text": b"hello", "truncated": file.read_bytes()[:60], "nothing": b""}[broken]
    file.write_bytes(content)
    with pytest.raises(DataError, match=r"1\.png: cannot be read as an image"):
        image_folder(tree)


@pytest.mark.parametrize("settings", [{"size": 0}, {"limit_per_class": 0}])
def test_sizes_below_one_are_refused(tree, settings):
    with pytest.raises(DataError, match="must be at least 1"):
        image_folder(tree, **settings)
