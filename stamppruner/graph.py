"""From the reach of every output channel to groups of channels: what must live or die together.

Every output position of a layer and every input position of a layer is an *element*. Elements
that meet are one channel (union-find over all of them at once); channels with the same readers
and writers form a group. Equal-count rules (grouped convolutions, equal halves of a split) become
blocks of a group where the counts alone matter, and ties between channels otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
from torch import nn

from stamppruner import layers
from stamppruner.channels import (
    KEPT,
    BoolArray,
    ChannelGraph,
    ChannelGroup,
    IntArray,
    LayerKind,
    LayerMap,
)
from stamppruner.inputs import Inputs
from stamppruner.probe import Reach

Blocks = list[IntArray]
"""Elements in equal blocks: the same number must be kept in each."""


@dataclass
class Elements:
    """Numbering of elements: outputs of producers first, then inputs of readers.

    Attributes:
        outputs: first element of each producer's (or depthwise layer's) outputs.
        inputs: first element of each reader's inputs.
        count: number of elements.
    """

    outputs: dict[str, int]
    inputs: dict[str, int]
    count: int

    @classmethod
    def number(cls, reach: Reach) -> Elements:
        """Number the elements of everything that the probe saw."""
        widths = dict(reach.widths)
        widths |= {name: reach.readers[name] * m for name, m in reach.depthwise.items()}
        starts = np.cumsum([0, *widths.values(), *reach.readers.values()]).tolist()
        outputs = dict(zip(widths, starts, strict=False))
        inputs = dict(zip(reach.readers, starts[len(widths) :], strict=False))
        return cls(outputs, inputs, starts[-1])


def build_graph(
    model: nn.Module,
    reach: Reach,
    *,
    protect: Mapping[str, str],
    protect_inputs: Mapping[str, str],
    spatial: Mapping[str, int],
    example: Inputs,
) -> ChannelGraph:
    """The channel graph of a model.

    Args:
        model: the traced model.
        reach: what the probe found.
        protect: layers whose outputs stay whole, with the reason.
        protect_inputs: layers whose inputs stay whole, with the reason.
        spatial: output positions a sample of each mixing or depthwise layer.
        example: one sample, for the record.
    """
    modules = dict(model.named_modules())
    elements = Elements.number(reach)
    edges = _edges(reach, elements)
    frozen, reasons = _freeze(modules, reach, elements, protect, protect_inputs)
    rules = _grouped_rules(modules, reach, elements)
    while True:
        label = _components(elements.count, edges)
        fixed = np.zeros(elements.count, dtype=bool)
        fixed[label[frozen]] = True  # a component with a frozen element is frozen
        key = _footprints(label, reach, elements)
        ties = _interleave_ties(reach, elements, label, fixed[label])
        rules_now = [*rules, *_split_rules(reach, elements, label, fixed, key)]
        merged, conflicts, unequal = _apply_rules(rules_now, label, fixed, key)
        new = [e for e in (*ties, *conflicts) if (label[e[0]] != label[e[1]]).any()]
        if new:
            edges = np.concatenate([edges, *(np.stack(e, axis=1) for e in new)])
            continue
        if len(unequal):
            frozen[unequal] = True
            reasons.append((unequal, "equal blocks of a split or grouped convolution are tied to fixed channels"))
            continue
        return _assemble(
            modules, reach, elements, label, fixed, key, merged, reasons, spatial, example
        )


def matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """Names that equal a pattern, lie below it, or match it as a shell pattern."""
    return [
        name
        for name in names
        if any(name == p or name.startswith(p + ".") or fnmatchcase(name, p) for p in patterns)
    ]


def _edges(reach: Reach, elements: Elements) -> IntArray:
    """Pairs of elements that are one channel.

    Producers of width 1 are left out: they are never removed, and a broadcast of one channel over
    many does not couple the many.
    """
    out = np.array([elements.outputs[name] for name in reach.widths], dtype=np.int64)
    width = np.array(list(reach.widths.values()), dtype=np.int64)
    base = min(elements.inputs.values(), default=0)
    found = np.concatenate([reach.pairs, reach.ties])
    found = found[width[found[:, 0]] > 1]
    edges = [np.stack([out[found[:, 0]] + found[:, 1], base + found[:, 2]], axis=1)]
    for name, multiplier in reach.depthwise.items():
        channel = np.arange(reach.readers[name] * multiplier)
        source = elements.inputs[name] + channel // multiplier
        edges.append(np.stack([source, elements.outputs[name] + channel], axis=1))
    return np.concatenate(edges)


def _components(count: int, edges: IntArray) -> IntArray:
    """Smallest element of each element's component, by label propagation with pointer jumping."""
    label = np.arange(count)
    if not len(edges):
        return label
    u, v = edges.T
    while True:
        low = np.minimum(label[u], label[v])
        new = label.copy()
        np.minimum.at(new, label[u], low)
        np.minimum.at(new, label[v], low)
        while (new != new[new]).any():
            new = new[new]
        if (new == label).all():
            return label
        label = new


