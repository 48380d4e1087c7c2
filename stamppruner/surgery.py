"""Cut channels out of a model: a plan in, smaller layers out. No proof here, see certificate.py.

The only importer of torch-pruning: its dependency graph's handlers cut convolutions, linear
layers and batch norms. Grouped and depthwise convolutions with a multiplier are cut here, because
their groups may keep different patterns, and so are parametrized weights and modules with other
per-channel state.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.parametrize import is_parametrized

from stamppruner import layers
from stamppruner.channels import BoolArray, ChannelPlan
from stamppruner.errors import PlanError
from stamppruner.rewire import PLACES, rewire_


def cut(model: nn.Module, plan: ChannelPlan, *, share: bool = False) -> nn.Module:
    """A copy of the model without the channels that the plan drops.

    With ``share``, parameters that are not cut are the model's own, which saves their memory.

    The copy keeps the class, train or eval mode, ``requires_grad``, memory format and attributes
    of every parameter. Optimizers built on the dense model do not see the new parameters.

    Raises:
        PlanError: the plan is of another model; nothing was changed.
    """
    check_fits(model, plan)
    modules = dict(model.named_modules())
    weights = [modules[layer.name]._parameters.get("weight") for layer, _, _ in plan.cut_layers()]
    if share:  # but those that a parametrization would write to
        named = model.named_parameters()
        weights += [p for name, p in named if ".parametrizations." not in f".{name}"]
    # weights that are replaced below need no copy before
    slim = copy.deepcopy(model, {id(weight): weight for weight in weights if weight is not None})
    modules = dict(slim.named_modules())
    around = plan.keep | plan.graph.stays_wide
    with torch.no_grad():
        for layer, inputs, outputs in plan.cut_layers():
            module = modules[layer.name]
            _cut_layer(module, inputs, outputs)
            if layer.kind == "mixing":
                rewire_(module, layer, plan.keep, around)
        for tensor in plan.graph.tensors:
            owner, _, name = tensor.name.rpartition(".")
            kept = tensor.kept(plan.keep)
            _cut_tensor(modules[owner], name, tensor.axis, kept)
            layers.set_width(modules[owner], len(kept), int(kept.sum()))
    return slim


def unsupported(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, str]:
    """Layers that cannot be cut, with the reason."""
    found = {}
    for name, module in modules:
        if is_parametrized(module) and not _parametrization_survives(module):
            found[name] = "its weight is computed by a parametrization that cannot be cut"
        elif hasattr(module, "weight_g") or hasattr(module, "weight_orig"):
            found[name] = "its weight is computed by a hook"
    return found


def check_fits(model: nn.Module, plan: ChannelPlan) -> None:
    """Raise if the plan is of another model."""
    modules = dict(model.named_modules())
    for layer, inputs, outputs in plan.cut_layers():
        module = modules.get(layer.name)
        if module is None:
            raise PlanError(f"the model has no layer {layer.name!r}: the plan is of another model")
        seen = layers.widths(module)
        if seen is not None and seen != (len(inputs), len(outputs)):
            raise PlanError(
                f"layer {layer.name!r} is {seen[0]} -> {seen[1]} channels wide, the plan was made "
                f"for {len(inputs)} -> {len(outputs)}: trace this model anew"
            )
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for tensor in plan.graph.tensors:
        found = tensors.get(tensor.name, torch.empty(0))
        if found.shape[tensor.axis : tensor.axis + 1] != (len(tensor.channels),):
            raise PlanError(
                f"{tensor.name!r} is missing or not {len(tensor.channels)} long in axis "
                f"{tensor.axis}: trace this model anew"
            )


def _cut_layer(module: nn.Module, inputs: BoolArray, outputs: BoolArray) -> None:
    if not (layers.is_mixing(module) or layers.is_depthwise(module)):
        _cut_channelwise(module, outputs)
        return
    before = dict(module.named_parameters(recurse=False))
    _cut_extras(module, inputs, outputs)
    if layers.is_depthwise(module):
        _cut_depthwise(module, inputs, outputs)
    elif is_parametrized(module, "weight"):
        _cut_parametrized(module, inputs, outputs)
    elif layers.blocks(module) > 1:
        _cut_grouped(module, inputs, outputs)
    else:
        handler = _handler(module)
        if not outputs.all():
            handler.prune_out_channels(module, _dropped(outputs))
        if not inputs.all():
            handler.prune_in_channels(module, _dropped(inputs))
    for name, old in before.items():
        _restore(getattr(module, name), old)


def _cut_extras(module: nn.Module, inputs: BoolArray, outputs: BoolArray) -> None:
    """Slice what a layer holds a channel next to its weight and bias (a gain, say)."""
    for name, tensor, axis in list(layers.channel_tensors(module)):
        if name not in ("weight", "bias", *PLACES):
            for kept in (outputs, inputs):
                if len(kept) == tensor.numel():
                    _cut_tensor(module, name, axis, kept)
                    break


def _cut_grouped(module: nn.Module, inputs: BoolArray, outputs: BoolArray) -> None:
    """Every group keeps the same number of inputs and outputs, in a pattern of its own."""
    module.weight = nn.Parameter(_cut_weight(module, inputs, outputs))
    if module.bias is not None:
        module.bias = nn.Parameter(_select(module.bias, 0, outputs))  # type: ignore[arg-type]
    _note_widths(module, inputs, outputs)


def _cut_parametrized(module: nn.Module, inputs: BoolArray, outputs: BoolArray) -> None:
    """Write the smaller weight through the parametrization's inverse."""
    module.weight = _cut_weight(module, inputs, outputs)
    if module.bias is not None:
        module.bias = nn.Parameter(_select(module.bias, 0, outputs))  # type: ignore[arg-type]
    _note_widths(module, inputs, outputs)


