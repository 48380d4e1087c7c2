"""Reference data that need no download: characters of seven alphabets, rendered from fonts.

The fonts are the DejaVu family that is installed with matplotlib. Each image is one glyph under a
random rotation, shear, scale and shift, in random colours, blurred and noisy. Digits are left out,
so that handwritten digits can be the unseen target, and so are letters that look like a digit or
like a letter already taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from stamppruner.data.arrays import ArrayDataset
from stamppruner.errors import DataError
from stamppruner.optional import require

LATIN = "ACDEGHJKLMNPQRTUVWXYZ" + "abdefimnqrt"
GREEK = "ΔΞΣΦΨΩ" + "βζλξσω"
CYRILLIC = "БДЖЦЧШЫЭЮЯЂ"
GEORGIAN = "აბდკლმრსტფქღყჩჯჰ"
ARMENIAN = "ԲԴԷԸԽԿՀՃՆՇՊՎՖ"
HEBREW = "אבגלמעצש"
ARABIC = "بسطعفكمي"
CHARACTERS = tuple(LATIN + GREEK + CYRILLIC + GEORGIAN + ARMENIAN + HEBREW + ARABIC)
"""The 100 classes, in the order of their labels."""

CHARACTERS_MEAN = (0.5, 0.5, 0.5)
CHARACTERS_STD = (0.3, 0.3, 0.3)

_FONTS = tuple(
    f"DejaVu{family}{style}.ttf"
    for family, slanted in (("Sans", "Oblique"), ("SansMono", "Oblique"), ("Serif", "Italic"))
    for style in ("", "-Bold", f"-{slanted}", f"-Bold{slanted}")
)
_CANVAS = 64  # pixels a side of the stencil that is cut once a glyph, font and stroke
_GLYPH = 42  # pixels of a glyph's longer side on that canvas
_STROKES = 3  # choices of outline: 0, 1 or 2 extra pixels


def render_characters(
    per_class: int = 60,
    size: int = 32,
    seed: int = 0,
    classes: Sequence[str] | None = None,
) -> ArrayDataset:
    """Images ``(N, size, size, 3)`` uint8 of rendered characters, grouped by class.

    A class has the same images whichever other classes are asked for.

    Args:
        per_class: images a class.
        size: pixels a side.
        seed: the same seed gives the same bytes.
        classes: characters to render, label 0 first; ``None`` is :data:`CHARACTERS`.

    Raises:
        DataError: a size below its least, no or repeated characters, or one without a glyph.
        MissingExtraError: matplotlib (for its fonts) or Pillow is not installed.
    """
    characters = CHARACTERS if classes is None else tuple(classes)
    if per_class < 1 or size < 8:
        raise DataError(
            f"render_characters: per_class is {per_class} and size {size}; "
            "they must be at least 1 and 8"
        )
    if not characters or len(set(characters)) != len(characters):
        raise DataError("render_characters: classes is empty or repeats a character")
    fonts = load_fonts()
    images = [_render_class(character, fonts, per_class, size, seed) for character in characters]
    return ArrayDataset(
        np.concatenate(images),
        np.repeat(np.arange(len(characters)), per_class),
        mean=CHARACTERS_MEAN,
        std=CHARACTERS_STD,
        classes=characters,
    )


@dataclass(frozen=True)
class Font:
    """One font file: its name, the code points it has a glyph for, and the face to draw with."""

    name: str
    code_points: frozenset[int]
    face: Any

    def stencil(self, character: str, stroke: int = 0) -> npt.NDArray[np.uint8]:
        """The glyph in white on black, centred and scaled to one length, ``(64, 64)``."""
        image_module = require("PIL.Image", "rendering characters")
        draw_module = require("PIL.ImageDraw", "rendering characters")
        left, top, right, bottom = self.face.getbbox(character, stroke_width=stroke)
        glyph = image_module.new("L", (int(right - left), int(bottom - top)))
        pen = draw_module.Draw(glyph)
        pen.text((-left, -top), character, font=self.face, fill=255, stroke_width=stroke)
        scale = _GLYPH / max(glyph.size)
        width, height = (max(1, round(side * scale)) for side in glyph.size)
        canvas = image_module.new("L", (_CANVAS, _CANVAS))
        corner = ((_CANVAS - width) // 2, (_CANVAS - height) // 2)
        canvas.paste(glyph.resize((width, height), image_module.Resampling.BILINEAR), corner)
        return np.array(canvas, dtype=np.uint8)


def load_fonts() -> list[Font]:
    """The upright, bold and slanted DejaVu fonts that are installed with matplotlib.

    Raises:
        MissingExtraError: matplotlib or Pillow is not installed.
    """
    matplotlib = require("matplotlib", "rendering characters")
    charts = require("matplotlib.ft2font", "rendering characters")
    drawing = require("PIL.ImageFont", "rendering characters")
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    fonts = []
    for name in _FONTS:
        path = str(folder / name)
        face = drawing.truetype(path, 48, layout_engine=drawing.Layout.BASIC)
        fonts.append(Font(name, frozenset(charts.FT2Font(path).get_charmap()), face))
    return fonts


def _render_class(
    character: str, fonts: Sequence[Font], count: int, size: int, seed: int
) -> npt.NDArray[np.uint8]:
    """``(count, size, size, 3)`` images of one character."""
    if len(character) != 1 or character.isspace():
        raise DataError(f"render_characters: {character!r} is not one printable character")
    usable = [font for font in fonts if ord(character) in font.code_points]
    if not usable:
        raise DataError(
            f"render_characters: no DejaVu font has a glyph for {character!r} "
            f"(U+{ord(character):04X}); leave it out of classes"
        )
    rng = np.random.default_rng([seed, ord(character)])
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    # Fonts take turns in a random order, so that each is seen equally often.
    turns = rng.permutation(np.arange(count) % len(usable))
    strokes = rng.integers(_STROKES, size=count)
    cut = {
        (font, stroke): usable[font].stencil(character, stroke)
        for font, stroke in set(zip(turns.tolist(), strokes.tolist(), strict=True))
    }
    stencils = np.stack([cut[key] for key in zip(turns.tolist(), strokes.tolist(), strict=True)])
    masks = torch.from_numpy(stencils)[:, None].to(torch.float32) / 255
    masks = _blur(_warp(masks, size, generator), generator)
    pixels = _colour(masks, generator).mul_(255).round_().clamp_(0, 255).to(torch.uint8)
    return pixels.permute(0, 2, 3, 1).contiguous().numpy()


def _uniform(low: float, high: float, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator) * (high - low) + low


def _warp(masks: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Random affine maps of ``(N, 1, 64, 64)``, sampled at twice the size and averaged down."""
    count = len(masks)
    angle, shear, stretch, zoom = (
        _uniform(-1, 1, (4, count), generator)
        * torch.tensor([math.radians(15), 0.15, 0.12, 0.18])[:, None]
    )
    cos, sin = torch.cos(angle), torch.sin(angle)
    across, down = torch.exp(-zoom - stretch), torch.exp(-zoom + stretch)
    shift = _uniform(-0.12, 0.12, (2, count), generator)
    top = torch.stack([across * (cos + shear * sin), across * (shear * cos - sin), shift[0]], 1)
    bottom = torch.stack([down * sin, down * cos, shift[1]], 1)
    grid = F.affine_grid(
        torch.stack([top, bottom], 1), [count, 1, 2 * size, 2 * size], align_corners=False
    )
    return F.avg_pool2d(F.grid_sample(masks, grid, align_corners=False), 2)


