"""Cut channels out of a model: a plan in, smaller layers out. No proof here, see certificate.py.

The only importer of torch-pruning: its dependency graph's handlers cut convolutions, linear
layers and batch norms. Grouped and depthwise convolutions with a multiplier are cut here, because
their groups may keep different patterns, and so are modules with other per-channel state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import numpy as np
import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from stamppruner import layers
from stamppruner.channels import BoolArray, ChannelPlan
from stamppruner.errors import PlanError


def cut(model: nn.Module, plan: ChannelPlan) -> nn.Module:
    """A copy of the model without the channels that the plan drops.

    The copy keeps the class, train or eval mode, ``requires_grad``, memory format and attributes
    of every parameter. Optimizers built on the dense model do not see the new parameters.

    Raises:
        PlanError: the plan is of another model; nothing was changed.
    """
    modules = dict(model.named_modules())
    for layer, inputs, outputs in plan.cut_layers():
        module = modules.get(layer.name)
        if module is None:
            raise PlanError(f"the model has no layer {layer.name!r}: the plan is of another model")
        if layer.name in plan.graph.spatial:
            seen = (layers.input_width(module), layers.output_width(module))
        else:
            seen = (layers.channelwise_width(module) or 0,) * 2
        if seen != (len(inputs), len(outputs)):
            raise PlanError(
                f"layer {layer.name!r} is {seen[0]} -> {seen[1]} channels wide, the plan was made "
                f"for {len(inputs)} -> {len(outputs)}: trace this model anew"
            )
    slim = copy.deepcopy(model)
    modules = dict(slim.named_modules())
    for layer, inputs, outputs in plan.cut_layers():
        _cut_layer(modules[layer.name], inputs, outputs)
    return slim


def _cut_layer(module: nn.Module, inputs: BoolArray, outputs: BoolArray) -> None:
    before = dict(module.named_parameters(recurse=False))
    if layers.is_depthwise(module):
        _cut_depthwise(module, inputs, outputs)
    elif layers.is_mixing(module) and layers.blocks(module) > 1:
        _cut_grouped(module, inputs, outputs)
    elif layers.is_mixing(module) or isinstance(module, _BatchNorm):
        handler = tp.DependencyGraph().get_pruner_of_module(module)
        if not outputs.all():
            handler.prune_out_channels(module, np.flatnonzero(~outputs).tolist())
        if not inputs.all() and layers.is_mixing(module):
            handler.prune_in_channels(module, np.flatnonzero(~inputs).tolist())
    else:
        _cut_channelwise(module, outputs)
    for name, old in before.items():
        _restore(getattr(module, name), old)


def _cut_grouped(module: nn.Module, inputs: BoolArray, outputs: BoolArray) -> None:
    """Every group keeps the same number of inputs and outputs, in a pattern of its own."""
    out_axis, in_axis = layers.weight_axes(module)
    groups = layers.blocks(module)
    weight = module.weight  # (out, in / groups, ...), transposed (in, out / groups, ...)
    split_axis = 0
    kept = {out_axis: outputs.reshape(groups, -1), in_axis: inputs.reshape(groups, -1)}
    parts = []
    for g, part in enumerate(weight.detach().chunk(groups, dim=split_axis)):
        for axis, rows in kept.items():
            part = _select(part, axis, rows[g])
        parts.append(part)
    module.weight = nn.Parameter(torch.cat(parts, dim=split_axis))
    if module.bias is not None:
        module.bias = nn.Parameter(_select(module.bias.detach(), 0, outputs))
    module.in_channels, module.out_channels = int(inputs.sum()), int(outputs.sum())


def _cut_depthwise(module: nn.Module, inputs: BoolArray, outputs: BoolArray) -> None:
    """An input channel takes its outputs (one a multiplier) and its group with it."""
    rows = inputs if layers.weight_axes(module)[1] == 0 else outputs
    module.weight = nn.Parameter(_select(module.weight.detach(), 0, rows))
    if module.bias is not None:
        module.bias = nn.Parameter(_select(module.bias.detach(), 0, outputs))
    module.in_channels, module.out_channels = int(inputs.sum()), int(outputs.sum())
    module.groups = module.in_channels


def _cut_channelwise(module: nn.Module, kept: BoolArray) -> None:
    """Slice every per-channel parameter and buffer, and every width among the attributes."""
    for name, tensor, axis in list(layers.channel_tensors(module)):
        smaller = _select(tensor.detach(), axis, kept)
        if isinstance(tensor, nn.Parameter):
            smaller = nn.Parameter(smaller, tensor.requires_grad)
        setattr(module, name, smaller)
    for name in layers.width_attributes(module, len(kept)):
        setattr(module, name, int(kept.sum()))


def _select(tensor: Tensor, axis: int, kept: BoolArray) -> Tensor:
    index = torch.from_numpy(np.flatnonzero(kept)).to(tensor.device)
    return tensor.index_select(axis, index)


def _restore(new: Tensor | None, old: Tensor | None) -> None:
    """Give a cut parameter the ``requires_grad``, memory format and attributes of the old one."""
    if new is None or old is None or new is old:
        return
    new.requires_grad_(old.requires_grad)
    if old.dim() == 4 and old.is_contiguous(memory_format=torch.channels_last):
        new.data = new.data.contiguous(memory_format=torch.channels_last)
    for name, value in vars(old).items():
        setattr(new, name, value)


def unsupported(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    """Layers that cannot be cut, with the reason."""
    found = {}
    for name, module in modules:
        if hasattr(module, "parametrizations") or hasattr(module, "weight_g"):
            found[name] = "its weight is computed by a parametrization"
        elif type(module).__name__.startswith(("QuantizedConv", "Lazy")):
            found[name] = f"{type(module).__name__} cannot be cut"
    return found