def _freeze(
    modules: Mapping[str, nn.Module],
    reach: Reach,
    elements: Elements,
    protect: Mapping[str, str],
    protect_inputs: Mapping[str, str],
) -> tuple[BoolArray, list[tuple[IntArray, str]]]:
    """Elements that stay, ``(count,)``, and why, as (elements, reason) in order of precedence."""
    base = min(elements.inputs.values(), default=0)
    reasons: list[tuple[IntArray, str]] = []

    def outputs(name: str) -> IntArray:
        width = reach.widths.get(name) or reach.readers[name] * reach.depthwise[name]
        return elements.outputs[name] + np.arange(width)

    for name, reason in protect.items():
        if name in elements.outputs:
            reasons.append((outputs(name), reason))
    for name, reason in protect_inputs.items():
        if name in elements.inputs:
            reasons.append((elements.inputs[name] + np.arange(reach.readers[name]), reason))
    for name in reach.output_producers:
        reasons.append((outputs(name), "writes the model's output"))
    reasons.append((base + reach.input_positions, "meets the model's own input"))
    read = set(np.unique(np.append(reach.pairs[:, 0], reach.ties[:, 0])).tolist())
    for producer, (name, width) in enumerate(reach.widths.items()):
        if width == 1:
            reasons.append((outputs(name), "has a single channel"))
        elif producer not in read and name not in reach.output_producers:
            reasons.append((outputs(name), "no layer reads it in evaluation mode"))
    owners: dict[int, list[str]] = {}
    for name in dict.fromkeys([*reach.widths, *reach.readers]):
        for parameter in modules[name].parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(name)
    for names in owners.values():
        if len(names) > 1:
            for name in names:
                reason = f"shares its parameters with {', '.join(n for n in names if n != name)}"
                reasons.append((elements.inputs[name] + np.arange(reach.readers[name]), reason))
                if name in elements.outputs:
                    reasons.append((outputs(name), reason))
    frozen = np.zeros(elements.count, dtype=bool)
    for where, _ in reasons:
        frozen[where] = True
    return frozen, reasons


def _grouped_rules(
    modules: Mapping[str, nn.Module], reach: Reach, elements: Elements
) -> list[Blocks]:
    """Inputs and outputs of grouped convolutions: equal counts in each of their groups."""
    rules = []
    for name, width in reach.widths.items():
        groups = layers.blocks(modules[name])
        if groups > 1:
            inputs = elements.inputs[name] + np.arange(reach.readers[name])
            rules.append(list(inputs.reshape(groups, -1)))
            rules.append(list((elements.outputs[name] + np.arange(width)).reshape(groups, -1)))
    return rules


def _footprints(label: IntArray, reach: Reach, elements: Elements) -> IntArray:
    """A hash of the layers (and sides) that each component touches, per element label."""
    rng = np.random.default_rng(0)
    key = np.zeros(elements.count, dtype=np.int64)
    starts = [*elements.outputs.values(), *elements.inputs.values(), elements.count]
    sizes = np.diff(starts)
    salt = np.repeat(rng.integers(1, 2**62, len(sizes)), sizes)
    np.add.at(key, label, salt)
    return key