def _parametrization_survives(module: nn.Module) -> bool:
    """Whether a smaller weight, written through the parametrization, is read back unchanged."""
    if not is_parametrized(module, "weight") or len(module.parametrizations) > 1:  # type: ignore[arg-type]
        return False
    if layers.is_depthwise(module):
        return False
    half = copy.deepcopy(module)
    groups = layers.blocks(module)
    kept = [
        np.arange(width) % (width // groups) < max(1, width // groups // 2)
        for width in (layers.input_width(module), layers.output_width(module))
    ]
    expected = _cut_weight(half, *kept)
    try:
        _cut_parametrized(half, *kept)
        return torch.allclose(half.weight, expected, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
    except (RuntimeError, ValueError, NotImplementedError, AttributeError):
        return False


def _cut_weight(module: nn.Module, inputs: BoolArray, outputs: BoolArray) -> Tensor:
    """The weight's kept part; in each group of a convolution its own pattern."""
    out_axis, in_axis = layers.weight_axes(module)
    groups = layers.blocks(module)
    # (out, in / groups, ...), transposed (in, out / groups, ...): the groups lie along axis 0
    kept = {out_axis: outputs.reshape(groups, -1), in_axis: inputs.reshape(groups, -1)}
    parts = []
    for g, part in enumerate(module.weight.detach().chunk(groups)):  # type: ignore[operator]
        for axis, rows in kept.items():
            part = _select(part, axis, rows[g])
        parts.append(part)
    return torch.cat(parts)


def _cut_depthwise(module: nn.Module, inputs: BoolArray, outputs: BoolArray) -> None:
    """An input channel takes its outputs (one a multiplier) and its group with it."""
    rows = inputs if layers.weight_axes(module)[1] == 0 else outputs
    module.weight = nn.Parameter(_select(module.weight, 0, rows))  # type: ignore[arg-type]
    if module.bias is not None:
        module.bias = nn.Parameter(_select(module.bias, 0, outputs))  # type: ignore[arg-type]
    _note_widths(module, inputs, outputs)
    module.groups = module.in_channels


def _note_widths(module: nn.Module, inputs: BoolArray, outputs: BoolArray) -> None:
    names = ("in_features", "out_features")
    if not isinstance(module, nn.Linear):
        names = ("in_channels", "out_channels")
    for name, kept in zip(names, (inputs, outputs), strict=True):
        setattr(module, name, int(kept.sum()))


def _cut_channelwise(module: nn.Module, kept: BoolArray) -> None:
    """Slice every per-channel parameter and buffer, and every width among the attributes."""
    if isinstance(module, _BatchNorm) and (handler := _handler(module)):
        before = dict(module.named_parameters(recurse=False))
        handler.prune_out_channels(module, _dropped(kept))
        for name, old in before.items():
            _restore(getattr(module, name), old)
        return
    named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    for name, tensor in named:
        axes = [axis for axis, length in enumerate(tensor.shape) if length == len(kept)]
        if axes:
            _cut_tensor(module, name, axes[0], kept)
    layers.set_width(module, len(kept), int(kept.sum()))


def _cut_tensor(module: nn.Module, name: str, axis: int, kept: BoolArray) -> None:
    """Replace a parameter or buffer by its kept part."""
    old = getattr(module, name)
    if kept.all():
        return
    new = _select(old, axis, kept)
    if isinstance(old, nn.Parameter):
        new = nn.Parameter(new, old.requires_grad)
        _restore(new, old)
    setattr(module, name, new)


def _handler(module: nn.Module) -> Any:
    """What cuts the module; imported late, so that slim files load without torch-pruning."""
    import torch_pruning as tp

    return tp.DependencyGraph().get_pruner_of_module(module)


def _select(tensor: Tensor, axis: int, kept: BoolArray) -> Tensor:
    index = torch.from_numpy(np.flatnonzero(kept)).to(tensor.device)
    return tensor.detach().index_select(axis, index)


def _dropped(kept: BoolArray) -> list[int]:
    return np.flatnonzero(~kept).tolist()


def _restore(new: Tensor | None, old: Tensor | None) -> None:
    """Give a cut parameter the ``requires_grad``, memory format and attributes of the old one."""
    if new is None or old is None or new is old:
        return
    new.requires_grad_(old.requires_grad)
    for dim, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if old.dim() == dim and old.is_contiguous(memory_format=layout):
            new.data = new.data.contiguous(memory_format=layout)
    for name, value in vars(old).items():
        setattr(new, name, value)
