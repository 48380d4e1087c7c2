"""Layers on identity shortcuts: what they are, the record of them, and putting them into a model.

The record is a list of JSON-able entries, one a layer, and rebuilds them without data:

* ``name``: qualified name of the new layer;
* ``layer`` and ``width``: its class in ``torch.nn`` and its channels;
* ``sum`` and ``side``: for sums that a ``forward`` writes, the place (see splice.py); entries
  without them replace an attribute of the block that is None, an identity or empty.

Each layer carries its entry as an attribute, so the record is read off the model itself.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from stamppruner.errors import CheckpointError, UnsupportedModelError, shown
from stamppruner.layers import first_floating
from stamppruner.splice import Place, SpliceError, residual_sums, splice

Entry = dict[str, Any]

_LAYERS = ("Conv1d", "Conv2d", "Conv3d", "Linear")
_MARK = "projected_shortcut"
_MAX_WIDTH = 2**14
_MAX_SUM = 2**16
_MAX_ENTRIES = 2**12
_MAX_GROWTH = 4
_ALWAYS_ALLOWED = 2**20
_OF_ANY_MODULE = frozenset(dir(nn.Module())) | frozenset(dir(torch.fx.GraphModule))


def projections(model: nn.Module) -> list[Entry]:
    """The record of the projections in a model; empty if there is none.

    Example:
        >>> import torch
        >>> from stamppruner import project_shortcuts
        >>> from stamppruner.models import ResNet
        >>> net = project_shortcuts(ResNet((1, 1), (8, 8), 3), torch.zeros(1, 3, 16, 16))
        >>> projections(net)[0]["name"]
        'stages.0.0.shortcut'
    """
    return [dict(getattr(m, _MARK)) for m in model.modules() if hasattr(m, _MARK)]


def apply_projections(model: nn.Module, record: Iterable[Mapping[str, Any]]) -> nn.Module:
    """A copy of the model with the projections of a record; nothing is run.

    New layers select the identity, take gradients, and have the mode, device and dtype of their
    block. Projections that the model has already are left as they are.

    Args:
        model: it is not changed.
        record: of :func:`projections`.

    Raises:
        UnsupportedModelError: an entry is malformed, or does not fit the model; it is named.

    Example:
        >>> import torch
        >>> from stamppruner import project_shortcuts
        >>> from stamppruner.models import ResNet
        >>> net = project_shortcuts(ResNet((1, 1), (8, 8), 3), torch.zeros(1, 3, 16, 16))
        >>> again = apply_projections(ResNet((1, 1), (8, 8), 3), projections(net))
        >>> again.load_state_dict(net.state_dict())
        <All keys matched successfully>
    """
    return apply_(copy.deepcopy(model), record)


def apply_(model: nn.Module, record: Iterable[Mapping[str, Any]]) -> nn.Module:
    """As :func:`apply_projections`, in place; the result is another module if the root changes."""
    sums: dict[str, list[Entry]] = {}
    for checked in checked_record(record):
        parent, _, leaf = checked["name"].rpartition(".")
        block = _block(model, parent, checked["name"])
        if hasattr(block._modules.get(leaf), _MARK):
            continue
        if "sum" in checked:
            sums.setdefault(parent, []).append(checked)
        elif is_identity(block, leaf):
            set_attribute_(block, leaf, new_layer(block, checked))
        else:
            raise _misfit(checked["name"], f"{parent!r} has no empty attribute {leaf!r}")
    for parent, entries in sums.items():
        block = _block(model, parent, entries[0]["name"])
        try:
            shortcuts = residual_sums(block).items()
            if wrong := [e["name"] for e in entries if place(e) not in shortcuts]:
                raise _misfit(wrong[0], "its sum has no shortcut on that side")
            spliced = splice(block, {place(e): inserted(block, e) for e in entries})
        except SpliceError as error:
            raise _misfit(entries[0]["name"], str(error)) from error
        model = replace_(model, block, spliced)
    return model


def replay_(model: nn.Module, record: Any, path: object) -> nn.Module:
    """As :func:`apply_`, for the record of a file, which is trusted in nothing.

    Raises:
        CheckpointError: the record is damaged, does not fit the model, or asks for layers that are
            out of proportion to it.
    """
    try:
        if not isinstance(record, list):
            raise UnsupportedModelError(f"projected shortcuts are {shown(record)}, not a list")
        _check_size(model, checked_record(record))
        return apply_(model, record)
    except UnsupportedModelError as error:
        raise CheckpointError(f"{path} is damaged or of another model: {error}") from error


def checked_record(record: Iterable[Any]) -> list[Entry]:
    """The entries of a record, if all have the right form and no two are one.

    Raises:
        UnsupportedModelError: an entry is malformed; it is named.
    """
    entries = [_checked(entry) for entry in record]
    if len(entries) > _MAX_ENTRIES:
        raise UnsupportedModelError(
            f"{len(entries)} projected shortcuts: at most {_MAX_ENTRIES} are taken"
        )
    seen: set[object] = set()
    for entry in entries:
        block = entry["name"].rpartition(".")[0]
        places = {entry["name"], (block, *place(entry)) if "sum" in entry else entry["name"]}
        if places & seen:
            raise _misfit(entry["name"], "its record has its name or place twice")
        seen |= places
    return entries


def _check_size(model: nn.Module, entries: Iterable[Entry]) -> None:
    """Raise before layers are made that take far more memory than the model does."""
    allowed = _MAX_GROWTH * sum(p.numel() for p in model.parameters()) + _ALWAYS_ALLOWED
    for entry in entries:
        allowed -= entry["width"] ** 2
        if allowed < 0:
            raise _misfit(
                entry["name"],
                f"up to its width, {entry['width']}, the layers of the record take over "
                f"{_MAX_GROWTH} times the parameters of the model",
            )


def without_projections(model: nn.Module) -> nn.Module:
    """A copy of the model with identities in place of its projections; the model if it has none."""
    names = [entry["name"] for entry in projections(model)]
    if not names:
        return model
    plain = copy.deepcopy(model)
    for name in names:
        parent, _, leaf = name.rpartition(".")
        setattr(plain.get_submodule(parent), leaf, nn.Identity())
    return plain


def new_layer(block: nn.Module, entry: Mapping[str, Any]) -> nn.Module:
    """The layer of an entry: 1x1, without bias, on the identity; marked with the entry."""
    kind, width, like = entry["layer"], entry["width"], first_floating(block)
    size = () if kind == "Linear" else (1,)
    layer: nn.Module = getattr(nn, kind)(
        width, width, *size, bias=False, device=like.device, dtype=like.dtype
    )
    with torch.no_grad():
        identity = torch.eye(width, dtype=like.dtype, device=like.device)
        layer.weight.copy_(identity.reshape(layer.weight.shape))  # type: ignore[operator, union-attr, arg-type]
    setattr(layer, _MARK, dict(entry))
    return layer.train(block.training)


def place(entry: Mapping[str, Any]) -> Place:
    """Where an entry's layer is spliced in."""
    return entry["sum"], entry["side"]


