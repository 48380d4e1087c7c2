"""What the package knows about layer types: who mixes channels, who only carries them.

*Mixing* layers (convolutions, transposed convolutions, linear layers) sum over their input
channels: they end one channel's life and begin others. *Depthwise* convolutions and
*channelwise* modules (batch norm, PReLU, frozen norms) carry channels through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from stamppruner.errors import UnsupportedModelError


def is_mixing(module: nn.Module) -> bool:
    """Whether every output channel of the module reads every input channel of its block."""
    return isinstance(module, _ConvNd | nn.Linear) and not is_depthwise(module)


def is_depthwise(module: nn.Module) -> bool:
    """Whether the module is a convolution whose groups each read a single input channel.

    One group over one input channel is an ordinary convolution.
    """
    return isinstance(module, _ConvNd) and module.groups == module.in_channels > 1


def channelwise_width(module: nn.Module) -> int | None:
    """Number of channels of a module whose whole state is one value a channel, else None.

    Covers batch and instance norms (fused with an activation or not), PReLU, frozen batch norms,
    layer scales, and any module of the user's whose parameters and buffers are all of one length.
    Whether it really treats channels apart is not assumed: the probe runs it, and the certificate
    checks the cut.
    """
    if has_deep_state(module):
        return None
    widths = {tensor.numel() for _, tensor, _ in channel_tensors(module)}
    state = [t for t in (*module.parameters(False), *module.buffers(False)) if t.numel() > 1]
    if len(widths) != 1 or len(state) != len(list(channel_tensors(module))):
        return None
    return widths.pop()


def has_deep_state(module: nn.Module) -> bool:
    """Whether a child of the module has parameters or buffers."""
    return any(True for child in module.children() for _ in (*child.parameters(), *child.buffers()))


def channel_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor, int]]:
    """Name, tensor and channel axis of the per-channel parameters and buffers of a module.

    A tensor is per-channel when all its axes but one have length 1.
    """
    named = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    for name, tensor in named:
        long = [axis for axis, length in enumerate(tensor.shape) if length > 1]
        if len(long) == 1:
            yield name, tensor, long[0]


def input_width(module: nn.Module) -> int:
    """Number of input channels (or features) of a mixing or depthwise layer."""
    return int(module.in_channels if isinstance(module, _ConvNd) else module.in_features)  # type: ignore[arg-type]


def output_width(module: nn.Module) -> int:
    """Number of output channels (or features) of a mixing or depthwise layer."""
    return int(module.out_channels if isinstance(module, _ConvNd) else module.out_features)  # type: ignore[arg-type]


def widths(module: nn.Module) -> tuple[int, int] | None:
    """Input and output width of a layer with channels; None where its state does not tell."""
    if is_mixing(module) or is_depthwise(module):
        return input_width(module), output_width(module)
    for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
        long = [length for length in tensor.shape if length > 1]
        if long:
            return long[0], long[0]
    return None


def blocks(module: nn.Module) -> int:
    """Number of groups of a convolution, 1 for a linear layer."""
    return int(module.groups) if isinstance(module, _ConvNd) else 1


def channel_axis(module: nn.Module, dim: int) -> int:
    """Axis of the channels in a ``dim``-dimensional input or output of the layer.

    ``(B, C, ...)`` and unbatched ``(C, ...)`` for convolutions, ``(..., C)`` for linear layers.
    """
    if isinstance(module, _ConvNd):
        return dim - len(module.kernel_size) - 1
    return dim - 1


def weight_axes(module: nn.Module) -> tuple[int, int]:
    """Axes of the weight that run over outputs and inputs: ``(output, input)``."""
    return (1, 0) if isinstance(module, _ConvTransposeNd) else (0, 1)


def applications(module: nn.Module, x: Tensor, y: Tensor) -> int:
    """Number of places in one call at which the kernel of a mixing or depthwise layer is applied.

    These are output positions (``B * H * W``, tokens), of a transposed convolution input positions.
    """
    if isinstance(module, _ConvTransposeNd):
        return x.numel() // input_width(module)
    return y.numel() // output_width(module)


def macs_per_position(module: nn.Module) -> int:
    """Multiply-adds of one output position of a mixing or depthwise layer, all channels."""
    return sum(p.numel() for p in module.parameters(recurse=False) if p.dim() > 1)


def first_floating(module: nn.Module) -> Tensor:
    """A floating parameter or buffer, which tells the device and dtype; else a CPU float."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            return tensor
    return torch.empty(0)


def first_nan(module: nn.Module) -> str | None:
    """Name of the first parameter or buffer that has a NaN."""
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        known = tensor.is_floating_point() and not tensor.is_meta
        if known and bool(tensor.detach().isnan().any()):
            return name
    return None


def check_no_nan(module: nn.Module) -> None:
    """Raise UnsupportedModelError if there is a NaN; the parameter or buffer is named."""
    if (name := first_nan(module)) is not None:
        raise UnsupportedModelError(
            f"{name!r} of {type(module).__name__} has NaN: load weights that are finite"
        )


WIDTH_ATTRIBUTES = (
    "in_channels",
    "out_channels",
    "groups",
    "in_features",
    "out_features",
    "num_features",
    "num_channels",
    "num_groups",
    "num_parameters",
    "channels",
    "dim",
)
"""Integer attributes in which layers note their own widths."""


def written_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a torch layer's tensors by the widths that it notes, of kernels the first two axes.

    Empty for other classes, which may keep their tensors in any shape.
    """
    if not type(module).__module__.startswith("torch."):
        return {}
    if isinstance(module, _ConvNd):
        ways = module.out_channels, module.in_channels
        first, second = ways[::-1] if isinstance(module, _ConvTransposeNd) else ways
        groups = module.groups if first % module.groups == second % module.groups == 0 else 0
        inner = second // groups if groups else 0  # 0: no tensor has this shape
        return {"weight": (first, inner), "bias": (module.out_channels,)}
    if isinstance(module, nn.Linear):
        ways = module.out_features, module.in_features
        return {"weight": ways, "bias": ways[:1]}
    if isinstance(module, _NormBase):
        names = ("weight", "bias", "running_mean", "running_var")
        return dict.fromkeys(names, (module.num_features,))
    if isinstance(module, nn.GroupNorm):
        width = module.num_channels if module.num_channels % module.num_groups == 0 else 0
        return dict.fromkeys(("weight", "bias"), (width,))
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return dict.fromkeys(("weight", "bias"), tuple(module.normalized_shape))
    if isinstance(module, nn.PReLU):
        return {"weight": (module.num_parameters,)}
    return {}


def set_width(module: nn.Module, old: int, new: int) -> None:
    """Write the new width into every attribute of the module that notes the old one."""
    for name in WIDTH_ATTRIBUTES:
        if module.__dict__.get(name) == old:
            setattr(module, name, new)
    shape = getattr(module, "normalized_shape", None)
    if isinstance(shape, Sequence) and shape[0] == old:
        module.normalized_shape = (new, *shape[1:])  # type: ignore[assignment]
