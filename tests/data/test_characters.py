"""Rendered characters: real glyphs, distinct ones, fixed by the seed."""

import sys

import numpy as np
import pytest
import torch

from stamppruner.data import CHARACTERS, render_characters
from stamppruner.data.characters import load_fonts
from stamppruner.errors import DataError, MissingExtraError


@pytest.fixture(scope="module")
def fonts():
    pytest.importorskip("matplotlib", reason='needs the fonts of extra "demo"')
    return load_fonts()


@pytest.fixture(scope="module")
def rendered(fonts):
    return render_characters(per_class=12)


def test_there_are_a_hundred_classes_and_no_digits():
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 100
    assert not any(character.isdigit() for character in CHARACTERS)


def test_every_class_has_real_glyphs_in_several_fonts(fonts):
    # U+E0FF is for private use: without a glyph, so the font's box for "missing" is drawn.
    for font in fonts:
        assert 0xE0FF not in font.code_points
    boxes = {font.name: font.stencil("\ue0ff") for font in fonts}
    for character in CHARACTERS:
        able = [font for font in fonts if ord(character) in font.code_points]
        assert len(able) >= 4, character
        for font in able:
            stencil = font.stencil(character)
            assert stencil.max() > 200, character
            assert not np.array_equal(stencil, boxes[font.name]), (character, font.name)


def test_no_two_classes_nor_a_class_and_a_digit_look_the_same(fonts):
    names = [*CHARACTERS, *"0123456789"]
    glyphs = np.stack([fonts[0].stencil(c).astype(float).ravel() for c in names])
    glyphs /= np.linalg.norm(glyphs, axis=1, keepdims=True)
    alike = glyphs @ glyphs.T - np.eye(len(names))
    alike[-10:, -10:] = 0
    first, second = np.unravel_index(alike.argmax(), alike.shape)
    assert alike.max() < 0.9, (names[first], names[second])


def test_shapes_labels_and_names(rendered):
    assert rendered.images.shape == (1200, 3, 32, 32)
    assert rendered.images.dtype == torch.uint8
    assert rendered.targets.bincount().tolist() == [12] * 100
    assert rendered.classes == CHARACTERS


def test_images_vary_within_a_class_and_in_polarity(rendered):
    for label in (0, 40, 99):
        images = rendered.images[rendered.targets == label]
        assert len(images.flatten(1).unique(dim=0)) == 12
    border = rendered.images[:, :, 0, :].float().mean((1, 2))
    bright = (border > 127.5).float().mean().item()
    assert 0.4 < bright < 0.6


def test_statistics_suit_the_images(rendered):
    images, _ = rendered.tensors()
    assert images.mean().item() == pytest.approx(0, abs=0.05)
    assert images.std().item() == pytest.approx(1, abs=0.05)


def test_ink_stays_away_from_the_border(fonts):
    data = render_characters(per_class=20, classes="WMДЖA")
    spread = data.images.float().std(1 + 1)  # of each channel's columns, over the rows
    edge, middle = spread[..., [0, -1]].mean(), spread[..., 12:20].mean()
    assert edge * 2.5 < middle


def test_seed_fixes_every_byte(fonts):
    first = render_characters(2, seed=3, classes="ΨЖ")
    again = render_characters(2, seed=3, classes="ΨЖ")
    other = render_characters(2, seed=4, classes="ΨЖ")
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)


def test_a_class_does_not_depend_on_the_others(fonts):
    alone = render_characters(3, classes="Ж")
    among = render_characters(3, classes="ΨЖA")
    assert torch.equal(alone.images, among.images[3:6])


def test_rendering_leaves_the_global_generators_alone(fonts):
    before = torch.get_rng_state()
    render_characters(1, classes="A")
    assert torch.equal(torch.get_rng_state(), before)


def test_size_is_a_choice(fonts):
    assert render_characters(1, size=20, classes="AЖ").image_shape == (3, 20, 20)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"per_class": 0}, "per_class is 0"),
        ({"size": 4}, "size 4"),
        ({"classes": ""}, "empty"),
        ({"classes": "ABA"}, "repeats"),
        ({"classes": ["AB"]}, "'AB' is not one"),
        ({"classes": " "}, "' ' is not one"),
        ({"classes": "A漢"}, r"'漢' \(U\+6F22\)"),
    ],
)
def test_rendering_refuses(fonts, settings, named):
    with pytest.raises(DataError, match=named):
        render_characters(**settings)


def test_missing_matplotlib_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtraError, match=r'pip install "stamppruner\[demo\]"'):
        render_characters(1)
