"""Figures of a pruned network, gathered into a report."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import torch
from torch import nn

from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelGraph, ChannelPlan
from stamppruner.latency import batch_size, did_not_fall, latencies_ms
from stamppruner.layers import first_floating
from stamppruner.projection import projections, without_projections
from stamppruner.report import GroupRow, LayerRow, Report


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
    measure_latency: bool = True,
) -> Report:
    """The report of one cut: costs before and after, layers, kept channels, budget, settings.

    Latencies, where they are measured, are medians of a few forward passes on the model's device;
    a network with fewer multiply-adds that is not faster gets a warning. Of a network with
    projected shortcuts, the costs before are those without; what they add is in the settings.
    """
    graph = plan.graph
    widths = chooser.widths(plan)
    before = {name: cost.full for name, cost in chooser.costs.items()}
    after = {name: float(cost(widths)) for name, cost in chooser.costs.items()}
    facts: dict[str, Any] = {"versions": versions()}
    given = without_projections(dense)
    if added := [entry["name"] for entry in projections(dense)]:
        costs = {name: cost.of(added) for name, cost in chooser.costs.items()}
        facts["projections"] = {"layers": added, **costs}
    notes = list(warnings)
    if measure_latency and graph.example is not None:
        samples, device = batch_size(before["macs"]), str(first_floating(dense).device)
        pair = latencies_ms([given, slim], graph.example, samples=samples)
        before["latency_ms"], after["latency_ms"] = pair
        facts |= {"latency_batch_size": samples, "latency_device": device}
        left = after["macs"] / before["macs"] if before["macs"] else 1.0
        where = f"{samples} samples on {device}"
        if note := did_not_fall(*pair, left=left, where=where):
            notes.append(note)
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
        rewired=_rewired(graph),
        warnings=tuple(notes),
        metrics=dict(metrics),
        timings=dict(timings),
        settings={**facts, **settings},
    )


def _rewired(graph: ChannelGraph) -> dict[str, str]:
    """Layers that scatter their outputs or fill up their inputs, with the reason."""
    text = "its weight is used as a whole: zeros stand in for inputs that are gone"
    return graph.rewired | {n: text for n, layer in graph.layers.items() if layer.whole}


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
