"""Figures of a pruned network, gathered into a report."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn

from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelGraph, ChannelPlan
from stamppruner.costs import Setting
from stamppruner.counting import macs_of_pass
from stamppruner.latency import batch_size, did_not_fall, latencies_ms, running_with
from stamppruner.layers import first_floating
from stamppruner.meet import Times
from stamppruner.projection import projections, without_projections
from stamppruner.report import GroupRow, LayerRow, Report

_AS_SLOW = 0.9
"""Share of its time that a layer keeps to be called no faster,"""

_SMALLER = 0.75
"""though it keeps less than this share of its multiply-adds."""

_NAMED = 5
"""Layers that a warning names."""


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
    times: Mapping[str, Times] = MappingProxyType({}),
) -> Report:
    """The report of one cut: costs before and after, layers, kept channels, budget, settings.

    Latencies, where they are measured, are lower quartiles of a few forward passes on the model's
    device; a network with fewer multiply-adds that is not faster gets a warning. Of a network with
    projected shortcuts, the costs before are those without; what they add is in the settings.
    Of a budget in milliseconds, ``times`` has what was measured to meet it, and predicted.
    """
    graph = plan.graph
    widths = chooser.widths(plan)
    before = {name: cost.full for name, cost in chooser.costs.items()}
    after = {name: float(cost(widths)) for name, cost in chooser.costs.items()}
    if chooser.costs["macs"].constant and graph.example is not None:
        after["macs"] = macs_of_pass(slim, graph.example)  # products of activations may be smaller
    facts: dict[str, Any] = {"versions": versions()}
    asked: dict[str, float] = {}
    given = without_projections(dense)
    if added := [entry["name"] for entry in projections(dense)]:
        costs = {name: cost.of(added) for name, cost in chooser.costs.items()}
        facts["projections"] = {"layers": added, **costs}
    notes = list(warnings)
    setting = Setting(batch_size=batch_size(before["macs"]))
    if budget is not None:
        asked = budget.bounds()
        setting = budget.setting if times else dataclasses.replace(setting, amp=budget.amp)
        for cost in chooser.costs_of(budget):
            before[cost.name], after[cost.name] = cost.full, float(cost(widths))
    for name, time in times.items():
        before[name], after[name] = time.before, time.after
        facts[f"{name}_predicted"] = time.predicted
    device = setting.device or str(first_floating(dense).device)
    if measure_latency and "latency_ms" not in times and graph.example is not None:
        with running_with(setting.threads, amp=setting.amp, device=device):
            pair = latencies_ms([given, slim], graph.example, samples=setting.batch_size)
        before["latency_ms"], after["latency_ms"] = pair
    if "latency_ms" in before:
        facts |= {"latency_batch_size": setting.batch_size, "latency_device": device}
        facts |= {"latency_amp": True} if setting.amp else {}
        notes += _not_faster(chooser, widths, before, after, setting, device)
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


def _not_faster(
    chooser: Chooser,
    widths: torch.Tensor,
    before: Mapping[str, float],
    after: Mapping[str, float],
    setting: Setting,
    device: str,
) -> list[str]:
    """A warning, with the layers that are to blame, if the network is smaller but not faster."""
    left = after["macs"] / before["macs"] if before["macs"] else 1.0
    pair = before["latency_ms"], after["latency_ms"]
    where = f"{setting.batch_size} samples on {device}{', bfloat16 autocast' * setting.amp}"
    if did_not_fall(*pair, left=left, where=where) is None:
        return []
    cost = chooser.cost("latency_ms", setting)
    full, kept = (cost.per_layer(w) for w in (chooser.full_widths(), widths))
    macs = [chooser.costs["macs"].per_layer(w) for w in (chooser.full_widths(), widths)]
    slow = (kept > _AS_SLOW * full) & (macs[1] < _SMALLER * macs[0])
    dearest = kept.argsort(descending=True)
    names = list(chooser.graph.layers)
    layers = [names[i] for i in dearest.tolist() if slow[i]][:_NAMED]
    return [str(did_not_fall(*pair, left=left, where=where, layers=layers))]


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
    full = chooser.full_widths()
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
