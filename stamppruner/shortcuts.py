"""Projection shortcuts: a 1x1 layer on every identity shortcut, as in the paper's ResNet-18.

Identity shortcuts tie the channels of a whole stage into one group. With a layer on the shortcut,
both sides of the sum are pruned on their own. The new layers select the identity, so the network
computes what it did; they cost multiply-adds and parameters until they are cut.

Candidates are attributes of a block that hold nothing (``downsample`` is None), which are tried
out with NaN in place of channels as in probe.py, and sums in the code of a block, see splice.py.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stamppruner.calls import FORWARD_ERRORS, copied_module, evaluating, floating_tensors
from stamppruner.comparison import in_double
from stamppruner.errors import EquivalenceError, UnsupportedModelError
from stamppruner.inputs import Inputs
from stamppruner.projection import (
    Entry,
    apply_projections,
    inserted,
    is_identity,
    new_layer,
    place,
    projections,
    replace_,
    set_attribute_,
)
from stamppruner.splice import SpliceError, has_mixing, residual_sums, splice
from stamppruner.trial import (
    Call,
    Tap,
    channel_axis,
    first_calls,
    is_read,
    is_residual,
    nan_arrives,
)

__all__ = ["Shortcuts", "apply_projections", "find_shortcuts", "project_shortcuts", "projections"]

logger = logging.getLogger(__name__)

TOLERANCE = 1e-6
"""Largest difference of the outputs that projecting may make, relative to the largest value."""

_ATTRIBUTES = (
    "downsample", "shortcut", "skip", "proj", "projection", "residual", "identity", "skip_conv",
    "shortcut_conv", "conv_shortcut", "skip_connection", "identity_conv", "residual_conv",
)  # fmt: skip
"""Names under which blocks hold the layer of their shortcut, or nothing."""

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Shortcuts:
    """Identity shortcuts of a model.

    Attributes:
        record: those that can be projected, as :func:`apply_projections` takes them.
        coupled: blocks with residual sums that are left as they are, with the reason.
    """

    record: tuple[Entry, ...]
    coupled: Mapping[str, str]


def project_shortcuts(model: nn.Module, example_inputs: Any) -> nn.Module:
    """A copy of the model with a 1x1 layer, on the identity, on every identity shortcut.

    The layer is a convolution without bias, or a linear one where the channels come last. Sums
    that cannot be projected stay as they are and are logged; :func:`find_shortcuts` tells why.
    Blocks (or the model) that write the sum in their own ``forward`` become
    ``torch.fx.GraphModule``: parameters keep their names, other methods and attributes are gone.
    GPUs that round convolutions to TF32 round the shortcuts, too.

    Args:
        model: it is not changed.
        example_inputs: as for :func:`~stamppruner.trace_channels`.

    Returns:
        The projected model; :func:`projections` reads the record off it.

    Raises:
        UnsupportedModelError: the model has no shortcut that can be projected, cannot be copied,
            or fails on the inputs.
        EquivalenceError: the projected model gives other outputs.

    Example:
        >>> from stamppruner.models import resnet18
        >>> net = project_shortcuts(resnet18(10, width=0.125), torch.zeros(1, 3, 32, 32))
        >>> [entry["name"] for entry in projections(net)][:2]
        ['stages.0.0.shortcut', 'stages.0.1.shortcut']
    """
    return projected(model, example_inputs)[0]


def projected(model: nn.Module, example_inputs: Any) -> tuple[nn.Module, Shortcuts]:
    """As :func:`project_shortcuts`, with what was found."""
    found = find_shortcuts(model, example_inputs)
    for name, why in found.coupled.items():
        logger.warning("%s keeps its identity shortcut: %s", name, why)
    before = projections(model)
    if not found.record and not before:
        reasons = "; ".join(f"{name}: {why}" for name, why in found.coupled.items())
        raise UnsupportedModelError(
            f"no shortcut of {type(model).__name__} can be projected: "
            f"{reasons or 'it has no residual sum with an identity side'}. Use shortcuts='couple'"
        )
    net = apply_projections(model, found.record)
    _check_unchanged(model, net, Inputs.of(example_inputs, model))
    return net, found


def find_shortcuts(model: nn.Module, example_inputs: Any) -> Shortcuts:
    """Find the identity shortcuts of a model; it is not changed.

    Raises:
        UnsupportedModelError: the model cannot be copied, or fails on the inputs.
    """
    work = copied_module(model)
    record: list[Entry] = []
    coupled: dict[str, str] = {}
    with evaluating(work):
        calls = first_calls(work, Inputs.of(example_inputs, work).random(2, seed=0))
        opaque: dict[str, tuple[Call, str]] = {}
        named = list(work.named_modules())
        for name, block in reversed(named):  # children first
            if block not in calls or type(block) in _CONTAINERS or not has_mixing(block):
                continue
            call = calls[block]
            try:
                record += _empty_attributes(name, block, call)
                entries, spliced = _written_sums(name, block, call, coupled)
            except SpliceError as error:
                opaque[name] = (call, str(error))
                continue
            except FORWARD_ERRORS as error:
                coupled[name] = f"it cannot be run on its own ({type(error).__name__}: {error})"
                continue
            record += entries
            work = replace_(work, block, spliced)
        order = {name: number for number, (name, _) in enumerate(named)}
        record.sort(key=lambda entry: order[entry["name"].rpartition(".")[0]])
        for name, (call, why) in opaque.items():
            if is_residual(work.get_submodule(name), call):
                coupled[name] = why
    named_reasons = {name or "the model": why for name, why in sorted(coupled.items())}
    return Shortcuts(tuple(record), named_reasons)


def _empty_attributes(name: str, block: nn.Module, call: Call) -> list[Entry]:
    """Project shortcuts that an attribute of the block holds, in place."""
    found = []
    for attribute in _ATTRIBUTES:
        if not is_identity(block, attribute):
            continue
        old, tap = getattr(block, attribute), Tap()
        set_attribute_(block, attribute, tap)
        try:
            entry = _on_attribute(f"{name}.{attribute}".lstrip("."), block, tap, call)
        except FORWARD_ERRORS:
            entry = None
        if entry is None:
            set_attribute_(block, attribute, old)
        else:
            found.append(entry)
    return found


def _on_attribute(name: str, block: nn.Module, tap: Tap, call: Call) -> Entry | None:
    """Put a layer in the place of the tap if it is on the identity side of a residual sum."""
    call.run(block)
    seen = tap.seen
    if seen is None or not nan_arrives(block, call, everything=True):
        return None
    entry = _entry(name, seen, channel_axis(block, call, lambda outputs: outputs[0]))
    if entry is None:
        return None
    layer = new_layer(block, entry)
    set_attribute_(block, name.rpartition(".")[2], layer)
    alone = nan_arrives(block, call, poisoned=lambda m: m is layer)
    others = nan_arrives(block, call, poisoned=lambda m: m is not layer)
    through = nan_arrives(block, call, everything=True) or is_read(block, call, layer)
    return entry if alone and others and not through else None


def _written_sums(
    name: str, block: nn.Module, call: Call, coupled: dict[str, str]
) -> tuple[list[Entry], nn.Module]:
    """Entries for the residual sums in the code of the block, and the block with their layers.

    Raises:
        SpliceError: the block cannot be rewritten.
    """
    found = []
    for number, side in residual_sums(block).items():
        taps = Tap(), Tap()
        tapped = splice(block, {(number, i): (f"tap_{i}", tap) for i, tap in enumerate(taps)})
        call.run(tapped)
        shortcut, branch = taps[side], taps[1 - side]
        if shortcut.seen is None or branch.seen is None or shortcut.seen.shape != branch.seen.shape:
            continue
        axis = channel_axis(tapped, call, partial(_seen, branch))
        entry = _entry(f"{name}.shortcut_{number}".lstrip("."), shortcut.seen, axis)
        if entry is None:
            coupled[name] = "the axis of the channels cannot be told"
            continue
        found.append(entry | {"sum": number, "side": side})
    if not found:
        return [], block
    spliced = splice(block, {place(e): inserted(block, e) for e in found})
    if not all(map(_close, call.run(block), call.run(spliced))):
        coupled[name] = "the code that torch.fx traced gives other outputs"
        return [], block
    return found, spliced


def _seen(tap: Tap, _outputs: list[Tensor]) -> Tensor:
    assert tap.seen is not None
    return tap.seen


def _entry(name: str, x: Tensor, axis: int | None) -> Entry | None:
    """The layer for values ``x`` with channels along an axis."""
    if axis == 1 and 3 <= x.dim() <= 5:
        kind = f"Conv{x.dim() - 2}d"
    elif axis == x.dim() - 1:
        kind = "Linear"
    else:
        return None
    return {"name": name, "layer": kind, "width": x.shape[axis]}


def _check_unchanged(model: nn.Module, net: nn.Module, inputs: Inputs) -> None:
    """Compare outputs in evaluation mode, in double precision where the model takes it."""
    noise = inputs.random(2, seed=1)
    try:
        doubled = noise.to(torch.float64)
        before, after = (_outputs(in_double(m), doubled) for m in (model, net))
    except FORWARD_ERRORS:
        before, after = (_outputs(copy.deepcopy(m), noise) for m in (model, net))
    if len(before) != len(after) or not all(map(_close, before, after)):
        raise EquivalenceError(
            f"{type(model).__name__} with projected shortcuts gives other outputs on "
            f"{noise.describe()}: use shortcuts='couple'"
        )


def _outputs(model: nn.Module, inputs: Inputs) -> list[Tensor]:
    with evaluating(model):
        return floating_tensors(inputs.call(model))


def _close(x: Tensor, y: Tensor) -> bool:
    if x.shape != y.shape:
        return False
    scale = float(x.abs().nan_to_num(0.0, 0.0, 0.0).max()) if x.numel() else 0.0
    return torch.allclose(x, y, rtol=0.0, atol=TOLERANCE * scale, equal_nan=True)
