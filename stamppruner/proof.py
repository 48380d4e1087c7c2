"""Cut, compare, and protect what differs, until the cut of half of every group is proved.

The proof runs on a copy with random norms, biases and scales: in a new network they are all equal,
which would hide a wrong permutation, or zero, which would hide a whole branch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from stamppruner import layers, surgery
from stamppruner.calls import FORWARD_ERRORS, evaluating, run
from stamppruner.channels import KEPT, ChannelGraph, ChannelGroup, ChannelPlan, IntArray
from stamppruner.comparison import Equivalence, compare, in_double
from stamppruner.graph import Traced, build_graph
from stamppruner.inputs import Inputs
from stamppruner.progress import Tick

logger = logging.getLogger(__name__)

_MULTIPLES = (2, 4, 8, 16, 32)
"""Divisors that are tried for a group that cannot keep any number; each divides the next."""

_NEAR = 4
"""Layers before the place where a slim network broke off that are suspected first."""


def prove(
    model: nn.Module, traced: Traced, inputs: Inputs, tick: Tick = lambda: None
) -> ChannelGraph:
    """The channel graph, with everything protected whose removal cannot be proved.

    Args:
        model: the traced model; it is not changed.
        traced: what is known of it; protections are added.
        inputs: for the comparison.
        tick: called before every comparison.
    """
    case = _Case(model, traced, inputs, tick)
    graph = build_graph(traced)
    for case.odd in (False, True):
        while graph.groups and not (verdict := case.verdict(graph, graph.groups)):
            known = traced.decisions
            if case.odd:
                case.restrict(graph, verdict)
            else:
                case.protect(graph, verdict)
            if traced.decisions == known:  # the verdict points at nothing that can still be saved
                case.give_up(graph, graph.groups, f"the cut could not be proved ({verdict})")
            graph = build_graph(traced)
    return graph


class _Case:
    """A model under proof; ``odd`` says which counts are kept: odd ones, or about half."""

    def __init__(self, model: nn.Module, traced: Traced, inputs: Inputs, tick: Tick) -> None:
        self.traced, self.tick, self.odd = traced, tick, False
        self.passes = traced.calls.passes
        self.model, self.inputs = _randomised(model, inputs, self.passes)

    def verdict(
        self, graph: ChannelGraph, groups: Sequence[ChannelGroup], limit: int | None = None
    ) -> Equivalence:
        """Cut some groups, and compare, up to a limit as in :func:`compare`."""
        counts = {g.name: _count(g, self.odd) for g in groups}
        return self.compared(graph, counts, limit, last=not self.odd)

    def compared(
        self,
        graph: ChannelGraph,
        counts: dict[str, int],
        limit: int | None = None,
        *,
        last: bool = False,
    ) -> Equivalence:
        """Cut groups to a count a block, at random, and compare.

        With ``last`` they keep the last channels, and the first ones of every second block: random
        ones of few may be, by chance, those that the code needs, or in the right order.
        """
        self.tick()
        rng = np.random.default_rng(0)
        keep = np.ones(graph.num_channels, dtype=bool)
        for group in graph.groups:
            for b in range(group.blocks):
                order = rng.permutation(group.block_size)
                if last:
                    order = np.arange(group.block_size)[:: 1 if b % 2 else -1]
                dropped = order[counts.get(group.name, group.size) :]
                keep[group.start + b * group.block_size + dropped] = False
        plan = ChannelPlan(graph, keep)
        slim = [surgery.cut(self.model, plan, share=True)]
        passes = self.passes
        return compare(self.model, slim.pop(), plan, self.inputs, passes=passes, limit=limit)

    def protect(self, graph: ChannelGraph, verdict: Equivalence) -> None:
        """Protect the layers that a failed comparison points at."""
        reason = f"the cut could not be proved ({verdict})"
        if verdict.worst_layer and verdict.side == "output" and not verdict.error:
            traced = self.traced
            again = verdict.worst_layer in traced.whole or not traced.rewire
            for name in self._alike(verdict.worst_layer):
                (traced.protect_inputs if again else traced.whole).setdefault(name, reason)
            return
        suspects = self._suspects(graph, verdict)
        if len(suspects) != 1 or not self._restricted(graph, suspects[0]):
            self.give_up(graph, suspects, reason)

    def restrict(self, graph: ChannelGraph, verdict: Equivalence) -> None:
        """Find the multiple that a group needs, or protect it."""
        for group in self._suspects(graph, verdict):
            if not self._restricted(graph, group):
                self.give_up(graph, [group], f"its width is fixed by the code ({verdict})")

    def _restricted(self, graph: ChannelGraph, group: ChannelGroup) -> bool:
        """Note the multiple that a group needs, of those that the failed count is none of."""
        fits = [m for m in _MULTIPLES if group.multiple < m < group.block_size]
        fits = [m for m in fits if _count(group, self.odd) % m]

        def passes(multiple: int) -> bool:
            counts = {group.name: multiple}
            return all(bool(self.compared(graph, counts, last=last)) for last in (True, False))

        if not fits or not passes(fits[-1]):  # a multiple of them all
            return False
        self.traced.multiples[group.name] = next(filter(passes, fits))
        return True

    def _alike(self, name: str) -> list[str]:
        """The layer, which read the right thing and used its weight as a whole; and its like."""
        modules = self.traced.modules
        kind = type(modules[name])
        if kind.__module__.startswith("torch.nn."):
            return [name]
        return [other for other in self.traced.reach.widths if type(modules[other]) is kind]

    def give_up(self, graph: ChannelGraph, groups: Sequence[ChannelGroup], reason: str) -> None:
        """Rewire the groups, and those in the same place of other blocks; or protect them.

        Protected are those that are rewired already, and those that cannot be.
        """
        for group in groups:
            rewire = self.traced.rewire and not group.rewired and not _normed(graph, group)
            decided = self.traced.rewired if rewire else self.traced.protect
            logger.info("%s is %s: %s", group.name, "rewired" if rewire else "protected", reason)
            decided.update({n: reason for n in group.writers if n not in decided})
            text = f"like {group.name!r}: {reason}"
            for other in self._like(graph, group, rewire=rewire):
                decided.update({n: text for n in other.writers if n not in decided})

    def _like(
        self, graph: ChannelGraph, group: ChannelGroup, *, rewire: bool
    ) -> list[ChannelGroup]:
        """Groups that share the fate of a group.

        Rewired are those of the same name in other blocks. Protected are those of the same readers
        in other blocks, if the next one fails alone.
        """
        if rewire:
            like = [g for g in graph.groups if _same_place([group.name], [g.name])]
            return [g for g in like if not _normed(graph, g)]
        later = graph.groups[graph.groups.index(group) + 1 :]
        like = [g for g in later if _same_place(group.readers, g.readers)]
        return like if like and not self.verdict(graph, like[:1]) else []

    def _suspects(self, graph: ChannelGraph, verdict: Equivalence) -> list[ChannelGroup]:
        """The groups where the difference showed if they fail alone, else found by bisection.

        Everything was equal up to there, so a single group is at fault for sure, unless the slim
        network broke off on the way: then it may be one that was written shortly before.
        """
        suspects: list[ChannelGroup] = []
        if layer := graph.layers.get(verdict.worst_layer):
            positions = layer.inputs if verdict.side == "input" else layer.outputs
            suspects = _groups_of(graph, positions[list(verdict.positions)])
            broke_off = bool(verdict.error) and "has shape" not in verdict.error
            if len(suspects) == 1 and not broke_off:
                return suspects
            if broke_off:
                called = [n for n, other in graph.layers.items() if other.kind == "mixing"]
                at = called.index(verdict.worst_layer)
                written = [graph.layers[n].outputs for n in called[max(0, at - _NEAR) : at]]
                suspects += _groups_of(graph, np.concatenate([*written, positions]))
        suspects = list(dict.fromkeys(suspects))
        limit = verdict.agreed + 1
        if suspects and not self.verdict(graph, suspects, limit):
            return self._bisect(graph, suspects, limit)
        return self._bisect(graph, list(graph.groups), limit)

    def _bisect(
        self, graph: ChannelGraph, groups: list[ChannelGroup], limit: int
    ) -> list[ChannelGroup]:
        """Groups that fail, up to a limit, when they are cut without the others.

        A failing set that does not split into a failing half is returned whole.
        """
        if len(groups) == 1:
            return groups
        middle = len(groups) // 2
        for half in (groups[:middle], groups[middle:]):
            if not self.verdict(graph, half, limit):
                return self._bisect(graph, half, limit)
        return groups


def _groups_of(graph: ChannelGraph, channels: IntArray) -> list[ChannelGroup]:
    return [graph.groups[g] for g in np.unique(graph.group_of[channels[channels != KEPT]])]


def _normed(graph: ChannelGraph, group: ChannelGroup) -> bool:
    """Whether a norm takes statistics over the group: it would count empty places."""
    norms = (layer for layer in graph.layers.values() if layer.kind == "norm")
    return any(group in _groups_of(graph, norm.inputs) for norm in norms)


def _same_place(names: Sequence[str], others: Sequence[str]) -> bool:
    """Whether names differ in numbers alone: ``layer1.0.conv2``, ``layer3.5.conv2``.

    The members of a plain sequence, ``features.3`` and ``features.7``, have nothing in common.
    """
    places, other_places = ({re.sub(r"\d+", "#", n) for n in both} for both in (names, others))
    words = [[w for w in place.split(".") if not w.startswith("#")] for place in places]
    return places == other_places and all(len(w) > 1 for w in words)


def _count(group: ChannelGroup, odd: bool) -> int:
    """Channels to keep in each block: about half, or an odd number of multiples."""
    half = max(1, round(group.block_size / group.multiple / 2))
    if odd and group.multiple == 1:
        half += 1 - half % 2 if half > 2 else 1 - half
    return min(group.block_size, half * group.multiple)


def _randomised(
    model: nn.Module, inputs: Inputs, passes: Sequence[bool]
) -> tuple[nn.Module, Inputs]:
    """A copy in double precision with random parameters, if it runs; else a plain copy."""
    tried = in_double(model)
    doubled = inputs.to(torch.float64)
    generator = torch.Generator().manual_seed(0)

    def fill(tensor: torch.Tensor, low: float, high: float) -> None:
        if tensor.is_cpu:
            tensor.uniform_(low, high, generator=generator)
        else:
            tensor.copy_(torch.empty(tensor.shape).uniform_(low, high, generator=generator))

    for parameter in tried.parameters():
        if sum(length > 1 for length in parameter.shape) > 1:
            bound = (3 / (parameter.numel() / parameter.shape[0])) ** 0.5
            fill(parameter, -bound, bound)
        elif parameter.numel() > 1:
            fill(parameter, 0.5, 1.5)
    for module in tried.modules():
        if layers.channelwise_width(module):
            for buffer in module.buffers(recurse=False):
                if buffer.is_floating_point():
                    fill(buffer, 0.5, 1.5)
    try:
        with evaluating(tried):
            run(tried, doubled, passes)
        return tried, doubled
    except FORWARD_ERRORS:
        return model, inputs
