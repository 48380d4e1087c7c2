"""One scoring, networks of several sizes: the same as one by one, with a record and a page."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stripes import dataset, loader, same_state, snapshot, stripes, vgg
from torch import nn

from stamppruner import (
    Budget,
    Pareto,
    STAMPConfig,
    StampError,
    STAMPPruner,
    TaskSampler,
    evaluate,
    finetune,
    load_slim,
)
from stamppruner.errors import BudgetError, CheckpointError, ConfigError, DataError
from stamppruner.pareto import Point
from stamppruner.pruner import NotMetaFittedWarning
from stamppruner.report.front import picture

SHARES = [0.5, 0.25, 0.8]
CONFIG = STAMPConfig(
    iterations=2,
    tasks_per_iteration=1,
    ways=3,
    shots=8,
    minibatch_size=12,
    measure_latency=False,
)
IMAGES = stripes(4)[0]


@pytest.fixture(scope="module")
def pruner() -> STAMPPruner:
    model = vgg()
    finetune(model, loader(), epochs=4, lr=0.1, progress=False)
    return STAMPPruner(model, config=CONFIG).meta_fit(
        TaskSampler(dataset(16), 3, 8), progress=False
    )


@pytest.fixture(scope="module")
def found(pruner: STAMPPruner) -> Pareto:
    return pruner.pareto(loader(seed=3), SHARES, evaluate_on=loader(seed=9), progress=False)


def other(pruner: STAMPPruner, **changes: Any) -> STAMPPruner:
    own = copy.copy(pruner)
    own.config = dataclasses.replace(pruner.config, **changes)
    return own


def made(points: list[tuple[float, float]]) -> Pareto:
    """A record of points of these costs and accuracies."""
    drawn = [
        Point({"macs": 0.5}, {"macs": cost}, {"accuracy_after_cut": accuracy}, f"slim-{i}")
        for i, (cost, accuracy) in enumerate(points)
    ]
    return Pareto("Net", Point({}, {"macs": 9e6}, {"accuracy_before_cut": 0.9}), tuple(drawn))


class Counted:
    """A loader that counts how often it is read."""

    def __init__(self) -> None:
        self.reads = 0

    def __iter__(self) -> Any:
        self.reads += 1
        return iter(loader(seed=3))


# One scoring, the networks of prune


@pytest.mark.parametrize("changes", [{}, {"prune_epochs": 0.5}])
def test_each_network_is_that_of_prune(pruner: STAMPPruner, changes: dict[str, Any]) -> None:
    own = other(pruner, **changes)
    counted = Counted()
    found = own.pareto(counted, [0.5, Budget(params=0.3)], progress=False)
    assert counted.reads == 1
    for result, budget in zip(found.results, [Budget(macs=0.5), Budget(params=0.3)], strict=True):
        alone = own.prune(loader(seed=3), budget, progress=False)
        assert result.plan == alone.plan
        assert same_state(result.model, snapshot(alone.model))
        assert result.report.budget == budget.bounds()
        assert result.report.metrics == alone.report.metrics
        assert result.report.timings.keys() == alone.report.timings.keys()
        assert np.array_equal(result.keep_probability, alone.keep_probability)


def test_scores_of_one_budget_do_not_leak_into_the_next(pruner: STAMPPruner) -> None:
    moving = other(pruner, prune_epochs=1.0, weights_lr=0.01)
    first, second = (moving.pareto(loader(seed=3), b, progress=False) for b in ([0.3, 0.6], [0.6]))
    assert same_state(first.results[1].model, snapshot(second.results[0].model))
    scores = [r.keep_probability for r in first.results]
    assert not np.array_equal(*scores)


def test_choose_is_the_plan_of_prune_without_a_cut(
    pruner: STAMPPruner, found: Pareto, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stamppruner.pruner.finish", None)
    plan, scores = pruner.choose(loader(seed=3), Budget(macs=0.5), progress=False)
    assert plan == found.results[0].plan
    assert np.array_equal(scores, found.results[0].keep_probability)


@pytest.mark.parametrize("round_to", [1, 8])
def test_a_larger_budget_never_gives_a_smaller_network(pruner: STAMPPruner, round_to: int) -> None:
    shares = [0.15, 0.16, 0.2, 0.3, 0.31, 0.5, 0.75, 1.0]
    own = other(pruner, round_to=round_to, reconstruct=False)
    found = own.pareto(loader(seed=3), shares, progress=False)
    macs = [point.costs["macs"] for point in found.points]
    assert macs == sorted(macs)
    assert macs[-1] == found.full.costs["macs"] > macs[0]
    assert all(m <= s * macs[-1] for m, s in zip(macs, shares, strict=True))


# Errors come before any cut


@pytest.mark.parametrize(
    ("budgets", "named"),
    [
        ([], "no budgets"),
        ([0.5, 0.5], r"Budget\(macs=0.5\) is given twice"),
        ([0.25, Budget(macs=0.25)], r"Budget\(macs=0.25\) is given twice"),
        ([0.5, 1e-4], r"Budget\(macs=0.0001\) cannot be met"),
        ([0.5, Budget(params=3)], r"Budget\(params=3\) cannot be met"),
        ([0.5, 25.0], "25.0 is no share"),
        ([0.0], "0.0 is no share"),
        ([float("nan")], "nan is no share"),
        ([True], "True is none"),
        ([0.5, "0.25"], "'0.25' is none"),
        ([None], "None is none"),
        (0.5, "budgets=0.5: pass a list"),
        ("0.5", "budgets='0.5': pass a list"),
        (Budget(macs=0.5), r"pass a list"),
        ({0.5: 1}, "pass a list"),
    ],
)
def test_bad_budgets_are_named_before_any_cut(
    pruner: STAMPPruner, monkeypatch: pytest.MonkeyPatch, budgets: Any, named: str
) -> None:
    monkeypatch.setattr("stamppruner.pruner.finish", None)
    with pytest.raises(BudgetError, match=named):
        pruner.pareto(loader(), budgets, progress=False)


@pytest.mark.parametrize(
    "settings", [{}, {"epochs": 1, "momentumm": 0.5}, {"epochs": -1}, {"lr": 0.1}, 3, {"model": 1}]
)
def test_bad_settings_of_fine_tuning(pruner: STAMPPruner, settings: Any) -> None:
    counted = Counted()
    with pytest.raises(ConfigError, match=r"pass a dict such as|epochs=-1"):
        pruner.pareto(counted, [0.5], finetune=settings, progress=False)
    assert counted.reads == 0


def test_data_that_are_needed_again_must_not_run_dry(pruner: STAMPPruner) -> None:
    with pytest.raises(DataError, match="only once"):
        pruner.pareto(iter(loader()), [0.5], finetune={"epochs": 1}, progress=False)
    with pytest.raises(DataError, match="label 5 needs 6 outputs"):
        pruner.pareto(loader(classes=4), [0.5], evaluate_on=loader(), progress=False)
    with pytest.raises(DataError, match="only once"):
        pruner.pareto(loader(), [0.5], evaluate_on=iter(loader()), progress=False)
    assert len(pruner.pareto(iter(loader()), [0.5], progress=False).points) == 1


@pytest.mark.parametrize("method", ["prune", "choose", "pareto"])
def test_warnings_point_at_the_callers_line(method: str) -> None:
    fresh = STAMPPruner(vgg(), config=CONFIG)
    budget = [0.5] if method == "pareto" else Budget(macs=0.5)
    with pytest.warns(NotMetaFittedWarning, match="call meta_fit first") as seen:
        getattr(fresh, method)(loader(), budget, progress=False)
    assert [Path(w.filename).name for w in seen if w.category is NotMetaFittedWarning] == [
        Path(__file__).name
    ]


# Accuracies and costs


def test_points_have_the_figures_of_the_reports(found: Pareto) -> None:
    assert [p.budget for p in found.points] == [{"macs": share} for share in SHARES]
    for point, result in zip(found.points, found.results, strict=True):
        assert point.costs == result.report.after
        assert point.costs["params"] == sum(p.numel() for p in result.model.parameters())
        assert point.metrics["accuracy_after_cut"] == evaluate(result.model, loader(seed=9))
        assert (
            point.metrics["target_accuracy_after"]
            == (result.report.metrics["target_accuracy_after"])
        )
        assert found.full.costs == result.report.before
    assert found.full.metrics.keys() == {"accuracy_before_cut", "target_accuracy_before"}
    assert all(0.5 < value <= 1 for value in found.full.metrics.values())
    assert found.metrics[0] == "accuracy_after_cut"


def test_fine_tuning_is_that_of_the_result(pruner: STAMPPruner) -> None:
    data, test = dataset(8, seed=3), dataset(8, seed=9)
    settings = {"epochs": 2, "lr": 0.05}
    found = pruner.pareto(data, [0.3], evaluate_on=test, finetune=settings, progress=False)
    alone = pruner.prune(data, Budget(macs=0.3), progress=False)
    before = alone.evaluate(test)
    alone.finetune(data, **settings, progress=False)
    assert same_state(found.results[0].model, snapshot(alone.model))
    (point,) = found.points
    assert point.metrics["accuracy_after_cut"] == before
    assert point.metrics["accuracy_after_finetune"] == evaluate(alone.model, test)
    assert found.metrics[0] == "accuracy_after_finetune"
    assert len(found.results[0].history) == 2


def test_without_other_data_fine_tuned_networks_are_measured_on_the_target(
    pruner: STAMPPruner,
) -> None:
    data = dataset(8, seed=3)
    found = pruner.pareto(data, [0.3], finetune={"epochs": 1}, progress=False)
    (point,) = found.points
    assert found.metrics == ["target_accuracy_after_finetune", "target_accuracy_after"]
    assert point.metrics[found.metrics[0]] == evaluate(found.results[0].model, data)


def test_warnings_of_one_network_name_its_budget() -> None:
    with pytest.warns(NotMetaFittedWarning):
        found = STAMPPruner(vgg(), config=CONFIG).pareto(loader(), [0.5, 0.2], progress=False)
    first, second = found.results
    first.report = dataclasses.replace(first.report, warnings=[*first.report.warnings, "slow"])
    again = Pareto.of([first, second], {})
    assert [text for text in again.warnings if "not meta-fitted" in text] == [
        "not meta-fitted: channels are ranked by Taylor scores on the target"
    ]
    assert again.warnings[-1] == "MACs 50.0%: slow"


def test_latencies_of_other_settings_are_not_compared(found: Pareto) -> None:
    results = [copy.copy(result) for result in found.results]
    for result, samples in zip(results, (32, 1, 32), strict=True):
        report = result.report
        result.report = dataclasses.replace(
            report,
            before={**report.before, "latency_ms": 8.0},
            after={**report.after, "latency_ms": samples / 8},
            settings={**report.settings, "latency_batch_size": samples},
        )
    mixed = Pareto.of(results, {})
    assert [point.costs.get("latency_ms") for point in mixed.points] == [4, None, 4]
    assert mixed.full.costs["latency_ms"] == 8
    assert [text for text in mixed.warnings if "left out" in text] == [mixed.warnings[-1]]
    assert mixed.warnings[-1].startswith("MACs 25.0%: its latency")
    assert "latency_ms" not in mixed.costs
    row = mixed.table().splitlines()[3].split()
    assert row[5:7] == ["KiB", "-"]


@given(
    st.lists(
        st.tuples(st.integers(1, 4).map(float), st.integers(0, 4).map(lambda k: k / 4)),
        min_size=1,
        max_size=8,
    )
)
def test_the_front_is_what_no_point_beats(points: list[tuple[float, float]]) -> None:
    front = made(points).front()
    assert front
    for i, (cost, accuracy) in enumerate(points):
        beaten = [
            j
            for j, (c, a) in enumerate(points)
            if c <= cost and a >= accuracy and (c < cost or a > accuracy)
        ]
        assert (i in front) == (not beaten)
    assert [points[i] for i in front] == sorted(points[i] for i in front)


def test_the_front_of_unknown_costs_and_metrics(found: Pareto) -> None:
    assert found.front("params", "target_accuracy_after")
    with pytest.raises(ConfigError, match="all points have the costs macs, params, size_bytes"):
        found.front("colour")
    with pytest.raises(ConfigError, match="accuracy_after_cut, target_accuracy_after"):
        found.front(metric="accuracy_after_finetune")


def test_the_table_has_a_row_a_network_and_stars_the_front() -> None:
    points = [(5e6, 0.8), (3e6, 0.8), (1e6, 0.7)]
    lines = made(points).table().splitlines()
    assert len(lines) == 5
    assert lines[1].split() == ["full", "network", "9.00M", "90.0%"]
    assert [line.endswith("*") for line in lines[2:]] == [False, True, True]
    assert str(made(points)) == made(points).table()


# Files


def test_the_record_is_read_back(found: Pareto) -> None:
    text = json.dumps(found.to_json(), allow_nan=False)
    again = Pareto.from_json(json.loads(text))
    assert json.dumps(again.to_json()) == text
    assert again.points == found.points
    assert again.table() == found.table()
    assert again.front() == found.front()
    assert again.results == ()


@pytest.mark.parametrize(
    "change", [{"format": 9}, {"points": [{}]}, {"points": None}, {"full": 3}, {"settings": 1}]
)
def test_damaged_records(found: Pareto, change: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        Pareto.from_json(found.to_json() | change)
    without = {k: v for k, v in found.to_json().items() if k not in change}
    with pytest.raises(CheckpointError):
        Pareto.from_json(without)


def numbers(page: str) -> dict[str, float]:
    pairs = re.findall(r'<data data-key="([^"]+)" data-value="([^"]+)">', page)
    return {key: float(value) for key, value in pairs}


def flat(record: dict[str, Any]) -> dict[str, float]:
    points = {"full": record["full"]} | {f"points.{i}": p for i, p in enumerate(record["points"])}
    return {
        f"{key}.{kind}.{name}": value
        for key, point in points.items()
        for kind in ("costs", "metrics")
        for name, value in point[kind].items()
    }


def test_saved_networks_record_and_page(found: Pareto, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    found.save(folder)
    record = json.loads((folder / "pareto.json").read_text())
    files = [point["file"] for point in record["points"]]
    assert files == [f"slim-{i}-macs-{s}.safetensors" for i, s in enumerate(SHARES, 1)]
    assert {path.name for path in folder.iterdir()} == {*files, "pareto.json", "pareto.html"}
    for file, result in zip(files, found.results, strict=True):
        with torch.no_grad():
            outputs = load_slim(folder / file, vgg())(IMAGES)
            assert torch.equal(outputs, result.model.eval()(IMAGES))
    assert Pareto.from_json(record).points == found.points
    page = (folder / "pareto.html").read_text()
    assert numbers(page) == flat(record)
    block = re.search(
        r'<script type="application/json" id="stamppruner-pareto">(.*)</script>', page
    )
    assert block
    assert json.loads(block[1]) == record


def test_the_page_is_one_document_with_one_plot_and_no_requests(
    found: Pareto, tmp_path: Path
) -> None:
    found.save(tmp_path)
    page = (tmp_path / "pareto.html").read_text()
    assert not re.search(r"https?://|url\(|@import|javascript:|src=|href=", page)
    assert page.count("<script") == page.count('class="plot"') == 1
    svg = ElementTree.fromstring(re.search(r'<svg class="plot".*?\n</svg>', page, re.DOTALL)[0])
    kinds = {group.get("class") for group in svg.iter("g")}
    assert kinds == {"first", "reference"}
    titles = [title.text for title in svg.iter("title")]
    for point in found.points:
        shown = f"{100 * point.metrics['accuracy_after_cut']:.1f}%"
        assert any(point.label in t and shown in t for t in titles)
    texts = {text.text for text in svg.iter("text")}
    assert {"50%", "25%", "80%", "accuracy"} <= texts


def test_the_line_of_the_plot_runs_through_the_front_alone() -> None:
    points = made([(5e6, 0.8), (3e6, 0.8), (2e6, 0.6), (1e6, 0.7)])
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", picture(points), re.DOTALL)[0])
    *_, drawn = (g for g in svg.iter("g") if g.get("class") == "first")
    places = [(m.get("x"), m.get("y")) for m in drawn.iter("svg")]
    (line,) = drawn.iter("line")
    ends = {(line.get("x1"), line.get("y1")), (line.get("x2"), line.get("y2"))}
    assert ends == {places[i] for i in points.front()} == {places[1], places[3]}


def test_a_folder_that_cannot_be_made_leaves_everything(found: Pareto, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="choose another"):
        found.save(tmp_path / "file")
    (tmp_path / "pareto.html").mkdir()
    with pytest.raises(CheckpointError, match="is a directory"):
        found.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "pareto.html"}


def test_a_failed_write_leaves_the_record_of_before(
    found: Pareto, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found.save(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    later = dataclasses.replace(found, warnings=("new",))

    def broken(*_args: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("stamppruner.files.os.replace", broken)
    with pytest.raises(CheckpointError, match="disk full"):
        later.save(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_record_alone_has_no_networks_to_save(found: Pareto, tmp_path: Path) -> None:
    with pytest.raises(StampError, match="no networks to save"):
        Pareto.from_json(found.to_json()).save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_pruner_and_its_model_are_not_worn_out(pruner: STAMPPruner) -> None:
    net = pruner._gated()
    parts: list[nn.Module] = [net.model, net.posterior, net.encoder, pruner.model]
    before = [snapshot(part) for part in parts]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pruner.pareto(dataset(8, classes=4), [0.5, 0.3], finetune={"epochs": 1}, progress=False)
    assert all(same_state(part, state) for part, state in zip(parts, before, strict=True))
