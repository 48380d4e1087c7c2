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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from stamppruner import layers
from stamppruner.calls import FORWARD_ERRORS, evaluating, floating_tensors, patched_forwards
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
_NORMS = (nn.LayerNorm, nn.GroupNorm)


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
        logger.warning("%s keeps its identity shortcut: %s", name or "the model", why)
    before = projections(model)
    if not found.record and not before:
        reasons = "; ".join(f"{name or 'the model'}: {why}" for name, why in found.coupled.items())
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
    try:
        work = copy.deepcopy(model)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedModelError(f"{type(model).__name__} cannot be copied: {error}") from error
    record: list[Entry] = []
    coupled: dict[str, str] = {}
    with evaluating(work):
        calls = _calls(work, Inputs.of(example_inputs, work).random(2, seed=0))
        opaque: dict[str, tuple[_Call, str]] = {}
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
            if _is_residual(work.get_submodule(name), call):
                coupled[name] = why
    return Shortcuts(tuple(record), dict(sorted(coupled.items())))


@dataclass(frozen=True)
class _Call:
    """The arguments of one call of a block."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, block: nn.Module, *, poisoned: bool = False) -> list[Tensor]:
        """Floating outputs of the block; of NaN in place of the floating arguments if asked."""

        def fresh(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            nan = poisoned and x.is_floating_point()
            return torch.full_like(x, torch.nan) if nan else x.clone()

        return floating_tensors(block(*tree_map(fresh, self.args), **tree_map(fresh, self.kwargs)))


def _calls(model: nn.Module, inputs: Inputs) -> dict[nn.Module, _Call]:
    """The first call of every module with children.

    Raises:
        UnsupportedModelError: the model fails.
    """
    calls: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module not in calls:
            keep = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs))
            calls[module] = _Call(*keep)

    blocks = [m for m in model.modules() if next(m.children(), None) is not None]
    handles = [m.register_forward_pre_hook(note, with_kwargs=True) for m in blocks]
    try:
        inputs.call(model)
    except FORWARD_ERRORS as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails on the example inputs {inputs.describe()}: "
            f"{type(error).__name__}: {error}. Pass example_inputs it takes"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    return calls


class _Tap(nn.Identity):
    """An identity that remembers what passed."""

    seen: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x
        return x


def _empty_attributes(name: str, block: nn.Module, call: _Call) -> list[Entry]:
    """Project shortcuts that an attribute of the block holds, in place."""
    found = []
    for attribute in _ATTRIBUTES:
        if not is_identity(block, attribute):
            continue
        old, tap = getattr(block, attribute), _Tap()
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


def _on_attribute(name: str, block: nn.Module, tap: _Tap, call: _Call) -> Entry | None:
    """Put a layer in the place of the tap if it is on the identity side of a residual sum."""
    call.run(block)
    seen = tap.seen
    if seen is None or not _nan(block, call, everything=True):
        return None
    entry = _entry(name, seen, _axis(block, call, lambda outputs: outputs[0]))
    if entry is None:
        return None
    layer = new_layer(block, entry)
    set_attribute_(block, name.rpartition(".")[2], layer)
    alone = _nan(block, call, layers_=lambda m: m is layer)
    others = _nan(block, call, layers_=lambda m: m is not layer)
    through = _nan(block, call, everything=True) or _is_read(block, call, layer)
    return entry if alone and others and not through else None


def _written_sums(
    name: str, block: nn.Module, call: _Call, coupled: dict[str, str]
) -> tuple[list[Entry], nn.Module]:
    """Entries for the residual sums in the code of the block, and the block with their layers.

    Raises:
        SpliceError: the block cannot be rewritten.
    """
    found = []
    for number, side in residual_sums(block).items():
        taps = _Tap(), _Tap()
        tapped = splice(block, {(number, i): (f"tap_{i}", tap) for i, tap in enumerate(taps)})
        call.run(tapped)
        shortcut, branch = taps[side], taps[1 - side]
        if shortcut.seen is None or branch.seen is None or shortcut.seen.shape != branch.seen.shape:
            continue
        axis = _axis(tapped, call, partial(_seen, branch))
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


def _seen(tap: _Tap, _outputs: list[Tensor]) -> Tensor:
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


def _axis(block: nn.Module, call: _Call, read: Callable[[list[Tensor]], Tensor]) -> int | None:
    """Axis of the channels of some values: the only one along which channel 0 is alone NaN.

    Where norms of unknown kinds spread the NaN, blocks of convolutions have it at 1.
    """
    with _answering(block, lambda _: True):
        nan = read(call.run(block)).isnan()
    axes = [
        axis
        for axis in range(1, nan.dim())
        if nan.shape[axis] > 1 and int(nan.movedim(axis, 0).flatten(1).any(1).sum()) == 1
    ]
    if len(axes) == 1:
        return axes[0]
    mixing = [m for m in block.modules() if layers.is_mixing(m)]
    convolutions = mixing and not any(isinstance(m, nn.Linear) for m in mixing)
    return 1 if convolutions and nan.dim() > 2 else None


def _nan(
    block: nn.Module,
    call: _Call,
    *,
    layers_: Callable[[nn.Module], bool] = lambda _: False,
    everything: bool = False,
) -> bool:
    """Whether NaN arrives at the block's output, from some mixing layers or from its input."""
    with _answering(block, layers_):
        return any(bool(x.isnan().any()) for x in call.run(block, poisoned=everything))


def _is_read(block: nn.Module, call: _Call, layer: nn.Module) -> bool:
    """Whether a mixing layer of the block reads what a layer writes: it is not on a shortcut."""
    read: list[bool] = []
    mixing = [m for m in block.modules() if layers.is_mixing(m)]
    handles = [
        m.register_forward_pre_hook(lambda _m, args: read.append(bool(args[0].isnan().any())))
        for m in mixing
    ]
    try:
        _nan(block, call, layers_=lambda m: m is layer)
    finally:
        for handle in handles:
            handle.remove()
    return any(read)


def _is_residual(block: nn.Module, call: _Call) -> bool:
    """Whether both the block's input and its mixing layers reach its output."""
    try:
        arrives = _nan(block, call, everything=True)
        return arrives and _nan(block, call, layers_=lambda _: True)
    except FORWARD_ERRORS:
        return False


def _answering(block: nn.Module, poisoned: Callable[[nn.Module], bool]) -> Any:
    """Mixing layers answer with ones, and NaN in channel 0 where asked; norms let all pass."""

    def answer(module: nn.Module, forward: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Any:
        y = torch.ones_like(forward(*args, **kwargs))
        if poisoned(module):
            y.select(layers.channel_axis(module, y.dim()), 0).fill_(torch.nan)
        return y

    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for module in block.modules():
        if layers.is_mixing(module):
            forwards[module] = partial(answer, module, module.forward)
        elif isinstance(module, _NORMS):
            forwards[module] = lambda x: x
    return patched_forwards(forwards)


def _check_unchanged(model: nn.Module, net: nn.Module, inputs: Inputs) -> None:
    """Compare outputs in evaluation mode, in double precision where the model takes it."""
    noise = inputs.random(2, seed=1)
    try:
        pair = [copy.deepcopy(m).double() for m in (model, net)]
        before, after = _outputs(pair[0], noise.to(torch.float64)), None
        after = _outputs(pair[1], noise.to(torch.float64))
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
