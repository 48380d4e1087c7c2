"""Handwritten digits: a stratified split that loses and repeats nothing."""

import sys

import numpy as np
import pytest
import torch

from stamppruner.data import digits
from stamppruner.errors import DataError, MissingExtraError


@pytest.fixture(scope="module")
def raw():
    found = pytest.importorskip("sklearn.datasets", reason='needs scikit-learn of extra "demo"')
    return found.load_digits()


def rows(*datasets):
    pixels = torch.cat([data.images for data in datasets]).flatten(1).numpy()
    labels = torch.cat([data.targets for data in datasets]).numpy()
    return sorted(zip(labels.tolist(), map(bytes, pixels), strict=True))


def test_split_is_stratified_and_complete(raw):
    train, test = digits(20)
    assert train.targets.bincount().tolist() == [20] * 10
    assert len(train) + len(test) == 1797
    assert train.images.shape == (200, 3, 32, 32)
    assert train.images.dtype == torch.uint8
    # Another split of the same images: the union never changes.
    assert rows(train, test) == rows(*digits(33, seed=9))


def test_values_follow_the_source(raw):
    train, test = digits(1)
    images = torch.cat([train.images, test.images])
    assert torch.equal(images[:, 0], images[:, 1])
    assert torch.equal(images[:, 0], images[:, 2])
    assert images.max() == 255
    assert images.min() == 0
    assert images.float().mean().item() == pytest.approx(np.mean(raw.images) / 16 * 255, rel=0.01)
    normal = test.tensors()[0]
    assert normal.mean().item() == pytest.approx(0, abs=0.05)
    assert normal.std().item() == pytest.approx(1, abs=0.05)


def test_seed_chooses_the_training_images(raw):
    first, again, other = (digits(5, seed=seed)[0].images for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("count", [0, 174, 1000])
def test_split_refuses_a_class_without_images(raw, count):
    with pytest.raises(DataError, match=rf"train_per_class is {count}; it must lie in 1\.\.173"):
        digits(count)


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtraError, match=r'pip install "stamppruner\[demo\]"'):
        digits()
