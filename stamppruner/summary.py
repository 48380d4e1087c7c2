"""Figures of a pruned network, gathered into a report."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.benchmark import Timer

from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelPlan
from stamppruner.evidence import running_statistics
from stamppruner.inputs import Inputs
from stamppruner.report import GroupRow, LayerRow, Report

LATENCY_BATCH = 32
"""Samples a forward pass in measured latencies."""


def state_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, which a weights file holds beside its header."""
    return sum(t.numel() * t.element_size() for t in model.state_dict().values())


def latency_ms(model: nn.Module, inputs: Inputs, *, batch_size: int = LATENCY_BATCH) -> float:
    """Median milliseconds of a forward pass in evaluation mode, measured here and now."""
    batch = inputs.random(batch_size, seed=0)
    with running_statistics(model), torch.no_grad():
        timer = Timer("call(model)", globals={"call": batch.call, "model": model})
        return float(timer.blocked_autorange(min_run_time=0.1).median * 1e3)


def make_report(
    dense: nn.Module,
    slim: nn.Module,
    plan: ChannelPlan,
    chooser: Chooser,
    *,
    title: str,
    budget: Budget | None,
    warnings: list[str],
    metrics: Mapping[str, float],
    timings: Mapping[str, float],
    settings: Mapping[str, Any],
) -> Report:
    """The report of one cut: costs before and after, layers, kept channels, budget, settings."""
    graph = plan.graph
    widths = chooser.widths(plan)
    before = {name: cost.full for name, cost in chooser.costs.items()}
    after = {name: float(cost(widths)) for name, cost in chooser.costs.items()}
    before["size_bytes"], after["size_bytes"] = state_bytes(dense), state_bytes(slim)
    if graph.example is not None:
        before["latency_ms"] = latency_ms(dense, graph.example)
        after["latency_ms"] = latency_ms(slim, graph.example)
    asked = budget.bounds() if budget is not None else {}
    reached = {n: after[n] / before[n] if asked[n] <= 1 else after[n] for n in asked}
    return Report(
        title=title,
        model=type(dense).__name__,
        before=before,
        after=after,
        budget=asked or None,
        reached=reached or None,
        layers=_layer_rows(dense, plan, chooser),
        groups=tuple(
            GroupRow(g.name, g.size, tuple(np.flatnonzero(plan.keep[g.channels]).tolist()))
            for g in graph.groups
        ),
        protected=dict(graph.protected),
        warnings=tuple(warnings),
        metrics=dict(metrics),
        timings=dict(timings),
        settings={"versions": versions(), "latency_batch_size": LATENCY_BATCH, **settings},
    )


def versions() -> dict[str, str]:
    """Versions of what computed a result."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    return found | {name: _version(name) for name in ("stamppruner", "torch-pruning")}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _layer_rows(dense: nn.Module, plan: ChannelPlan, chooser: Chooser) -> tuple[LayerRow, ...]:
    macs, params = chooser.costs["macs"], chooser.costs["params"]
    full = chooser.widths(ChannelPlan.full(plan.graph))
    kept = chooser.widths(plan)
    figures = [c.per_layer(w).tolist() for c in (macs, params) for w in (full, kept)]
    rows = []
    for i, layer in enumerate(plan.graph.layers.values()):
        rows.append(
            LayerRow(
                name=layer.name,
                kind=type(dense.get_submodule(layer.name)).__name__,
                in_before=len(layer.inputs),
                in_after=int(layer.kept_inputs(plan.keep).sum()),
                out_before=len(layer.outputs),
                out_after=int(layer.kept_outputs(plan.keep).sum()),
                macs_before=figures[0][i],
                macs_after=figures[1][i],
                params_before=figures[2][i],
                params_after=figures[3][i],
            )
        )
    return tuple(rows)
