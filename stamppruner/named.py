"""Networks by name, as a command line needs them: a short list, and no import of anything else.

``vgg19`` and ``resnet18`` are those of :mod:`stamppruner.models`, ``vgg`` and ``resnet`` their
classes; ``torchvision:NAME`` and ``timm:NAME`` ask those libraries for one of their own, without
pretrained weights. Sizes that are not given are read off the tensors of a file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stamppruner.errors import CheckpointError, ConfigError, MissingExtraError
from stamppruner.models import VGG, ResNet, resnet18, vgg19

Tensors = Mapping[str, Tensor]
Shapes = Mapping[str, tuple[int, ...]]

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
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    model = _made(name, arguments, shapes)
    _check_fits(model, shapes, name)
    return model


def fresh_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A network by name and arguments alone, with random weights.

    Raises:
        ConfigError: an unknown name, or arguments that are not taken.
        MissingExtraError: the library is not installed.
    """
    return _made(name, arguments, {})


def pretrained_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A network of a library with the weights that the library fetches.

    Raises:
        ConfigError: the name is of no library, or the arguments are not taken.
        MissingExtraError: the library is not installed.
    """
    library, _, short = name.rpartition(":")
    fresh_model(name, arguments)  # raises what is wrong with the name and the arguments
    if library not in ("torchvision", "timm"):
        raise ConfigError(f"model {name!r} has no pretrained weights: pass a file of yours")
    try:
        if library == "torchvision":
            from torchvision import models

            return models.get_model(short, weights="DEFAULT", **arguments)
        import timm

        return timm.create_model(short, pretrained=True, **arguments)
    except (OSError, RuntimeError) as error:
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(
            f"the weights of {name} cannot be fetched ({why}): pass a file of yours, or none to "
            "start from random weights"
        ) from error


def blank_model(name: str, arguments: Mapping[str, Any]) -> nn.Module:
    """A network by name and arguments alone: without weights, on the ``meta`` device.

    Networks that cannot be made there are made on the CPU.

    Raises:
        ConfigError: an unknown name, or arguments that are not taken.
        MissingExtraError: the library is not installed.
    """
    try:
        with torch.device("meta"):
            model = _made(name, arguments, {})
        if not any(_holds_meta(module) for module in model.modules()):
            return model
    except (ConfigError, NotImplementedError):
        pass
    return fresh_model(name, arguments)


def _holds_meta(module: nn.Module) -> bool:
    """Whether a tensor without data is an attribute, where no file fills it in."""
    return any(isinstance(x, Tensor) and x.is_meta for x in tree_leaves(_plain(module)))


def _plain(module: nn.Module) -> dict[str, Any]:
    hidden = ("_parameters", "_buffers", "_modules")
    return {k: v for k, v in vars(module).items() if k not in hidden}


def _made(name: str, arguments: Mapping[str, Any], shapes: Shapes) -> nn.Module:
    if refused := [key for key in arguments if key.startswith(_FORBIDDEN)]:
        raise ConfigError(f"model argument {refused[0]!r}: weights come from the file")
    library, _, short = name.rpartition(":")
    makers = {"": _ours, "torchvision": _torchvision, "timm": _timm}
    if library not in makers:
        raise ConfigError(f"model {name!r}: {_CHOICES}")
    try:
        return makers[library](short, arguments, shapes)
    except _REFUSALS as error:
        raise ConfigError(f"model {name!r} does not take {dict(arguments)!r}: {error}") from error


_CHOICES = "choose vgg19, resnet18, torchvision:NAME or timm:NAME"


def _ours(name: str, arguments: Mapping[str, Any], shapes: Shapes) -> nn.Module:
    if name in ("vgg", "vgg19"):
        make: Callable[..., nn.Module] = vgg19 if name == "vgg19" and arguments else VGG
        return make(**(arguments or vgg_arguments(shapes)))
    if name in ("resnet", "resnet18"):
        make = resnet18 if name == "resnet18" and arguments else ResNet
        return make(**(arguments or resnet_arguments(shapes)))
    raise ConfigError(f"model {name!r}: {_CHOICES}")


def vgg_arguments(shapes: Shapes) -> dict[str, Any]:
    """The VGG of these tensors: a convolution, its norm and a ReLU are three entries of a list.

    Raises:
        CheckpointError: they are not those of a VGG of this package.
    """
    blocks: list[list[int]] = []
    last = -4
    convolutions = _matching(shapes, r"features\.(\d+)\.weight", axes=4)
    for (index,), weight in convolutions:
        if index - last > 3:  # a pool lies between
            blocks.append([])
        blocks[-1].append(weight[0])
        last = index
    if not blocks:
        raise CheckpointError(f"the file has no VGG in it: {_OTHER}")
    channels = convolutions[0][1][1]
    return {"widths": blocks, "num_classes": _classes(shapes), "in_channels": channels}


def resnet_arguments(shapes: Shapes) -> dict[str, Any]:
    """The ResNet of these tensors.

    Raises:
        CheckpointError: they are not those of a ResNet of this package.
    """
    widths: dict[int, int] = {}
    blocks: dict[int, int] = {}
    for (stage, block), weight in _matching(shapes, r"stages\.(\d+)\.(\d+)\.conv1\.weight", axes=4):
        widths[stage], blocks[stage] = weight[0], block + 1
    stem = shapes.get("conv1.weight", ())
    if not widths or len(stem) != 4:
        raise CheckpointError(f"the file has no ResNet of this package in it: {_OTHER}")
    return {
        "blocks": list(blocks.values()),
        "widths": list(widths.values()),
        "num_classes": _classes(shapes),
        "in_channels": stem[1],
    }


_OTHER = "pass --model as the network that the pruner was made for"


def _matching(
    shapes: Shapes, pattern: str, axes: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Shapes of some axes by the numbers in their names, in the order of these."""
    found = []
    for name, shape in shapes.items():
        match = re.fullmatch(pattern, name)
        if match and len(shape) == axes:
            found.append((tuple(map(int, match.groups())), shape))
    return sorted(found, key=lambda item: item[0])


