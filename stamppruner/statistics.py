"""Mean and spread of images, to notice a target that was scaled unlike the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_FAR = 3.0
"""Standard deviations of the reference by which a mean may be off; and factor between spreads."""

_BELOW = 0.2
"""Standard deviations below zero at which a reference's least value must be for a target of raw
pixels, which have none below zero, to be told from it."""


@dataclass(frozen=True)
class ImageStatistics:
    """Of a set of images, a number a channel.

    Attributes:
        mean: over images and pixels.
        std: likewise.
        least: the least value; None where it is not known.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    least: tuple[float, ...] | None = None

    @classmethod
    def of(cls, images: Tensor) -> ImageStatistics:
        """Statistics of images ``(B, C, H, W)``."""
        channels = images.detach().double().transpose(0, 1).flatten(1)
        found = channels.mean(1), channels.std(1, correction=0), channels.amin(1)
        return cls(*(tuple(part.tolist()) for part in found))

    @classmethod
    def from_json(cls, record: Any) -> ImageStatistics | None:
        """Inverse of :meth:`to_json`; None for None. Raises ValueError for anything else."""
        if record is None:
            return None
        names = ("mean", "std", *(["least"] if "least" in record else []))
        parts = [tuple(float(x) for x in record[name]) for name in names]
        if len(lengths := {len(part) for part in parts}) > 1:
            raise ValueError(f"image statistics of {sorted(lengths)} channels")
        return cls(*parts)

    def to_json(self) -> dict[str, list[float]]:
        """JSON-able form."""
        found = {"mean": list(self.mean), "std": list(self.std)}
        return found if self.least is None else {**found, "least": list(self.least)}

    def unlike(self, other: ImageStatistics) -> str | None:
        """A warning if other images were probably scaled in another way than these, else None."""
        for channel, (m, s, om, os) in enumerate(
            zip(self.mean, self.std, other.mean, other.std, strict=False)
        ):
            far = abs(om - m) > _FAR * s
            if far or not s / _FAR <= os <= s * _FAR:
                return (
                    f"the target's images have mean {_short(other.mean)} and standard deviation "
                    f"{_short(other.std)}, the reference's {_short(self.mean)} and "
                    f"{_short(self.std)} (channel {channel} is far off): normalise both alike"
                )
        if self.least is None or other.least is None:
            return None
        low = all(least < -_BELOW * std for least, std in zip(self.least, self.std, strict=True))
        if low and min(other.least) >= 0:
            return (
                f"the target's images have no value below 0, the reference's go down to "
                f"{_short(self.least)}: pass normalised images, not pixels, as there"
            )
        return None


def _short(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{value:.2g}" for value in values) + ")"
