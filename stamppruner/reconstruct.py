"""Closed-form weights after a cut: what is left learns to say what the full network said.

Layer by layer, from input to output, in one forward pass: each convolution and linear layer of
the slim network is re-solved by ridge regression so that, from the inputs it now gets, it gives
the dense network's outputs on the target's images (compare He et al. 2017, "Channel pruning for
accelerating very deep neural networks", which alternates with the choice of channels). Batch
norms are re-estimated on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from stamppruner import layers
from stamppruner.batchnorm import reestimated_statistics
from stamppruner.calls import patched_forwards
from stamppruner.channels import ChannelPlan
from stamppruner.evidence import running_statistics

ROWS = 16384
"""Most samples (image x position) that one layer's regression sees."""

_RIDGE = 0.03


def reconstruct_(
    slim: nn.Module, dense: nn.Module, plan: ChannelPlan, images: Tensor, *, seed: int = 0
) -> None:
    """Re-solve the slim network's weights on images; in place.

    Grouped, depthwise and transposed convolutions, layers that are called more than once and the
    output layers keep the weights that the cut left.

    Args:
        slim: ``dense`` cut by ``plan``.
        dense: the full network; not changed.
        plan: what was kept.
        images: ``(N, C, H, W)``, one batch.
        seed: of the sampled positions.
    """
    targets = _dense_outputs(dense, plan, images, seed)
    forwards: dict[nn.Module, Callable[[Tensor], Tensor]] = {}
    for name, wanted in targets.items():
        module = slim.get_submodule(name)
        assert isinstance(module, nn.Conv2d | nn.Linear)
        forwards[module] = _solving(module, wanted)
    with reestimated_statistics(slim), torch.no_grad(), patched_forwards(forwards):
        slim(images)


@dataclass
class _Wanted:
    """What a layer should give.

    Attributes:
        where: sampled output positions.
        outputs: of the dense layer there, kept channels alone, ``(rows, out)``.
        shifted: whether an offset a channel may be left out, because the layer has a bias or a
            batch norm comes next.
    """

    where: Tensor
    outputs: Tensor
    shifted: bool


def _dense_outputs(
    dense: nn.Module, plan: ChannelPlan, images: Tensor, seed: int
) -> dict[str, _Wanted]:
    """What every layer that is re-solved should give."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, _Wanted] = {}
    calls: dict[str, int] = {}
    latest: list[tuple[str, Tensor]] = []

    def normed(_module: nn.Module, args: Any) -> None:
        if latest and args and args[0] is latest[0][1]:
            found[latest[0][0]].shifted = True

    def hook(name: str) -> Callable[..., None]:
        kept = torch.from_numpy(plan.graph.layers[name].kept_outputs(plan.keep))

        def note(module: nn.Module, _args: Any, output: Tensor) -> None:
            calls[name] = calls.get(name, 0) + 1
            axis = layers.channel_axis(module, output.dim())
            y = output.movedim(axis, -1)
            y = y.reshape(len(y), -1, y.shape[-1])[..., kept.to(y.device)]
            count = max(1, min(y.shape[1], ROWS // len(y)))
            where = torch.randperm(y.shape[1], generator=generator)[:count].to(y.device)
            biased = getattr(module, "bias", None) is not None
            found[name] = _Wanted(where, y[:, where].flatten(0, 1), biased)
            latest[:] = [(name, output)]

        return note

    handles = [
        dense.get_submodule(layer.name).register_forward_hook(hook(layer.name))
        for layer in plan.graph.layers.values()
        if layer.kind == "mixing"
        and layer.name not in plan.graph.output_layers
        and not layer.kept_inputs(plan.keep).all()
        and type(module := dense.get_submodule(layer.name)) in (nn.Conv2d, nn.Linear)
        and layers.blocks(module) == 1
    ]
    norms = [m for m in dense.modules() if isinstance(m, _BatchNorm)]
    handles += [norm.register_forward_pre_hook(normed) for norm in norms]
    try:
        with running_statistics(dense), torch.no_grad():
            dense(images)
    finally:
        for handle in handles:
            handle.remove()
    return {name: value for name, value in found.items() if calls[name] == 1}


def _solving(module: nn.Conv2d | nn.Linear, wanted: _Wanted) -> Callable[[Tensor], Tensor]:
    """A forward that first re-solves the module's weights for the input it is given."""
    own: Callable[..., Tensor] = type(module).forward

    def forward(x: Tensor) -> Tensor:
        rows = _patches(module, x, wanted.where).flatten(0, 1)  # (rows, fan-in)
        prior = module.weight.flatten(1).T
        weight, bias = _ridge(rows, wanted.outputs, prior, centre=wanted.shifted)
        module.weight.copy_(weight.T.view_as(module.weight))
        if module.bias is not None:
            module.bias.copy_(bias)
        return own(module, x)

    return forward


def _patches(module: nn.Module, x: Tensor, where: Tensor) -> Tensor:
    """What the sampled output positions read, ``(N, positions, fan-in)``."""
    if isinstance(module, nn.Linear):
        return x.reshape(len(x), -1, x.shape[-1])[:, where]
    assert isinstance(module, nn.Conv2d)
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    x = F.pad(x, module._reversed_padding_repeated_twice, mode=mode)
    spans = [d * (k - 1) + 1 for d, k in zip(module.dilation, module.kernel_size, strict=True)]
    columns = (x.shape[3] - spans[1]) // module.stride[1] + 1
    top = where // columns * module.stride[0]
    left = where % columns * module.stride[1]
    offsets = [
        torch.arange(k, device=x.device) * d
        for k, d in zip(module.kernel_size, module.dilation, strict=True)
    ]
    vertical = (top[:, None] + offsets[0])[:, :, None]
    horizontal = (left[:, None] + offsets[1])[:, None, :]
    patches = x[:, :, vertical, horizontal]  # (N, C, positions, kH, kW)
    return patches.transpose(1, 2).flatten(2)


def _ridge(x: Tensor, y: Tensor, prior: Tensor, *, centre: bool) -> tuple[Tensor, Tensor]:
    """Weights ``(fan-in, out)`` and bias ``(out,)`` of least squares, shrunk towards ``prior``."""
    if x.dtype in (torch.float16, torch.bfloat16):  # sums of squares overflow, or are coarse
        x, y, prior = x.float(), y.float(), prior.float()
    mean_x, mean_y = x.mean(0) * centre, y.mean(0) * centre
    centred = x - mean_x
    gram = (centred.T @ centred).double()
    residual = (centred.T @ (y - mean_y - centred @ prior)).double()
    gram.diagonal().add_(_RIDGE * gram.diagonal().mean() + 1e-8)
    change = torch.linalg.solve(gram, residual).to(prior.dtype)
    weight = prior + change
    return weight, mean_y - mean_x @ weight
