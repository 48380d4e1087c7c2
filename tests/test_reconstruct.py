from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from nets import conv_bn, head
from stripes import hooks, same_state, snapshot
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner import ChannelPlan, shrink, trace_channels
from stamppruner.reconstruct import _patches, reconstruct_

SIZE = 12


def images(n: int = 64, seed: int = 0, channels: int = 3) -> Tensor:
    return torch.randn(n, channels, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def seeded(make: Any) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return make()


def cut(model: nn.Module, removed: dict[int, list[int]], like: Tensor) -> tuple[Any, ChannelPlan]:
    """The slim model without some channels, by group number and index in the group."""
    graph = trace_channels(model, like[:1])
    keep = np.ones(graph.num_channels, dtype=bool)
    for group, gone in removed.items():
        keep[graph.groups[group].start + np.array(gone)] = False
    plan = ChannelPlan(graph, keep)
    return shrink(model, plan), plan


READERS = {
    "plain": lambda: nn.Conv2d(8, 5, 3),
    "stride": lambda: nn.Conv2d(8, 5, 3, stride=2),
    "stride and padding": lambda: nn.Conv2d(8, 5, 3, stride=(2, 1), padding=(1, 2)),
    "dilation": lambda: nn.Conv2d(8, 5, 3, dilation=2, padding=2),
    "reflected": lambda: nn.Conv2d(8, 5, (3, 5), padding=(1, 2), padding_mode="reflect"),
    "pointwise": lambda: nn.Conv2d(8, 5, 1),
}


def twins(reader: nn.Module) -> nn.Module:
    """Channels 4 to 7 of the first layer repeat channels 0 to 3, scaled."""
    first = nn.Conv2d(3, 8, 3)
    with torch.no_grad():
        first.weight[4:] = 2 * first.weight[:4]
        first.bias[4:] = 2 * first.bias[:4]
    return nn.Sequential(first, nn.ReLU(), reader, nn.ReLU(), head(5, 4)).eval()


@pytest.mark.parametrize("name", READERS)
def test_what_repeats_in_kept_channels_is_restored(name: str) -> None:
    model = seeded(lambda: twins(READERS[name]()))
    x = images()
    slim, plan = cut(model, {0: [4, 5, 6, 7]}, x)
    with torch.no_grad():
        wanted = model[:3](x)
        before = (slim[:3](x) - wanted).square().mean()
        reconstruct_(slim, model, plan, x)
        after = (slim[:3](x) - wanted).square().mean()
    assert before > 0.05 * wanted.var()
    assert after < 0.01 * before


def test_without_bias_or_norm_the_offset_is_restored_as_well() -> None:
    def make() -> nn.Module:
        first = nn.Conv2d(3, 8, 3)
        with torch.no_grad():
            first.weight[4:] = 0  # constants, of which channel 7 stays
            first.bias[4:] = torch.tensor([1.0, 2.0, 3.0, 0.5])
        return nn.Sequential(
            first, nn.ReLU(), nn.Conv2d(8, 5, 3, bias=False), nn.ReLU(), head(5, 4)
        )

    model = seeded(make).eval()
    x = images()
    slim, plan = cut(model, {0: [4, 5, 6]}, x)
    with torch.no_grad():
        wanted = model[:3](x)
        before = (slim[:3](x) - wanted).square().mean()
        reconstruct_(slim, model, plan, x)
        after = (slim[:3](x) - wanted).square().mean()
    assert after < 0.1 * before


def test_linear_layers_are_restored_too() -> None:
    def make() -> nn.Module:
        first = nn.Linear(6, 8)
        with torch.no_grad():
            first.weight[4:], first.bias[4:] = first.weight[:4], first.bias[:4]
        return nn.Sequential(first, nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))

    model = seeded(make)
    x = torch.randn(200, 6, generator=torch.Generator().manual_seed(1))
    slim, plan = cut(model, {0: [4, 5, 6, 7]}, x)
    with torch.no_grad():
        wanted = model[:3](x)
        before = (slim[:3](x) - wanted).square().mean()
        reconstruct_(slim, model, plan, x)
        after = (slim[:3](x) - wanted).square().mean()
    assert after < 0.01 * before


def random_net(bias: bool, norm: bool) -> nn.Module:
    def block(i: int, o: int) -> list[nn.Module]:
        conv = nn.Conv2d(i, o, 3, padding=1, bias=bias)
        return [conv, *([nn.BatchNorm2d(o)] if norm else []), nn.ReLU()]

    return nn.Sequential(*block(3, 10), *block(10, 12), *block(12, 8), head(8, 4))


@pytest.mark.parametrize(
    ("bias", "norm", "left"), [(True, False, 0.75), (False, False, 0.75), (False, True, 0.95)]
)
def test_outputs_of_a_random_net_come_nearer(bias: bool, norm: bool, left: float) -> None:
    model = seeded(lambda: random_net(bias, norm))
    x, fresh = images(), images(seed=5)
    if norm:  # statistics of these images
        model.train()
        for _ in range(40):
            model(x)
    model.eval()
    slim, plan = cut(model, {0: [0, 3, 4, 7], 1: [1, 2, 9, 11, 5], 2: [0, 6]}, x)
    kept = np.flatnonzero(plan.graph.layers[_third(model)].kept_outputs(plan.keep))
    depth = 8 if norm else 5  # up to the third convolution, with its norm
    with torch.no_grad():
        wanted = model[:depth](fresh)[:, kept]
        before = (slim[:depth](fresh) - wanted).square().mean()
        reconstruct_(slim, model, plan, x)
        after = (slim[:depth](fresh) - wanted).square().mean()
    assert after < left * before