def _blur(masks: Tensor, generator: torch.Generator) -> Tensor:
    """A Gaussian of 5 taps each way, its own width for each image; ``(N, 1, H, W)``."""
    count = len(masks)
    sigma = _uniform(0.2, 0.9, (count, 1), generator)
    taps = torch.exp(-0.5 * (torch.arange(-2.0, 3.0) / sigma) ** 2)
    taps = (taps / taps.sum(1, keepdim=True))[:, None]
    batch = masks.transpose(0, 1)
    batch = F.conv2d(batch, taps[:, :, None, :], padding=(0, 2), groups=count)
    batch = F.conv2d(batch, taps[:, :, :, None], padding=(2, 0), groups=count)
    return batch.transpose(0, 1)


def _colour(masks: Tensor, generator: torch.Generator) -> Tensor:
    """Blend a dark and a light colour, either as the ground, and add noise; ``(N, 3, H, W)``."""
    count, _, height, width = masks.shape
    dark = _uniform(0.0, 0.4, (count, 3, 1, 1), generator)
    light = _uniform(0.6, 1.0, (count, 3, 1, 1), generator)
    inverted = torch.rand((count, 1, 1, 1), generator=generator) < 0.5
    ground, ink = torch.where(inverted, light, dark), torch.where(inverted, dark, light)
    sigma = _uniform(0.0, 0.06, (count, 1, 1, 1), generator)
    noise = torch.randn((count, 3, height, width), generator=generator) * sigma
    return ground + (ink - ground) * masks + noise
