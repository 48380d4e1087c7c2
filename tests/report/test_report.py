"""A report says the same thing as text, as data and as a page, whatever the names contain."""

import html
import json
import math
import os
import re
from dataclasses import fields, replace
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stamppruner.errors import CheckpointError, ConfigError
from stamppruner.report import GroupRow, LayerRow, Report

REPORT = Report(
    title="STAMP: small net",
    model="ResNet",
    before={"params": 11_173_962, "macs": 555_422_720, "size_bytes": 44_695_848, "latency_ms": 8.3},
    after={"params": 2_309_114, "macs": 138_600_111, "size_bytes": 9_236_456, "latency_ms": 3.9001},
    budget={"macs": 0.25, "latency_ms": 3.5},
    reached={"macs": 0.24953984, "latency_ms": 3.9001},
    layers=(
        LayerRow("conv1", "Conv2d", 3, 3, 64, 21, 1_769_472, 580_608, 1728, 567),
        LayerRow("fc", "Linear", 512, 99, 10, 10, 5120, 990, 5130, 1000),
    ),
    groups=(GroupRow("conv1", 64, tuple(range(0, 63, 3))), GroupRow("layer1.conv2", 8, (0, 7))),
    protected={f"layer{i}.down": f"reason {i}" for i in range(5)},
    rewired={"layer1.conv1": "fixed places"},
    warnings=("the latency budget was not reached",),
    metrics={"accuracy_before": 0.9321, "accuracy_after_cut": 0.1 + 0.2},
    timings={"prune": 3.217, "finetune": 401.25},
    settings={"seed": 0, "versions": {"torch": "2.6"}, "config": {"betas": (0.9, 0.999)}},
)
EMPTY = Report("nothing", "Net")
NASTY = '<script>alert("&\'")</script>\n\x1b[31m\u202e</style> -->|]]>'
ODD = Report(
    title=NASTY,
    model=NASTY,
    before={NASTY: 1.0},
    after={NASTY: 2},
    budget={NASTY: 1.0},
    reached={NASTY: 2.0},
    layers=(LayerRow(NASTY, NASTY, 1, 1, 1, 1, 0, 0, 0, 0),),
    groups=(GroupRow(NASTY, 3, (1,)),),
    protected={NASTY: NASTY},
    rewired={NASTY: NASTY},
    warnings=(NASTY,),
    metrics={NASTY: math.inf},
    timings={NASTY: 0},
    settings={NASTY: NASTY, "list": [NASTY, None, 1.5]},
)
ALL = [REPORT, EMPTY, ODD]


class Page(HTMLParser):
    """Tags, attributes, visible text and the JSON block of a page."""

    VOID = frozenset({"meta"})

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.attributes, self.values, self.text = [], [], [], {}, []
        self.data = ""
        self.feed(source)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "data":
            self.values[dict(attrs)["data-key"]] = float(dict(attrs)["data-value"])
        if tag not in {*self.VOID, "wbr"}:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["script"]:
            self.data += data
        elif self.open[-1:] != ["style"]:
            self.text.append(data)


def page_of(report, tmp_path):
    report.to_html(tmp_path / "report.html")
    return (tmp_path / "report.html").read_text("utf-8")


# ---------------------------------------------------------------------------- JSON


@pytest.mark.parametrize("report", ALL)
def test_json_round_trip_is_exact(report):
    text = json.dumps(report.to_json(), allow_nan=False)
    again = Report.from_json(json.loads(text))
    assert again == report
    assert str(again) == str(report)
    assert json.dumps(again.to_json()) == text


def test_json_has_every_field():
    assert REPORT.to_json().keys() == {item.name for item in fields(Report)} | {"format"}
    assert REPORT.to_json()["groups"][1] == {"name": "layer1.conv2", "size": 8, "kept": [0, 7]}
    assert isinstance(REPORT.to_json()["after"]["params"], int)


@given(st.dictionaries(st.text(), st.floats(allow_nan=False) | st.integers()))
def test_any_numbers_survive(metrics):
    report = replace(EMPTY, metrics=metrics)
    again = Report.from_json(json.loads(json.dumps(report.to_json(), allow_nan=False)))
    assert again.metrics == metrics


