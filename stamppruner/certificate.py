"""The proof behind every cut: the masked dense network and the slim network agree everywhere.

Both run on the same noise in evaluation mode, in double precision where the model takes it, and
are compared at the input of *every* mixing layer and at the output, so a wrong index map is found
at the layer where it first shows, even if later layers would hide it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stamppruner import layers
from stamppruner.channels import ChannelPlan
from stamppruner.errors import DataError, EquivalenceError
from stamppruner.gates import Gates
from stamppruner.inputs import Inputs
from stamppruner.surgery import cut

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference relative to the largest value at the same place; 2e-2 in half precision."""

_BATCH = 2


@dataclass(frozen=True)
class Equivalence:
    """How far the slim network is from the masked dense one.

    Attributes:
        max_abs: largest absolute difference of the outputs.
        max_rel: largest difference at any layer, relative to the largest value there.
        worst_layer: where ``max_rel`` was seen; empty for the model's output.
        positions: input positions of ``worst_layer`` that differ, in the dense numbering.
        tolerance: bound on ``max_rel`` that was applied.
        error: what the slim network raised, if it did not run.
    """

    max_abs: float
    max_rel: float
    worst_layer: str = ""
    positions: tuple[int, ...] = ()
    tolerance: float = 0.0
    error: str = ""

    @property
    def passed(self) -> bool:
        """Whether the networks agree."""
        return not self.error and self.max_rel <= self.tolerance

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        if self.error:
            return f"the slim network fails: {self.error}"
        where = f"input of layer {self.worst_layer!r}" if self.worst_layer else "the output"
        verdict = "equal" if self.passed else "DIFFERENT"
        return (
            f"{verdict}: relative difference {self.max_rel:.2g} at {where} "
            f"(bound {self.tolerance:.0e}), absolute {self.max_abs:.2g} at the output"
        )


def check_equivalence(
    model: nn.Module, plan: ChannelPlan, example_inputs: Any = None, *, seed: int = 0
) -> Equivalence:
    """Compare the hard-masked dense model with the model that is cut by the plan.

    Args:
        model: the dense model; it is not changed.
        plan: what to keep.
        example_inputs: give the shapes of the noise, as for :func:`~stamppruner.trace_channels`;
            by default those of the plan's graph.
        seed: of the noise.

    Raises:
        PlanError: the plan is of another model.
        DataError: no example inputs, and none in the graph.
    """
    return compare(model, cut(model, plan), plan, _inputs(model, plan, example_inputs), seed=seed)


def shrink(
    model: nn.Module, plan: ChannelPlan, example_inputs: Any = None, *, certify: bool = True
) -> nn.Module:
    """A smaller copy of the model, of the same class, proved equal to the masked dense model.

    Args:
        model: the dense model; it is not changed.
        plan: what to keep.
        example_inputs: for the certificate, as in :func:`check_equivalence`.
        certify: prove the cut; switch it off only for plans proved before.

    Raises:
        PlanError: the plan is of another model.
        EquivalenceError: the slim model fails or differs; it is not returned.
    """
    slim = cut(model, plan)
    if certify:
        verdict = compare(model, slim, plan, _inputs(model, plan, example_inputs))
        if not verdict:
            raise EquivalenceError(
                f"{type(model).__name__} cut by a plan that {plan}: {verdict}. "
                "Protect the layers named here with trace_channels(..., protect=...)"
            )
    return slim


def compare(
    dense: nn.Module, slim: nn.Module, plan: ChannelPlan, inputs: Inputs, *, seed: int = 0
) -> Equivalence:
    """Compare a dense model under the plan's mask with a slim model, layer by layer.

    Neither model is changed; both are copied where double precision needs it.
    """
    dtype = layers.first_floating(dense).dtype
    if dtype == torch.float32:
        try:
            return _compare(_double(dense), _double(slim), plan, inputs.to(torch.float64), seed)
        except _DenseFailureError:
            pass  # the model insists on its own precision
    return _compare(dense, slim, plan, inputs, seed)


class _DenseFailureError(Exception):
    """The dense model itself does not run on the inputs."""


