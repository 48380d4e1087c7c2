"""Forward passes of a model, observed: which layers are called, and with what shapes.

A model may call layers in training mode only (auxiliary heads). So besides the evaluation pass
there is a second one where that makes a difference: containers in training mode, leaf modules
(norms, dropout) in evaluation mode.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from stamppruner import layers, norms
from stamppruner.errors import UnsupportedModelError
from stamppruner.inputs import Inputs

FORWARD_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    AttributeError,
    AssertionError,
    ArithmeticError,
    NotImplementedError,
)
"""What a forward pass raises when it does not fit its inputs or its layers."""

_OPAQUE = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention, nn.Bilinear)
"""Modules that mix what they read and are never cut."""

_FUNCTIONAL = {
    F.linear,
    F.conv1d,
    F.conv2d,
    F.conv3d,
    F.conv_transpose1d,
    F.conv_transpose2d,
    F.conv_transpose3d,
}


@dataclass
class Calls:
    """Shapes seen in ordinary passes over one sample.

    Attributes:
        passes: the passes that were run: False in evaluation, True with training containers.
        outputs: output shapes of every mixing or depthwise layer, one a call, by name, in the
            order of first calls, pass after pass.
        applied: number of places at which each of these layers is applied in the evaluation pass
            (see :func:`~stamppruner.layers.applications`).
        channelwise: width of every channelwise module that was called.
        norms: every norm over channels, and its width.
        opaque: width of the input of every module that is never cut.
        functional: those of them whose weight goes straight to ``F.linear`` or ``F.conv2d``.
        peak: elements of the largest output of any module.
    """

    passes: tuple[bool, ...] = (False,)
    outputs: dict[str, list[torch.Size]] = field(default_factory=dict)
    applied: dict[str, int] = field(default_factory=dict)
    channelwise: dict[str, int] = field(default_factory=dict)
    norms: dict[str, tuple[norms.Norm, int]] = field(default_factory=dict)
    opaque: dict[str, int] = field(default_factory=dict)
    functional: dict[str, int] = field(default_factory=dict)
    peak: int = 1

    def note(self, name: str, module: nn.Module, x: Any, output: Any) -> None:
        """Note one call."""
        if isinstance(module, _OPAQUE) and isinstance(x, Tensor):
            self.opaque[name] = x.shape[-1]
        if not isinstance(output, Tensor):
            return
        self.peak = max(self.peak, output.numel())
        if layers.is_mixing(module) or layers.is_depthwise(module):
            self.outputs.setdefault(name, []).append(output.shape)
            places = layers.applications(module, x, output)
            self.applied[name] = self.applied.get(name, 0) + places
        elif name not in self.norms and isinstance(x, Tensor) and x.shape == output.shape:
            if norm := norms.recognise(module, x):
                self.norms[name] = (norm, x.shape[norm.axis])
            elif x.dim() > 1 and layers.channelwise_width(module) == x.shape[1] > 1:
                self.channelwise[name] = x.shape[1]


def copied_module(model: nn.Module, *, weights: bool = True) -> nn.Module:
    """A copy of the model; without weights it shares those of its mixing layers.

    Raises:
        UnsupportedModelError: it cannot be copied, or its copy has parts of the model itself.
    """
    mixing = [] if weights else [m for m in model.modules() if layers.is_mixing(m)]
    found = [m._parameters.get("weight") for m in mixing]
    shared = {id(w): w for w in found if w is not None}
    try:
        copied = copy.deepcopy(model, dict(shared))
    except (RuntimeError, TypeError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot be copied ({error}): detach tensors that are kept as "
            "attributes, or replace old-style weight_norm by torch.nn.utils.parametrizations"
        ) from error
    own = {id(tensor) for _, tensor in _named_tensors(copied)} - shared.keys()
    for name, tensor in _named_tensors(model):
        if id(tensor) in own:
            raise UnsupportedModelError(
                f"{name!r} is not copied when {type(model).__name__} is (a __deepcopy__ gives it "
                "again), and work on a copy would change the model: let it be copied"
            )
    return copied


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def record_calls(model: nn.Module, inputs: Inputs) -> Calls:
    """Run the model, in evaluation mode, and note the shapes that its layers see.

    Raises:
        UnsupportedModelError: the forward pass fails.
    """
    calls = Calls()
    with _noting(model, calls):
        try:
            inputs.call(model)
        except FORWARD_ERRORS as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} fails on the example inputs {inputs.describe()} in "
                f"evaluation mode: {type(error).__name__}: {error}. Pass example_inputs it takes"
            ) from error
    within = tuple(f"{name}." for name in calls.opaque)  # what attention holds is not called
    mixing = {name for name, module in model.named_modules() if layers.is_mixing(module)}
    hidden = mixing - calls.outputs.keys() - calls.functional.keys()
    if all(name.startswith(within) for name in hidden):
        return calls
    both = Calls(passes=(False, True))
    with _noting(model, both):
        try:
            run(model, inputs, both.passes)
        except FORWARD_ERRORS:  # it wants targets, say: what it only does in training is not seen
            return calls
    both.applied = calls.applied
    return both if both.outputs.keys() > calls.outputs.keys() else calls


def run(model: nn.Module, inputs: Inputs, passes: Sequence[bool]) -> list[Any]:
    """The outputs of some passes of a model that is in evaluation mode."""
    outputs = []
    for training in passes:
        with _training_containers(model if training else None):
            outputs.append(inputs.call(model))
    return outputs


def floating_tensors(output: Any) -> list[Tensor]:
    """Floating tensors in an output of any nesting; of a dataclass or object, in its fields."""
    found = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, nn.Module | type):
            found += [x for x in tree_leaves(vars(leaf)) if isinstance(x, Tensor)]
    return [x for x in found if x.is_floating_point()]


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients, the random state kept; modes restored on exit."""
    training = [module for module in model.modules() if module.training]
    cuda = [p.device.index or 0 for p in model.parameters() if p.is_cuda][:1]
    model.eval()
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(cuda):
            yield
    finally:
        for module in model.modules():
            module.training = False
        for module in training:
            module.training = True