def test_nan_survives():
    report = Report.from_json(replace(EMPTY, metrics={"loss": math.nan}).to_json())
    assert math.isnan(report.metrics["loss"])


def test_numpy_and_torch_numbers_become_plain():
    report = Report(
        "t",
        "m",
        before={"macs": np.int64(3)},
        metrics={"accuracy": torch.tensor(0.5)},
        layers=[LayerRow("a", "Conv2d", *np.arange(8))],
        groups=[GroupRow("a", np.int64(3), np.array([0, 2]))],
    )
    json.dumps(report.to_json())
    assert report.groups == (GroupRow("a", 3, (0, 2)),)
    assert report.metrics == {"accuracy": 0.5}


def test_the_report_does_not_follow_later_changes():
    costs = {"macs": 1}
    report = Report("t", "m", before=costs)
    costs["macs"] = 2
    assert report.before == {"macs": 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"before": {"macs": "many"}}, r"before\.macs .* is 'many', not a number"),
        ({"metrics": {"a": torch.ones(2)}}, r"metrics\.a"),
        ({"settings": {"model": object()}}, "do not fit into JSON"),
        ({"settings": {"lr": math.nan}}, "do not fit into JSON"),
    ],
)
def test_bad_values_are_named(change, reason):
    with pytest.raises(ConfigError, match=reason):
        replace(EMPTY, **change)


def test_bad_records_are_named():
    data = REPORT.to_json()
    with pytest.raises(CheckpointError, match="format 2, this version reads 1"):
        Report.from_json({**data, "format": 2})
    with pytest.raises(CheckpointError, match=r"the report .* extra, title"):
        Report.from_json({**{k: v for k, v in data.items() if k != "title"}, "extra": 1})
    with pytest.raises(CheckpointError, match=r"entry of groups .* kept, size"):
        Report.from_json({**data, "groups": [{"name": "a"}]})


# ---------------------------------------------------------------------------- text


def test_text_tells_the_essentials():
    text = str(REPORT)
    for line in [
        r"parameters +11\.2M +-> +2\.31M +20\.7% +4\.84x less",
        r"MACs +555M +-> +139M +25\.0% +4\.01x less",
        r"size +42\.6 MiB +-> +8\.81 MiB +20\.7% +4\.84x less",
        r"latency +8\.30 ms +-> +3\.90 ms +47\.0% +2\.13x less",
        r"MACs +25\.0% +25\.0%$",
        r"latency +3\.50 ms +3\.90 ms +over budget",
        r"channels +23 of 72 kept in 2 groups",
        r"accuracy after cut +0\.3",
        r"time +prune 3\.22 s, finetune 7 min",
        r"warning: the latency budget was not reached",
    ]:
        assert re.search(f"(?m)^{line}", text), (line, text)
    assert "5 left whole: layer0.down (reason 0), layer1.down (reason 1)" in text
    assert "layer4.down" not in text


@pytest.mark.parametrize("report", ALL)
def test_text_is_narrow_and_printable(report):
    text = str(report)
    assert all(len(line) <= 100 for line in text.splitlines() if not line.startswith(("<", "=")))
    assert text.replace("\n", "").isprintable()


def test_missing_costs_have_no_ratio():
    text = str(
        Report("t", "m", before={"macs": 0, "params": 5}, after={"macs": 0, "size_bytes": 1})
    )
    assert re.search(r"(?m)^MACs +0 +-> +0 +-$", text)
    assert re.search(r"(?m)^parameters +5 +-> +- +-$", text)
    assert re.search(r"(?m)^size +- +-> +1 B +-$", text)


def test_over_budget():
    assert REPORT.over_budget("latency_ms")
    assert not REPORT.over_budget("macs")
    assert not REPORT.over_budget("params")
    exact = replace(EMPTY, budget={"macs": 0.1}, reached={"macs": 0.1 * (1 + 1e-16)})
    assert not exact.over_budget("macs")


@pytest.mark.parametrize("changes", [{"layers": None}, {"groups": 3}, {"metrics": [1]},
                                     {"metrics": {"a": "much"}}, {"before": 3}])  # fmt: skip
