"""Elements: outputs and inputs of layers, indices of free tensors; and which of them are one.

Elements that meet are one channel: a *component* of the graph whose edges the probe found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from stamppruner.channels import BoolArray, IntArray
from stamppruner.free import FreeAxis
from stamppruner.reach import Reach


@dataclass(frozen=True)
class Elements:
    """Numbers of the elements: outputs first, then inputs, then free axes.

    Attributes:
        outputs: elements of each producer's and depthwise layer's outputs, by name.
        inputs: elements of each reader's inputs, by name.
        free: elements of each free axis.
        count: number of elements.
        first_input: number of the first input element.
    """

    outputs: dict[str, IntArray]
    inputs: dict[str, IntArray]
    free: list[IntArray]
    count: int
    first_input: int

    @classmethod
    def number(cls, reach: Reach, free: Sequence[FreeAxis]) -> Elements:
        """Number the elements of everything that the probe saw."""
        widths = reach.widths | {n: reach.readers[n] * m for n, m in reach.depthwise.items()}
        sizes = [*widths.values(), *reach.readers.values(), *(axis.length for axis in free)]
        runs = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
        middle = len(widths) + len(reach.readers)
        return cls(
            outputs=dict(zip(widths, runs, strict=False)),
            inputs=dict(zip(reach.readers, runs[len(widths) : middle], strict=True)),
            free=runs[middle:],
            count=sum(sizes),
            first_input=sum(widths.values()),
        )

    def edges(self, reach: Reach, free: Sequence[FreeAxis]) -> IntArray:
        """``(K, 2)`` pairs of elements that are one channel.

        Producers of width 1 are left out: they are never removed, and a broadcast of one channel
        over many does not couple the many.
        """
        width = np.array(list(reach.widths.values()), dtype=np.int64)
        first = np.array([self.outputs[name][0] for name in reach.widths], dtype=np.int64)
        found = np.concatenate([reach.pairs, reach.ties])
        found = found[width[found[:, 0]] > 1]
        pairs = [(first[found[:, 0]] + found[:, 1], self.first_input + found[:, 2])]
        for name, multiplier in reach.depthwise.items():
            pairs.append((self.inputs[name].repeat(multiplier), self.outputs[name]))
        for axis, elements in zip(free, self.free, strict=True):
            pairs.append((elements[axis.indices], self.first_input + axis.positions))
        return np.concatenate([np.stack(pair, axis=1) for pair in pairs])

    def alive(self, label: IntArray, reach: Reach) -> BoolArray:
        """Elements of components that some mixing layer writes and some mixing layer reads."""
        found = np.ones(self.count, dtype=bool)
        for runs in (self.outputs, self.inputs):
            touched = np.zeros(self.count, dtype=bool)
            for name in reach.widths:
                touched[runs[name]] = True
            found &= spread(touched, label)
        return found

    def footprints(self, label: IntArray) -> IntArray:
        """A hash of the layers (and sides) that each component touches, at its label."""
        runs = [*self.outputs.values(), *self.inputs.values(), *self.free]
        salt = np.random.default_rng(0).integers(1, 2**62, len(runs))
        key = np.zeros(self.count, dtype=np.int64)
        np.add.at(key, label, np.repeat(salt, [len(run) for run in runs]))
        return key


def components(count: int, edges: IntArray) -> IntArray:
    """Smallest element of each element's component, by label propagation with pointer jumping."""
    label = np.arange(count)
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


def spread(marked: BoolArray, label: IntArray) -> BoolArray:
    """Mark whole components: those with a marked element."""
    fixed = np.zeros(len(label), dtype=bool)
    fixed[label[marked]] = True
    return fixed[label]
