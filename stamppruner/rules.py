"""Rules of equal counts: grouped convolutions, group norms, and tensors that code splits in parts.

A rule is a list of equal runs of elements in which the same number must be kept. Where the runs
cover whole groups of channels, they become the blocks of one group; else their channels are tied
one to one, which satisfies the rule in any case.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from torch import nn

from stamppruner import layers
from stamppruner.channels import BoolArray, IntArray
from stamppruner.elements import Elements
from stamppruner.norms import Norm
from stamppruner.reach import Reach

Blocks = list[IntArray]
"""Elements in equal blocks: the same number must be kept in each."""


def grouped(
    modules: Mapping[str, nn.Module],
    norms: Mapping[str, tuple[Norm, int]],
    reach: Reach,
    elements: Elements,
) -> list[Blocks]:
    """Inputs and outputs of grouped convolutions, inputs of group norms."""
    rules = []
    for name in reach.widths:
        if (groups := layers.blocks(modules[name])) > 1:
            rules.append(np.split(elements.inputs[name], groups))
            rules.append(np.split(elements.outputs[name], groups))
    for name, (norm, _) in norms.items():
        if norm.groups > 1:
            rules.append(np.split(elements.inputs[name], norm.groups))
    return rules


def slices(
    reach: Reach, elements: Elements, label: IntArray, fixed: BoolArray
) -> Iterator[tuple[str, Blocks]]:
    """Producers whose outputs are cut apart by the code (chunk, split, slice, shuffle).

    Within one slice, consecutive channels reach positions of every reader at a constant stride.
    A component counts once, where it first occurs.
    """
    names = list(reach.widths)
    starts = np.array([run[0] for run in elements.inputs.values()]) - elements.first_input
    reader = np.searchsorted(starts, reach.pairs[:, 2], side="right") - 1
    order = np.lexsort((reach.pairs[:, 2], reach.pairs[:, 1], reader, reach.pairs[:, 0]))
    producer, channel, position = reach.pairs[order].T
    reader = reader[order]
    bounds = np.searchsorted(producer, np.arange(len(names) + 1))
    for p, name in enumerate(names):
        outputs = elements.outputs[name]
        if fixed[outputs].all():
            continue
        first = np.unique(label[outputs], return_index=True)[1]
        first.sort()
        rank = np.full(len(outputs), -1)
        rank[first] = np.arange(len(first))
        here = slice(bounds[p], bounds[p + 1])
        breaks = _breaks(
            reader[here], channel[here], rank[channel[here]], position[here], len(first)
        )
        runs = np.split(outputs[first], np.flatnonzero(breaks) + 1)
        if len(runs) > 1:
            yield name, runs


def _breaks(
    reader: IntArray, channel: IntArray, rank: IntArray, position: IntArray, count: int
) -> BoolArray:
    """Whether channels ``r`` and ``r + 1`` lie apart for some reader, ``(count - 1,)``."""
    breaks = np.zeros(count + 1, dtype=bool)  # before each rank, and after the last
    keep = rank >= 0
    if not keep.any():
        return breaks[1:-1]
    reader, channel, rank, position = (a[keep] for a in (reader, channel, rank, position))
    new = np.append(True, (np.diff(reader) != 0) | (np.diff(rank) != 0))
    # of each, the least position
    reader, channel, rank, position = (a[new] for a in (reader, channel, rank, position))
    starts = np.flatnonzero(np.append(True, np.diff(reader) != 0)).tolist()
    for low, high in zip(starts, [*starts[1:], len(reader)], strict=True):
        r, x = rank[low:high], position[low:high]
        breaks[r[0]] = breaks[r[-1] + 1] = True
        step, jump, ahead = np.diff(r), np.diff(x), np.diff(channel[low:high])
        apart = step != 1
        for i in np.flatnonzero(step == 1)[:1]:
            apart |= jump * ahead[i] != jump[i] * ahead
        breaks[r[1:][apart]] = True
        breaks[r[:-1][step != 1] + 1] = True
    return breaks[1:-1]


def interleaved(
    reach: Reach, elements: Elements, label: IntArray, fixed: BoolArray
) -> Iterator[tuple[IntArray, IntArray]]:
    """Ties of the channels that a shuffle (reshape to r rows, transpose) reads together.

    A shuffle of the kept channels puts them in the order of the kept positions only if whole
    columns are kept, so the r channels of a column are tied. A channel that is read several times
    in a row (behind a depthwise convolution with a multiplier, say) counts once.
    """
    for name in reach.widths:
        inputs = elements.inputs[name]
        inputs = inputs[np.append(True, np.diff(label[inputs]) != 0)]
        roots = label[inputs]
        width = len(roots)
        order = np.argsort(roots)
        if fixed[inputs].any() or (np.diff(roots) > 0).all() or (np.diff(roots[order]) == 0).any():
            continue
        rank = np.empty(width, dtype=np.int64)
        rank[order] = np.arange(width)
        columns = int(rank[1])  # the second position reads the second row's first channel
        if width % columns == 0:
            shuffle = np.arange(width).reshape(-1, columns).T.ravel()
            if (rank == shuffle).all():
                table = inputs[order].reshape(-1, columns)
                yield np.repeat(table[:1], len(table) - 1, 0).ravel(), table[1:].ravel()


class Applied(NamedTuple):
    """What :func:`apply` makes of rules.

    Attributes:
        merged: per footprint, a (merged footprint, blocks of component labels).
        ties: in place of the rules that do not fit, each with the number of its rule.
        unequal: numbers of the rules in which a block holds a fixed channel.
    """

    merged: dict[int, tuple[int, Blocks]]
    ties: list[tuple[int, tuple[IntArray, IntArray]]]
    unequal: list[int]


def apply(
    rules: Sequence[Blocks], label: IntArray, fixed: BoolArray, key: IntArray, roots: IntArray
) -> Applied:
    """Turn rules into blocks of groups where that is possible.

    Args:
        rules: the rules.
        label: component of each element, ``fixed`` whether it stays, ``key`` its footprint.
        roots: labels of the components that can be removed.
    """
    found = Applied({}, [], [])
    footprint, size = np.unique(key[roots], return_counts=True)
    members = dict(zip(footprint.tolist(), size.tolist(), strict=True))
    for number, rule in enumerate(rules):
        held = [int(fixed[block].sum()) for block in rule]
        if all(h == len(b) for h, b in zip(held, rule, strict=True)):
            continue
        if any(held):
            found.unequal.append(number)
            continue
        blocks = [label[block] for block in rule]
        if all((block == blocks[0]).all() for block in blocks):
            continue  # tied column by column: the counts are always equal
        together = np.concatenate(blocks)
        keys = np.unique(key[together]).tolist()
        whole = sum(members.get(k, 0) for k in keys)
        distinct = len(np.unique(together)) == len(together) == whole
        known = [found.merged[k][1] for k in keys if k in found.merged]
        if distinct and all(_same(blocks, other) for other in known):
            found.merged.update({k: (keys[0], blocks) for k in keys if not known})
        else:
            tie = np.tile(rule[0], len(rule) - 1), np.concatenate(rule[1:])
            found.ties.append((number, tie))
    return found


def _same(a: Blocks, b: Blocks) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(np.sort(x), np.sort(y)) for x, y in zip(a, b, strict=True)
    )
