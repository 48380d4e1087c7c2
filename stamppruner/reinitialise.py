"""Random weights in place of trained ones: networks that are trained from scratch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from stamppruner.errors import UnsupportedModelError
from stamppruner.layers import first_floating

_RESETS = ("reset_parameters", "_reset_parameters")
"""Methods by which modules draw their weights anew; attention has the second one."""

_NAMED = 5
"""Parameters that an error names."""


@torch.no_grad()
def reinitialise_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw all weights anew, in place, as every layer's ``reset_parameters`` draws them.

    Batch norms get their running statistics of the start. Buffers without such a method (a fixed
    filter) stay, frozen parameters are drawn like any other, and weights that are held at zero
    (:mod:`~stamppruner.zeros`) stay held. A network's own scheme of initialisation, if it had one,
    is not repeated: convolutions and linear layers get PyTorch's.

    Args:
        model: any network; slim and unstructured ones are.
        seed: of the weights. The global random state is left alone.

    Returns:
        The model.

    Raises:
        UnsupportedModelError: some parameters belong to no module that can draw them, or are
            computed from others; they are named, and the model is as it was.

    Example:
        >>> net = nn.Linear(2, 2)
        >>> torch.equal(reinitialise_(net, 1).weight, reinitialise_(nn.Linear(2, 2), 1).weight)
        True
    """
    before = [(t, t.detach().clone()) for t in _tensors(model)]
    parameters = {n: p for n, p in model.named_parameters() if p.is_floating_point()}
    for parameter in parameters.values():
        parameter.fill_(torch.nan)  # what is still NaN at the end was not drawn
    try:
        with _seeded(model, seed):
            for module in model.modules():
                _reset_(module)
        if missed := sorted(name for name, p in parameters.items() if bool(p.isnan().any())):
            more = ", ..." if len(missed) > _NAMED else ""
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot be re-initialised: no reset_parameters() draws "
                f"{', '.join(missed[:_NAMED])}{more}. Give the module that holds them such a "
                "method, or make the network anew"
            )
    except BaseException:
        for tensor, old in before:
            tensor.copy_(old)
        raise
    return model


def _reset_(module: nn.Module) -> None:
    """Draw a module's own parameters, if it can."""
    if parametrize.is_parametrized(module):
        _reset_parametrized_(module)
        return
    for name in _RESETS:
        if callable(reset := getattr(module, name, None)):
            reset()
            return


def _reset_parametrized_(module: nn.Module) -> None:
    """Draw the weight that a parametrization gives, and write it through the inverse.

    Without an inverse nothing is written, and the parameters are found to be missed.
    """
    plain = copy.deepcopy(module)
    plain.__class__ = parametrize.type_before_parametrizations(module)
    names = list(module.parametrizations)  # type: ignore[arg-type]
    del plain.parametrizations
    for name in names:
        plain.register_parameter(name, nn.Parameter(getattr(module, name).detach().clone()))
    _reset_(plain)
    with suppress(NotImplementedError):
        for name, parameter in plain.named_parameters(recurse=False):
            if name in names:
                setattr(module, name, parameter.detach())
            else:
                getattr(module, name).copy_(parameter)


@contextmanager
def _seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """PyTorch's generators on a seed inside the block, as before after it."""
    device = first_floating(model).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _tensors(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()
