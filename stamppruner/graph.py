"""From the reach of every output channel to groups of channels: what must live or die together.

Elements that meet are one channel; channels with the same readers and writers form a group.
Equal-count rules become blocks of a group where the counts alone matter, and ties otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

import numpy as np
from torch import nn

from stamppruner import rules
from stamppruner.calls import Calls
from stamppruner.channels import (
    KEPT,
    BoolArray,
    ChannelGraph,
    ChannelGroup,
    IntArray,
    LayerKind,
    LayerMap,
    TensorMap,
)
from stamppruner.elements import Elements, components, spread
from stamppruner.free import FreeAxis
from stamppruner.inputs import Inputs
from stamppruner.reach import Reach


class Reason(NamedTuple):
    """Why some elements stay."""

    elements: IntArray
    text: str


@dataclass
class Traced:
    """What is known of a model before its channels are grouped, and what is decided meanwhile.

    Attributes:
        modules: by qualified name.
        calls, reach, free: what was recorded and probed.
        spatial, macs: see :class:`~stamppruner.ChannelGraph`.
        example: one sample.
        protect: layers whose outputs stay whole, with the reason.
        protect_inputs: layers whose inputs stay whole, with the reason.
        multiples: by group name, the kept count a block must be a multiple of this.
        rewired: layers whose outputs keep their places in the activations, with the reason.
        whole: layers that use their weight as a whole, with the reason.
        rewire: whether there may be such layers; else their channels stay.
    """

    modules: Mapping[str, nn.Module]
    calls: Calls
    reach: Reach
    free: Sequence[FreeAxis]
    spatial: Mapping[str, int]
    example: Inputs
    macs: float = 0.0
    protect: dict[str, str] = field(default_factory=dict)
    protect_inputs: dict[str, str] = field(default_factory=dict)
    multiples: dict[str, int] = field(default_factory=dict)
    rewired: dict[str, str] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
    rewire: bool = True

    @property
    def decisions(self) -> tuple[int, int, int, int, tuple[tuple[str, int], ...]]:
        """Grows with every protection."""
        known = (self.protect, self.protect_inputs, self.rewired, self.whole)
        protect, protect_inputs, rewired, whole = map(len, known)
        return protect, protect_inputs, rewired, whole, tuple(sorted(self.multiples.items()))


class _Partition(NamedTuple):
    """Elements in components, and components in blocks."""

    label: IntArray
    fixed: BoolArray
    key: IntArray
    merged: Mapping[int, tuple[int, rules.Blocks]]
    reasons: Sequence[Reason]
    wide: BoolArray  # elements whose places in the activations stay
    why: Sequence[Reason]  # they stay


def build_graph(traced: Traced) -> ChannelGraph:
    """The channel graph of a model."""
    elements = Elements.number(traced.reach, traced.free)
    partition = _partition(traced, elements)
    channel, groups, too_small = _numbered(partition, elements)
    channels = channel[partition.label]
    narrow = np.where(partition.wide, KEPT, channels)  # what does not shrink is not cut
    maps = _layer_maps(traced, elements, channels, narrow)
    tensors = tuple(
        TensorMap(axis.name, axis.axis, positions)
        for axis, run in zip(traced.free, elements.free, strict=True)
        if ((positions := narrow[run]) != KEPT).any()
    )
    reasons = (*partition.reasons, *too_small)
    why = [""] * (int(channels.max()) + 1)
    for where, text in partition.why:
        for c in np.unique(channels[where]).tolist():
            if c != KEPT:
                why[c] = why[c] or text
    return ChannelGraph(
        groups=tuple(_named(group, maps, traced.multiples, why) for group in groups),
        layers=maps,
        tensors=tensors,
        protected=_protected(traced.reach, maps, elements, partition.label, reasons),
        output_layers=traced.reach.output_producers,
        spatial=dict(traced.spatial),
        example=traced.example,
        macs=traced.macs,
    )


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Names that equal a pattern, lie below it, or match it as a shell pattern."""
    return [
        name
        for name in names
        if any(name == p or name.startswith(p + ".") or fnmatchcase(name, p) for p in patterns)
    ]


def _partition(traced: Traced, elements: Elements) -> _Partition:
    """Unite, freeze and rewire elements until every rule holds and no rule leaves too little."""
    while True:
        partition, tied = _settled(traced, elements)
        _, _, too_small = _numbered(partition, elements)
        stuck = np.zeros(elements.count, dtype=bool)
        for reason in too_small:
            stuck[reason.elements] = True
        stuck = spread(stuck, partition.label) & spread(tied, partition.label)
        new = [
            name
            for name, run in elements.outputs.items()
            if name in traced.reach.widths and name not in traced.rewired and stuck[run].any()
        ]
        if not (traced.rewire and new):
            return partition
        text = "the code takes its channels apart in a pattern that ties all of them together"
        traced.rewired |= dict.fromkeys(new, text)


