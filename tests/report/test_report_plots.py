"""Figures show the numbers that they were given, and say what they lack."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from stamppruner.errors import ConfigError, MissingExtraError
from stamppruner.history import History
from stamppruner.pareto import Pareto, Point
from stamppruner.report import (
    GroupRow,
    Report,
    plot_history,
    plot_kept_channels,
    plot_pareto,
)

FULL = Point({}, {"macs": 4e6, "params": 1e4}, {"accuracy_before_cut": 0.97})
POINTS = tuple(
    Point(
        {"macs": share},
        {"macs": 4e6 * share, "params": 1e4 * share},
        {"accuracy_after_cut": cut, "accuracy_after_finetune": tuned},
    )
    for share, cut, tuned in [(0.5, 0.9, 0.96), (0.25, 0.8, 0.91), (0.3, 0.7, 0.90)]
)
PARETO = Pareto("ResNet", FULL, POINTS)
REPORT = Report("STAMP", "Net", groups=(GroupRow("a", 4, (0, 2)), GroupRow("b" * 40, 600, (5,))))
HISTORY = History([{"epoch": i, "loss": 1.0 / (i + 1), "accuracy": i / 5} for i in range(5)])


def saved(figure: Figure, tmp_path) -> Figure:
    figure.savefig(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000
    return figure


def test_pareto_has_every_network_and_a_line_through_the_front(tmp_path):
    (axes,) = saved(plot_pareto(PARETO), tmp_path).axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    marks = lines["after fine-tuning"].get_xydata().tolist()
    assert marks == [[2e6, 96], [1e6, 91], [1.2e6, 90]]
    front = axes.get_lines()[0].get_xydata().tolist()
    assert front == [[1e6, 91], [2e6, 96]]
    assert lines["right after the cut"].get_xydata()[0].tolist() == [2e6, 90]
    assert lines["full network, not fine-tuned"].get_ydata()[0] == 97
    markers = [line.get_marker() for line in lines.values() if line.get_marker() != "None"]
    assert len(set(markers)) == len(markers) == 2
    assert axes.get_xscale() == "log"


def test_pareto_over_another_cost_and_of_one_accuracy():
    (axes,) = plot_pareto(PARETO, cost="params", metrics=["accuracy_after_cut"]).axes
    assert axes.get_lines()[1].get_xydata().tolist()[0] == [5e3, 90]
    for wrong in ({"cost": "joules"}, {"metrics": ["f1"]}, {"metrics": []}):
        with pytest.raises(ConfigError):
            plot_pareto(PARETO, **wrong)
    blind = replace(PARETO, points=tuple(replace(p, metrics={}) for p in POINTS))
    with pytest.raises(ConfigError, match="no accuracy"):
        plot_pareto(blind)


def kept(axes) -> list[list[float]]:
    """Of each row, where the tall ticks are."""
    tall = [
        c for c in axes.collections if c.get_color()[0][:3].tolist() == [0, 114 / 255, 178 / 255]
    ]
    return [[segment[0][0] for segment in c.get_segments()] for c in tall]


def test_kept_channels_are_the_tall_ones(tmp_path):
    (axes,) = saved(plot_kept_channels(REPORT), tmp_path).axes
    assert kept(axes) == [[0, 0.5], [5 / 600]]
    assert axes.get_title() == "STAMP: 3 of 604 kept"
    texts = [text.get_text() for text in axes.texts]
    assert texts == ["2/4", "1/600"]
    assert len(axes.get_yticklabels()[1].get_text()) == 28


def test_networks_of_several_data_sets_stand_side_by_side(tmp_path):
    other = replace(REPORT, groups=(GroupRow("a", 4, (1,)), GroupRow("b" * 40, 600, (6,))))
    figure = saved(plot_kept_channels({"birds": REPORT, "parts": other}), tmp_path)
    assert [kept(axes)[0] for axes in figure.axes] == [[0, 0.5], [0.25]]
    alien = replace(REPORT, groups=REPORT.groups[:1])
    for wrong in ({}, {"a": REPORT, "b": alien}, replace(REPORT, groups=()), 3):
        with pytest.raises(ConfigError, match="plot_kept_channels"):
            plot_kept_channels(wrong)


def test_history_has_a_panel_a_figure(tmp_path):
    loss, accuracy = saved(plot_history(HISTORY), tmp_path).axes
    assert (loss.get_title(), accuracy.get_title()) == ("loss", "accuracy")
    assert loss.get_lines()[0].get_ydata().tolist() == HISTORY["loss"]
    assert loss.get_xlabel() == "epoch"
    assert len(plot_history(HISTORY, ["loss"]).axes) == 1
    for wrong in (["f1"], []):
        with pytest.raises(ConfigError, match="plot_history"):
            plot_history(HISTORY, wrong)
    with pytest.raises(ConfigError, match="no rows"):
        plot_history(History())


def test_without_matplotlib_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"stamppruner\[plots\]"):
        plot_history(HISTORY)


def test_no_global_state():
    assert "pyplot" not in importlib.import_module("stamppruner.report.plots").__dict__
    backend = importlib.import_module("matplotlib").get_backend
    before = backend()
    plot_history(HISTORY)
    assert backend() == before
