"""Mean and spread of images, to notice a target that was scaled unlike the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_FAR = 3.0
"""Standard deviations of the reference by which a mean may be off; and factor between spreads."""


@dataclass(frozen=True)
class ImageStatistics:
    """Of a set of images, a number a channel.

    Attributes:
        mean: over images and pixels.
        std: likewise.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, images: Tensor) -> ImageStatistics:
        """Statistics of images ``(B, C, H, W)``."""
        channels = images.detach().double().transpose(0, 1).flatten(1)
        return cls(tuple(channels.mean(1).tolist()), tuple(channels.std(1, correction=0).tolist()))

    @classmethod
    def from_json(cls, record: Any) -> ImageStatistics | None:
        """Inverse of :meth:`to_json`; None for None. Raises ValueError for anything else."""
        if record is None:
            return None
        mean, std = (tuple(float(x) for x in record[key]) for key in ("mean", "std"))
        if len(mean) != len(std):
            raise ValueError(f"image statistics of {len(mean)} and {len(std)} channels")
        return cls(mean, std)

    def to_json(self) -> dict[str, list[float]]:
        """JSON-able form."""
        return {"mean": list(self.mean), "std": list(self.std)}

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
        return None


def _short(values: Sequence[float]) -> str:
    return "(" + ", ".join(f"{value:.2g}" for value in values) + ")"
