"""Convolutions of few positions are those of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stamppruner.few_positions import few_positions

KINDS: dict[str, tuple[dict[str, Any], bool]] = {
    "3x3": ({"kernel_size": 3, "padding": 1}, True),
    "no bias": ({"kernel_size": 3, "padding": 1, "bias": False}, True),
    "strided": ({"kernel_size": (1, 2), "stride": 2}, True),
    "dilated": ({"kernel_size": 2, "dilation": (1, 2), "padding": (0, 1)}, True),
    "grouped": ({"kernel_size": 3, "padding": 1, "groups": 2}, False),
    "named padding": ({"kernel_size": 3, "padding": "same"}, False),
    "reflected": ({"kernel_size": 3, "padding": 1, "padding_mode": "reflect"}, False),
}


def outcome(conv: nn.Conv2d, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients."""
    x = x.clone().requires_grad_()
    conv.zero_grad()
    y = conv(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in conv.parameters())]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "side"), [(1, 2), (2, 2), (1, 5)])
def test_outputs_and_gradients_are_those_of_torch(
    kind: str, batch: int, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    settings, takes = KINDS[kind]
    conv, x = nn.Conv2d(4, 6, **settings), torch.randn(batch, 4, side, side)
    wanted, products = outcome(conv, x), []
    linear = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: products.append(1) or linear(*args))
    with few_positions(nn.Sequential(conv)):
        found = outcome(conv, x)
    assert bool(products) == (takes and wanted[0][:, 0].numel() <= 8)
    for one, two in zip(found, wanted, strict=True):
        assert torch.allclose(one, two, atol=1e-4)
    assert "forward" not in conv.__dict__


def test_a_map_that_is_too_small_is_an_error_as_before() -> None:
    conv = nn.Conv2d(4, 6, 3)
    with few_positions(conv), pytest.raises(RuntimeError, match="Kernel size"):
        conv(torch.zeros(1, 4, 2, 2))
    conv.forward = lambda x: x  # somebody else's
    with few_positions(conv):
        assert conv(torch.zeros(1)).shape == (1,)
    assert "forward" in conv.__dict__


def test_what_a_set_says_is_read_with_them() -> None:
    from stripes import vgg

    from stamppruner import evidence, trace_channels

    model = vgg()
    reader = evidence.ChannelReader(model, trace_channels(model, torch.zeros(1, 3, 8, 8)))
    seen: list[bool] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, *_: seen.append("forward" in m.__dict__))
    reader.read(torch.zeros(1, 3, 8, 8))
    assert seen
    assert all(seen)
