from __future__ import annotations

import pytest
import torch
from nets import Residual, SqueezeExcite, conv_bn, noise, seeded
from torch import Tensor, nn

from stamppruner.errors import UnsupportedModelError
from stamppruner.inputs import Inputs
from stamppruner.trial import Call, channel_axis, first_calls, is_read, is_residual, nan_arrives

CALL = Call((noise(2, 8, 6, 6),), {})


def first(outputs: list[Tensor]) -> Tensor:
    return outputs[0]


def test_what_arrives() -> None:
    block = seeded(lambda: Residual(8, 6)).double()
    plain = seeded(lambda: nn.Sequential(conv_bn(8, 8), nn.ReLU())).double()
    assert is_residual(block, CALL)
    assert not is_residual(plain, CALL)
    assert nan_arrives(block, CALL, everything=True)
    assert not nan_arrives(block, CALL)
    assert not is_read(block, CALL, block.body[2][0])
    assert is_read(block, CALL, block.body[0][0])
    assert torch.isfinite(block(CALL.args[0])).all()  # left as it was


@pytest.mark.parametrize(
    ("make", "axis"),
    [
        (lambda: conv_bn(8, 8), 1),
        (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8)), 1),
        (lambda: nn.Sequential(nn.Conv2d(8, 8, 1), nn.Softmax(1)), 1),  # by the layers' kind
        (lambda: nn.Sequential(conv_bn(8, 8), SqueezeExcite(8, 4)), 1),
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5)), 3),
        (lambda: nn.Sequential(nn.Linear(6, 5), nn.Softmax(3)), None),
    ],
)
def test_the_axis_of_channels(make, axis) -> None:
    assert channel_axis(seeded(make).double(), CALL, first) == axis


def test_first_calls() -> None:
    model = nn.Sequential(conv_bn(3, 8), Residual(8, 6))
    calls = first_calls(model, Inputs.of(noise(2, 3, 6, 6), model))
    assert list(calls) == [model, model[0], model[1], model[1].body, *model[1].body[::2]]
    assert calls[model[1]].args[0].shape == (2, 8, 6, 6)
    with pytest.raises(UnsupportedModelError, match="fails on the example inputs"):
        first_calls(model, Inputs.of(noise(2, 4, 6, 6), model))
    assert not any(m._forward_pre_hooks for m in model.modules())
