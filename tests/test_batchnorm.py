from __future__ import annotations

import copy
import math

import pytest
import torch
from nets import conv_bn, head
from stripes import same_state, snapshot
from torch import nn

from stamppruner.batchnorm import frozen_statistics, recalibrate_


def net() -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return nn.Sequential(conv_bn(3, 4), nn.ReLU(), conv_bn(4, 5), nn.Dropout(0.5), head(5, 2))


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [1 + 2 * torch.randn(6, 3, 7, 7, generator=generator) for _ in range(count)]


def test_statistics_are_plain_averages_over_batches() -> None:
    model, data = net(), batches()
    recalibrate_(model, data)
    with torch.no_grad():
        outputs = [model[0][0](x) for x in data]
    means = torch.stack([y.mean((0, 2, 3)) for y in outputs]).mean(0)
    variances = torch.stack([y.var((0, 2, 3)) for y in outputs]).mean(0)
    assert torch.allclose(model[0][1].running_mean, means, atol=1e-5)
    assert torch.allclose(model[0][1].running_var, variances, rtol=1e-4)
    assert model[0][1].num_batches_tracked == 3


def test_a_generator_of_batches_is_read_in_full() -> None:
    first, second = net(), net()
    recalibrate_(first, batches())
    recalibrate_(second, (x for x in batches()))
    assert same_state(first, second.state_dict())


def test_what_was_there_before_does_not_matter_and_dropout_is_off() -> None:
    first, second = net(), net()
    nn.init.constant_(second[2][1].running_mean, 100.0)
    second[2][1].num_batches_tracked += 7
    recalibrate_(first, batches())
    recalibrate_(second, batches())
    assert same_state(first, second.state_dict())


@pytest.mark.parametrize("training", [True, False])
def test_modes_and_momenta_return_also_after_an_exception(training: bool) -> None:
    model = net().train(training)
    model[0].eval()
    model[0][1].momentum, model[2][1].momentum = None, 0.3
    modes = [m.training for m in model.modules()]
    recalibrate_(model, batches())
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(RuntimeError):
        recalibrate_(model, [torch.zeros(2, 9, 7, 7)])
    assert [m.training for m in model.modules()] == modes
    assert (model[0][1].momentum, model[2][1].momentum) == (None, 0.3)


def test_nothing_happens_without_batches_norms_or_statistics() -> None:
    model = net()
    before = snapshot(model)
    recalibrate_(model, [])
    assert same_state(model, before)
    bare = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    before = snapshot(bare)
    recalibrate_(bare, batches())
    assert same_state(bare, before)
    assert bare[1].running_mean is None


def test_weights_are_left() -> None:
    model = net()
    before = {n: p.clone() for n, p in model.named_parameters()}
    recalibrate_(model, batches())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("momentum", [0.1, None])
def test_frozen_statistics_stay_though_batch_statistics_are_used(momentum: float | None) -> None:
    model, (x, *_) = net().train(), batches()
    for part in (model[0][1], model[2][1]):
        part.momentum = momentum
    before = snapshot(model)
    with frozen_statistics(model), torch.random.fork_rng([]):
        torch.manual_seed(2)
        frozen = model(x)
    assert same_state(model, before)
    assert model[0][1].momentum == momentum
    with torch.random.fork_rng([]):
        torch.manual_seed(2)
        thawed = model(x)
    assert torch.equal(frozen, thawed)
    assert not same_state(model, before)
    assert model[0][1].num_batches_tracked == before["0.1.num_batches_tracked"] + 1


def test_frozen_statistics_thaw_after_an_exception() -> None:
    model = net().train()
    before = snapshot(model)

    def fail() -> None:
        with frozen_statistics(model):
            model(batches()[0])
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert same_state(model, before)
    assert model[0][1].momentum == 0.1


def test_frozen_statistics_survive_images_that_are_not_finite() -> None:
    norm = nn.BatchNorm2d(2).train()
    before = copy.deepcopy(norm.state_dict())
    with frozen_statistics(norm):
        norm(torch.full((4, 2, 3, 3), math.nan))
    assert all(torch.equal(value, before[name]) for name, value in norm.state_dict().items())
    norm(torch.randn(4, 2, 3, 3))
    assert norm.num_batches_tracked == 1
