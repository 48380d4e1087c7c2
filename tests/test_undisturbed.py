"""Modes of PyTorch that the caller is in change no result."""

from __future__ import annotations

import copy
import warnings
from contextlib import AbstractContextManager

import pytest
import torch
from stripes import dataset, vgg

from stamppruner import Budget, STAMPConfig, STAMPPruner, TaskSampler, finetune
from stamppruner.baselines import LAMP, Magnitude, Taylor
from stamppruner.undisturbed import undisturbed

BUDGET = Budget(macs=0.5)
QUIET = STAMPConfig(measure_latency=False, iterations=1, weight_steps=1, ways=3, shots=4)
AMBIENT = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
}
ambient = pytest.mark.parametrize("mode", AMBIENT)


def entered(mode: str) -> AbstractContextManager[object]:
    return AMBIENT[mode]()


def same(one: torch.nn.Module, two: torch.nn.Module) -> bool:
    states = one.state_dict(), two.state_dict()
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][name]) for name, value in states[0].items()
    )


@ambient
def test_the_same_network_is_pruned_in_any_mode(mode: str) -> None:
    model = vgg()
    pruner = STAMPPruner(model, torch.zeros(1, 3, 8, 8), config=QUIET)
    pruner.meta_fit(TaskSampler(dataset(8), 3, 4), progress=False)
    plain = pruner.prune(dataset(8), BUDGET, progress=False)
    with entered(mode):
        under = pruner.prune(dataset(8), BUDGET, progress=False)
    assert same(plain.model, under.model)
    assert plain.report.metrics == under.report.metrics


@ambient
def test_the_same_pruner_is_fitted_in_any_mode(mode: str) -> None:
    models, samplers = [vgg(), vgg()], [TaskSampler(dataset(8), 3, 4) for _ in "ab"]

    def fitted() -> STAMPPruner:
        pruner = STAMPPruner(models.pop(), torch.zeros(1, 3, 8, 8), config=QUIET)
        return pruner.meta_fit(samplers.pop(), progress=False)

    plain = fitted()
    with entered(mode):
        under = fitted()
    assert same(plain.network, under.network)
    assert (plain.keep_probability() == under.keep_probability()).all()


@ambient
@pytest.mark.parametrize("method", [Magnitude, Taylor, LAMP])
def test_baselines_are_the_same_in_any_mode(method: type, mode: str) -> None:
    budget = Budget(params=0.5) if method is LAMP else BUDGET
    plain = method(measure_latency=False).prune(vgg(), dataset(8), budget)
    with entered(mode):
        under = method(measure_latency=False).prune(vgg(), dataset(8), budget)
    assert same(plain.model, under.model)
    assert plain.report.metrics == under.report.metrics


@ambient
def test_training_is_the_same_in_any_mode(mode: str) -> None:
    one = vgg()
    two = copy.deepcopy(one)
    finetune(one, dataset(8), epochs=1, seed=0, progress=False)
    with entered(mode):
        finetune(two, dataset(8), epochs=1, seed=0, progress=False)
    assert same(one, two)


@ambient
def test_modes_are_those_of_before_afterwards(mode: str) -> None:
    def modes() -> tuple[bool, ...]:
        asked = torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()
        return (*asked, torch.is_inference_mode_enabled())

    with entered(mode):
        before = modes()
        with undisturbed():
            assert modes() == (False, True, False)
        assert modes() == before
        with pytest.raises(ZeroDivisionError), undisturbed():
            raise ZeroDivisionError
        assert modes() == before


def test_a_default_of_double_precision_changes_nothing_but_rounding() -> None:
    model = vgg()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = [(x.float(), y) for x, y in torch.utils.data.DataLoader(dataset(8), 16)]
            result = STAMPPruner(model, config=QUIET).prune(data, BUDGET, progress=False)
    finally:
        torch.set_default_dtype(torch.float32)
    assert {p.dtype for p in result.model.parameters()} == {torch.float32}
    assert result.report.reached is not None
    assert result.report.reached["macs"] <= 0.5


@ambient
def test_training_under_amp_sees_its_new_weights(mode: str) -> None:
    one = vgg()
    two = copy.deepcopy(one)
    history = finetune(one, dataset(8), epochs=8, lr=0.1, amp=True, seed=0, progress=False)
    with entered(mode):
        under = finetune(two, dataset(8), epochs=8, lr=0.1, amp=True, seed=0, progress=False)
    assert history["loss"][-1] < 0.8 * history["loss"][0]
    assert under["loss"][-1] == pytest.approx(history["loss"][-1], rel=0.05)
