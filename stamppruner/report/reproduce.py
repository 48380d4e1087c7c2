"""The lines of Python that give the same network again, from what a report knows."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from stamppruner.config import STAMPConfig
from stamppruner.report.format import one_line

if TYPE_CHECKING:
    from stamppruner.report._report import Report

_TIMES = ("latency_ms", "train_step_ms")


def reproduce(report: Report) -> str:
    """Versions, settings and the call, as Python; what only the user knows has a name in capitals.

    Returns:
        Lines of code and comments; empty where the settings say too little.
    """
    versions, config = (report.settings.get(name) for name in ("versions", "config"))
    if not isinstance(versions, dict) or not (
        isinstance(config, dict) or "seed" in report.settings
    ):
        return ""
    lines = [f"# {', '.join(f'{name} {version}' for name, version in versions.items())}"]
    lines += _stamp(report, config) if isinstance(config, dict) else _baseline(report)
    return "\n".join(one_line(line) for line in lines)


def _stamp(report: Report, config: dict[str, object]) -> list[str]:
    names = [f"{name}={value!r}" for name, value in _changed(config)]
    lines = ["from stamppruner import Budget, STAMPConfig, STAMPPruner", ""]
    if report.settings.get("meta_fitted"):
        lines += [
            "pruner = STAMPPruner.load(PRUNER_FILE)  # or meta_fit anew, with the config below",
            f"config = STAMPConfig({', '.join(names)})  # in the file",
        ]
    else:
        shortcuts = report.settings.get("shortcuts", "couple")
        more = f", shortcuts={shortcuts!r}" if shortcuts != "couple" else ""
        lines += [
            f"config = STAMPConfig({', '.join(names)})",
            f"pruner = STAMPPruner(MODEL, config=config{more})",
        ]
    return [*lines, f"result = pruner.prune(TARGET{_budget(report, ', ')})"]


def _baseline(report: Report) -> list[str]:
    named = {
        name: value
        for name, value in report.settings.items()
        if name in ("seed", "floor", "round_to", "reconstruct")
    }
    arguments = ", ".join(f"{name}={value!r}" for name, value in named.items())
    return [
        "from stamppruner import Budget",
        "",
        f"# METHOD: the class of stamppruner.baselines called {report.title!r}",
        f"result = METHOD({arguments}).prune(MODEL, TARGET{_budget(report, ', ')})",
    ]


def _changed(config: dict[str, object]) -> list[tuple[str, object]]:
    """The seed, and settings that are not the defaults; lists of JSON are tuples."""
    found = []
    for field in dataclasses.fields(STAMPConfig):
        value = config.get(field.name, field.default)
        value = tuple(value) if isinstance(value, list) else value
        if value != field.default or field.name == "seed":
            found.append((field.name, value))
    return found


def _budget(report: Report, before: str) -> str:
    if not report.budget:
        return ""
    bounds = [f"{name}={value!r}" for name, value in report.budget.items()]
    if any(name in report.budget for name in _TIMES) and "latency_batch_size" in report.settings:
        bounds.append(f"batch_size={report.settings['latency_batch_size']}")
        bounds += ["amp=True"] * bool(report.settings.get("latency_amp"))
    return f"{before}Budget({', '.join(bounds)})"