def _compare(
    dense: nn.Module, slim: nn.Module, plan: ChannelPlan, inputs: Inputs, seed: int
) -> Equivalence:
    like = layers.first_floating(dense)
    noise = inputs.random(_BATCH, seed)
    tolerance = TOLERANCE.get(like.dtype, 2e-2)
    gates = Gates(dense, plan.graph)
    gates.values = torch.from_numpy(plan.keep.copy()).to(like.device, like.dtype)
    with gates.injected():
        try:
            expected, dense_out = _readings(dense, plan, noise)
        except (RuntimeError, TypeError, ValueError) as error:
            raise _DenseFailureError(str(error)) from error
    try:
        seen, slim_out = _readings(slim, plan, noise)
    except (RuntimeError, TypeError, ValueError, IndexError, AssertionError) as error:
        return Equivalence(0, 0, tolerance=tolerance, error=f"{type(error).__name__}: {error}")

    worst = Equivalence(0.0, 0.0, tolerance=tolerance)
    for (name, x), (other, y) in zip(expected, seen, strict=False):
        axis = layers.channel_axis(dense.get_submodule(name), x.dim())
        kept = torch.from_numpy(plan.graph.layers[name].kept_inputs(plan.keep)).to(x.device)
        x = x.index_select(axis, kept.nonzero().squeeze(1))
        if name != other or x.shape != y.shape:
            return Equivalence(0, 0, name, tolerance=tolerance, error=f"shapes differ at {name!r}")
        relative = _relative(x, y)
        if not relative <= tolerance:
            difference = (x - y).abs().movedim(axis, 0).flatten(1).amax(1)
            bad = difference > tolerance * float(x.abs().max())
            positions = kept.nonzero().squeeze(1)[bad].tolist()
            return Equivalence(0.0, relative, name, tuple(positions), tolerance)
        if relative > worst.max_rel:
            worst = Equivalence(0.0, relative, name, (), tolerance)
    if len(expected) != len(seen) or len(dense_out) != len(slim_out):
        return Equivalence(0, 0, tolerance=tolerance, error="the networks call different layers")
    max_abs = 0.0
    for x, y in zip(dense_out, slim_out, strict=True):
        if x.shape != y.shape:
            return Equivalence(0, 0, tolerance=tolerance, error="outputs have different shapes")
        max_abs = max(max_abs, float((x - y).abs().max()) if x.numel() else 0.0)
        relative = _relative(x, y)
        if relative > worst.max_rel:
            worst = Equivalence(0.0, relative, "", (), tolerance)
    return Equivalence(max_abs, worst.max_rel, worst.worst_layer, worst.positions, tolerance)


def _relative(x: Tensor, y: Tensor) -> float:
    """Largest difference over the largest value; infinite where only one side is finite."""
    if not x.numel():
        return 0.0
    same = (x == y) | (x.isnan() & y.isnan())
    difference = torch.where(same, 0.0, (x - y).abs()).nan_to_num(torch.inf)
    scale = x.abs().nan_to_num(0.0, 0.0, 0.0).max()
    return float(difference.max() / scale.clamp_min(torch.finfo(x.dtype).tiny))


def _readings(
    model: nn.Module, plan: ChannelPlan, inputs: Inputs
) -> tuple[list[tuple[str, Tensor]], list[Tensor]]:
    """What every mixing layer reads, in call order, and the floating outputs."""
    read: list[tuple[str, Tensor]] = []
    handles = [
        model.get_submodule(layer.name).register_forward_pre_hook(
            lambda _module, args, name=layer.name: read.append((name, args[0]))
        )
        for layer in plan.graph.layers.values()
        if layer.kind == "mixing"
    ]
    try:
        with evaluating(model):
            output = inputs.call(model)
    finally:
        for handle in handles:
            handle.remove()
    floats = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    return read, floats


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
        for module in training:
            module.training = True


def _double(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).double()


def _inputs(model: nn.Module, plan: ChannelPlan, example_inputs: Any) -> Inputs:
    if example_inputs is not None:
        return Inputs.of(example_inputs, model)
    if plan.graph.example is None:
        raise DataError("the plan's graph holds no example inputs: pass example_inputs")
    return Inputs.of(plan.graph.example, model)