def _classes(shapes: Shapes) -> int:
    head = shapes.get("classifier.weight")
    if not head:
        raise CheckpointError(f"the file has no 'classifier.weight': {_OTHER}")
    return head[0]


def _torchvision(name: str, arguments: Mapping[str, Any], shapes: Shapes) -> nn.Module:
    try:
        from torchvision import models
    except ImportError as error:
        raise MissingExtraError("torchvision is missing; run: pip install torchvision") from error
    if name not in models.list_models(module=models):  # detectors fetch backbones
        raise ConfigError(
            f"torchvision has no classifier {name!r}: see torchvision.models.list_models"
        )
    return _with_classes(
        lambda **own: models.get_model(name, weights=None, **own), arguments, shapes
    )


def _timm(name: str, arguments: Mapping[str, Any], shapes: Shapes) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise MissingExtraError("timm is missing; run: pip install timm") from error
    if not timm.is_model(name):  # also with the tag of its weights
        near = difflib.get_close_matches(name, timm.list_models(), 3)
        like = f": did you mean {', '.join(near)}?" if near else ": see timm.list_models"
        raise ConfigError(f"timm has no model {name!r}{like}")
    return _with_classes(
        lambda **own: timm.create_model(name, pretrained=False, **own), arguments, shapes
    )


def _with_classes(
    make: Callable[..., nn.Module], arguments: Mapping[str, Any], shapes: Shapes
) -> nn.Module:
    """The network; where its last layer is longer in the file, one of that many classes."""
    model = make(**arguments)
    last = [n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)][-1:]
    weight = shapes.get(f"{last[0]}.weight") if last else None
    if not weight or "num_classes" in arguments:
        return model
    if weight[0] == len(model.get_parameter(f"{last[0]}.weight")):
        return model
    return make(**arguments, num_classes=weight[0])


def _check_fits(model: nn.Module, saved: Shapes, name: str) -> None:
    """One line about the first tensor that differs, where loading would list hundreds."""
    own = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    for key in [*own, *saved]:
        if own.get(key) != saved.get(key):
            raise CheckpointError(
                f"the file is not of this {name}: {key} is {saved.get(key, 'missing')} in the file "
                f"and {own.get(key, 'missing')} in the network; {_OTHER}, or its sizes as "
                "--model-args, such as '{\"width\": 0.5}'"
            )
