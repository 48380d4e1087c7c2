"""Single weights that are held at zero: what unstructured pruning leaves of a network.

A held weight is a parametrization of PyTorch's (``torch.nn.utils.parametrize``) that multiplies by
a mask. The layer reads ``weight * mask`` wherever it reads its weight, so optimizers, copies and
state dicts need to know nothing of it, and no step of training brings a weight back. Multiply-adds,
bytes and latency stay those of the dense network.

``torch.save`` takes no whole module with parametrizations: save its state dict, or the plain copy
that :func:`released` makes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from stamppruner.errors import PlanError


class HeldAtZero(nn.Module):
    """The parametrization ``weight * mask``.

    Attributes:
        mask: booleans of the weight's shape; False is held at zero.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask.bool())

    def forward(self, weight: Tensor) -> Tensor:
        """The weight with zeros; gradients of these are zero, too."""
        return torch.where(self.mask, weight, weight.new_zeros(()))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """What is stored for a weight: the same zeros."""
        return torch.where(self.mask, weight, weight.new_zeros(()))


def weights_of(model: nn.Module) -> dict[str, nn.Module]:
    """Convolutions and linear layers whose weights can be held, by qualified name.

    Left out are weights that several modules share, and layers with something that is computed,
    by a parametrization or a hook.
    """
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, _ConvNd | nn.Linear)
        and not parametrize.is_parametrized(module)
        and (weight := module._parameters.get("weight")) is not None
        and uses[id(weight)] == 1
    }


def hold_(model: nn.Module, masks: Mapping[str, Tensor]) -> nn.Module:
    """Hold weights of a model at zero, in place.

    Args:
        model: a network, see :func:`weights_of`.
        masks: booleans of the weight's shape, by name of the layer; False is held at zero.

    Raises:
        PlanError: a name or a shape that the model lacks, or its weight is computed already;
            nothing was changed.

    Example:
        >>> net = hold_(nn.Linear(2, 1, bias=False), {"": torch.tensor([[True, False]])})
        >>> float(net.weight[0, 1])
        0.0
    """
    layers = weights_of(model)
    for name, mask in masks.items():
        if name not in layers or layers[name].weight.shape != mask.shape:
            raise PlanError(
                f"no weight of the shape {tuple(mask.shape)} can be held at zero in {name!r}: "
                "make the masks for this model, and release_ what holds its weights now"
            )
    for name, mask in masks.items():
        weight = cast(nn.Parameter, layers[name].weight)
        held = HeldAtZero(mask.to(weight.device))
        parametrize.register_parametrization(layers[name], "weight", held)
    return model


def held(model: nn.Module) -> dict[str, Tensor]:
    """The masks of a model, by name of the layer; empty if none of its weights is held."""
    return {name: hold.mask for name, module in model.named_modules() if (hold := _hold_of(module))}


def num_held(model: nn.Module) -> int:
    """Number of weights that are held at zero."""
    return sum(int((~mask).sum()) for mask in held(model).values())


@torch.no_grad()
def release_(model: nn.Module) -> nn.Module:
    """Make held weights plain parameters again, in place: the zeros stay, training moves them.

    PyTorch's own ``remove_parametrizations`` takes the weight off all copies of the layer, too.
    """
    for module in list(model.modules()):
        if _hold_of(module):
            weight = module.parametrizations["weight"].original  # type: ignore[index,union-attr]
            weight.copy_(module.weight)
            module.__class__ = parametrize.type_before_parametrizations(module)
            del module.parametrizations
            others = dict(module._parameters)
            module._parameters.clear()
            module._parameters.update({"weight": weight, **others})
    return model


def released(model: nn.Module) -> nn.Module:
    """A plain copy with the same outputs; the model itself if it holds no weights."""
    return release_(copy.deepcopy(model)) if held(model) else model


def _hold_of(module: nn.Module) -> HeldAtZero | None:
    """The only parametrization of the module's weight, if it is one of ours."""
    if not parametrize.is_parametrized(module, "weight"):
        return None
    steps = module.parametrizations["weight"]  # type: ignore[index,union-attr]
    return steps[0] if len(steps) == 1 and isinstance(steps[0], HeldAtZero) else None
