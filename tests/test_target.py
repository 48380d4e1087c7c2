from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from stripes import dataset, loader, stripes, vgg
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from stamppruner.batches import as_loader, checked_batches, reread
from stamppruner.errors import DataError, UnsupportedModelError
from stamppruner.target import Target, check_fits, first_images, sample_target

IMAGES, LABELS = stripes(4)


def nan_images() -> torch.Tensor:
    images = IMAGES.clone()
    images[5, 0, 2, 2] = math.nan
    return images


BAD: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "no iterable": (3, "is no loader"),
    "images alone": ([IMAGES], "not a pair"),
    "three parts": ([(IMAGES, LABELS, LABELS)], "not a pair"),
    "float labels": ([(IMAGES, LABELS.float())], "labels are torch.float32"),
    "negative labels": ([(IMAGES, LABELS - 1)], "span -1"),
    "labels of another length": ([(IMAGES, LABELS[:3])], "labels have shape"),
    "one-hot labels": ([(IMAGES, torch.eye(24).long())], "labels have shape"),
    "byte images": ([((255 * IMAGES).byte(), LABELS)], "floating-point"),
    "flat images": ([(IMAGES.flatten(1), LABELS)], r"give \(B, C, H, W\)"),
    "NaN": ([(nan_images(), LABELS)], r"NaN or Inf, first at positions \[5\]"),
    "another number of channels": ([(IMAGES[:, :1], LABELS)], "1 channels and the model reads 3"),
    "one class": ([(IMAGES, LABELS * 0 + 2)], "single class 2"),
    "two sizes": ([(IMAGES, LABELS), (IMAGES[..., :4], LABELS)], "resize"),
    "no images in a batch": ([(IMAGES[:0], LABELS[:0])], "none of them 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_data_are_refused_with_a_reason(name: str) -> None:
    data, reason = BAD[name]
    with pytest.raises(DataError, match=reason):
        sample_target(data, 100, channels=3)


def test_the_number_of_the_bad_batch_is_named() -> None:
    with pytest.raises(DataError, match="target batch 1"):
        list(checked_batches([(IMAGES, LABELS), (nan_images(), LABELS)]))


def test_small_data_are_kept_whole_in_another_order() -> None:
    target = sample_target(loader(4), 1000)
    assert target.num_images == len(target.labels) == 24
    assert target.num_classes == 6
    assert not torch.equal(target.labels, LABELS)
    order = torch.cdist(target.images.flatten(1), IMAGES.flatten(1)).argmin(1)
    assert sorted(order.tolist()) == list(range(24))
    assert torch.equal(target.labels, LABELS[order])


def test_a_sorted_loader_gives_all_classes_alike() -> None:
    images = torch.rand(1000, 1, 2, 2)
    labels = torch.arange(1000) // 100
    data = DataLoader(TensorDataset(images, labels), batch_size=50)
    target = sample_target(data, 300, seed=0)
    assert (len(target.labels), target.num_images, target.num_classes) == (300, 1000, 10)
    assert target.labels.bincount(minlength=10).min() >= 15  # 30 expected
    first, second = target.labels[:150], target.labels[150:]
    assert abs(first.float().mean() - second.float().mean()) < 1.5


def test_the_sample_follows_from_the_seed() -> None:
    data = loader(8)
    one, same, other = (sample_target(data, 20, seed=s) for s in (0, 0, 1))
    assert torch.equal(one.images, same.images)
    assert torch.equal(one.labels, same.labels)
    assert not torch.equal(one.images, other.images)


def test_classes_that_fall_out_of_the_sample_still_count() -> None:
    images, labels = torch.rand(500, 1, 2, 2), torch.zeros(500, dtype=torch.int64)
    labels[::2], labels[7] = 1, 11
    assert sample_target([(images, labels)], 4).num_classes == 12


@pytest.mark.parametrize("kind", ["data set", "list of batches", "iterable data set"])
def test_data_in_any_form(kind: str) -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            yield IMAGES, LABELS

    data = {
        "data set": TensorDataset(IMAGES, LABELS),
        "list of batches": [(IMAGES, LABELS)],
        "iterable data set": Stream(),
    }[kind]
    assert sample_target(data, 100).num_images == 24
    assert torch.equal(first_images(data), IMAGES)


def test_a_generator_is_refused_where_data_are_read_twice() -> None:
    with pytest.raises(DataError, match="read only once"):
        first_images((IMAGES, LABELS) for _ in range(3))
    with pytest.raises(DataError, match="read only once"):
        reread(iter(loader()))
    data = loader()
    assert reread(data) is data
    assert as_loader(data) is data


def test_first_images_of_nothing() -> None:
    with pytest.raises(DataError, match="empty"):
        first_images([])


def test_batches_cover_everything_and_a_lone_image_joins_the_last() -> None:
    target = Target(torch.arange(9.0).view(9, 1, 1, 1), torch.arange(9), 9, 9)
    assert [len(y) for _, y in target.batches(4)] == [4, 5]
    assert [len(y) for _, y in target.batches(5)] == [5, 4]
    assert [len(y) for _, y in target.batches(1)] == [1] * 7 + [2]
    assert torch.cat([y for _, y in target.batches(4)]).tolist() == list(range(9))
    images = torch.cat(target.image_batches(4))
    assert torch.equal(images, target.images)


def test_check_fits_names_what_does_not() -> None:
    model = vgg(6).train()
    check_fits(model, IMAGES, 6)
    assert model.training
    with pytest.raises(DataError, match="8 classes and VGG 6 outputs"):
        check_fits(model, IMAGES, 8)
    with pytest.raises(DataError, match=r"does not take images of \(3, 8, 8\), torch.float64"):
        check_fits(model, IMAGES.double(), 6)
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 6))
    with pytest.raises(DataError, match=r"does not take images of \(3, 8, 8\)"):
        check_fits(flat, IMAGES, 6)
    with pytest.raises(UnsupportedModelError, match="Conv2d gives no logits"):
        check_fits(nn.Conv2d(3, 2, 1), IMAGES, 6)
    check_fits(nn.Conv2d(3, 2, 1), IMAGES, 0)


def test_a_data_set_is_read_in_batches() -> None:
    assert sum(len(y) for _, y in checked_batches(dataset(50))) == 300
