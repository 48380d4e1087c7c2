"""Which channels live and die together, where they are read and written, and which are kept.

Vocabulary
----------
*channel*
    The smallest unit that can be removed. Output channels of different layers that meet
    (through a residual sum, say) are one channel.
*group*
    Channels that are written and read by the same layers; one mask vector.
*layer map*
    For one layer, the channel behind each of its input and output positions, or ``KEPT`` (-1)
    where the position can never be removed. It covers any wiring: an offset behind a concat,
    ``H * W`` inputs a channel behind a flatten, a permutation behind a shuffle.

Channels are numbered ``0 .. graph.num_channels - 1``, group after group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from stamppruner.errors import PlanError
from stamppruner.inputs import Inputs
from stamppruner.norms import Norm

KEPT = -1
"""The entry of a layer map for a position that is never removed."""

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]
LayerKind = Literal["mixing", "channelwise", "norm"]


@dataclass(frozen=True, eq=False)
class LayerMap:
    """The channels behind the positions of one layer.

    Attributes:
        name: qualified module name.
        kind: ``"mixing"`` (conv, transposed conv, linear: every output reads every input of its
            block), ``"channelwise"`` (batch norm, PReLU, depthwise conv: no gate is needed) or
            ``"norm"`` (layer and group norm: statistics over channels, which are gated).
        inputs: channel of each input position, ``(in,)``; ``KEPT`` where fixed.
        outputs: channel of each output position, ``(out,)``; ``KEPT`` where fixed.
        norm: how the statistics are taken, of the kind ``"norm"``.
        whole: the layer uses its weight as a whole (weight standardisation), so its inputs are
            not cut: zeros stand in for those that are gone.
    """

    name: str
    kind: LayerKind
    inputs: IntArray
    outputs: IntArray
    norm: Norm | None = None
    whole: bool = False

    def kept_inputs(self, keep: BoolArray) -> BoolArray:
        """Input positions that survive, ``(in,)``, for a keep vector ``(num_channels,)``."""
        return np.ones(len(self.inputs), dtype=bool) if self.whole else self.read_inputs(keep)

    def read_inputs(self, keep: BoolArray) -> BoolArray:
        """Input positions at which something is read, ``(in,)``."""
        return _lookup(keep, self.inputs)

    def kept_outputs(self, keep: BoolArray) -> BoolArray:
        """Output positions that survive, ``(out,)``, for a keep vector ``(num_channels,)``."""
        return _lookup(keep, self.outputs)


@dataclass(frozen=True, eq=False)
class TensorMap:
    """The channels along an axis of a parameter or buffer that belongs to no layer.

    Attributes:
        name: qualified name of the parameter or buffer.
        axis: that follows channels.
        channels: channel of each index along the axis, ``(length,)``; ``KEPT`` where fixed.
    """

    name: str
    axis: int
    channels: IntArray

    def kept(self, keep: BoolArray) -> BoolArray:
        """Indices that survive, ``(length,)``, for a keep vector ``(num_channels,)``."""
        return _lookup(keep, self.channels)


@dataclass(frozen=True)
class ChannelGroup:
    """Channels that share their readers and writers.

    Attributes:
        name: qualified name of the first layer that writes the channels.
        start: number of its first channel; the group is ``start .. start + size - 1``.
        size: number of channels.
        blocks: the same count must be kept in each of ``blocks`` equal consecutive runs
            (grouped convolutions, halves of a ``chunk``); 1 where there is no such rule.
        writers: layers whose outputs are these channels.
        readers: mixing layers whose inputs are these channels.
        multiple: the count that is kept in each block is a multiple of this, unless it is whole
            (the model's code asks for it).
        rewired: why the channels keep their places in the activations, with zeros where they were
            removed (the code fixes the width, see rewire.py); empty for groups that shrink.

    Example:
        >>> group = ChannelGroup("conv1", start=16, size=8, blocks=2)
        >>> group.channels, group.block_size
        (slice(16, 24, None), 4)
    """

    name: str
    start: int
    size: int
    blocks: int = 1
    writers: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    multiple: int = 1
    rewired: str = ""

    @property
    def channels(self) -> slice:
        """Slice of this group in any ``(num_channels,)`` vector."""
        return slice(self.start, self.start + self.size)

    @property
    def block_size(self) -> int:
        """Number of channels in each block."""
        return self.size // self.blocks


@dataclass(frozen=True, eq=False)
class ChannelGraph:
    """Everything that masking, costing and cutting need to know about a model.

    Attributes:
        groups: the prunable groups; together they cover all channels once.
        layers: layer maps by qualified module name, in call order.
        protected: layers whose output channels are left whole, with the reason.
        output_layers: mixing layers that write the model's output.
        spatial: per mixing or depthwise layer, the number of places a sample at which it is
            applied at the traced input size (``H * W`` times calls; of the input for a transposed
            convolution, else of the output); multiply-adds follow from it. It is 0 for
            layers that are called in training mode only.
        macs: multiply-adds of a pass of one sample, in layers or not; 0 if they were not counted.
        example: one sample of the traced inputs.
        tensors: maps of parameters and buffers outside layers that follow channels.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from stamppruner import trace_channels
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> graph = trace_channels(net, torch.zeros(1, 3, 9, 9))
        >>> graph.num_channels, graph.groups[0].readers, graph.protected
        (8, ('2',), {'2': "writes the model's output"})
    """

    groups: tuple[ChannelGroup, ...]
    layers: Mapping[str, LayerMap]
    protected: Mapping[str, str] = field(default_factory=dict)
    output_layers: tuple[str, ...] = ()
    spatial: Mapping[str, int] = field(default_factory=dict)
    example: Inputs | None = None
    tensors: tuple[TensorMap, ...] = ()
    macs: float = 0.0

    @cached_property
    def num_channels(self) -> int:
        """Number of removable channels."""
        return sum(group.size for group in self.groups)

    @cached_property
    def group_of(self) -> IntArray:
        """Index of the group of each channel, ``(num_channels,)``."""
        return np.repeat(np.arange(len(self.groups)), [group.size for group in self.groups])

    @cached_property
    def stays_wide(self) -> BoolArray:
        """Channels whose places in the activations stay when they go, ``(num_channels,)``."""
        return np.array([bool(group.rewired) for group in self.groups], dtype=bool)[self.group_of]

    @property
    def rewired(self) -> dict[str, str]:
        """Layers that scatter what they write, with the reason."""
        return {name: g.rewired for g in self.groups if g.rewired for name in g.writers}

    def __str__(self) -> str:
        blocks = sum(group.blocks > 1 for group in self.groups)
        return (
            f"{self.num_channels} removable channels in {len(self.groups)} groups "
            f"({blocks} with equal blocks), {len(self.protected)} layers protected"
        )


@dataclass(frozen=True, eq=False)
class ChannelPlan:
    """Which channels are kept: the one record that masks, cuts and rebuilds a network.

    Attributes:
        graph: the graph that numbers the channels.
        keep: ``(num_channels,)`` booleans.

    Raises:
        PlanError: the vector has another length, a group would lose all its channels, the blocks
            of a group keep unequal counts, or a count that is not a multiple of what the code asks.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from stamppruner import trace_channels
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> graph = trace_channels(net, torch.zeros(1, 3, 9, 9))
        >>> plan = ChannelPlan(graph, np.arange(8) < 3)  # or ChannelPlan.random(graph, keep=0.5)
        >>> plan.record()
        {'0': [0, 1, 2]}
    """

    graph: ChannelGraph
    keep: BoolArray

    def __post_init__(self) -> None:
        keep = np.asarray(self.keep)
        if keep.dtype != np.bool_ or keep.shape != (self.graph.num_channels,):
            raise PlanError(
                f"keep has dtype {keep.dtype} and shape {keep.shape}, the graph needs bool "
                f"({self.graph.num_channels},): build the plan from the same graph"
            )
        keep = keep.copy()
        keep.setflags(write=False)
        object.__setattr__(self, "keep", keep)
        for group in self.graph.groups:
            counts = keep[group.channels].reshape(group.blocks, -1).sum(axis=1)
            if counts.min() == 0:
                raise PlanError(f"group {group.name!r} keeps no channel: keep at least one a block")
            if counts.min() != counts.max():
                raise PlanError(
                    f"group {group.name!r} keeps {counts.tolist()} channels in its "
                    f"{group.blocks} blocks: keep the same number in each"
                )
            if counts[0] % group.multiple and counts[0] != group.block_size:
                raise PlanError(
                    f"group {group.name!r} keeps {counts[0]} channels a block: the model's code "
                    f"needs a multiple of {group.multiple}"
                )

    @classmethod
    def full(cls, graph: ChannelGraph) -> ChannelPlan:
        """The plan that keeps everything."""
        return cls(graph, np.ones(graph.num_channels, dtype=bool))

    @classmethod
    def random(cls, graph: ChannelGraph, keep: float = 0.5, seed: int = 0) -> ChannelPlan:
        """Keep a random ``keep`` share of every group, at least one channel (or multiple) a block.

        Raises:
            PlanError: ``keep`` is not in (0, 1].
        """
        if not 0 < keep <= 1:
            raise PlanError(f"keep is {keep}, not in (0, 1]: give the share of channels to keep")
        rng = np.random.default_rng(seed)
        vector = np.zeros(graph.num_channels, dtype=bool)
        for group in graph.groups:
            block, multiple = group.block_size, group.multiple
            count = min(block, max(1, round(keep * block / multiple)) * multiple)
            for b in range(group.blocks):
                chosen = rng.permutation(block)[:count]
                vector[group.start + b * block + chosen] = True
        return cls(graph, vector)

    @classmethod
    def from_record(cls, graph: ChannelGraph, record: Mapping[str, Iterable[int]]) -> ChannelPlan:
        """Inverse of :meth:`record`. Groups that the record leaves out are kept whole.

        Raises:
            PlanError: an unknown group, or an index outside its group, or an invalid plan.
        """
        vector = np.ones(graph.num_channels, dtype=bool)
        groups = {group.name: group for group in graph.groups}
        for name, kept in record.items():
            if name not in groups:
                raise PlanError(f"the graph has no group {name!r}: the plan is of another model")
            group, indices = groups[name], np.asarray(list(kept))
            integral = np.issubdtype(indices.dtype, np.integer) and indices.size > 0
            if not integral or indices.min() < 0 or indices.max() >= group.size:
                raise PlanError(
                    f"group {name!r}: kept channels must be integers in [0, {group.size})"
                )
            vector[group.channels] = False
            vector[group.start + indices] = True
        return cls(graph, vector)

    def record(self) -> dict[str, list[int]]:
        """JSON-able form: group name to kept channel indices within the group."""
        return {
            group.name: np.flatnonzero(self.keep[group.channels]).tolist()
            for group in self.graph.groups
        }

    def cut_layers(self) -> Iterator[tuple[LayerMap, BoolArray, BoolArray]]:
        """Layers that lose something, each with its kept inputs and kept outputs."""
        for layer in self.graph.layers.values():
            inputs, outputs = layer.kept_inputs(self.keep), layer.kept_outputs(self.keep)
            if not (inputs.all() and outputs.all() and layer.read_inputs(self.keep).all()):
                yield layer, inputs, outputs

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, ChannelPlan) and self.record() == other.record()

    def __hash__(self) -> int:
        return hash(self.keep.tobytes())

    def __str__(self) -> str:
        return f"keeps {int(self.keep.sum())} of {self.keep.size} channels"


def _lookup(keep: BoolArray, positions: IntArray) -> BoolArray:
    """``keep`` at each position, True at ``KEPT`` ones."""
    return np.append(keep, True)[positions]
