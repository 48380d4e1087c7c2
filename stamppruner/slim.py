"""Slim networks as files: one safetensors file with the weights and a plan that rebuilds them.

Needs torch and safetensors alone. Loading changes the widths of a freshly made model and fills in
the weights by name: no tracing, no pickle. Projected shortcuts are put in again first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from stamppruner.devices import why_not
from stamppruner.errors import CheckpointError, ConfigError, shown
from stamppruner.factory import full_model
from stamppruner.files import PathLike
from stamppruner.io import parse_record, read_metadata, read_safetensors, write_safetensors
from stamppruner.layers import WIDTH_ATTRIBUTES, written_shapes
from stamppruner.projection import projections, replay_
from stamppruner.rewire import is_place, restore_
from stamppruner.state_dicts import misfit, plain

FORMAT = "stamppruner.slim"
VERSION = 1

_MAX_WIDTH = 2**24
_SHAPE = "normalized_shape"


def save_slim(path: PathLike, model: nn.Module, plan: Mapping[str, Any]) -> None:
    """Write a slim model.

    Args:
        path: usually ``*.safetensors``; replaced atomically.
        model: the slim model.
        plan: JSON-able facts to travel with it (kept channels, budget, versions).

    Raises:
        CheckpointError: the path cannot be written.
    """
    record = {
        "format": FORMAT,
        "version": VERSION,
        "model_class": f"{type(model).__module__}.{type(model).__qualname__}",
        "widths": _widths(model),
        "projections": projections(model),
        **plan,
    }
    write_safetensors(path, {**model.state_dict(), **_unsaved(model)}, {FORMAT: json.dumps(record)})


def describe(path: PathLike) -> dict[str, Any]:
    """The plan in a slim file; reads its header only.

    Args:
        path: a file of :meth:`PruneResult.save`.

    Returns:
        What the file says of itself, as JSON values: kept channels, budget asked and reached,
        names of the classes, settings.

    Raises:
        CheckpointError: the file cannot be read or is not a slim file of a known version.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_slim(f"{folder}/slim.safetensors", nn.Linear(2, 2), {"budget": {"macs": 0.5}})
        ...     describe(f"{folder}/slim.safetensors")["budget"]
        {'macs': 0.5}
    """
    return parse_record(read_metadata(path), FORMAT, VERSION, path, noun="slim model")


def load_slim(
    path: PathLike,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """Rebuild a slim model, with exactly the outputs of the one that was saved.

    Args:
        path: a file of :meth:`PruneResult.save`.
        model: a full model of the saved class, which is not changed, or a function that makes one
            (a class, ``lambda: resnet18(100)``). Its weights do not matter: it may be on the
            ``meta`` device. By default the function of torchvision, timm or this package that the
            file names, see :mod:`~stamppruner.factory`; nothing else is ever called.
        device: of the result.

    Returns:
        The slim model, in evaluation mode.

    Raises:
        CheckpointError: the file cannot be read, is of another format or version, or does not fit
            the model; every name that does not fit is listed. Or it names no function, and no
            model is given.
        ConfigError: there is no such device, or ``model`` is neither.
        MissingExtraError: the library of the function is not installed.

    Example:
        >>> import tempfile
        >>> net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1))  # slim: 5 of 8 channels
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_slim(f"{folder}/slim.safetensors", net, {})
        ...     full = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 1))
        ...     again = load_slim(f"{folder}/slim.safetensors", full)
        >>> torch.equal(again(torch.ones(1, 3, 4, 4)), net(torch.ones(1, 3, 4, 4)))
        True
    """
    if (reason := why_not(device)) is not None:
        raise ConfigError(f"load_slim(device={str(device)!r}): {reason}")
    tensors, metadata = read_safetensors(path)
    record = parse_record(metadata, FORMAT, VERSION, path, noun="slim model")
    slim = full_model(model, record, path, blank=True)
    slim = replay_(slim, record.get("projections", []), path)
    _check_names(slim, {n: t for n, t in tensors.items() if not is_place(n)}, path)
    _apply_widths(slim, record.get("widths"), path)
    _check_kernels(slim, tensors, path)
    restore_(slim, tensors, path)
    for name, tensor in tensors.items():
        _assign(slim, name, tensor)
    _check_filled(slim, path)
    return slim.to(device).eval()


def _check_filled(model: nn.Module, path: PathLike) -> None:
    """No tensor may be left without data."""
    named = (*model.named_parameters(), *model.named_buffers())
    if empty := sorted(name for name, tensor in named if tensor.is_meta):
        raise CheckpointError(
            f"{path} has no values for {', '.join(empty[:5])}, and the model is on the meta "
            "device: make it on the CPU"
        )


def _widths(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Width attributes of every module that has some: integers, and shapes of layer norms."""
    found = {}
    for name, module in model.named_modules():
        own: dict[str, Any] = {
            a: v
            for a in WIDTH_ATTRIBUTES
            if type(v := vars(module).get(a)) is int and v > 0  # an axis may be called dim
        }
        if isinstance(shape := getattr(module, _SHAPE, None), tuple):
            own[_SHAPE] = list(shape)
        if own:
            found[name] = own
    return found


