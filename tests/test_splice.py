from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Residual, conv_bn, difference, noise, seeded
from torch import Tensor, nn

from stamppruner.splice import SpliceError, has_mixing, residual_sums, splice

X = noise(2, 4, 6, 6)


class Wired(nn.Module):
    """Two convolutions, wired by a function."""

    def __init__(self, wiring: Callable[..., Any]) -> None:
        super().__init__()
        self.a, self.b, self.wiring = conv_bn(4, 4), conv_bn(4, 4), wiring

    def forward(self, x: Tensor) -> Tensor:
        return self.wiring(self, x)


WIRINGS: dict[str, tuple[Callable[..., Any], dict[int, int]]] = {
    "left": (lambda n, x: x + n.b(n.a(x)), {0: 0}),
    "right": (lambda n, x: n.b(n.a(x)) + x, {0: 1}),
    "in place": (lambda n, x: n.b(n.a(x)).add_(x), {0: 1}),
    "function": (lambda n, x: torch.add(n.b(n.a(x)), x), {0: 1}),
    "through an activation": (lambda n, x: n.b(n.a(x)) + x.relu(), {0: 1}),
    "both mix": (lambda n, x: n.a(x) + n.b(x), {}),
    "no layer": (lambda n, x: n.b(n.a(x + x.relu())), {}),
    "constant": (lambda n, x: n.b(n.a(x)) + 1, {}),
    "scaled": (lambda n, x: torch.add(n.b(n.a(x)), x, alpha=2), {}),
    "one after the other": (lambda n, x: (y := x + n.a(x)) + n.b(y), {0: 0, 1: 0}),
    "a chain": (lambda n, x: x + n.a(x) + n.b(x), {0: 0}),
    "product": (lambda n, x: x * n.b(n.a(x)), {}),
}


@pytest.mark.parametrize("name", WIRINGS)
def test_residual_sums(name: str) -> None:
    wiring, expected = WIRINGS[name]
    block = seeded(lambda: Wired(wiring)).double()
    assert residual_sums(block) == expected
    taps = {(number, side): (f"tap_{number}", nn.Identity()) for number, side in expected.items()}
    with torch.no_grad():
        assert torch.equal(splice(block, taps)(X.clone()), block(X.clone()))


def test_a_spliced_module_shares_and_survives_copies() -> None:
    block = seeded(lambda: Residual(4, 6)).double().train()
    spliced = splice(block, {(0, 0): ("extra", nn.Conv2d(4, 4, 1).double())})
    assert spliced.body is block.body
    assert spliced.training
    assert list(spliced.state_dict()) != list(block.state_dict())
    for other in (copy.deepcopy(spliced), pickle.loads(pickle.dumps(spliced))):
        with torch.no_grad():
            assert difference(spliced.eval()(X), other.eval()(X)) == 0


@pytest.mark.parametrize("training", [False, True])
def test_nothing_is_left_behind(training: bool) -> None:
    def wiring(net: Any, x: Tensor) -> Tensor:
        net.note = x
        return x + net.a(x)

    block = seeded(lambda: Wired(wiring)).train(training)
    before = dict(block.__dict__)
    with pytest.raises(SpliceError, match=r"attributes \(note\)"):
        residual_sums(block)
    assert block.__dict__ == before


def test_refusals() -> None:
    block = seeded(lambda: Residual(4, 6))
    for inserted in ({(1, 0): ("extra", nn.Identity())}, {(0, 0): ("body", nn.Identity())}):
        with pytest.raises(SpliceError, match="it has no sum"):
            splice(block, inserted)
    handle = block.register_forward_hook(lambda *_: None)
    with pytest.raises(SpliceError, match="hooks"):
        residual_sums(block)
    handle.remove()
    random = seeded(lambda: Wired(lambda n, x: x + n.b(n.a(x)) * torch.ones(4, 1, 1)))
    with pytest.raises(SpliceError):
        residual_sums(random)
    unused = seeded(lambda: Wired(lambda n, x: x + n.a(x)))
    with pytest.raises(SpliceError, match="other parameters"):
        splice(unused, {(0, 0): ("extra", nn.Identity())})


def test_what_mixes_channels() -> None:
    class Own(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(shape))

    assert has_mixing(nn.Sequential(nn.ReLU(), nn.Linear(2, 2)))
    assert has_mixing(Own(4, 4))
    assert not has_mixing(nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)))
    assert not has_mixing(Own(4, 1, 1))