def _third(model: nn.Module) -> str:
    return [n for n, m in model.named_modules() if isinstance(m, nn.Conv2d)][2]


def test_only_the_slim_network_changes_and_modes_return() -> None:
    model = seeded(lambda: nn.Sequential(conv_bn(3, 8), nn.ReLU(), conv_bn(8, 6), head(6, 4)))
    x = images(16)
    slim, plan = cut(model, {0: [1, 2]}, x)
    slim.train()
    slim[0].eval()
    modes = [m.training for m in slim.modules()]
    momenta = [m.momentum for m in slim.modules() if isinstance(m, nn.BatchNorm2d)]
    dense, head_weight = snapshot(model), slim[3][2].weight.clone()
    drawn = torch.random.get_rng_state()
    reconstruct_(slim, model, plan, x)
    assert same_state(model, dense)
    assert hooks(model) == hooks(slim) == 0
    assert [m.training for m in slim.modules()] == modes
    assert [m.momentum for m in slim.modules() if isinstance(m, nn.BatchNorm2d)] == momenta
    assert torch.equal(slim[3][2].weight, head_weight)  # output layers are not touched
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_layers_that_lost_no_input_and_grouped_ones_are_left() -> None:
    model = seeded(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 4, 1), head(4)
        )
    )
    x = images(8)
    slim, plan = cut(model, {0: [0, 5]}, x)
    before = snapshot(slim)
    reconstruct_(slim, model, plan, x)
    after = slim.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"3.weight", "3.bias"}


def test_batch_norms_are_re_estimated_under_the_new_weights() -> None:
    model = seeded(lambda: nn.Sequential(conv_bn(3, 8), nn.ReLU(), conv_bn(8, 6), head(6, 4)))
    x = images(32)
    slim, plan = cut(model, {0: [1, 2, 7]}, x)
    reconstruct_(slim, model, plan, x)
    slim.eval()
    with torch.no_grad():
        y = slim[2][0](slim[1](slim[0](x)))
    assert torch.allclose(slim[2][1].running_mean, y.mean((0, 2, 3)), atol=1e-3)
    assert torch.allclose(slim[2][1].running_var, y.var((0, 2, 3)), rtol=1e-2)


def test_a_layer_that_is_called_twice_is_left() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.again, self.last = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1), head(6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).relu()
            return self.last(self.again(self.again(x).relu()))

    model = seeded(Twice)
    x = images(8)
    graph = trace_channels(model, x[:1])
    keep = np.ones(graph.num_channels, dtype=bool)
    keep[graph.groups[0].start] = False
    plan = ChannelPlan(graph, keep)
    slim = shrink(model, plan)
    before = copy.deepcopy(slim.again.state_dict())
    reconstruct_(slim, model, plan, x)
    assert same_state(slim.again, before)


def test_the_same_seed_gives_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stamppruner.reconstruct.ROWS", 64)  # so that positions are drawn
    model = seeded(lambda: twins(nn.Conv2d(8, 5, 3)))
    x = images(16)
    found = []
    for seed in (0, 0, 1):
        slim, plan = cut(model, {0: [0, 1]}, x)
        reconstruct_(slim, model, plan, x, seed=seed)
        found.append(slim[2].weight.detach())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    "settings",
    [
        {"kernel_size": 3},
        {"kernel_size": (3, 2), "stride": (2, 3), "padding": (1, 0)},
        {"kernel_size": 3, "dilation": (2, 3), "padding": 3},
        {"kernel_size": 1, "stride": 2},
    ],
)
def test_patches_are_those_of_unfold(settings: dict[str, Any]) -> None:
    module = nn.Conv2d(3, 4, **settings)
    x = torch.randn(2, 3, 9, 11)
    unfolded = F.unfold(
        x,
        module.kernel_size,
        dilation=module.dilation,
        padding=module.padding,
        stride=module.stride,
    ).transpose(1, 2)
    where = torch.randperm(unfolded.shape[1])
    assert torch.equal(_patches(module, x, where), unfolded[:, where])


@pytest.mark.parametrize("mode", ["same", "reflect", "circular", "replicate"])
def test_patches_times_weights_are_the_outputs_under_any_padding(mode: str) -> None:
    settings: dict[str, Any] = {"padding": "same"}
    if mode != "same":
        settings = {"padding": (1, 2), "padding_mode": mode}
    module = nn.Conv2d(3, 4, (3, 5), **settings).double()
    x = torch.randn(2, 3, 9, 11, dtype=torch.float64)
    y = module(x)
    patches = _patches(module, x, torch.arange(y[0, 0].numel()))
    product = patches @ module.weight.flatten(1).T + module.bias
    assert torch.allclose(product, y.flatten(2).transpose(1, 2))
