"""ArrayDataset and BatchLoader: values, order, seeds, and what is refused."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from stamppruner.data import ArrayDataset, BatchLoader, CropFlip
from stamppruner.errors import DataError

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(256, size=(10, 6, 5, 3), dtype=np.uint8)
LABELS = np.arange(10) % 3


def dataset(**settings):
    return ArrayDataset(PIXELS, LABELS, **settings)


def jitter(images, generator):
    return images + torch.rand(images.shape, generator=generator)


def test_items_are_scaled_then_normalised():
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    image, label = dataset(mean=mean, std=std)[4]
    expected = ((PIXELS[4] / 255 - mean) / std).transpose(2, 0, 1)
    np.testing.assert_allclose(image.numpy(), expected, rtol=1e-5, atol=1e-6)
    assert image.dtype == torch.float32
    assert type(label) is int
    assert label == LABELS[4]


def test_float_images_are_normalised_without_scaling():
    images = torch.rand(4, 2, 3, 3, dtype=torch.float64)
    data = ArrayDataset(images, [0, 1, 0, 1], mean=(1.0, 2.0), std=(2.0, 4.0))
    expected = (images - torch.tensor([1.0, 2.0]).view(2, 1, 1)) / torch.tensor([2.0, 4.0]).view(
        2, 1, 1
    )
    torch.testing.assert_close(data.tensors()[0], expected.float())


def test_fetch_leaves_the_stored_images_alone():
    images = torch.rand(4, 1, 3, 3)
    before = images.clone()
    ArrayDataset(images, [0, 1, 0, 1], mean=(0.5,)).tensors()
    torch.testing.assert_close(images, before, rtol=0, atol=0)


def test_fetch_tensors_and_items_agree():
    data = dataset(mean=(0.5,) * 3)
    images, labels = data.tensors()
    torch.testing.assert_close(data.fetch([7, 2]), images[[7, 2]])
    torch.testing.assert_close(torch.stack([data[i][0] for i in range(10)]), images)
    assert labels is data.targets
    assert [label for _, label in data] == LABELS.tolist()


def test_subset_and_names():
    part = dataset(classes=("a", "b", "c")).subset([5, 0])
    assert part.targets.tolist() == [2, 0]
    assert part.num_classes == 3
    assert part.image_shape == (3, 6, 5)
    assert dataset().num_classes == 3


def test_augmentation_comes_before_normalisation_and_is_seeded():
    def blank(images, generator):
        return torch.zeros_like(images)

    assert set(dataset(mean=(0.5,) * 3, augment=blank)[0][0].flatten().tolist()) == {-0.5}
    first, again, other = (dataset(augment=jitter, seed=seed).tensors()[0] for seed in (3, 3, 4))
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, other)


def test_workers_do_not_draw_alike_nor_repeat_an_epoch():
    grey = np.full((4, 2, 2, 3), 128, dtype=np.uint8)
    data = ArrayDataset(grey, [0, 1, 0, 1], augment=jitter)
    order = torch.Generator().manual_seed(0)
    loader = DataLoader(data, batch_size=1, num_workers=2, generator=order)
    drawn = [x.sum().item() for _ in range(2) for x, _ in loader]
    assert len(set(drawn)) == 8


@pytest.mark.parametrize(
    ("images", "labels", "settings", "named"),
    [
        (PIXELS[0], [0], {}, r"shape \(6, 5, 3\)"),
        (PIXELS[:0], [], {}, r"shape \(0,"),
        (PIXELS.astype(np.int64), LABELS, {}, "images are torch.int64"),
        (PIXELS, LABELS[:4], {}, r"labels have shape \(4,\)"),
        (PIXELS, LABELS.astype(float), {}, "labels are torch.float64"),
        (PIXELS, LABELS - 1, {}, r"labels span -1\.\.1"),
        (PIXELS, LABELS, {"classes": ("a", "b")}, r"labels span 0\.\.2"),
        (PIXELS, LABELS, {"mean": (0.5,)}, "mean has 1 entries"),
        (PIXELS, LABELS, {"std": (0.5, 0.0, 0.5)}, "std is"),
        (np.full((2, 1, 3, 3), np.nan), [0, 1], {}, r"2 images hold NaN or Inf.*\[0, 1\]"),
    ],
)
def test_dataset_refuses(images, labels, settings, named):
    with pytest.raises(DataError, match=named):
        ArrayDataset(images, labels, **settings)


def test_index_outside_the_dataset():
    assert dataset()[-1][1] == LABELS[-1]
    with pytest.raises(IndexError, match="index 10"):
        dataset()[10]


def test_loader_covers_each_epoch_once_in_a_new_order():
    loader = BatchLoader(dataset(), 4, seed=1)
    epochs = []
    for _ in range(2):
        batches = list(loader)
        assert [len(y) for _, y in batches] == [4, 4, 2]
        epochs.append(torch.cat([x for x, _ in batches]))
    assert len(loader) == 3
    assert not torch.equal(*epochs)
    everything = dataset().tensors()[0]
    for epoch in epochs:
        assert sorted(epoch.flatten(1).sum(1).tolist()) == pytest.approx(
            sorted(everything.flatten(1).sum(1).tolist())
        )


def test_loader_keeps_images_with_their_labels():
    images, _ = dataset().tensors()
    for x, y in BatchLoader(dataset(), 3):
        for image, label in zip(x, y, strict=True):
            where = (images == image).flatten(1).all(1).nonzero().item()
            assert LABELS[where] == label


def test_loader_is_fixed_by_its_seed_and_apart_from_other_loaders():
    data = dataset(augment=jitter)
    first = BatchLoader(data, 4, seed=5)
    second = BatchLoader(data, 4, seed=5)
    a = [list(first), list(first)]
    b = [list(second), list(second)]
    for left, right in zip(a, b, strict=True):
        for (x, y), (u, v) in zip(left, right, strict=True):
            torch.testing.assert_close(x, u, rtol=0, atol=0)
            assert torch.equal(y, v)
    assert not torch.equal(a[0][0][0], a[1][0][0])


def test_loader_without_shuffle_or_last_batch():
    loader = BatchLoader(dataset(), 4, shuffle=False, drop_last=True)
    assert len(loader) == 2
    assert torch.cat([y for _, y in loader]).tolist() == LABELS[:8].tolist()


def test_loader_augmentation_leaves_the_dataset_alone():
    data = dataset()
    loader = BatchLoader(data, 10, shuffle=False, augment=CropFlip(padding=2))
    assert not torch.equal(next(iter(loader))[0], data.tensors()[0])
    assert data.augment is None


def test_loader_matches_a_dataloader():
    ours = list(BatchLoader(dataset(), 4, shuffle=False))
    theirs = list(DataLoader(dataset(), 4))
    for (x, y), (u, v) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, u)
        assert torch.equal(y, v)


def test_loader_refuses_an_empty_batch():
    with pytest.raises(DataError, match="batch_size is 0"):
        BatchLoader(dataset(), 0)