def _settled(traced: Traced, elements: Elements) -> tuple[_Partition, BoolArray]:
    """The partition, and which elements are tied to others only because of slices in the code."""
    reach = traced.reach
    edges = elements.edges(reach, traced.free)
    reasons = list(_reasons(traced, elements))
    frozen = np.zeros(elements.count, dtype=bool)
    for reason in reasons:
        frozen[reason.elements] = True
    wide, tied = np.zeros_like(frozen), np.zeros_like(frozen)
    over_channels = np.zeros_like(frozen)
    for name in traced.calls.norms:
        over_channels[elements.inputs[name]] = True
    constant = rules.grouped(traced.modules, traced.calls.norms, reach, elements)
    by_code = [Reason(elements.outputs[name], text) for name, text in traced.rewired.items()]
    why: list[Reason] = []
    while True:
        label = components(elements.count, edges)
        normed = spread(over_channels, label)  # their statistics would count the empty places
        for reason in by_code:
            if traced.rewire and not normed[reason.elements].any():
                wide[reason.elements] = True
                why.append(reason)
            else:
                frozen[reason.elements] = True
                reasons.append(reason)
        by_code = []
        fixed = spread(frozen, label) | ~elements.alive(label, reach)
        wide = spread(wide, label) & ~fixed
        key = elements.footprints(label)
        key = np.where(wide, ~key, key)
        roots = np.unique(label[: elements.first_input])  # components that some layer writes
        roots = roots[~fixed[roots]]
        cuts = []
        for name, runs in rules.slices(reach, elements, label, fixed | wide):
            equal = len({len(run) for run in runs}) == 1 and len(runs[0]) > 1
            if equal and not wide[np.concatenate(runs)].any():
                cuts.append(runs)
            else:
                text = f"the code takes the channels of {name!r} apart at fixed places"
                by_code.append(Reason(elements.outputs[name], text))
        for rule in constant:
            together = np.concatenate(rule)
            if wide[together].any() and not (wide | fixed)[together].all():
                text = "must keep equal counts with channels that keep their places"
                by_code.append(Reason(together, text))
        found = rules.apply([*constant, *cuts], label, fixed, key, roots)
        text = "must keep equal counts with channels that stay"
        for where in found.unequal:
            reason = Reason(np.concatenate(([*constant, *cuts])[where]), text)
            if where >= len(constant):
                by_code.append(reason)
            else:
                frozen[reason.elements] = True
                reasons.append(reason)
        if by_code or found.unequal:
            continue
        shuffled = list(rules.interleaved(reach, elements, label, fixed | wide))
        loose = [tie for where, tie in found.ties if where >= len(constant)]
        ties = [*shuffled, *(tie for _, tie in found.ties)]
        new = [tie for tie in ties if (label[tie[0]] != label[tie[1]]).any()]
        for tie in (*shuffled, *loose):
            tied[np.concatenate(tie)] = True
        if not new:
            return _Partition(label, fixed, key, found.merged, reasons, wide, why), tied
        edges = np.concatenate([edges, *(np.stack(tie, axis=1) for tie in new)])


def _reasons(traced: Traced, elements: Elements) -> Iterator[Reason]:
    """Elements that stay, in order of precedence."""
    reach, modules = traced.reach, traced.modules
    for name, text in traced.protect.items():
        if name in elements.outputs:
            yield Reason(elements.outputs[name], text)
    for name, text in traced.protect_inputs.items():
        if name in elements.inputs:
            yield Reason(elements.inputs[name], text)
    for name in reach.output_producers:
        yield Reason(elements.outputs[name], "writes the model's output")
    for name in traced.calls.opaque:
        text = f"is read by {name!r} ({type(modules[name]).__name__}), which is not cut"
        yield Reason(elements.inputs[name], text)
    text = "meets the model's input or a layer that is not cut"
    yield Reason(elements.first_input + reach.input_positions, text)
    read = set(np.unique(np.append(reach.pairs[:, 0], reach.ties[:, 0])).tolist())
    for producer, (name, width) in enumerate(reach.widths.items()):
        if width == 1:
            yield Reason(elements.outputs[name], "has a single channel")
        elif producer not in read and name not in reach.output_producers:
            yield Reason(elements.outputs[name], "no layer is seen to read it")
    for names in _sharing(modules, [*reach.widths, *reach.readers]):
        for name in names:
            text = f"shares its parameters with {', '.join(n for n in names if n != name)}"
            yield Reason(elements.inputs[name], text)
            if name in elements.outputs:
                yield Reason(elements.outputs[name], text)


