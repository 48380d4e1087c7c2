"""CIFAR, SVHN, Fashion-MNIST and folder trees without a network, and balanced subsets."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from stamppruner.data import (
    ArrayDataset,
    balanced_subset,
    cifar10,
    cifar100,
    fashion_mnist,
    folder_tree,
    load_dataset,
    svhn,
)
from stamppruner.errors import DataError

RNG = np.random.default_rng(0)


@pytest.fixture
def tree(tmp_path):
    for split, shade in (("train", 10), ("val", 200)):
        for name in ("cat", "dog"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            Image.new("RGB", (32, 32), (shade,) * 3).save(folder / "a.png")
    return tmp_path


@pytest.fixture
def fake(monkeypatch):
    """Stands in for torchvision's classes; records how they were called."""
    calls = []

    def install(name, **content):
        def make(root, **settings):
            calls.append({"root": root, **settings})
            return SimpleNamespace(**content)

        monkeypatch.setattr(torchvision.datasets, name, make)
        return calls

    return install


@pytest.mark.parametrize(("loader", "name"), [(cifar10, "CIFAR10"), (cifar100, "CIFAR100")])
def test_cifar_through_torchvision(fake, tmp_path, loader, name):
    data = RNG.integers(256, size=(6, 32, 32, 3), dtype=np.uint8)
    calls = fake(name, data=data, targets=[0, 1, 0, 1, 0, 1], classes=["x", "y"])
    found = loader(tmp_path, train=False, download=False)
    assert calls == [{"root": str(tmp_path), "train": False, "download": False}]
    assert np.array_equal(found.images.permute(0, 2, 3, 1).numpy(), data)
    assert found.targets.tolist() == [0, 1, 0, 1, 0, 1]
    assert found.classes == ("x", "y")
    assert 0.4 < found.mean.min() < found.mean.max() < 0.55
    assert 0.2 < found.std.min() < found.std.max() < 0.3


def test_svhn_through_torchvision(fake, tmp_path):
    data = RNG.integers(256, size=(4, 3, 32, 32), dtype=np.uint8)
    calls = fake("SVHN", data=data, labels=np.array([0, 9, 3, 3]))
    found = svhn(tmp_path)
    assert calls == [{"root": str(tmp_path), "split": "train", "download": True}]
    assert np.array_equal(found.images.numpy(), data)
    assert found.num_classes == 10


def test_fashion_mnist_gets_a_margin_and_colours(fake, tmp_path):
    data = torch.from_numpy(RNG.integers(1, 256, size=(4, 28, 28), dtype=np.uint8))
    labels = torch.tensor([0, 9, 3, 3])
    calls = fake("FashionMNIST", data=data, targets=labels, classes=list("abcdefghij"))
    found = fashion_mnist(tmp_path)
    assert calls == [{"root": str(tmp_path), "train": True, "download": True}]
    assert found.image_shape == (3, 32, 32)
    assert torch.equal(found.images[:, 1, 2:-2, 2:-2], data)
    assert int(found.images.sum()) == 3 * int(data.sum())
    assert torch.equal(found.targets, labels)


def test_torchvision_reads_its_own_files(tmp_path, monkeypatch):
    """The real CIFAR10 class, on fabricated batches, without its checksums."""
    base = tmp_path / "cifar-10-batches-py"
    base.mkdir()
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name in names:
        content = {"data": np.full((2, 3072), len(name), dtype=np.uint8), "labels": [0, 9]}
        (base / name).write_bytes(pickle.dumps(content))
    meta = {"label_names": list("abcdefghij")}
    (base / "batches.meta").write_bytes(pickle.dumps(meta))
    real = torchvision.datasets.CIFAR10
    monkeypatch.setattr(real, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *a, **k: True)
    train, test = load_dataset(cifar10, tmp_path, download=False)
    assert (len(train), len(test)) == (10, 2)
    assert train.classes == tuple("abcdefghij")


@pytest.mark.parametrize("loader", [cifar10, cifar100, svhn, fashion_mnist])
def test_absent_data_are_a_data_error(tmp_path, loader):
    with pytest.raises(DataError, match="was not fetched"):
        loader(tmp_path, download=False)


def test_failed_download_is_a_data_error(tmp_path, monkeypatch):
    def offline(*arguments, **settings):
        raise OSError("no route")

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", offline)
    with pytest.raises(DataError, match=r"no route.*train/<class>"):
        cifar10(tmp_path)


@pytest.mark.parametrize("loader", [cifar10, cifar100, svhn, fashion_mnist, folder_tree])
def test_folder_tree_takes_precedence(tree, loader):
    train, test = load_dataset(loader, tree)
    assert train.classes == test.classes == ("cat", "dog")
    assert int(train.images[0, 0, 0, 0]) == 10
    assert int(test.images[0, 0, 0, 0]) == 200
    assert torch.equal(train.mean, test.mean)


def test_folder_tree_prefers_test_to_val(tree):
    (tree / "val").rename(tree / "test")
    (tree / "val").mkdir()
    assert int(folder_tree(tree, train=False).images[0, 0, 0, 0]) == 200


@pytest.mark.parametrize("missing", ["train", "val"])
def test_half_a_tree_is_refused(tree, missing):
    (tree / missing).rename(tree / "elsewhere")
    with pytest.raises(DataError, match="no image folders"):
        folder_tree(tree)


def test_train_and_test_need_the_same_classes(tree):
    (tree / "val" / "dog").rename(tree / "val" / "fox")
    with pytest.raises(DataError, match=r"differ.*dog, fox"):
        load_dataset(folder_tree, tree)


LABELS = np.repeat(np.arange(3), [9, 6, 7])
DATASET = ArrayDataset(np.arange(22 * 4, dtype=np.uint8).reshape(22, 2, 2, 1), LABELS)


@given(total=st.integers(3, 18), seed=st.integers(0, 99))
def test_subset_is_balanced_and_without_repeats(total, seed):
    part = balanced_subset(DATASET, total, seed)
    counts = part.targets.bincount(minlength=3)
    assert counts.sum() == len(part) == total
    assert counts.max() - counts.min() <= 1
    firsts = part.images[:, 0, 0, 0].tolist()
    assert len(set(firsts)) == total
    assert [LABELS[first // 4] for first in firsts] == part.targets.tolist()
    assert torch.equal(part.images, balanced_subset(DATASET, total, seed).images)


def test_subset_depends_on_the_seed():
    assert not torch.equal(
        balanced_subset(DATASET, 9, 0).images, balanced_subset(DATASET, 9, 1).images
    )


def test_subset_refuses_what_is_not_there():
    with pytest.raises(DataError, match="total is 2, below the 3 classes"):
        balanced_subset(DATASET, 2, 0)
    with pytest.raises(DataError, match="class 1 has 6 images and 7 are wanted"):
        balanced_subset(DATASET, 21, 0)


def test_cache_keeps_both_splits(tree, tmp_path):
    first = load_dataset(folder_tree, tree, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 2
    again = load_dataset(folder_tree, tree, cache=tmp_path / "cache")
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.images, other.images)