def test_damaged_records_are_refused(changes):
    with pytest.raises(CheckpointError, match="damaged"):
        Report.from_json({**REPORT.to_json(), **changes})


def test_says_how_times_were_measured():
    settings = {"latency_batch_size": 8, "latency_device": "cuda:0"}
    plain = Report("STAMP", "ResNet", before={"latency_ms": 8.0}, settings=settings)
    assert "of 8 samples on cuda:0\n" in f"{plain}\n"
    assert "of 8 samples on cuda:0.</p>" in plain._repr_html_()
    fast = replace(plain, settings={**settings, "latency_amp": True})
    for told in (str(fast), fast._repr_html_()):
        assert "of 8 samples on cuda:0, bfloat16 autocast" in told
    assert not EMPTY.latency_note


# ---------------------------------------------------------------------------- HTML


@pytest.mark.parametrize("report", ALL)
def test_page_is_well_formed_and_needs_nothing_else(report, tmp_path):
    source = page_of(report, tmp_path)
    page = Page(source)
    assert page.open == []
    assert not re.search(r"https?://|url\(|@import|javascript:", source)
    assert not {"src", "href", "srcset", "onload", "onerror"} & {
        name for name, _ in page.attributes
    }
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert page.tags.count("script") == 1
    assert "default-src 'none'" in source
    assert os.listdir(tmp_path) == ["report.html"]


@pytest.mark.parametrize("report", ALL)
def test_page_carries_the_record(report, tmp_path):
    page = Page(page_of(report, tmp_path))
    assert Report.from_json(json.loads(page.data)) == report


@pytest.mark.parametrize("report", [REPORT, EMPTY])
def test_numbers_of_the_page_are_those_of_the_json(report, tmp_path):
    data, expected = report.to_json(), {}
    for group in ("before", "after", "budget", "reached", "metrics", "timings"):
        expected |= {f"{group}.{name}": value for name, value in (data[group] or {}).items()}
    assert Page(page_of(report, tmp_path)).values == expected


def test_layer_numbers_of_the_page_are_those_of_the_json(tmp_path):
    titles = [
        value for name, value in Page(page_of(REPORT, tmp_path)).attributes if name == "title"
    ]
    expected = [
        f"{row[f'{what}_before']} → {row[f'{what}_after']}"
        for row in REPORT.to_json()["layers"]
        for what in ("in", "out", "params", "macs")
    ]
    assert titles == expected


def test_odd_names_are_shown_not_obeyed(tmp_path):
    source = page_of(ODD, tmp_path)
    assert "<script>alert" not in source
    assert source.count("</style>") == 1
    assert html.escape('<script>alert("') in source
    assert "\x1b" not in source
    shown = "".join(Page(source).text)
    assert shown.count("alert(") >= 9


def test_sections_appear_only_with_content():
    everything, nothing = REPORT._repr_html_(), EMPTY._repr_html_()
    for heading in ("Warnings", "Budget", "Results", "Kept channels", "Layers", "Time", "Settings"):
        assert f"<h2>{heading}</h2>" in everything
    assert "Left whole (5)" in everything
    assert "<h2>" not in nothing


def test_notebook_form_is_a_fragment():
    shown = REPORT._repr_html_()
    assert shown.startswith('<div class="stamppruner-report">')
    assert "<html" not in shown
    assert "<script" not in shown


def test_style_stays_inside_the_report():
    style = re.search(r"<style>(.*)</style>", REPORT._repr_html_(), re.DOTALL).group(1)
    for selectors in re.findall(r"(?m)^ *([^@{};\n][^{};]*?) *\{", style):
        assert all(".stamppruner-report" in selector for selector in selectors.split(","))
    assert "prefers-color-scheme: dark" in style
    assert "@media print" in style


def test_unwritable_page_is_named_and_an_old_one_kept(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="not an existing directory"):
        REPORT.to_html(tmp_path / "missing" / "report.html")
    path = tmp_path / "report.html"
    path.write_text("old")

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("stamppruner.files.os.fsync", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        REPORT.to_html(path)
    assert path.read_text() == "old"
