"""What the commands share: how classes are compared and pixels described."""

from __future__ import annotations

import pytest

from stamppruner.cli._shared import check_same_classes, normalisation
from stamppruner.errors import DataError

CLASSES = [f"class{i}" for i in range(9)]


def test_classes_that_differ_are_named() -> None:
    check_same_classes("here", CLASSES, CLASSES, "there")
    with pytest.raises(DataError, match=r"here lacks class8, beside the 9 classes of there"):
        check_same_classes("here", CLASSES[:8], CLASSES, "there")
    with pytest.raises(DataError, match=r"lacks class0 and has besides other, "):
        check_same_classes("here", [*CLASSES[1:], "other"], CLASSES, "there")
    with pytest.raises(DataError, match=r"lacks class2, .*, class6 and 2 more, "):
        check_same_classes("here", CLASSES[:2], CLASSES, "there")
    with pytest.raises(DataError, match=r"another order"):
        check_same_classes("here", CLASSES[::-1], CLASSES, "there")


def test_what_a_server_does_to_pixels() -> None:
    record = {"images": {"mean": [0.5, 0.25, 0.125], "std": [1, 1, 0.5]}}
    assert normalisation(record) == "pixels in [0, 1], minus (0.5, 0.25, 0.125), over (1, 1, 0.5)"
    assert normalisation({}) == normalisation({"images": {"mean": None}}) == ""
