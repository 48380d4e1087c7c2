"""``trace_channels``: from any model to a graph of removable channels that is proved to be right."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from stamppruner import layers, surgery
from stamppruner.certificate import compare, evaluating
from stamppruner.channels import ChannelGraph, ChannelGroup, ChannelPlan
from stamppruner.errors import UnsupportedModelError
from stamppruner.graph import build_graph, matching
from stamppruner.inputs import Inputs
from stamppruner.probe import Calls, Reach, probe, record_calls

logger = logging.getLogger(__name__)

_SMALL_SIDES = (64, 128)
"""Image sides, in pixels, on which probing is tried before the full size."""


def trace_channels(
    model: nn.Module,
    example_inputs: Any,
    *,
    protect: Sequence[str] = (),
    protect_inputs: Sequence[str] = (),
    certify: bool = True,
) -> ChannelGraph:
    """Find the channels of a model that can be removed, and prove it.

    The model is not changed: a copy is traced, in evaluation mode and without gradients. A group
    whose removal cannot be proved is protected, with the reason in ``graph.protected``.

    Args:
        model: any module with convolutions or linear layers.
        example_inputs: a tensor ``(B, C, H, W)``, a tuple of positional or a dict of keyword
            arguments. Values do not matter, shapes do.
        protect: qualified names or shell patterns of layers whose outputs stay whole.
        protect_inputs: the same for layers whose inputs stay whole.
        certify: cut half of every group and compare with the masked model.

    Returns:
        The graph; ``graph.groups`` may be empty only if every layer is protected by name.

    Raises:
        UnsupportedModelError: the model has no convolution or linear layer, cannot be copied, is
            scripted, or fails on the example inputs.
        DataError: the example inputs hold no tensor.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UnsupportedModelError(
            f"{type(model).__name__} is a TorchScript module: pass the Python model it was made of"
        )
    with torch.inference_mode(False), torch.no_grad():
        inputs = Inputs.of(example_inputs, model).repeat(1)
        traced = _copy(model)
        with evaluating(traced):
            calls = record_calls(traced, inputs)
            if not calls.outputs:
                raise UnsupportedModelError(
                    f"{type(model).__name__} calls no convolution and no linear layer: there is "
                    "nothing to prune"
                )
            reach, small = _reach(traced, inputs, calls)
        modules = dict(traced.named_modules())
        names = list(reach.readers)
        because = dict.fromkeys(matching(names, protect), "protected by the user")
        because_inputs = dict.fromkeys(matching(names, protect_inputs), "protected by the user")
        uncut = surgery.unsupported((name, modules[name]) for name in names)
        build = _Builder(traced, reach, {**uncut, **because}, {**uncut, **because_inputs}, calls, inputs)
        return _certified(build, small) if certify else build.graph()


class _Builder:
    """Builds the graph again as protections are added."""

    def __init__(
        self,
        model: nn.Module,
        reach: Reach,
        protect: dict[str, str],
        protect_inputs: dict[str, str],
        calls: Calls,
        inputs: Inputs,
    ) -> None:
        self.model, self.reach, self.inputs = model, reach, inputs
        self.protect, self.protect_inputs = protect, protect_inputs
        self.spatial = {
            name: sum(_positions(model.get_submodule(name), shape) for shape in shapes)
            for name, shapes in calls.outputs.items()
        }

    def graph(self) -> ChannelGraph:
        return build_graph(
            self.model,
            self.reach,
            protect=self.protect,
            protect_inputs=self.protect_inputs,
            spatial=self.spatial,
            example=self.inputs,
        )

    def give_up(self, groups: Sequence[ChannelGroup], reason: str) -> None:
        """Protect everything that writes the groups."""
        for group in groups:
            for name in group.writers:
                self.protect.setdefault(name, reason)


def _certified(build: _Builder, inputs: Inputs) -> ChannelGraph:
    """Protect groups until a cut of half of every group is proved."""
    graph = build.graph()
    while graph.groups:
        verdict = compare(build.model, surgery.cut(build.model, plan := _half(graph)), plan, inputs)
        if verdict:
            break
        suspects: list[ChannelGroup] = []
        if verdict.positions:
            channels = graph.layers[verdict.worst_layer].inputs[list(verdict.positions)]
            hit = {int(graph.group_of[c]) for c in channels if c >= 0}
            suspects = [graph.groups[g] for g in sorted(hit)]
        if not suspects:
            suspects = _bisect(build.model, graph, inputs, list(graph.groups))
        reason = f"the cut could not be proved ({verdict})"
        for group in suspects:
            logger.info("%s is protected: %s", group.name, reason)
        build.give_up(suspects, reason)
        graph = build.graph()
    return graph


def _half(graph: ChannelGraph, only: Sequence[ChannelGroup] | None = None) -> ChannelPlan:
    """A plan that keeps a random half of some groups (by default of all)."""
    plan = ChannelPlan.random(graph, keep=0.5, seed=0)
    if only is None:
        return plan
    keep = ChannelPlan.full(graph).keep.copy()
    for group in only:
        keep[group.channels] = plan.keep[group.channels]
    return ChannelPlan(graph, keep)


def _bisect(
    model: nn.Module, graph: ChannelGraph, inputs: Inputs, groups: list[ChannelGroup]
) -> list[ChannelGroup]:
    """Groups that fail when they are cut without the others; a failing set that does not split
    into failing halves is returned whole."""

    def fails(some: list[ChannelGroup]) -> bool:
        plan = _half(graph, some)
        return not compare(model, surgery.cut(model, plan), plan, inputs)

    if len(groups) == 1:
        return groups
    middle = len(groups) // 2
    halves = [half for half in (groups[:middle], groups[middle:]) if fails(half)]
    if not halves:
        return groups
    return [group for half in halves for group in _bisect(model, graph, inputs, half)]


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be copied ({error}): detach tensors that are kept as "
            "attributes, or replace old-style weight_norm by torch.nn.utils.parametrizations"
        ) from error


def _reach(model: nn.Module, inputs: Inputs, calls: Calls) -> tuple[Reach, Inputs]:
    """Probe at the smallest image size at which the model runs with the same layer widths."""
    for side in _SMALL_SIDES:
        small = inputs.cropped(side)
        if small is None:
            break
        try:
            small_calls = record_calls(model, small)
            if small_calls.outputs.keys() == calls.outputs.keys():
                return probe(model, small, small_calls), small
        except UnsupportedModelError:
            continue
    return probe(model, inputs, calls), inputs


def _positions(module: nn.Module, shape: torch.Size) -> int:
    """Output positions a sample of one call: ``H * W`` of a convolution, tokens of a linear layer."""
    return math.prod(shape) // (shape[0] * layers.output_width(module)) if len(shape) > 1 else 1
