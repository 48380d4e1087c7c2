"""CropFlip against the plain way of doing it."""

import pytest
import torch
import torch.nn.functional as F

from stamppruner.data import CropFlip
from stamppruner.errors import ConfigError, DataError


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("mode", ["reflect", "zeros"])
@pytest.mark.parametrize("flip", [True, False])
def test_every_image_is_a_crop_of_the_padded_image(mode, flip):
    images = torch.rand(40, 2, 6, 7, generator=generator()) + 0.1
    out = CropFlip(padding=2, flip=flip, mode=mode)(images, generator(1))
    padded = F.pad(images, (2,) * 4, mode="reflect" if mode == "reflect" else "constant")
    flips, corners = 0, set()
    for source, result in zip(padded, out, strict=True):
        found = [
            (top, left, mirrored)
            for top in range(5)
            for left in range(5)
            for mirrored in (False, True)
            if torch.equal(
                result.flip(2) if mirrored else result, source[:, top : top + 6, left : left + 7]
            )
        ]
        assert len(found) == 1
        corners.add(found[0][:2])
        flips += found[0][2]
    assert len(corners) > 10
    assert 10 < flips < 30 if flip else flips == 0


def test_no_padding_and_no_flip_changes_nothing():
    images = torch.rand(3, 1, 4, 4)
    assert torch.equal(CropFlip(padding=0, flip=False)(images, generator()), images)


def test_augmentation_refuses_bad_settings():
    with pytest.raises(ConfigError, match="padding is -1"):
        CropFlip(padding=-1)
    with pytest.raises(ConfigError, match="mode is 'wrap'"):
        CropFlip(mode="wrap")
    with pytest.raises(DataError, match="padding 4 does not fit images of 4x9"):
        CropFlip()(torch.zeros(1, 1, 4, 9), generator())
