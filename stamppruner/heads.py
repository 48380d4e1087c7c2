"""The classification head: find it, fit it in closed form, put it in place."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner.channels import KEPT, ChannelGraph
from stamppruner.errors import DataError
from stamppruner.evidence import running_statistics
from stamppruner.inputs import Inputs

RIDGES = tuple(10.0**k for k in range(-5, 3))
"""Candidate ridge penalties, as multiples of the features' mean variance."""

_SCALES = tuple(2.0**k for k in range(7))


def find_head(model: nn.Module, graph: ChannelGraph) -> str | None:
    """Name of the linear layer whose output is the model's output, else None.

    Only such a layer can be replaced and fitted: it is called once, reads one vector a sample, and
    nothing but a log-softmax follows it.
    """
    if len(graph.output_layers) != 1:
        return None
    name = graph.output_layers[0]
    head = model.get_submodule(name)
    own = {key for key, _ in head.named_parameters()} | {key for key, _ in head.named_buffers()}
    if not isinstance(head, nn.Linear) or not own <= {"weight", "bias"}:
        return None
    if graph.example is None:
        return name
    written: list[Tensor] = []
    handle = head.register_forward_hook(lambda _m, _args, output: written.append(output))
    try:
        with running_statistics(model), torch.no_grad():
            output = Inputs.of(graph.example, model).random(2, seed=0).call(model)
    finally:
        handle.remove()
    return name if len(written) == 1 and _passed_on(written[0], output) else None


def num_outputs(model: nn.Module, head: str | None) -> int | None:
    """Outputs of the head; None if there is none."""
    return None if head is None else int(model.get_submodule(head).out_features)  # type: ignore[arg-type]


def _passed_on(logits: Tensor, output: Any) -> bool:
    """Whether the model gives these logits ``(B, classes)`` as they are, or their log-softmax."""
    if not isinstance(output, Tensor) or logits.dim() != 2 or output.shape != logits.shape:
        return False
    same = output.data_ptr() == logits.data_ptr()
    return same or torch.allclose(output, logits.log_softmax(1), rtol=1e-4, atol=1e-5)


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module at a qualified name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def new_head(old: nn.Linear, classes: int) -> nn.Linear:
    """A linear layer like ``old`` with another number of outputs, zeroed."""
    head = copy.deepcopy(old)
    head.out_features = classes
    head.weight = nn.Parameter(old.weight.new_zeros(classes, old.in_features))
    if old.bias is not None:
        head.bias = nn.Parameter(old.bias.new_zeros(classes))
    return head


@contextmanager
def borrowed_parameters(head: nn.Linear, other: nn.Linear) -> Iterator[None]:
    """A layer with the parameters of another in the block; its hooks, such as gates, stay."""
    own = head.weight, head.bias, head.out_features
    try:
        head.weight, head.bias, head.out_features = other.weight, other.bias, other.out_features
        yield
    finally:
        head.weight, head.bias, head.out_features = own


def with_classes(
    model: nn.Module, graph: ChannelGraph, classes: int
) -> tuple[nn.Module, ChannelGraph]:
    """A copy of the model, and its graph, whose head has the target's number of classes.

    A head that already has it is kept as it is; so is a model whose output is not written by one
    linear layer, and any for 0 classes.
    """
    own = copy.deepcopy(model)
    head = find_head(own, graph)
    if head is None or not classes:
        return own, graph
    old = own.get_submodule(head)
    assert isinstance(old, nn.Linear)
    if old.out_features == classes:
        return own, graph
    set_module(own, head, new_head(old, classes))
    widened = dataclasses.replace(graph.layers[head], outputs=np.full(classes, KEPT))
    more = graph.spatial.get(head, 0) * old.in_features * (classes - old.out_features)
    layers = {**graph.layers, head: widened}
    return own, dataclasses.replace(graph, layers=layers, macs=graph.macs + more)


def head_inputs(model: nn.Module, head: str, batches: list[Tensor]) -> Tensor | None:
    """What the head reads, ``(N, F)`` on the model's device; None if it is not one vector a sample.

    The mode of the model decides about batch norms; no gradients.
    """
    found: list[Tensor] = []
    module = model.get_submodule(head)
    handle = module.register_forward_pre_hook(lambda _m, args: found.append(args[0].detach()))
    try:
        with torch.no_grad():
            for images in batches:
                model(images)
    finally:
        handle.remove()
    whole = [x for x in found if x.dim() == 2]
    if len(whole) != len(batches) or sum(map(len, whole)) != sum(map(len, batches)):
        return None
    return torch.cat(whole).float()


def fit_ridge_(head: nn.Linear, features: Tensor, labels: Tensor) -> None:
    """Fit a linear layer to one-hot labels by ridge regression, in place.

    The penalty minimises the leave-one-out error, which the singular value decomposition gives in
    closed form (Golub, Heath and Wahba 1979); the logits are then scaled to the least
    leave-one-out cross-entropy, so that training can go on from them.

    Args:
        head: ``F -> classes``.
        features: ``(N, F)``.
        labels: ``(N,)`` integers below ``classes``.

    Raises:
        DataError: features that are not finite.
    """
    if not bool(features.isfinite().all()):
        raise DataError(
            "the features that the head reads are not finite: scale the images as the network was "
            f"trained on, or pass it as float32 (its head is {head.weight.dtype})"
        )
    x, n, labels = features.double(), len(features), labels.long()
    y = F.one_hot(labels, head.out_features).double()
    centring = float(head.bias is not None)
    mean_x, mean_y = centring * x.mean(0), centring * y.mean(0)
    u, s, vh = torch.linalg.svd(x - mean_x, full_matrices=False)
    target = u.T @ (y - mean_y)
    variance = float(s.square().sum() / max(1, x.shape[1]))
    best: tuple[float, Tensor, Tensor] | None = None
    for ridge in RIDGES:
        shrink = s.square() / (s.square() + ridge * variance + 1e-12)
        fitted = (u * shrink) @ target + mean_y
        leverage = (u.square() * shrink).sum(1) + centring / n
        out = y - (y - fitted) / (1 - leverage.clamp(max=1 - 1e-6))[:, None]  # left-one-out
        error = float((y - out).square().mean())
        if best is None or error < best[0]:
            best = error, shrink, out
    assert best is not None
    _, shrink, out = best
    prior = centring * mean_y.clamp_min(1e-4).log()
    scale = min(_SCALES, key=lambda k: float(F.cross_entropy(k * (out - mean_y) + prior, labels)))
    weight = vh.T @ ((shrink / s.clamp_min(1e-12))[:, None] * target)  # (F, classes)
    bias = prior - scale * (mean_x @ weight)
    with torch.no_grad():
        head.weight.copy_(scale * weight.T)
        if head.bias is not None:
            head.bias.copy_(bias)
