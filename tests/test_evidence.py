from __future__ import annotations

import pytest
import torch
from nets import conv_bn, head
from stripes import hooks, resnet, same_state, snapshot, stripes, vgg
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner import trace_channels
from stamppruner.encoders import DeepSets
from stamppruner.evidence import ChannelReader, running_statistics

X = torch.zeros(1, 3, 8, 8)


@pytest.mark.parametrize("make", [vgg, resnet])
def test_standardised_readings_have_mean_zero_and_deviation_one_in_each_group(make) -> None:
    model = make()
    graph = trace_channels(model, X)
    reading = ChannelReader(model, graph).standardised(stripes(2)[0]).detach()
    assert reading.shape == (graph.num_channels,)
    for group in graph.groups:
        values = reading[group.channels]
        assert values.mean().abs() < 1e-5
        assert values.std(correction=0) == pytest.approx(1, abs=1e-3)


def test_a_reading_is_the_mean_of_what_the_readers_read() -> None:
    model = vgg().eval()
    graph, images = trace_channels(model, X), stripes(2)[0]
    with torch.no_grad():
        reading = ChannelReader(model, graph).read(images)
        first = model.features[:3](images)  # up to the second convolution
        last = model.pool(model.features(images)).flatten(1)
    first_map = graph.layers["features.4"].inputs
    assert torch.allclose(reading[torch.from_numpy(first_map)], _pooled(model, first), atol=1e-5)
    last_map = graph.layers["classifier"].inputs
    assert torch.allclose(reading[torch.from_numpy(last_map)], last.mean(0), atol=1e-5)


def _pooled(model: nn.Module, first: Tensor) -> Tensor:
    """What the second convolution reads: behind the max-pool."""
    return model.features[3](first).mean((0, 2, 3))


def test_channels_that_several_layers_read_are_averaged() -> None:
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1), nn.Conv2d(4, 5, 1)
            self.last = head(5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.last(self.a(x) + self.b(3 * x))

    model = Fork()
    graph, images = trace_channels(model, X), stripes(2)[0]
    with torch.no_grad():
        reading = ChannelReader(model, graph).read(images)
        stem = model.stem(images).mean((0, 2, 3))
    assert torch.allclose(
        reading[torch.from_numpy(graph.layers["a"].inputs)], (1 + 3) / 2 * stem, atol=1e-5
    )


def test_other_images_give_other_readings_and_the_same_ones_the_same() -> None:
    model = resnet()
    reader = ChannelReader(model, trace_channels(model, X))
    images, labels = stripes(8)
    first, second = images[labels == 0], images[labels == 5]
    assert torch.equal(reader.standardised(first), reader.standardised(first))
    assert (reader.standardised(first) - reader.standardised(second)).abs().max() > 0.1


def test_reading_leaves_no_trace_even_when_it_fails() -> None:
    model = vgg().train()
    model.features[1].eval()
    before, modes = snapshot(model), [m.training for m in model.modules()]
    reader = ChannelReader(model, trace_channels(model, X))
    reader.read(stripes(1)[0])
    with pytest.raises(RuntimeError):
        reader.read(torch.zeros(1, 7, 8, 8))
    assert hooks(model) == 0
    assert same_state(model, before)
    assert [m.training for m in model.modules()] == modes


def test_the_gradient_reaches_the_encoder() -> None:
    model, encoder = vgg(), DeepSets(3, seed=0)
    graph = trace_channels(model, X)
    reading = ChannelReader(model, graph).standardised(encoder(stripes(2)[0]))
    weights = torch.linspace(-1, 1, graph.num_channels)
    (reading * weights).sum().backward()
    gradients = [p.grad for p in encoder.parameters()]
    assert all(g is not None and torch.isfinite(g).all() for g in gradients)
    assert sum(float(g.abs().sum()) for g in gradients if g is not None) > 0


def test_a_constant_group_reads_zero_and_not_nan() -> None:
    model = nn.Sequential(conv_bn(3, 4), nn.ReLU(), head(4)).eval()
    nn.init.zeros_(model[0][1].weight)
    graph = trace_channels(nn.Sequential(conv_bn(3, 4), nn.ReLU(), head(4)).eval(), X)
    reading = ChannelReader(model, graph).standardised(stripes(1)[0])
    assert torch.equal(reading, torch.zeros(4))


def test_running_statistics_restores_every_mode() -> None:
    model = vgg().train()
    model.features[0].eval()
    with running_statistics(model):
        assert not any(m.training for m in model.modules())
        inside = F.relu(model(X))
    assert inside.shape == (1, 6)
    assert model.training
    assert not model.features[0].training
    assert model.features[1].training
