"""Networks by name, as a command line needs them: a short list, and no import of anything else.

``vgg19`` and ``resnet18`` are those of :mod:`stamppruner.models`; ``torchvision:NAME`` and
``timm:NAME`` ask those libraries for one of their own, without pretrained weights. Sizes that are
not given are read off the tensors of a file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from stamppruner.errors import CheckpointError, ConfigError, MissingExtraError
from stamppruner.models import VGG, ResNet, resnet18, vgg19

Tensors = Mapping[str, Tensor]

_FORBIDDEN = ("pretrained", "weights", "checkpoint", "cache")
"""Beginnings of arguments that would read files or fetch weights."""

_REFUSALS = (TypeError, ValueError, RuntimeError, AssertionError, KeyError, AttributeError)
"""What a library raises for arguments that do not fit."""


def named_model(name: str, arguments: Mapping[str, Any], tensors: Tensors) -> nn.Module:
    """A network into which tensors fit, with weights of its own.

    Args:
        name: ``vgg19``, ``resnet18``, ``torchvision:NAME`` or ``timm:NAME``.
        arguments: of the function that makes it. Without any, ours get the widths, blocks,
            classes and channels of the tensors, and those of libraries their classes.
        tensors: what it must hold, by name.

    Raises:
        ConfigError: an unknown name, or arguments that are not taken.
        CheckpointError: the tensors are not those of such a network; the first is named.
        MissingExtraError: the library is not installed.
    """
    if refused := [key for key in arguments if key.startswith(_FORBIDDEN)]:
        raise ConfigError(f"model argument {refused[0]!r}: weights come from the pruner's file")
    library, _, short = name.rpartition(":")
    makers = {"": _ours, "torchvision": _torchvision, "timm": _timm}
    if library not in makers:
        raise ConfigError(f"model {name!r}: {_CHOICES}")
    try:
        model = makers[library](short, arguments, tensors)
    except _REFUSALS as error:
        raise ConfigError(f"model {name!r} does not take {dict(arguments)!r}: {error}") from error
    _check_fits(model, tensors, name)
    return model


_CHOICES = "choose vgg19, resnet18, torchvision:NAME or timm:NAME"


def _ours(name: str, arguments: Mapping[str, Any], tensors: Tensors) -> nn.Module:
    makers: dict[str, tuple[Callable[..., nn.Module], Callable[[Tensors], nn.Module]]] = {
        "vgg19": (vgg19, _vgg_of),
        "resnet18": (resnet18, _resnet_of),
    }
    if name not in makers:
        raise ConfigError(f"model {name!r}: {_CHOICES}")
    make, of = makers[name]
    return make(**arguments) if arguments else of(tensors)


def _vgg_of(tensors: Tensors) -> nn.Module:
    """The VGG of these tensors: a convolution, its norm and a ReLU are three entries of a list."""
    blocks: list[list[int]] = []
    last = -4
    convolutions = _matching(tensors, r"features\.(\d+)\.weight", axes=4)
    for (index,), weight in convolutions:
        if index - last > 3:  # a pool lies between
            blocks.append([])
        blocks[-1].append(len(weight))
        last = index
    if not blocks:
        raise CheckpointError(f"the file has no VGG in it: {_OTHER}")
    return VGG(blocks, _classes(tensors), in_channels=convolutions[0][1].shape[1])


def _resnet_of(tensors: Tensors) -> nn.Module:
    """The ResNet of these tensors."""
    widths: dict[int, int] = {}
    blocks: dict[int, int] = {}
    for (stage, block), weight in _matching(
        tensors, r"stages\.(\d+)\.(\d+)\.conv1\.weight", axes=4
    ):
        widths[stage], blocks[stage] = len(weight), block + 1
    stem = tensors.get("conv1.weight")
    if not widths or stem is None or stem.dim() != 4:
        raise CheckpointError(f"the file has no ResNet of this package in it: {_OTHER}")
    sizes = list(blocks.values()), list(widths.values())
    return ResNet(*sizes, _classes(tensors), in_channels=stem.shape[1])


_OTHER = "pass --model as the network that the pruner was made for"


def _matching(tensors: Tensors, pattern: str, axes: int) -> list[tuple[tuple[int, ...], Tensor]]:
    """Tensors of some axes by the numbers in their names, in the order of these."""
    found = []
    for name, tensor in tensors.items():
        match = re.fullmatch(pattern, name)
        if match and tensor.dim() == axes:
            found.append((tuple(map(int, match.groups())), tensor))
    return sorted(found, key=lambda item: item[0])


def _classes(tensors: Tensors) -> int:
    head = tensors.get("classifier.weight")
    if head is None:
        raise CheckpointError(f"the file has no 'classifier.weight': {_OTHER}")
    return len(head)


def _torchvision(name: str, arguments: Mapping[str, Any], tensors: Tensors) -> nn.Module:
    try:
        from torchvision import models
    except ImportError as error:
        raise MissingExtraError("torchvision is missing; run: pip install torchvision") from error
    if name not in models.list_models(module=models):  # detectors fetch backbones
        raise ConfigError(
            f"torchvision has no classifier {name!r}: see torchvision.models.list_models"
        )
    return _with_classes(
        lambda **own: models.get_model(name, weights=None, **own), arguments, tensors
    )


def _timm(name: str, arguments: Mapping[str, Any], tensors: Tensors) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError("timm is missing; run: pip install timm") from error
    if name not in timm.list_models():
        raise ConfigError(f"timm has no model {name!r}: see timm.list_models")
    return _with_classes(
        lambda **own: timm.create_model(name, pretrained=False, **own), arguments, tensors
    )


def _with_classes(
    make: Callable[..., nn.Module], arguments: Mapping[str, Any], tensors: Tensors
) -> nn.Module:
    """The network; where its last layer is longer in the file, one of that many classes."""
    model = make(**arguments)
    last = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1:]
    weight = tensors.get(f"{last[0]}.weight") if last else None
    if weight is None or "num_classes" in arguments:
        return model
    if len(weight) == len(model.get_parameter(f"{last[0]}.weight")):
        return model
    return make(**arguments, num_classes=len(weight))


def _check_fits(model: nn.Module, tensors: Tensors, name: str) -> None:
    """One line about the first tensor that differs, where loading would list hundreds."""
    own = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    saved = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    for key in [*own, *saved]:
        if own.get(key) != saved.get(key):
            raise CheckpointError(
                f"the file is not of this {name}: {key} is {saved.get(key, 'missing')} in the file "
                f"and {own.get(key, 'missing')} in the network; {_OTHER}, or its sizes as "
                "--model-args, such as '{\"width\": 0.5}'"
            )