@contextmanager
def patched_forwards(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the ``forward`` of some modules; restored on exit, also after an exception."""
    before: dict[nn.Module, Any] = {m: m.__dict__.get("forward") for m in forwards}
    try:
        for module, forward in forwards.items():
            module.forward = forward  # type: ignore[method-assign]
        yield
    finally:
        for module, forward in before.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward


class FunctionalLayers(TorchFunctionMode):
    """Catches ``F.linear(x, layer.weight)`` and the like: layers used, but never called.

    Args:
        modules: layers to watch for, by name; other modules are left out.
        answer: called with a layer's name, the layer, ``x`` and what would compute the result;
            its result is the function's.
    """

    def __init__(self, modules: Mapping[str, nn.Module], answer: Callable[..., Tensor]) -> None:
        super().__init__()
        self.answer = answer
        self.owners = {
            id(module._parameters.get("weight")): (name, module)
            for name, module in modules.items()
            if layers.is_mixing(module) or layers.is_depthwise(module)
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _FUNCTIONAL:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            if owner := self.owners.get(id(weight)):
                x = args[0] if args else kwargs["input"]
                return self.answer(*owner, x, partial(func, *args, **kwargs))
        return func(*args, **kwargs)


@contextmanager
def _noting(model: nn.Module, calls: Calls) -> Iterator[None]:
    def hook(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            calls.note(name, module, args[0] if args else None, output)

        return note

    # first of all hooks: before a rewired layer scatters
    handles = [m.register_forward_hook(hook(n), prepend=True) for n, m in model.named_modules()]
    functional: dict[str, int] = {}

    def see(name: str, module: nn.Module, _x: Tensor, compute: Callable[[], Tensor]) -> Tensor:
        functional[name] = layers.input_width(module)
        return compute()

    try:
        with FunctionalLayers(dict(model.named_modules()), see):
            yield
    finally:
        for handle in handles:
            handle.remove()
    calls.functional = {n: w for n, w in functional.items() if n not in calls.outputs}
    calls.opaque |= calls.functional


@contextmanager
def _training_containers(model: nn.Module | None) -> Iterator[None]:
    """Training mode for the modules that only arrange others; for none if the model is None."""
    containers = [
        module
        for module in ([] if model is None else model.modules())
        if next(module.children(), None) is not None
        and not isinstance(module, _NormBase)
        and not layers.is_mixing(module)
        and not layers.is_depthwise(module)
    ]
    try:
        for module in containers:
            module.training = True
        yield
    finally:
        for module in containers:
            module.training = False
