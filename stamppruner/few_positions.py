"""Convolutions with few outputs an image and a large weight, as products of matrices.

Torch's kernel for a single image on the CPU makes the gradient of the weight in memory that it
fills with zeros first, and its products are slow where a map has a handful of positions, as behind
the last poolings of a network for small images. There this takes half of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner.calls import patched_forwards

_MOST = 8
"""Positions of all images together; with 16 nothing is gained."""


@contextmanager
def few_positions(model: nn.Module) -> Iterator[None]:
    """Plain 2-D convolutions borrow another forward inside the block; the same but for rounding."""
    taken = [m for m in model.modules() if type(m) is nn.Conv2d and _takes(m)]
    with patched_forwards({m: _forward_of(m) for m in taken}):
        yield


def _takes(module: nn.Conv2d) -> bool:
    """Whether it is one product for all channels, and its forward is its own."""
    plain = module.groups == 1 and module.padding_mode == "zeros"
    own = "forward" not in module.__dict__ and module.weight.device.type == "cpu"
    return plain and own and not isinstance(module.padding, str)


def _forward_of(module: nn.Conv2d) -> Callable[[Tensor], Tensor]:
    plain = module.forward

    def forward(x: Tensor) -> Tensor:
        sides = _sides(module, x) if x.dim() == 4 else [_MOST + 1]
        if len(x) * sides[0] * sides[-1] > _MOST or min(sides) < 1:
            return plain(x)
        padding = module.padding
        assert not isinstance(padding, str)
        patches = F.unfold(x, module.kernel_size, module.dilation, padding, module.stride)
        rows = patches.transpose(1, 2).contiguous()  # (B, positions, C * kernel)
        y = F.linear(rows, module.weight.flatten(1), module.bias)
        return y.transpose(1, 2).unflatten(2, sides)

    return forward


def _sides(module: nn.Conv2d, x: Tensor) -> list[int]:
    """Height and width of the output."""
    assert not isinstance(module.padding, str)
    places = zip(x.shape[2:], module.padding, module.dilation, module.kernel_size, module.stride,
                 strict=True)  # fmt: skip
    return [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in places]