def _sharing(modules: Mapping[str, nn.Module], names: Iterable[str]) -> list[list[str]]:
    """Layers that hold the same parameter."""
    owners: dict[int, list[str]] = {}
    for name in dict.fromkeys(names):
        for parameter in modules[name].parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    return [names for names in owners.values() if len(names) > 1]


def _numbered(
    partition: _Partition, elements: Elements
) -> tuple[IntArray, list[ChannelGroup], list[Reason]]:
    """Number the channels group by group.

    Returns:
        the channel of each component (at its label); unnamed groups; components left whole.
    """
    roots = np.unique(partition.label[: elements.first_input])
    by_key: dict[int, list[int]] = {}
    blocks_of: dict[int, rules.Blocks] = {}
    for root in roots[~partition.fixed[roots]].tolist():
        k = int(partition.key[root])
        if k in partition.merged:
            k, blocks_of[k] = partition.merged[k][0], partition.merged[k][1]
        by_key.setdefault(k, []).append(root)
    channel = np.full(elements.count, KEPT, dtype=np.int64)
    groups: list[ChannelGroup] = []
    too_small: list[Reason] = []
    start = 0
    for k, members in by_key.items():
        blocks = blocks_of.get(k, [np.array(members)])
        ordered = np.concatenate(blocks)
        if len(ordered) // len(blocks) < 2:
            text = "its channels depend on one another: none can go alone"
            too_small.append(Reason(ordered, text))
            continue
        channel[ordered] = start + np.arange(len(ordered))
        groups.append(ChannelGroup("", start, len(ordered), len(blocks)))
        start += len(ordered)
    return channel, groups, too_small


def _layer_maps(
    traced: Traced, elements: Elements, channels: IntArray, narrow: IntArray
) -> dict[str, LayerMap]:
    """Layer maps by name, from the channel of each element, and the same where it shrinks."""
    maps: dict[str, LayerMap] = {}
    for name, run in elements.inputs.items():
        if name in traced.calls.opaque:
            continue
        kind: LayerKind = "channelwise"
        norm = None
        if name in traced.reach.widths:
            kind = "mixing"
        elif name in traced.calls.norms:
            kind, norm = "norm", traced.calls.norms[name][0]
        of = channels if kind == "mixing" else narrow
        outputs = elements.outputs.get(name, run)
        maps[name] = LayerMap(name, kind, of[run], of[outputs], norm, name in traced.whole)
    return maps


def _named(
    group: ChannelGroup,
    maps: Mapping[str, LayerMap],
    multiples: Mapping[str, int],
    why: Sequence[str],
) -> ChannelGroup:
    """The group with its name and layers; ``why`` holds a text for each rewired channel."""

    def touches(positions: IntArray) -> bool:
        return bool(((positions >= group.start) & (positions < group.start + group.size)).any())

    mixing = [layer for layer in maps.values() if layer.kind == "mixing"]
    writers = tuple(layer.name for layer in mixing if touches(layer.outputs))
    readers = tuple(layer.name for layer in mixing if touches(layer.inputs))
    first = maps[writers[0]].outputs
    whole = first.min() >= group.start and first.max() < group.start + group.size
    offset = int(np.flatnonzero(first == group.start)[0]) if not whole else 0
    name = writers[0] if whole else f"{writers[0]}[{offset}:]"
    multiple = multiples.get(name, 1)
    return replace(
        group,
        name=name,
        writers=writers,
        readers=readers,
        multiple=multiple,
        rewired=why[group.start],
    )


def _protected(
    reach: Reach,
    maps: Mapping[str, LayerMap],
    elements: Elements,
    label: IntArray,
    reasons: Sequence[Reason],
) -> dict[str, str]:
    """Producers with no removable output, each with the first reason that holds it."""
    why: dict[int, str] = {}
    for where, text in reasons:
        for component in np.unique(label[where]).tolist():
            why.setdefault(component, text)
    protected = {}
    for name in reach.widths:
        if (maps[name].outputs == KEPT).all():
            found = [why[c] for c in label[elements.outputs[name]].tolist() if c in why]
            protected[name] = found[0] if found else "no reader can be told apart"
    return protected
