"""Bytes of activations, at inference and in a training step.

The dense network runs at two batch sizes while its memory is watched (:mod:`._watch`); the costs
are peaks over the moments of those runs.

Not counted are the input, what a kernel allocates within one operation (convolution workspaces)
and the blocks by which an allocator rounds up. Channels of rewired layers keep their places in the
activations, so they count as if they stayed; the short copies that gather and scatter them do not
count. What a matrix product outside any layer of the graph writes (attention by hand) counts whole,
and a second copy of a parameter's gradient, where its layout calls for one, as the layer's output.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from stamppruner.calls import FORWARD_ERRORS, copied_module, evaluating, floating_tensors
from stamppruner.channels import ChannelGraph
from stamppruner.costs._base import HERE, Cost, Setting
from stamppruner.costs._elements import Elements
from stamppruner.costs._watch import BATCHES, Peak, Watch, origins_of, watching
from stamppruner.errors import BudgetError, UnsupportedModelError
from stamppruner.inputs import Inputs


class Memory(Cost):
    """A cost with a peak over the moments of a run; it does not decrease in any width."""

    unit = "bytes"

    def __init__(self, model: nn.Module, graph: ChannelGraph, setting: Setting = HERE) -> None:
        if graph.example is None:
            raise BudgetError(
                f"a bound on {self.name} needs a graph with example inputs: get it by "
                "trace_channels(model, example_inputs)"
            )
        inputs = Inputs.of(graph.example, model)
        sizes = torch.tensor([group.size for group in graph.groups], dtype=torch.float64)
        runs = [self._watched(model, graph, inputs.repeat(count)) for count in BATCHES]
        self._peak = Peak(runs[0], runs[1], setting.batch_size, sizes, len(graph.layers))
        super().__init__(model, graph, setting)

    def per_layer(self, widths: Tensor) -> Tensor:
        """Bytes of each layer at the peak, ``(..., L)``, with what follows it up to the next."""
        return self._peak.per_layer(widths.to(torch.float64))

    def of(self, names: Collection[str]) -> float:
        """Layers that projection added are not told apart: 0."""
        return 0.0

    def __call__(self, widths: Tensor) -> Tensor:
        """Total cost, ``(...)``, for kept channels a group ``(..., G)``."""
        return self._peak(widths.to(torch.float64))

    @abstractmethod
    def _run(self, model: nn.Module, watched: Callable[[nn.Module], Any], inputs: Inputs) -> None:
        """Run the model on the inputs inside of ``watched``."""

    def _watched(self, model: nn.Module, graph: ChannelGraph, inputs: Inputs) -> Watch:
        origins = origins_of(graph)
        watch = Watch(origins.pop(""))
        try:
            self._run(model, partial(watching, watch=watch, origins=origins), inputs)
        except FORWARD_ERRORS as error:
            raise UnsupportedModelError(
                f"{self.name} of {type(model).__name__} cannot be told: on inputs "
                f"{inputs.describe()} it fails with {type(error).__name__}: {error}. "
                "Leave this bound out"
            ) from error
        return watch


class ActivationBytes(Memory):
    """Peak bytes of activations at inference, for ``setting.batch_size`` samples.

    These are the tensors that are alive at one time during a forward pass in evaluation mode
    without gradients, beside parameters, buffers and the input.

    Raises:
        BudgetError: the graph has no example inputs.
        UnsupportedModelError: the forward pass fails.
    """

    name = "activation_bytes"

    def _run(self, model: nn.Module, watched: Callable[[nn.Module], Any], inputs: Inputs) -> None:
        with evaluating(model), watched(model):
            inputs.call(model)


class _State(Elements):
    """Bytes of parameters, their gradients and their momentum, and of buffers."""

    name, unit = "state", "bytes"

    def weight(self, tensor: Tensor) -> int:
        """Bytes an element."""
        return tensor.element_size() * (3 if isinstance(tensor, nn.Parameter) else 1)


class TrainBytes(Memory):
    """Peak bytes of a training step by SGD with momentum, for ``setting.batch_size`` samples.

    Parameters, their gradients, momentum and buffers, all of them throughout, and the peak of the
    activations over the forward and backward pass, saved ones and gradients among them. All
    parameters count as trained. The input, and what a loss computes, do not count, but for the
    gradient of the output.

    Raises:
        BudgetError: the graph has no example inputs.
        UnsupportedModelError: the model cannot be copied, or a pass fails in training mode.
    """

    name = "train_bytes"

    def __init__(self, model: nn.Module, graph: ChannelGraph, setting: Setting = HERE) -> None:
        self._state = _State(model, graph, setting)
        super().__init__(model, graph, setting)

    def per_layer(self, widths: Tensor) -> Tensor:
        """Bytes of each layer, ``(..., L)``: its state, and what it holds at the peak."""
        return self._state.per_layer(widths.to(torch.float64)) + super().per_layer(widths)

    def __call__(self, widths: Tensor) -> Tensor:
        """Total cost, ``(...)``, for kept channels a group ``(..., G)``."""
        return self._state(widths) + super().__call__(widths)

    def _run(self, model: nn.Module, watched: Callable[[nn.Module], Any], inputs: Inputs) -> None:
        model = copied_module(model)
        for parameter in model.parameters():
            parameter.grad = None
            parameter.requires_grad_(parameter.is_floating_point())
        with evaluating(model), torch.enable_grad():
            model.train()
            with watched(model):
                outputs = [y for y in floating_tensors(inputs.call(model)) if y.requires_grad]
                torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
