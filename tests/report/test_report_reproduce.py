"""What a report says of how to get its network again does give it again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stamppruner import Budget, STAMPConfig, STAMPPruner
from stamppruner.baselines import Magnitude
from stamppruner.models import ResNet
from stamppruner.report import Report

TARGET = [
    (torch.randn(12, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3)
]


def model() -> ResNet:
    torch.manual_seed(3)
    return ResNet((1, 1), (8, 16), num_classes=3)


def stamp():
    config = STAMPConfig(seed=5, round_to=1, measure_latency=False, budget_range=(0.2, 0.5))
    pruner = STAMPPruner(model(), config=config, shortcuts="project")
    return pruner.prune(TARGET, Budget(macs=0.5))


def magnitude():
    return Magnitude(seed=2, floor=0.1, measure_latency=False).prune(
        model(), TARGET, Budget(macs=0.5, params=0.6)
    )


@pytest.mark.parametrize("make", [stamp, magnitude])
@pytest.mark.filterwarnings("ignore::stamppruner.pruner.NotMetaFittedWarning")
def test_the_lines_give_the_same_network(make):
    result = make()
    lines = result.report.reproduce()
    assert lines.startswith("# python ")
    assert f"torch {torch.__version__}" in lines
    scope = {"MODEL": model(), "TARGET": TARGET, "METHOD": Magnitude}
    exec(lines, scope)
    again = scope["result"]
    assert np.array_equal(again.plan.keep, result.plan.keep)
    for a, b in zip(again.model.parameters(), result.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_of_a_fitted_pruner_it_names_the_file(tmp_path):
    settings = {
        "versions": {"torch": "2.6"},
        "config": STAMPConfig(iterations=7).to_dict(),
        "meta_fitted": True,
        "latency_batch_size": 4,
        "latency_amp": True,
    }
    report = Report("STAMP", "ResNet", budget={"latency_ms": 3.0}, settings=settings)
    assert report.reproduce().splitlines() == [
        "# torch 2.6",
        "from stamppruner import Budget, STAMPConfig, STAMPPruner",
        "",
        "pruner = STAMPPruner.load(PRUNER_FILE)  # or meta_fit anew, with the config below",
        "config = STAMPConfig(iterations=7, seed=0)  # in the file",
        "result = pruner.prune(TARGET, Budget(latency_ms=3.0, batch_size=4, amp=True))",
    ]
    report.to_html(tmp_path / "page.html")
    assert "How to reproduce" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    "settings",
    [{}, {"versions": "2.6", "seed": 0}, {"versions": {"torch": "2.6"}}, {"config": {}, "seed": 1}],
)
def test_settings_that_say_too_little_give_no_lines(settings, tmp_path):
    report = Report("STAMP", "ResNet", settings=settings)
    assert report.reproduce() == ""
    report.to_html(tmp_path / "page.html")
    assert "How to reproduce" not in (tmp_path / "page.html").read_text()


def test_names_cannot_break_out_of_their_line():
    settings = {"versions": {"torch\nimport os": "1\n2"}, "seed": 0}
    report = Report("a\n'b", "ResNet", settings=settings)
    lines = report.reproduce()
    assert len(lines.splitlines()) == 5
    compile(lines, "lines", "exec")
    assert replace(report, settings={"versions": {}, "seed": 0}).reproduce().startswith("# ")
