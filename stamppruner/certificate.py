"""The proof behind every cut: the masked dense network and the slim network agree everywhere."""

from __future__ import annotations

from typing import Any

from torch import nn

from stamppruner.channels import ChannelPlan
from stamppruner.comparison import Equivalence, compare
from stamppruner.errors import DataError, EquivalenceError
from stamppruner.inputs import Inputs
from stamppruner.surgery import check_fits, cut

__all__ = ["Equivalence", "check_equivalence", "compare", "shrink"]


def check_equivalence(
    model: nn.Module,
    plan: ChannelPlan,
    example_inputs: Any = None,
    *,
    slim: nn.Module | None = None,
    seed: int = 0,
) -> Equivalence:
    """Compare the hard-masked dense model with the model that is cut by the plan.

    Args:
        model: the dense model; it is not changed.
        plan: what to keep.
        example_inputs: give the shapes of the noise, as for :func:`~stamppruner.trace_channels`;
            by default those of the plan's graph.
        slim: a model that was cut by the plan before, such as one loaded from a file; it is not
            changed. By default the model is cut here.
        seed: of the noise.

    Raises:
        PlanError: the plan is of another model.
        DataError: no example inputs, and none in the graph.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from stamppruner import ChannelPlan, trace_channels
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> graph = trace_channels(net, torch.zeros(1, 3, 9, 9))
        >>> check_equivalence(net, ChannelPlan.random(graph, keep=0.5)).passed
        True
    """
    inputs, passes = _inputs(model, plan, example_inputs), _passes(plan)
    if slim is None:
        slim = cut(model, plan)
    else:
        check_fits(model, plan)
    return compare(model, slim, plan, inputs, passes=passes, seed=seed)


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

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from stamppruner import ChannelPlan, trace_channels
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> graph = trace_channels(net, torch.zeros(1, 3, 9, 9))
        >>> slim = shrink(net, ChannelPlan.random(graph, keep=0.5))
        >>> net[0].out_channels, slim[0].out_channels, slim[2].in_channels
        (8, 4, 4)
    """
    slim = cut(model, plan)
    if certify:
        inputs = _inputs(model, plan, example_inputs)
        verdict = compare(model, slim, plan, inputs, passes=_passes(plan))
        if not verdict:
            raise EquivalenceError(
                f"{type(model).__name__} cut by a plan that {plan}: {verdict}. "
                "Protect the layers named here with trace_channels(..., protect=...)"
            )
    return slim


def _passes(plan: ChannelPlan) -> tuple[bool, ...]:
    """With the training pass where some layer is called in training mode only."""
    graph = plan.graph
    hidden = any(graph.spatial.get(n) == 0 for n, m in graph.layers.items() if m.kind == "mixing")
    return (False, True) if hidden else (False,)


def _inputs(model: nn.Module, plan: ChannelPlan, example_inputs: Any) -> Inputs:
    if example_inputs is not None:
        return Inputs.of(example_inputs, model)
    if plan.graph.example is None:
        raise DataError("the plan's graph holds no example inputs: pass example_inputs")
    return Inputs.of(plan.graph.example, model)
