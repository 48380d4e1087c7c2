"""Several reports in one table and on one page, with the same numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from stamppruner.errors import CheckpointError, ConfigError
from stamppruner.report import Comparison, Report, compare

SETTING = {"latency_batch_size": 32, "latency_device": "cpu"}
STAMP = Report(
    "STAMP",
    "ResNet",
    before={"macs": 4e6, "latency_ms": 2.0},
    after={"macs": 1e6, "latency_ms": 1.5},
    metrics={"accuracy_after_cut": 0.875, "accuracy_after_finetune": 0.9375},
    timings={"choose_channels": 1.5, "finetune": 2.0},
    settings=SETTING,
)
L1 = replace(
    STAMP,
    title="L1",
    after={"macs": 2e6, "latency_ms": 1.0, "params": 10},
    metrics={"accuracy_after_cut": 0.5},
    timings={},
)


def test_table_has_a_row_each_and_dashes_where_nothing_was_measured():
    lines = compare([STAMP, L1]).table().splitlines()
    assert lines[0].split() == [
        "MACs", "latency", "parameters", "fine-tuned", "after", "cut", "time"
    ]  # fmt: skip
    assert lines[1].split() == [
        "STAMP", "1.00M", "(25.0%)", "1.50", "ms", "(75.0%)", "-", "93.8%", "87.5%", "3.50", "s"
    ]  # fmt: skip
    assert lines[2].split() == [
        "L1", "2.00M", "(50.0%)", "1.00", "ms", "(50.0%)", "10", "-", "50.0%", "-"
    ]  # fmt: skip


def test_results_and_reports_by_name_or_in_a_row():
    result = SimpleNamespace(report=STAMP)
    assert list(compare({"mine": result, "theirs": L1}).reports) == ["mine", "theirs"]
    assert list(compare([STAMP, STAMP, L1]).reports) == ["STAMP", "STAMP'", "L1"]
    assert compare(iter([result])).reports == {"STAMP": STAMP}


@pytest.mark.parametrize("wrong", [[], {}, None, [3], {"a": "b"}])
def test_what_is_no_result_is_refused(wrong):
    with pytest.raises(ConfigError, match="compare"):
        compare(wrong)


def test_latencies_of_two_settings_are_not_compared():
    other = replace(L1, settings={**SETTING, "latency_device": "cuda"})
    found = compare([STAMP, other])
    assert "latency_ms" in found.reports["STAMP"].after
    assert found.reports["L1"] == replace(other, after={"macs": 2e6, "params": 10})
    assert found.warnings == ("L1: its latency was measured in another setting than the first's",)
    assert str(found).endswith("warning: " + found.warnings[0])


def test_record_and_page(tmp_path):
    found = compare({"<b>": STAMP, "L1": L1})
    record = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert Comparison.from_json(record) == found
    with pytest.raises(CheckpointError, match="format"):
        Comparison.from_json({"format": 2, "reports": {}})
    found.to_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<b>" not in page
    assert 'data-key="L1.after.macs" data-value="2000000.0"' in page
    assert 'data-value="0.875"' in page
    assert "http" not in page.replace("http-equiv", "")
    assert "<circle" in page  # all have an accuracy after the cut
    assert "<circle" not in compare([STAMP, replace(L1, metrics={})])._repr_html_()


def test_metrics_of_the_users_own_are_plain_numbers():
    own = replace(STAMP, metrics={"metric_after_cut": 12.5, "loss_after_finetune": 0.25})
    header, line = compare([own]).table().splitlines()
    assert "metric, after cut" in header
    assert "loss, fine-tuned" in header
    assert line.split()[-4:] == ["12.5", "0.25", "3.50", "s"]
    assert "<circle" not in compare([own])._repr_html_()
