"""The picture shows every group and every channel."""

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stamppruner.report import GroupRow, kept_channels_svg

SVG = "{http://www.w3.org/2000/svg}"


def channels(path: str) -> list[int]:
    """Channels that a path of ticks covers."""
    found = []
    for start, width in re.findall(r"M(\d+) [\d.]+h([\d.]+)v", path):
        found += range(int(start), int(start) + max(1, int(float(width))))
    return found


def rows(svg: str) -> list[ElementTree.Element]:
    return [g for g in ElementTree.fromstring(svg).iter(f"{SVG}g") if g.get("class") == "row"]


@given(
    st.integers(1, 200).flatmap(
        lambda size: st.tuples(st.just(size), st.sets(st.integers(0, size - 1)))
    )
)
def test_every_channel_is_drawn_once_in_its_kind(case):
    size, kept = case
    (row,) = rows(kept_channels_svg([GroupRow("g", size, tuple(sorted(kept)))]))
    drawn = {path.get("class"): channels(path.get("d")) for path in row.iter(f"{SVG}path")}
    assert drawn["kept"] == sorted(kept)
    assert drawn["removed"] == sorted(set(range(size)) - kept)


@pytest.mark.parametrize("count", [0, 1, 40])
def test_a_row_a_group(count):
    groups = [GroupRow(f"layer{i}.conv", 16, tuple(range(i % 16 + 1))) for i in range(count)]
    svg = kept_channels_svg(groups)
    assert len(rows(svg)) == count
    assert int(ElementTree.fromstring(svg).get("height")) >= 20 * count
    for row, group in zip(rows(svg), groups, strict=True):
        text = "".join(row.itertext())
        assert f"{len(group.kept)}/16" in text
        assert group.name in text


def test_names_are_escaped_and_long_ones_cut():
    names = ['<b>&"x"</b>\n', "features." * 20 + "conv"]
    svg = kept_channels_svg([GroupRow(name, 4, (0,)) for name in names])
    first, second = rows(svg)
    assert first.find(f"{SVG}svg/{SVG}text").text == '<b>&"x"</b> '
    shown = second.find(f"{SVG}svg/{SVG}text").text
    assert len(shown) == 30
    assert shown.startswith("…")
    assert shown.endswith("features.conv")
    assert second.find(f"{SVG}title").text.startswith(names[1])


def test_legend_and_namespace_are_optional():
    group = GroupRow("g", 2, (1,))
    assert 'class="legend"' in kept_channels_svg([group])
    inline = kept_channels_svg([group], legend=False, inline=True)
    assert "legend" not in inline
    assert "http" not in inline


def test_large_pictures_stay_small_files():
    assert len(kept_channels_svg([GroupRow("g", 4096, tuple(range(2048)))])) < 2500
