"""Images that were scaled unlike the reference are noticed."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stamppruner.statistics import ImageStatistics

IMAGES = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_numbers_are_those_of_each_channel():
    found = ImageStatistics.of(IMAGES * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1) + 1)
    assert found.mean == pytest.approx([1, 1, 1], abs=0.3)
    assert found.std == pytest.approx([1, 2, 3], rel=0.1)
    assert ImageStatistics.from_json(found.to_json()) == found
    assert ImageStatistics.from_json(None) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda x: (x + 2) * 64,  # 0 .. 255
        lambda x: x * 0.25 + 0.5,  # 0 .. 1
        lambda x: x + torch.tensor([0.0, 0.0, 5.0]).view(3, 1, 1),
        torch.zeros_like,
    ],
    ids=["bytes", "unit", "one channel", "black"],
)
def test_other_scales_are_named_with_the_remedy(change):
    warning = ImageStatistics.of(IMAGES).unlike(ImageStatistics.of(change(IMAGES)))
    assert "normalise both alike" in warning


def test_pixels_are_told_from_images_in_minus_one_to_one():
    pixels = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    normalised = ImageStatistics.of(2 * pixels - 1)
    assert "normalised images, not pixels" in normalised.unlike(ImageStatistics.of(pixels))
    assert ImageStatistics.of(pixels).unlike(ImageStatistics.of(pixels)) is None
    assert normalised.unlike(ImageStatistics.of(2 * pixels.square() - 1)) is None
    older = ImageStatistics(normalised.mean, normalised.std)
    assert ImageStatistics.from_json(older.to_json()) == older
    assert older.unlike(ImageStatistics.of(pixels)) is None


@given(st.floats(-1, 1), st.floats(0.5, 2))
def test_ordinary_differences_are_not(shift, scale):
    assert ImageStatistics.of(IMAGES).unlike(ImageStatistics.of(IMAGES * scale + shift)) is None


def test_damaged_records_are_refused():
    with pytest.raises(ValueError, match="channels"):
        ImageStatistics.from_json({"mean": [0.0], "std": [1.0, 2.0]})
