"""Layers that lose channels inside code that fixes widths: they gather and scatter.

A split at sizes in the code, a shuffle of odd halves or a ``view`` to a stored width runs at the
full width alone. There, a *rewired* layer computes fewer channels than its surroundings carry: it
gathers the channels that it reads, and scatters those that it writes to their old places, with
zeros between. Nothing reads the zeros. The multiply-adds go as with any cut; the activations in
between stay as large as they were, so less time is saved than where the code lets them shrink.

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
from stamppruner.channels import BoolArray, IntArray
from stamppruner.errors import CheckpointError

GATHER = "gathered_inputs"
"""Buffer: place of each input channel of the layer among those that arrive, ``(in,)``."""

SCATTER = "scattered_outputs"
"""Buffer: output channel at each place that the code expects, ``(places,)``; ``out`` for none."""


def rewire_(
    module: nn.Module,
    inputs: BoolArray,
    outputs: BoolArray,
    arriving: BoolArray,
    expected: BoolArray,
) -> None:
    """Make a layer that was cut fit surroundings of another width; in place.

    Args:
        module: a convolution or linear layer.
        inputs: its inputs that were kept, ``(in,)`` in the old numbering.
        outputs: its outputs that were kept, ``(out,)``.
        arriving: the inputs that its surroundings still carry, ``(in,)``.
        expected: the outputs that they still carry, ``(out,)``.
    """
    gathered, scattered = module._buffers.get(GATHER), module._buffers.get(SCATTER)
    if gathered is not None:  # cut a second time
        _note(module, GATHER, gathered.cpu().numpy()[inputs])
    elif (arriving & ~inputs).any():
        _note(module, GATHER, np.flatnonzero(inputs[arriving]))
    if scattered is not None or (expected & ~outputs).any():
        new = np.append(np.where(outputs, np.cumsum(outputs) - 1, outputs.sum()), outputs.sum())
        old = np.flatnonzero(expected) if scattered is None else scattered.cpu().numpy()
        _note(module, SCATTER, new[old])
    connect_(module)


def connect_(module: nn.Module) -> None:
    """Register the hooks that the layer's buffers ask for."""
    if GATHER in module._buffers and _gather not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_gather)
    if SCATTER in module._buffers and _scatter not in module._forward_hooks.values():
        module.register_forward_hook(_scatter)


def is_place(name: str) -> bool:
    """Whether a tensor of a state dict holds places."""
    return name.rpartition(".")[2] in (GATHER, SCATTER)


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
        width = layers.input_width(module) if leaf == GATHER else layers.output_width(module)
        low, high = (int(places.min()), int(places.max())) if places.numel() else (-1, -1)
        fits = places.dtype == torch.int64 and places.dim() == 1 and low >= 0
        if not fits or (len(places) != width if leaf == GATHER else high > width):
            raise CheckpointError(
                f"{path}: the places of {owner!r} in {leaf} do not fit its width {width}: the file "
                "is damaged"
            )
        module.register_buffer(leaf, places)
        connect_(module)


def _note(module: nn.Module, name: str, places: IntArray) -> None:
    index = torch.from_numpy(np.ascontiguousarray(places, dtype=np.int64))
    module.register_buffer(name, index.to(layers.first_floating(module).device))


def _gather(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    x: Tensor = args[0]
    axis, places = layers.channel_axis(module, x.dim()), module.get_buffer(GATHER)
    return (x.index_select(axis, places), *args[1:])


def _scatter(module: nn.Module, _args: Any, output: Tensor) -> Tensor:
    axis, places = layers.channel_axis(module, output.dim()), module.get_buffer(SCATTER)
    shape = list(output.shape)
    shape[axis] = 1
    padded = torch.cat([output, output.new_zeros(shape)], dim=axis)
    return padded.index_select(axis, places)
