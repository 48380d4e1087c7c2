"""What a pruner's file says besides its tensors, checked value by value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stamppruner.config import STAMPConfig
from stamppruner.errors import CheckpointError, ConfigError, UnsupportedModelError, shown
from stamppruner.history import History
from stamppruner.projection import Entry, checked_record
from stamppruner.statistics import ImageStatistics

SHORTCUTS = ("couple", "project")
"""Values of ``STAMPPruner(shortcuts=...)``."""

_MAX_PIXELS, _MAX_PLANES = 2**22, 2**12  # tracing takes what the model takes for such images
_MAX_PATTERNS, _MAX_PATTERN = 2**12, 2**10
_MAX_INTEGER = 2**63


@dataclass(frozen=True)
class Saved:
    """The record of a pruner's file.

    Attributes:
        image_shape: ``(C, H, W)`` of the images that the model was traced with.
        groups: name, size and blocks of every channel group.
        config: settings.
        protect: patterns of layers that stay whole.
        history: of meta-fitting.
        meta_fitted: whether there was any.
        classifies: whether the task was classification.
        shortcuts: what was done about them.
        coupled: blocks whose shortcut was left, with the reason.
        seen: statistics of the reference images.
        normalisation: what their pixels were normalised by.
        projections: layers on shortcuts.
    """

    image_shape: tuple[int, ...]
    groups: list[Any]
    config: STAMPConfig
    protect: tuple[str, ...]
    history: History
    meta_fitted: bool
    classifies: bool
    shortcuts: Literal["couple", "project"]
    coupled: dict[str, str]
    seen: ImageStatistics | None
    normalisation: ImageStatistics | None
    projections: list[Entry]

    @classmethod
    def of(cls, record: Mapping[str, Any], path: object) -> Saved:
        """The record, parsed.

        Raises:
            CheckpointError: a value is missing, or is not what is written there.
        """
        try:
            shape = _image_shape(record["image_shape"])
            return cls(
                image_shape=shape,
                groups=_groups(record["groups"]),
                config=_config(record["config"]),
                protect=_patterns(record["protect"]),
                history=_history(record["history"]),
                meta_fitted=_need(record["meta_fitted"], bool, "meta_fitted"),
                classifies=_need(record.get("classifies", True), bool, "classifies"),
                shortcuts=_shortcuts(record.get("shortcuts", "couple")),
                coupled=_texts(record.get("coupled", {})),
                seen=_statistics(record.get("image_statistics"), shape[0]),
                normalisation=_statistics(record.get("normalisation"), shape[0]),
                projections=checked_record(_need(record.get("projections", []), list, "layers")),
            )
        except KeyError as error:
            raise CheckpointError(f"{path}: its record is damaged: it has no {error}") from error
        except (ValueError, ConfigError, UnsupportedModelError) as error:
            raise CheckpointError(f"{path}: its record is damaged: {error}") from error


def _need(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{name} is {shown(value)}, not {kind.__name__}")
    return value


def _is_number(value: Any) -> bool:
    """Whether a value is a number that any code can take; NaN and infinity are."""
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _MAX_INTEGER)


def _shortcuts(value: Any) -> Any:
    if value not in SHORTCUTS:
        raise ValueError(f"shortcuts is {shown(value)}, not one of {', '.join(SHORTCUTS)}")
    return value


def _image_shape(value: Any) -> tuple[int, ...]:
    shape = _need(value, list, "image_shape")
    right = len(shape) == 3 and all(type(n) is int and n > 0 for n in shape)
    if not right or math.prod(shape) > _MAX_PIXELS or shape[0] > _MAX_PLANES:
        raise ValueError(f"image_shape is {shown(shape)}, not (C, H, W) of an image that fits")
    return tuple(shape)


def _groups(value: Any) -> list[Any]:
    for group in _need(value, list, "groups"):
        kinds = [type(part) for part in group] if isinstance(group, list) else []
        if kinds != [str, int, int]:
            raise ValueError(f"groups has {shown(group)}, not [name, size, blocks]")
    return value


def _config(value: Any) -> STAMPConfig:
    """The settings, if each has the type of its default."""
    default = STAMPConfig().to_dict()
    for name, setting in _need(value, dict, "config").items():
        like = default.get(name)
        if isinstance(like, bool):
            right = setting in (0, 1)
        elif isinstance(like, tuple):
            right = isinstance(setting, list) and len(setting) == len(like)
            right = right and all(map(_is_number, setting))
        else:
            right = _is_number(setting) or (name == "round_to" and setting is None)
        if name in default and not right:
            raise ValueError(f"config has {name} = {shown(setting)}")
        if isinstance(setting, float) and not math.isfinite(setting):
            raise ValueError(f"config has {name} = {setting}")
    return STAMPConfig.from_dict(value)


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = _need(value, list, "protect")
    if len(patterns) > _MAX_PATTERNS or not all(
        isinstance(text, str) and len(text) <= _MAX_PATTERN for text in patterns
    ):
        raise ValueError(f"protect is {shown(patterns)}, not a list of names or patterns")
    return tuple(patterns)


def _history(value: Any) -> History:
    for row in _need(value, list, "history"):
        if not isinstance(row, dict) or not all(map(_is_number, row.values())):
            raise ValueError(f"history has {shown(row)}, not a row of numbers")
    return History(list(value))


def _texts(value: Any) -> dict[str, str]:
    texts = _need(value, dict, "coupled")
    if not all(isinstance(text, str) for text in texts.values()):
        raise ValueError(f"coupled is {shown(texts)}, not reasons by name")
    return texts


def _statistics(value: Any, channels: int) -> ImageStatistics | None:
    if value is None:
        return None
    given = _need(value, dict, "image_statistics")
    names = ("mean", "std", *(["least"] if "least" in given else []))
    for part in map(given.get, names):
        numbers = isinstance(part, list) and len(part) == channels and all(map(_is_number, part))
        if not numbers or not all(map(math.isfinite, part)):
            raise ValueError(
                f"image_statistics is {shown(value)}, not numbers of {channels} channels each"
            )
    return ImageStatistics.from_json(value)
