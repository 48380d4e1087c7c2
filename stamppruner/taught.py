"""What a teacher that stays as it is says of the images of a data set, asked once an image.

An image is known again by its bits, so one that a data set augments is not mistaken for another
view of it. Answers are given in fixed groups of images, so that they are the same bits whenever,
and on whichever rank, they are given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from stamppruner import ranks
from stamppruner.tasks.labelled import IntArray

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Taught:
    """Answers to images of a data set, by their bits; all ranks make it, each its share.

    Args:
        answer: of the teacher, to images ``(B, C, H, W)``.
        read: yields the images at each of some groups of positions of the data set.
        positions: all of them.
        size: images in a group.
        limit: bytes that answers may take; there are none if they would take more.
    """

    def __init__(
        self,
        answer: Callable[[Tensor], Tensor],
        read: Callable[[Sequence[IntArray]], Iterator[Tensor]],
        positions: IntArray,
        size: int,
        *,
        limit: int = 2**28,
    ) -> None:
        groups = np.array_split(positions, max(1, round(len(positions) / size)))
        self._row_of: dict[int, int] = {}
        self._answers: Tensor | None = None
        with ranks.all_ready("first images"):
            first, again = read([groups[0]] * 2)
            outputs = answer(first[:1]).shape[1]
        augmented = digests(first) != digests(again)  # no image comes twice
        if ranks.any_of(augmented) or 4 * outputs * len(positions) > limit:
            return
        own: dict[int, tuple[list[int], Tensor]] = {}
        with ranks.all_ready("images of the teacher"):
            mine = ranks.mine(len(groups))
            for k, images in zip(mine, read([groups[k] for k in mine]), strict=True):
                own[k] = digests(images), answer(images).float().cpu()
        found = {k: one for part in ranks.gathered("answers", own) for k, one in part.items()}
        keys = [key for k in sorted(found) for key in found[k][0]]
        self._row_of = {key: row for row, key in enumerate(keys)}
        self._answers = torch.cat([found[k][1] for k in sorted(found)])

    def __call__(self, images: Tensor) -> Tensor | None:
        """The answers ``(B, classes)``, on the CPU; None where some image is not known."""
        if self._answers is None:
            return None
        rows = [self._row_of.get(key, -1) for key in digests(images)]
        return None if -1 in rows else self._answers[rows]


def digests(images: Tensor) -> list[int]:
    """A number for each image that follows from its bits; sums of integers have no rounding."""
    flat = images.detach().contiguous().flatten(1)
    bits = flat.view(_INTEGER[flat.element_size()])
    factors = torch.randint(
        -(2**62), 2**62, bits.shape[1:], generator=torch.Generator().manual_seed(0)
    )
    factors = (2 * factors + 1).to(bits.device)
    return [int((row.long() * factors).sum()) for row in bits]