def _runs(values: IntArray) -> list[IntArray]:
    """Indices of maximal runs of equal values."""
    return np.split(np.arange(len(values)), np.flatnonzero(np.diff(values)) + 1)


def _split_rules(
    reach: Reach, elements: Elements, label: IntArray, fixed: BoolArray, key: IntArray
) -> list[Blocks]:
    """Producers whose outputs fall into equal runs with different readers (chunk, split)."""
    rules = []
    for name, width in reach.widths.items():
        outputs = elements.outputs[name] + np.arange(width)
        runs = _runs(np.where(fixed[label[outputs]], KEPT, key[label[outputs]]))
        if 1 < len(runs) < width and len({len(run) for run in runs}) == 1:
            rules.append([outputs[run] for run in runs])
    return rules


def _interleave_ties(
    reach: Reach, elements: Elements, label: IntArray, fixed: BoolArray
) -> list[tuple[IntArray, IntArray]]:
    """Channels that a shuffle (reshape to r rows, transpose) reads together.

    A shuffle of the kept channels puts them in the order of the kept positions only if whole
    columns are kept, so the r channels of a column are tied.
    """
    ties = []
    for name in reach.widths:
        inputs = elements.inputs[name] + np.arange(reach.readers[name])
        roots = label[inputs]
        width = len(roots)
        order = np.argsort(roots)
        if fixed[inputs].any() or (np.diff(roots) > 0).all() or (np.diff(roots[order]) == 0).any():
            continue
        rank = np.empty(width, dtype=np.int64)
        rank[order] = np.arange(width)
        rows = int(rank[1])
        if rows and width % rows == 0:
            columns = np.arange(width).reshape(-1, rows).T.ravel()  # transpose back
            if (rank[np.arange(width)] == np.argsort(columns)).all():
                table = inputs[order].reshape(width // rows, rows)
                ties.append((np.repeat(table[:1], len(table) - 1, 0).ravel(), table[1:].ravel()))
    return ties


def _apply_rules(
    rules: Sequence[Blocks], label: IntArray, fixed: BoolArray, key: IntArray
) -> tuple[dict[int, tuple[int, Blocks]], list[tuple[IntArray, IntArray]], IntArray]:
    """Turn equal-count rules into blocks of groups where that is possible.

    Returns:
        per footprint hash, a (merged key, blocks of component labels); ties that replace the rules
        that do not fit; elements to freeze because their block holds a fixed channel.
    """
    merged: dict[int, tuple[int, Blocks]] = {}
    ties: list[tuple[IntArray, IntArray]] = []
    freeze: list[IntArray] = []
    members = {}
    roots = np.unique(label)
    roots = roots[~fixed[roots]]
    for k, root in zip(key[roots].tolist(), roots.tolist(), strict=True):
        members.setdefault(k, []).append(root)
    for rule in rules:
        blocks = [label[block] for block in rule]
        held = [int(fixed[block].sum()) for block in blocks]
        if all(h == len(b) for h, b in zip(held, blocks, strict=True)):
            continue
        if any(held):
            freeze.append(np.concatenate(rule))
            continue
        if all((block == blocks[0]).all() for block in blocks):
            continue  # tied column by column: the counts are always equal
        together = np.concatenate(blocks)
        keys = np.unique(key[together]).tolist()
        whole = sum(len(members[k]) for k in keys)
        distinct = len(np.unique(together)) == len(together) == whole
        known = [merged[k][1] for k in keys if k in merged]
        same = all(_same_blocks(blocks, other) for other in known)
        if distinct and same:
            if not known:
                merged |= {k: (keys[0], blocks) for k in keys}
        else:
            first = np.repeat(rule[0][None], len(rule) - 1, 0).ravel()
            ties.append((first, np.concatenate(rule[1:])))
    return merged, ties, np.concatenate(freeze) if freeze else np.empty(0, dtype=np.int64)


def _same_blocks(a: Blocks, b: Blocks) -> bool:
    return len(a) == len(b) and all(
        (np.sort(x) == np.sort(y)).all() for x, y in zip(a, b, strict=True)
    )


def _assemble(
    modules: Mapping[str, nn.Module],
    reach: Reach,
    elements: Elements,
    label: IntArray,
    fixed: BoolArray,
    key: IntArray,
    merged: Mapping[int, tuple[int, Blocks]],
    reasons: Sequence[tuple[IntArray, str]],
    spatial: Mapping[str, int],
    example: Inputs,
) -> ChannelGraph:
    """Number the channels group by group and map every layer's positions to them."""
    widths = dict(reach.widths)
    widths |= {name: reach.readers[name] * m for name, m in reach.depthwise.items()}
    first_output = min(elements.inputs.values(), default=0)
    roots = np.unique(label[:first_output])  # components with a writer
    roots = roots[~fixed[roots]]
    by_key: dict[int, list[int]] = {}
    blocks_of: dict[int, Blocks] = {}
    for root in roots.tolist():
        k = int(key[root])
        if k in merged:
            k, blocks_of[k] = merged[k][0], merged[k][1]
        by_key.setdefault(k, []).append(root)

    channel = np.full(elements.count, KEPT, dtype=np.int64)  # by component label
    groups: list[ChannelGroup] = []
    too_small: list[tuple[IntArray, str]] = []
    start = 0
    for k, members in by_key.items():
        ordered = np.concatenate(blocks_of[k]) if k in blocks_of else np.array(members)
        blocks = len(blocks_of[k]) if k in blocks_of else 1
        if len(ordered) // blocks < 2:
            too_small.append((ordered, "its channels depend on one another: none can go alone"))
            continue
        channel[ordered] = start + np.arange(len(ordered))
        groups.append(ChannelGroup("", start, len(ordered), blocks))
        start += len(ordered)

    maps: dict[str, LayerMap] = {}
    for name in dict.fromkeys([*reach.readers, *widths]):
        inputs = channel[label[elements.inputs[name] + np.arange(reach.readers[name])]]
        outputs = inputs
        if name in widths:
            outputs = channel[label[elements.outputs[name] + np.arange(widths[name])]]
        kind: LayerKind = "mixing" if name in reach.widths else "channelwise"
        maps[name] = LayerMap(name, kind, inputs, outputs)
    graph = ChannelGraph(
        groups=tuple(_named(group, maps) for group in groups),
        layers=maps,
        protected=_protected(reach, maps, elements, label, (*reasons, *too_small)),
        output_layers=reach.output_producers,
        spatial=dict(spatial),
        example=example,
    )
    return graph


def _named(group: ChannelGroup, maps: Mapping[str, LayerMap]) -> ChannelGroup:
    def touches(positions: IntArray) -> bool:
        return bool(((positions >= group.start) & (positions < group.start + group.size)).any())

    mixing = [layer for layer in maps.values() if layer.kind == "mixing"]
    writers = tuple(layer.name for layer in mixing if touches(layer.outputs))
    readers = tuple(layer.name for layer in mixing if touches(layer.inputs))
    first = maps[writers[0]].outputs
    whole = first.min() >= group.start and first.max() < group.start + group.size
    offset = int(np.flatnonzero(first == group.start)[0]) if not whole else 0
    name = writers[0] if whole else f"{writers[0]}[{offset}:]"
    return ChannelGroup(name, group.start, group.size, group.blocks, writers, readers)


def _protected(
    reach: Reach,
    maps: Mapping[str, LayerMap],
    elements: Elements,
    label: IntArray,
    reasons: Sequence[tuple[IntArray, str]],
) -> dict[str, str]:
    """Producers with no removable output, each with the first reason that holds it."""
    why: dict[int, str] = {}
    for where, reason in reasons:
        for component in np.unique(label[where]).tolist():
            why.setdefault(component, reason)
    protected = {}
    for name, width in reach.widths.items():
        if (maps[name].outputs == KEPT).all():
            components = label[elements.outputs[name] + np.arange(width)]
            found = [why[c] for c in components.tolist() if c in why]
            protected[name] = found[0] if found else "no reader can be told apart"
    return protected
