"""``trace_channels``: from any model to a graph of removable channels, proved to be right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stamppruner import surgery
from stamppruner.calls import FORWARD_ERRORS, Calls, copied_module, evaluating, record_calls
from stamppruner.channels import ChannelGraph
from stamppruner.counting import macs_of_pass
from stamppruner.errors import ConfigError, UnsupportedModelError
from stamppruner.free import FreeAxis, find_free_axes
from stamppruner.graph import Traced, build_graph, matching
from stamppruner.inputs import Inputs
from stamppruner.layers import check_no_nan
from stamppruner.probe import Probe
from stamppruner.progress import Tick, bar
from stamppruner.proof import prove
from stamppruner.reach import Reach, probe

_SMALL_SIDES = (64, 128)
"""Image sides, in pixels, on which probing is tried before the full size."""


def trace_channels(
    model: nn.Module,
    example_inputs: Any,
    *,
    protect: Sequence[str] = (),
    protect_inputs: Sequence[str] = (),
    rewire: bool = True,
    certify: bool = True,
    progress: bool = True,
) -> ChannelGraph:
    """Find the channels of a model that can be removed, and prove it.

    The model is not changed: a copy is traced, in evaluation mode and without gradients. A group
    whose removal cannot be proved is protected, with the reason in ``graph.protected``.

    Args:
        model: any module with convolutions or linear layers.
        example_inputs: a tensor ``(B, C, H, W)``, a tuple of positional or a dict of keyword
            arguments. Values do not matter, shapes do.
        protect: qualified names or shell patterns of layers whose outputs stay whole.
        protect_inputs: the same for layers whose inputs stay whole.
        rewire: where the code fixes the width of a tensor (splits at sizes in the code, views),
            cut the layers around it all the same and let them scatter and gather, see
            :mod:`~stamppruner.rewire`; ``graph.rewired`` names them. Else they are protected.
        certify: cut half of every group and compare with the masked model.
        progress: after two seconds, count the forward passes where the output is a terminal.

    Returns:
        The graph; ``graph.groups`` may be empty, ``graph.protected`` then says why.

    Raises:
        UnsupportedModelError: the model has no convolution or linear layer, cannot be copied, is
            scripted, or fails on the example inputs.
        DataError: the example inputs hold no tensor.
        ConfigError: a pattern of ``protect`` or ``protect_inputs`` matches no module.

    Example:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> print(trace_channels(net, torch.zeros(1, 3, 9, 9)))
        8 removable channels in 1 groups (0 with equal blocks), 1 layers protected
    """
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            what = repr(name) if name else type(model).__name__
            raise UnsupportedModelError(
                f"{what} is a TorchScript module: pass the Python module it was made of"
            )
    if any(hasattr(module, "_orig_mod") for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} is, or holds, what torch.compile made: pass the module it was "
            "made of (its _orig_mod), and compile the slim one"
        )
    if any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        raise UnsupportedModelError(
            f"{type(model).__name__} has lazy layers that have seen no input yet: run it on "
            "a batch first"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.layout != torch.strided:
            kind = str(tensor.layout).removeprefix("torch.")
            raise UnsupportedModelError(
                f"{name!r} is a {kind} tensor, which cannot be probed: make it an ordinary one "
                "(to_dense())"
            )
    check_no_nan(model)
    counted = bar(description="tracing", shown=progress, delay=2.0)
    with torch.inference_mode(False), torch.no_grad(), counted:
        inputs = Inputs.of(example_inputs, model).repeat(1)
        copied = copied_module(model, weights=False)
        with evaluating(copied):
            calls = record_calls(copied, inputs)
            if not calls.outputs:
                raise UnsupportedModelError(
                    f"{type(model).__name__} calls no convolution and no linear layer: there is "
                    "nothing to prune"
                )
            (reach, free, seen), small = _probed(copied, inputs, calls, counted.update)
        modules = dict(copied.named_modules())
        spatial = {name: calls.applied.get(name, 0) for name in calls.outputs}
        _check_patterns((*protect, *protect_inputs), modules)
        uncut = surgery.unsupported((name, modules[name]) for name in reach.readers)
        macs = _counted(copied, inputs)
        traced = Traced(modules, seen, reach, free, spatial, inputs, macs, rewire=rewire)
        by_user = "protected by the user"
        traced.protect |= uncut | dict.fromkeys(matching(reach.readers, protect), by_user)
        traced.protect_inputs |= uncut
        traced.protect_inputs |= dict.fromkeys(matching(reach.readers, protect_inputs), by_user)
        return prove(copied, traced, small, counted.update) if certify else build_graph(traced)


def _counted(model: nn.Module, inputs: Inputs) -> float:
    """Multiply-adds of a pass; 0, so that layers alone count, where no mode can look at one."""
    try:
        return macs_of_pass(model, inputs)
    except FORWARD_ERRORS:  # higher-order operators, for one
        return 0.0


def _check_patterns(patterns: Sequence[str], modules: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError for a pattern that protects nothing: it is a slip of the pen."""
    for pattern in patterns:
        if not isinstance(pattern, str) or not matching(modules, [pattern]):
            raise ConfigError(
                f"protect: {pattern!r} matches no module of the model: pass qualified names as in "
                "model.named_modules(), or shell patterns"
            )


def _probed(
    model: nn.Module, inputs: Inputs, calls: Calls, tick: Tick
) -> tuple[tuple[Reach, list[FreeAxis], Calls], Inputs]:
    """Probe at the smallest image size at which the model runs with the same layers."""
    for side in _SMALL_SIDES:
        small = inputs.cropped(side)
        if small is None:
            break
        try:
            small_calls = record_calls(model, small)
            if _alike(small_calls, calls):
                return _reach(model, small, small_calls, tick), small
        except UnsupportedModelError:
            continue
    return _reach(model, inputs, calls, tick), inputs


def _alike(small: Calls, full: Calls) -> bool:
    """Whether the same layers are called, and no axis shrinks to a single place or token.

    Attention over a single token does not read its queries and keys, for example.
    """
    if small.outputs.keys() != full.outputs.keys() or small.norms != full.norms:
        return False
    return all(
        len(a) == len(b) and not any(x == 1 < y for x, y in zip(a[1:], b[1:], strict=True))
        for name, shapes in full.outputs.items()
        for a, b in zip(small.outputs[name], shapes, strict=False)
    )


def _reach(
    model: nn.Module, inputs: Inputs, calls: Calls, tick: Tick
) -> tuple[Reach, list[FreeAxis], Calls]:
    asker = Probe(model, inputs, calls, tick)
    reach = probe(asker)
    return reach, find_free_axes(asker, reach.silent), calls
