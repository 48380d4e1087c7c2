"""Small networks of every wiring, for the tests of graph, gates, surgery and certificate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """Layers by name, and a function of (net, inputs) that wires them."""

    def __init__(self, wiring: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.wiring = wiring
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.wiring(self, *args, **kwargs)


class ChannelsFirstNorm(nn.Module):
    """Layer norm over the channels of ``(B, C, H, W)``, as in ConvNeXt."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Residual(nn.Module):
    """x + two convolutions."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv_bn(width, inner), nn.ReLU(), conv_bn(inner, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.body(x))


class SqueezeExcite(nn.Module):
    """Channels scaled by a function of their means."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


def conv_bn(i: int, o: int, size: int = 3, **settings: Any) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(i, o, size, padding=size // 2, **settings), nn.BatchNorm2d(o))


def head(width: int, classes: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def plain() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 8), nn.ReLU(), conv_bn(8, 12), nn.Sigmoid(), nn.Conv2d(12, 6, 1), head(6)
    )


def linear_stack() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 10), nn.GELU(), nn.Linear(10, 2))


def residual() -> nn.Module:
    return nn.Sequential(conv_bn(3, 8), Residual(8, 6), Residual(8, 10), head(8))


def depthwise() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 8, 1), nn.ReLU6(), conv_bn(8, 8, groups=8), nn.ReLU6(), conv_bn(8, 6, 1), head(6)
    )


def concat() -> nn.Module:
    def wiring(net: Any, x: Tensor) -> Tensor:
        a, b = net.a(x), net.b(x).relu()
        return net.head(net.c(torch.cat([b, x, a, b], 1)))

    return Net(wiring, a=conv_bn(3, 6), b=conv_bn(3, 4), c=conv_bn(17, 8), head=head(8))


def grouped() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 16, 1),
        nn.ReLU(),
        conv_bn(16, 32, groups=4),
        nn.ReLU(),
        conv_bn(32, 6, 1),
        head(6),
    )


def flattened() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 8), nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(72, 10), nn.ReLU(),
        nn.Linear(10, 4),
    )  # fmt: skip


def squeeze_excite() -> nn.Module:
    return nn.Sequential(conv_bn(3, 8), nn.SiLU(), SqueezeExcite(8, 4), conv_bn(8, 6), head(6))


def unet() -> nn.Module:
    def wiring(net: Any, x: Tensor) -> Tensor:
        top = net.top(x).relu()
        deep = net.up(net.deep(F.max_pool2d(top, 2)).relu())
        return net.out(net.merge(torch.cat([top, deep], 1)).relu())

    return Net(
        wiring, top=conv_bn(3, 6), deep=conv_bn(6, 8), up=nn.ConvTranspose2d(8, 5, 2, stride=2),
        merge=conv_bn(11, 7), out=nn.Conv2d(7, 2, 1),
    )  # fmt: skip


def chunked() -> nn.Module:
    def wiring(net: Any, x: Tensor) -> Tensor:
        a, b = net.split(x).chunk(2, 1)
        return net.head(net.a(a) + net.b(b))

    return Net(wiring, split=conv_bn(3, 12), a=conv_bn(6, 8), b=conv_bn(6, 8), head=head(8))


def layer_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), ChannelsFirstNorm(8), nn.Conv2d(8, 12, 1), nn.GELU(),
        nn.Conv2d(12, 8, 1), ChannelsFirstNorm(8), head(8),
    )  # fmt: skip


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.GroupNorm(3, 12), nn.ReLU(), nn.Conv2d(12, 6, 1), head(6)
    )


def shuffled() -> nn.Module:
    def wiring(net: Any, x: Tensor) -> Tensor:
        return net.head(net.last(F.channel_shuffle(net.first(x).relu(), 2)))

    return Net(wiring, first=conv_bn(3, 12), last=conv_bn(12, 6, groups=2), head=head(6))


def aux_head() -> nn.Module:
    """In training mode it also returns the output of a second head."""

    def wiring(net: Any, x: Tensor) -> Any:
        x = net.stem(x).relu()
        out = net.head(net.body(x))
        return (out, net.aux(x)) if net.training else out

    return Net(wiring, stem=conv_bn(3, 8), body=conv_bn(8, 6), head=head(6), aux=head(8))


@dataclass(frozen=True)
class Case:
    """A network, and two sample shapes that it takes."""

    name: str
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...] = ((3, 8, 8), (3, 12, 10))

    def model(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
        return seeded(self.make, seed).to(dtype)


CASES = (
    Case("plain", plain),
    Case("linear_stack", linear_stack, ((3,), (7, 3))),
    Case("residual", residual),
    Case("depthwise", depthwise),
    Case("concat", concat),
    Case("grouped", grouped),
    Case("flattened", flattened),
    Case("squeeze_excite", squeeze_excite),
    Case("unet", unet),
    Case("chunked", chunked),
    Case("layer_norm", layer_norm),
    Case("group_norm", group_norm),
    Case("shuffled", shuffled),
    Case("aux_head", aux_head),
)


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A model with random parameters and norm statistics, in evaluation mode.

    Fresh norms are all alike, which would hide a wrong permutation.
    """
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = make()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                if tensor.dim() == 1 and tensor.is_floating_point():
                    tensor.uniform_(0.5, 1.5)
    return model.eval()


def noise(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference, relative to the largest value."""
    assert a.shape == b.shape
    return float((a - b).detach().abs().max() / a.detach().abs().max())
