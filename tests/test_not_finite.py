"""Numbers that are not finite are named where they come from, and no network of them is given."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from stripes import dataset, vgg
from torch import Tensor, nn

from stamppruner import (
    Budget,
    STAMPConfig,
    STAMPPruner,
    check_equivalence,
    evaluate,
    finetune,
    trace_channels,
)
from stamppruner.baselines import Magnitude
from stamppruner.errors import DataError, DivergedError, StampError, UnsupportedModelError

BUDGET = Budget(macs=0.5)
QUIET = STAMPConfig(measure_latency=False)
BATCH = next(iter(torch.utils.data.DataLoader(dataset(8), 40)))


def pruned(model: nn.Module, batch: tuple[Tensor, Tensor], **changes: Any) -> Any:
    config = STAMPConfig(measure_latency=False, **changes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # not meta-fitted
        return STAMPPruner(model, config=config).prune([batch], BUDGET, progress=False)


def half(*, head: bool) -> nn.Module:
    torch.manual_seed(0)
    tail = (
        [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 6)]
        if head
        else [nn.Conv2d(16, 6, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    )
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), *tail]
    return nn.Sequential(*layers).half()


@pytest.mark.parametrize("head", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_of_half_precision_are_resolved_in_single(head: bool, dtype: torch.dtype) -> None:
    model, (images, labels) = half(head=head).to(dtype), BATCH
    images = (64 * images).to(dtype)  # squares of which sum to more than float16 holds
    result = pruned(model, (images, labels))
    assert {p.dtype for p in result.model.parameters()} == {dtype}
    assert result.model(images).isfinite().all()


def spoilt(name: str) -> nn.Module:
    model = vgg()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        tensors[name].view(-1)[0] = math.nan
    return model


NAMES = [n for n, t in vgg().state_dict().items() if t.is_floating_point()]


@pytest.mark.parametrize(
    "name", [NAMES[0], next(n for n in NAMES if "running_var" in n), NAMES[-1]]
)
def test_a_nan_in_the_model_is_named(name: str) -> None:
    model = spoilt(name)
    for refused in (
        lambda: trace_channels(model, BATCH[0][:1]),
        lambda: pruned(model, BATCH),
        lambda: Magnitude(measure_latency=False).prune(model, [BATCH], BUDGET),
    ):
        with pytest.raises(UnsupportedModelError, match=f"'{name}'.*NaN"):
            refused()


def test_a_nan_that_came_after_tracing_is_named() -> None:
    graph = trace_channels(vgg(), BATCH[0][:1])
    with pytest.raises(StampError, match="NaN"):
        Magnitude(measure_latency=False).prune(spoilt(NAMES[0]), [BATCH], BUDGET, graph=graph)


def test_nan_outputs_are_not_counted_as_a_class() -> None:
    with pytest.raises(DivergedError, match="NaN"):
        evaluate(spoilt(NAMES[-1]), [BATCH])


def test_images_that_are_far_too_large_are_named() -> None:
    images, labels = BATCH
    with pytest.raises(DataError, match="scale"):
        pruned(vgg(), (images * 1e30, labels))


def test_gates_that_diverge_on_the_target_are_named() -> None:
    with pytest.raises(DivergedError, match="K = 3"):
        pruned(vgg(), BATCH, prune_epochs=3.0, theta_lr=1e30, pi_lr=1e30, weights_lr=1e30)


@pytest.mark.parametrize("clip", [5.0, math.inf])
def test_a_gradient_that_is_not_finite_is_not_stepped_along(clip: float) -> None:
    model = vgg()
    before = {n: p.clone() for n, p in model.named_parameters()}

    def root(outputs: Tensor, _targets: Tensor) -> Tensor:
        return (0 * outputs).sum().sqrt()  # 0, with a gradient of 0 * inf

    with pytest.raises(DivergedError, match="norm of the gradient"):
        finetune(model, [BATCH], epochs=1, loss_fn=root, clip=clip, progress=False)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_weights_that_are_lost_in_the_last_step_are_named() -> None:
    with pytest.raises(DivergedError, match="diverged"):
        finetune(vgg(), [BATCH], epochs=1, schedule=lambda _: math.nan, progress=False)


def test_inputs_of_other_kinds_are_named() -> None:
    images, labels = BATCH
    for wrong in (images[:, :1], images.double(), images.half()):
        with pytest.raises(DataError, match="does not take images"):
            evaluate(vgg(), [(wrong, labels)])
        with pytest.raises(DataError, match="does not take images"):
            finetune(vgg(), [(wrong, labels)], epochs=1, progress=False)


def test_a_set_with_nan_has_no_keep_probability() -> None:
    pruner = STAMPPruner(vgg(), BATCH[0][:1], config=QUIET)
    with pytest.raises(DataError, match="hold NaN"):
        pruner.keep_probability(BATCH[0] * math.nan)


@pytest.mark.parametrize("kind", ["compiled", "lazy", "weight_norm"])
def test_models_that_cannot_be_traced_are_refused_with_the_remedy(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, remedy = {
            "compiled": lambda: (torch.compile(vgg()), "_orig_mod"),
            "lazy": lambda: (nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten()), "run it on"),
            "weight_norm": lambda: (
                nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 2, 1)),
                "parametrizations",
            ),
        }[kind]()
    for refused in (
        lambda: trace_channels(model, BATCH[0][:1]),
        lambda: STAMPPruner(model, BATCH[0][:1]),
    ):
        with pytest.raises(UnsupportedModelError, match=remedy):
            refused()


def test_an_equal_network_is_still_equal() -> None:
    model = vgg()
    result = pruned(model, BATCH, reconstruct=False, fit_head=False, recalibrate=False)
    assert check_equivalence(model, result.plan, BATCH[0][:1])
