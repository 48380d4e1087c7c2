"""What the probe finds about code between layers, and that it leaves the model as it was."""

import numpy as np
import pytest
import torch
from nets import Net, conv_bn, noise, seeded
from torch import nn

from stamppruner.calls import evaluating, record_calls
from stamppruner.inputs import Inputs
from stamppruner.probe import Probe
from stamppruner.reach import probe

WIDTH = 6


def reached(function, width=WIDTH, reader=WIDTH, side=4):
    """(channel, position) pairs from a convolution through a function to the next one."""

    def wiring(net, x):
        return net.out(function(net.first(x)))

    model = seeded(lambda: Net(wiring, first=nn.Conv2d(3, width, 1), out=nn.Conv2d(reader, 2, 1)))
    inputs = Inputs.of(torch.zeros(1, 3, side, side), model)
    with torch.no_grad(), evaluating(model):
        found = probe(Probe(model, inputs, record_calls(model, inputs)))
    pairs = found.pairs[found.pairs[:, 0] == 0]
    ties = found.ties[found.ties[:, 0] == 0]
    offset = found.readers["first"]
    return {(int(c), int(p) - offset) for _, c, p in (*pairs, *ties)}, found


def straight(channels):
    return {(c, p) for p, c in enumerate(channels)}


@pytest.mark.parametrize(
    ("function", "order"),
    [
        (torch.relu, range(6)),
        (lambda x: x.flip(1), [5, 4, 3, 2, 1, 0]),
        (lambda x: x.roll(2, 1), [4, 5, 0, 1, 2, 3]),
        (lambda x: x[:, [3, 1, 2, 0, 5, 4]], [3, 1, 2, 0, 5, 4]),
        (lambda x: torch.cat([x[:, 3:], x[:, :3]], 1), [3, 4, 5, 0, 1, 2]),
        (lambda x: x.unflatten(1, (2, 3)).transpose(1, 2).flatten(1, 2), [0, 3, 1, 4, 2, 5]),
        (lambda x: x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) * 2 + 1, range(6)),
        (lambda x: torch.stack(x.unbind(1), 1), range(6)),
        (lambda x: x / x.amax((2, 3), keepdim=True), range(6)),
    ],
)
def test_rearrangements(function, order):
    assert reached(function)[0] == straight(order)


def test_several_positions_a_channel():
    assert reached(lambda x: x.repeat(1, 2, 1, 1), reader=12)[0] == straight([*range(6), *range(6)])
    twice = reached(lambda x: x.repeat_interleave(2, 1), reader=12)[0]
    assert twice == straight(np.repeat(range(6), 2))


def test_padding_and_slices_leave_positions_open():
    padded = reached(lambda x: nn.functional.pad(x, (0, 0, 0, 0, 1, 2)), reader=9)[0]
    assert padded == {(c, c + 1) for c in range(6)}
    assert reached(lambda x: x[:, 1:4], reader=3)[0] == {(1, 0), (2, 1), (3, 2)}


def test_sums_of_channels_reach_from_each():
    pairs = reached(lambda x: x[:, :3] + x[:, 3:], reader=3)[0]
    assert pairs == {(c, c % 3) for c in range(6)}


def test_mixing_by_the_code_reaches_from_all():
    pairs, found = reached(lambda x: x.softmax(1))
    assert pairs == {(c, 0) for c in range(6)} | {(0, p) for p in range(6)}  # one component
    assert len(found.ties)
    assert not len(found.pairs[found.pairs[:, 0] == 0])


def test_output_and_input_positions():
    _, found = reached(torch.relu)
    assert found.output_producers == ("out",)
    assert found.input_positions.tolist() == [0, 1, 2]
    assert not len(found.silent)


def test_a_mean_over_the_batch_does_not_confuse_the_rows():
    assert reached(lambda x: x - x.mean(0, keepdim=True))[0] == straight(range(6))


def test_the_model_is_left_as_it_was():
    model = seeded(lambda: nn.Sequential(conv_bn(3, 8), nn.ReLU(), conv_bn(8, 4)))
    x = noise(2, 3, 6, 6, dtype=torch.float32)
    expected, keys = model(x), [sorted(vars(m)) for m in model.modules()]
    inputs = Inputs.of(torch.zeros(1, 3, 6, 6), model)
    with torch.no_grad(), evaluating(model):
        probe(Probe(model, inputs, record_calls(model, inputs)))
    assert torch.equal(model(x), expected)
    assert [sorted(vars(m)) for m in model.modules()] == keys
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def written(x):
    x[:, 2, 1, 1] = 1.0
    return x


@pytest.mark.parametrize("function", [written, lambda x: x.view(len(x), 6, -1)[:, :, None]])
@pytest.mark.parametrize("channels", [1, 6])
def test_code_that_needs_memory_of_its_own(function, channels):
    """Answers are stored once for all places, until a model cannot work with that."""
    view = (lambda x: x.view(len(x), -1).view_as(x)) if channels == 6 else (lambda x: x)
    assert reached(lambda x: view(function(x)).reshape(len(x), 6, -1, 4))[0] == straight(range(6))
