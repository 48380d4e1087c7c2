"""Who made a network: one of a short list of functions, found again by the network's structure.

A file that records the function is loaded without the user's code. Nothing is imported because a
file says so: names are looked up in the lists of :mod:`~stamppruner.named`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from stamppruner.errors import CheckpointError, ConfigError, StampError, shown
from stamppruner.models import VGG, ResNet
from stamppruner.named import blank_model, fresh_model, resnet_arguments, vgg_arguments
from stamppruner.projection import apply_, projections

_SIMPLE = (int, float, bool, str, type(None))

_MOST_LAYERS = 2**10
_LARGEST = {
    "num_classes": 2**17,
    "in_chans": 2**12,
    "in_channels": 2**12,
    "widths": 2**16,
    "blocks": _MOST_LAYERS,
}
"""Arguments that files may have, and the largest number in each."""

_HEADS = (nn.Linear, nn.Conv2d)

_FREE = frozenset({"training", "num_classes"})
"""Attributes that may differ: a new head does not change what a network says of its classes."""


@dataclass(frozen=True)
class Factory:
    """A function of the list, and its arguments.

    Attributes:
        name: see :func:`~stamppruner.named.named_model`.
        arguments: keyword arguments of JSON's types.
    """

    name: str
    arguments: Mapping[str, Any]

    def make(self, *, blank: bool = False) -> nn.Module:
        """The network, with random weights.

        Args:
            blank: without weights, on the ``meta`` device, where it can be made there.

        Raises:
            ConfigError: the name is not on the list, or the arguments are not taken.
            MissingExtraError: the library is not installed.
        """
        return (blank_model if blank else fresh_model)(self.name, self.arguments)

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"name": self.name, "arguments": dict(self.arguments)}

    @classmethod
    def of_file(cls, record: Mapping[str, Any], path: object) -> Factory:
        """The one that the record of a file names.

        Raises:
            CheckpointError: it names none, or the file is damaged.
        """
        if record.get("factory") is None:
            raise CheckpointError(
                f"{path} does not say how its {shown(record.get('model_class'))} is made: in "
                "Python, pass the full model or the function that makes it, as in "
                "load_slim(path, model); commands cannot use a class of your own"
            )
        return cls.from_json(record["factory"], path)

    @classmethod
    def from_json(cls, record: Any, path: object) -> Factory:
        """Of :meth:`to_json`.

        Raises:
            CheckpointError: it is not.
        """
        name, arguments = (
            (record.get("name"), record.get("arguments")) if isinstance(record, dict) else (None, 0)
        )
        if not isinstance(name, str) or not isinstance(arguments, dict) or not _modest(arguments):
            raise CheckpointError(f"{path}: its factory is {shown(record)}: the file is damaged")
        return cls(name, arguments)


def full_model(
    model: nn.Module | Callable[[], nn.Module] | None,
    record: Mapping[str, Any],
    path: object,
    *,
    blank: bool = False,
) -> nn.Module:
    """The model that a file is of: a copy of the one given, or what makes one.

    Args:
        model: the model, or a function that makes it; None for the one that the file names.
        record: of the file.
        path: of the file, for messages.
        blank: as for :meth:`Factory.make`, of a function that the file names.

    Raises:
        CheckpointError: none is given, and the file names none that is on the list.
        ConfigError: what is given is neither.
        MissingExtraError: the library of the function is not installed.
    """
    if isinstance(model, nn.Module):
        return copy.deepcopy(model)
    if callable(model):
        return model()
    if model is not None:
        raise ConfigError(f"model={shown(model)}: pass a module, or a function that makes one")
    try:
        return Factory.of_file(record, path).make(blank=blank)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _modest(arguments: Mapping[str, Any]) -> bool:
    """Whether arguments of a file are those that are written, and make nothing too large."""
    leaves = {key: tree_leaves(value) for key, value in arguments.items()}
    flat = [leaf for own in leaves.values() for leaf in own]
    return (
        leaves.keys() <= _LARGEST.keys()
        and len(flat) <= _MOST_LAYERS
        and all(type(leaf) is int and leaf > 0 for leaf in flat)
        and all(max(own, default=1) <= _LARGEST[key] for key, own in leaves.items())
        and sum(leaves.get("blocks", [])) <= _MOST_LAYERS
    )


@dataclass(frozen=True)
class Structure:
    """What tells networks of one library apart: modules, their settings, shapes of tensors.

    Attributes:
        kind: the network's class.
        modules: class and plain attributes of every module, by name.
        shapes: of every parameter and buffer, by name.
        projections: record of the layers on shortcuts, see :mod:`~stamppruner.projection`.
        hint: the name that the network gives itself.
    """

    kind: type[nn.Module]
    modules: Mapping[str, tuple[type[nn.Module], Mapping[str, Any]]]
    shapes: Mapping[str, tuple[int, ...]]
    projections: Sequence[Mapping[str, Any]]
    hint: str = ""

    @classmethod
    def of(cls, model: nn.Module) -> Structure:
        """The structure of a network, layers on shortcuts included."""
        return cls(
            type(model),
            {name: _kind_and_settings(module) for name, module in model.named_modules()},
            {name: tuple(x.shape) for name, x in _tensors(model)},
            projections(model),
            str((getattr(model, "default_cfg", None) or {}).get("architecture", "")),
        )


def recognise(structure: Structure) -> Factory | None:
    """The function that makes a network of just this structure, if it is on the list.

    Layers on shortcuts are put in as a file would.
    """
    return next((f for f in _candidates(structure) if _makes(f, structure)), None)


def _makes(factory: Factory, structure: Structure) -> bool:
    try:
        found = Structure.of(apply_(factory.make(blank=True), structure.projections))
    except StampError:
        return False
    return (found.modules, found.shapes) == (structure.modules, structure.shapes)


def _kind_and_settings(module: nn.Module) -> tuple[type[nn.Module], Mapping[str, Any]]:
    """Class and plain attributes; of a module that was rewritten, its code."""
    if isinstance(module, fx.GraphModule):
        return fx.GraphModule, {"code": module.code}
    return type(module), {
        key: value
        for key, value in vars(module).items()
        if key not in _FREE
        and not key.startswith("_")
        and (
            isinstance(value, _SIMPLE)
            or (isinstance(value, tuple) and all(isinstance(v, _SIMPLE) for v in value))
        )
    }


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _candidates(structure: Structure) -> Iterator[Factory]:
    """Factories of networks of this class, with the classes of this one."""
    if structure.kind is VGG:
        yield Factory("vgg", vgg_arguments(structure.shapes))
    elif structure.kind is ResNet:
        yield Factory("resnet", resnet_arguments(structure.shapes))
    library = structure.kind.__module__.partition(".")[0]
    names = []
    if library == "torchvision":
        names = _of_torchvision(structure)
    elif library == "timm":
        names = [structure.hint]
    stem = next(
        (n for n, (kind, _) in structure.modules.items() if issubclass(kind, nn.Conv2d)), ""
    )
    channels = structure.shapes.get(f"{stem}.weight", (0, 3))[1]
    heads = [name for name, (kind, _) in structure.modules.items() if issubclass(kind, _HEADS)]
    shape = structure.shapes.get(f"{heads[-1]}.weight") if heads else None
    arguments: list[dict[str, Any]] = [{}]
    if shape is not None:
        arguments.insert(0, {"num_classes": shape[0]})
    given = {"in_chans": channels} if library == "timm" and channels != 3 else {}
    for name in names:
        for classes in arguments:
            yield Factory(f"{library}:{name}", classes | given)


def _of_torchvision(structure: Structure) -> list[str]:
    """Its networks of this class; those of nearly as many parameters first."""
    from torchvision import models

    size = sum(math.prod(shape) for shape in structure.shapes.values())
    found = []
    for name in models.list_models(models):
        if models.get_model_builder(name).__module__ == structure.kind.__module__:
            default = next(iter(models.get_model_weights(name)), None)
            known = default.meta["num_params"] if default else 0
            found.append((abs(known - size), name))
    return [name for _, name in sorted(found)]