def inserted(block: nn.Module, entry: Mapping[str, Any]) -> tuple[str, nn.Module]:
    """Name within the block, and layer, of an entry."""
    return entry["name"].rpartition(".")[2], new_layer(block, entry)


def is_identity(block: nn.Module, name: str) -> bool:
    """Whether an attribute of a block stands for no operation.

    What every module has, and options of layers that hold no others (``momentum=None``), do not.
    """
    if name not in block._modules and (
        name not in block.__dict__ or name in _OF_ANY_MODULE or not block._modules
    ):
        return False
    value = getattr(block, name)
    empty = isinstance(value, nn.Sequential) and len(value) == 0
    return value is None or isinstance(value, nn.Identity) or empty


def set_attribute_(block: nn.Module, name: str, module: nn.Module | None) -> None:
    """Put a module in the place of a child, or of an attribute that is None; or None back."""
    if module is None:
        block._modules.pop(name, None)
    setattr(block, name, module)


def replace_(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put ``new`` wherever the model holds ``old``; returns the model, or ``new`` for the model."""
    if model is old:
        return new
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if child is old:
                module._modules[name] = new
    return model


def _block(model: nn.Module, parent: str, name: str) -> nn.Module:
    """The module of that name; only children are looked at, no other attributes."""
    block: nn.Module | None = model
    for part in parent.split(".") if parent else ():
        block = block._modules.get(part) if block is not None else None
    if block is None:
        raise _misfit(name, f"the model has no module {shown(parent)}")
    return block


def _checked(entry: Any) -> Entry:
    """The entry, if it has the right form."""
    if (
        not isinstance(entry, Mapping)
        or not isinstance(entry.get("name"), str)
        or not entry["name"]
    ):
        raise UnsupportedModelError(
            f"an entry of the projected shortcuts has no name: {shown(entry)}"
        )

    def whole(key: str, low: int, high: int) -> bool:
        return type(value := entry.get(key)) is int and low <= value <= high

    spliced = entry.keys() == {"name", "layer", "width", "sum", "side"}
    right = entry.get("layer") in _LAYERS and whole("width", 1, _MAX_WIDTH)
    if spliced:
        right &= whole("sum", 0, _MAX_SUM) and whole("side", 0, 1)
        # Nothing else: torch.fx writes the name into code without quoting it.
        right &= entry["name"].rpartition(".")[2] == f"shortcut_{entry['sum']}"
    if not right or not (spliced or entry.keys() == {"name", "layer", "width"}):
        raise _misfit(entry["name"], f"its record is malformed ({shown(dict(entry))})")
    return dict(entry)


def _misfit(name: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the projected shortcut {shown(name)} does not fit: {why}. Pass the model class (and code "
        "version) that was projected"
    )