def _unsaved(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a state dict leaves out (a fixed filter, say): they were cut like any other."""
    return {
        f"{owner}.{name}" if owner else name: buffer
        for owner, module in model.named_modules()
        for name in sorted(module._non_persistent_buffers_set)
        if (buffer := module._buffers[name]) is not None
    }


def _check_names(model: nn.Module, tensors: Mapping[str, Tensor], path: PathLike) -> None:
    own, optional = model.state_dict(), _unsaved(model)
    if text := misfit(own, tensors, optional=optional, widths_may_differ=True):
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}: {text}. Pass the model class (and code "
            "version) that was pruned"
        )


def _may_change(module: nn.Module, attribute: str, value: Any, others: Mapping[str, Any]) -> bool:
    """Whether a cut can have changed a module's attribute to this value.

    Modules without tensors are never cut: theirs are axes (``Softmax.dim``) or numbers of parts.
    """
    own = vars(module)
    if own.get(attribute) == value:
        return True
    if attribute == _SHAPE:
        return isinstance(own.get(_SHAPE), tuple) and len(own[_SHAPE]) == len(value)
    tensors = (*module.parameters(False), *module.buffers(False))
    if type(own.get(attribute)) is not int or not (tensors or parametrize.is_parametrized(module)):
        return False
    if attribute == "num_groups":  # of one channel each, or as many as there were
        return own.get("num_channels") == own[attribute] and others.get("num_channels") == value
    return True


def _apply_widths(model: nn.Module, widths: Any, path: PathLike) -> None:
    modules = dict(model.named_modules())
    if not isinstance(widths, dict):
        raise CheckpointError(f"{path}: the plan lists no widths: the file is damaged")
    for name, attributes in widths.items():
        if name not in modules or not isinstance(attributes, dict):
            raise CheckpointError(
                f"{path}: the model has no module {shown(name)}: pass the pruned class"
            )
        for attribute, value in attributes.items():
            known = attribute in (*WIDTH_ATTRIBUTES, _SHAPE) and hasattr(modules[name], attribute)
            whole = isinstance(value, list) == (attribute == _SHAPE)
            sizes = value if isinstance(value, list) else [value]
            if (
                not (known and whole)
                or any(type(n) is not int or not 0 < n < _MAX_WIDTH for n in sizes)
                or not _may_change(modules[name], attribute, value, attributes)
            ):
                raise CheckpointError(
                    f"{path}: {name!r} cannot have {plain(attribute)} = {shown(value)}: the file "
                    "is damaged or of another model"
                )
            value = tuple(value) if attribute == _SHAPE else value
            if getattr(modules[name], attribute) != value:
                setattr(modules[name], attribute, value)


def _check_kernels(model: nn.Module, tensors: Mapping[str, Tensor], path: PathLike) -> None:
    """Kernels of another size, and weights of other widths than noted, would load."""
    for name, module in model.named_modules():
        for leaf, shape in written_shapes(module).items():
            tensor = tensors.get(f"{name}.{leaf}" if name else leaf)
            if tensor is not None and tuple(tensor.shape[: len(shape)]) != shape:
                raise CheckpointError(
                    f"{path} does not fit {type(model).__name__}: {leaf} of {name!r} is "
                    f"{tuple(tensor.shape)} in the file, and {shape} by its widths: the file is "
                    "damaged or of another model"
                )
        weight = tensors.get(f"{name}.weight" if name else "weight")
        if not isinstance(module, _ConvNd) or weight is None:
            continue
        saved, own = tuple(weight.shape[2:]), tuple(module.kernel_size)
        if saved != own:
            raise CheckpointError(
                f"{path} does not fit {type(model).__name__}: the kernel of {name!r} is {saved} in "
                f"the file and {own} in the model. Pass the model class that was pruned"
            )


def _assign(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a tensor in the place of a parameter or buffer: its layout and ``requires_grad`` stay."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    old = module._parameters.get(leaf)
    if old is not None:
        tensor = tensor.contiguous(memory_format=_layout(old))
        module._parameters[leaf] = nn.Parameter(tensor, requires_grad=old.requires_grad)
    else:
        module._buffers[leaf] = tensor


def _layout(tensor: Tensor) -> torch.memory_format:
    """Channels last where the tensor is stored like that, and in no other order."""
    for axes, layout in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        other = tensor.dim() == axes and not tensor.is_contiguous()
        if other and tensor.is_contiguous(memory_format=layout):
            return layout
    return torch.contiguous_format
