"""Layers that lose channels inside code that fixes widths: they gather, scatter or fill up.

A split at sizes in the code, a shuffle of odd halves or a ``view`` to a stored width runs at the
full width alone. There, a *rewired* layer computes fewer channels than its surroundings carry: it
gathers the channels that it reads, and scatters those that it writes to their old places, with
zeros between. Nothing reads the zeros. A layer whose weight cannot be cut along its inputs (weight
standardisation) is filled up: zeros stand in for the inputs that are gone.

Multiply-adds go as with any cut; the activations in between stay as large as they were, so less
time is saved than where the code lets them shrink.

The places are buffers of the layer, so they are saved, moved and copied with it. Two hooks, which
hold no state, apply them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stamppruner import layers
from stamppruner.channels import BoolArray, IntArray, LayerMap
from stamppruner.errors import CheckpointError

GATHER = "gathered_inputs"
"""Buffer: place of each input channel of the layer among those that arrive, ``(in,)``."""

SCATTER = "scattered_outputs"
"""Buffer: output channel at each place that the code expects, ``(places,)``; ``out`` for none."""

FILL = "filled_inputs"
"""Buffer: place, among the channels that arrive, of each input of a layer that uses its weight as
a whole, ``(in,)``; the number of those that arrive for inputs that are gone, which read zero."""

PLACES = (GATHER, SCATTER, FILL)


def rewire_(module: nn.Module, layer: LayerMap, keep: BoolArray, around: BoolArray) -> None:
    """Make a layer that was cut fit surroundings of another width; in place.

    Args:
        module: a convolution or linear layer.
        layer: its map.
        keep: channels that are kept, ``(num_channels,)``.
        around: channels that its surroundings still carry, ``(num_channels,)``.
    """
    places = {name: module._buffers.get(name) for name in PLACES}
    old = {name: value.cpu().numpy() for name, value in places.items() if value is not None}
    read, outputs = layer.read_inputs(keep), layer.kept_outputs(keep)
    if layer.whole and not read.all():
        _note(module, FILL, _filled(read, layer.read_inputs(around), old.get(FILL)))
    elif GATHER in old:  # cut a second time
        _note(module, GATHER, old[GATHER][layer.kept_inputs(keep)])
    elif not layer.whole and (arriving := layer.read_inputs(around)).sum() > read.sum():
        _note(module, GATHER, np.flatnonzero(read[arriving]))
    expected = layer.kept_outputs(around)
    if SCATTER in old or (expected & ~outputs).any():
        new = np.append(np.where(outputs, np.cumsum(outputs) - 1, outputs.sum()), outputs.sum())
        _note(module, SCATTER, new[old.get(SCATTER, np.flatnonzero(expected))])
    connect_(module)


def connect_(module: nn.Module) -> None:
    """Register the hooks that the layer's buffers ask for."""
    if GATHER in module._buffers and _gather not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_gather)
    if FILL in module._buffers and _fill not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_fill)
    if SCATTER in module._buffers and _scatter not in module._forward_hooks.values():
        module.register_forward_hook(_scatter)


def is_place(name: str) -> bool:
    """Whether a tensor of a state dict holds places."""
    return name.rpartition(".")[2] in PLACES


def restore_(model: nn.Module, tensors: Mapping[str, Tensor], path: object) -> None:
    """Rewire the layers of a model for which a file holds places.

    Args:
        model: with its widths already changed.
        tensors: of the file, by name.
        path: of the file, for messages.

    Raises:
        CheckpointError: places of a layer that the model lacks, or that do not fit its width.
    """
    modules = dict(model.named_modules())
    for name, places in tensors.items():
        owner, _, leaf = name.rpartition(".")
        if not is_place(name):
            continue
        module = modules.get(owner)
        if module is None or not layers.is_mixing(module):
            raise CheckpointError(
                f"{path}: the model has no layer {owner!r}: pass the pruned class"
            )
        width = layers.output_width(module) if leaf == SCATTER else layers.input_width(module)
        both = {f"{owner}.{other}".lstrip(".") for other in (GATHER, FILL)} <= tensors.keys()
        if both or not _fits(places, leaf, width):
            raise CheckpointError(
                f"{path}: the places of {owner!r} in {leaf} do not fit its width {width}: the file "
                "is damaged"
            )
        module.register_buffer(leaf, places)
        connect_(module)


def _fits(places: Tensor, leaf: str, width: int) -> bool:
    """Whether places are such as :func:`rewire_` notes: all channels are there, in their order."""
    if places.dtype != torch.int64 or places.dim() != 1 or not places.numel() or places.min() < 0:
        return False
    if leaf == SCATTER:
        return int(places.max()) <= width and torch.equal(
            places[places < width], torch.arange(width)
        )
    there = places if leaf == GATHER else places[places < places.max()]
    return len(places) == width and bool((there.diff() > 0).all())


def _note(module: nn.Module, name: str, places: IntArray) -> None:
    index = torch.from_numpy(np.ascontiguousarray(places, dtype=np.int64))
    module.register_buffer(name, index.to(layers.first_floating(module).device))


def _filled(read: BoolArray, carried: BoolArray, old: IntArray | None) -> IntArray:
    """Where each input is among the channels that arrive once more of them are gone."""
    before = np.arange(len(read)) if old is None else old
    there = before < (len(read) if old is None else old.max())
    arriving = np.ones(int(there.sum()), dtype=bool)
    arriving[before[there]] = carried[there]
    rank = np.append(np.cumsum(arriving) - 1, arriving.sum())
    return np.where(there & read, rank[before], arriving.sum())


def _gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x: Tensor = args[0]
    axis, places = layers.channel_axis(module, x.dim()), module.get_buffer(GATHER)
    return (x.index_select(axis, places), *args[1:])


def _fill(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x: Tensor = args[0]
    return (_spread(x, layers.channel_axis(module, x.dim()), module.get_buffer(FILL)), *args[1:])


def _scatter(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    return _spread(output, layers.channel_axis(module, output.dim()), module.get_buffer(SCATTER))


def _spread(x: Tensor, axis: int, places: Tensor) -> Tensor:
    """The channel of ``x`` at each place; zero where the place is one behind its last channel."""
    shape = list(x.shape)
    shape[axis] = 1
    return torch.cat([x, x.new_zeros(shape)], dim=axis).index_select(axis, places)
