"""Modules, tensors and their places as Python expressions."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from stamppruner.layers import WIDTH_ATTRIBUTES
from stamppruner.rewire import PLACES

SETTINGS = (*WIDTH_ATTRIBUTES, "normalized_shape")
"""Attributes in which modules note widths."""

_LAYERS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d,
    nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.Linear, nn.PReLU, nn.GroupNorm, nn.LayerNorm,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
)  # fmt: skip
"""Layers that are written as calls of their class."""

HOOKS = '''
def gathering(axis):
    """Read some of the channels that arrive."""
    return lambda module, args: (args[0].index_select(axis, module.gathered_inputs), *args[1:])


def filling(axis):
    """Put zeros where channels are gone."""
    return lambda module, args: (spread(args[0], axis, module.filled_inputs), *args[1:])


def scattering(axis):
    """Write the channels to the places that the code expects, zeros elsewhere."""
    return lambda module, args, output: spread(output, axis, module.scattered_outputs)


def spread(x, axis, places):
    shape = list(x.shape)
    shape[axis] = 1
    return torch.cat([x, x.new_zeros(shape)], dim=axis).index_select(axis, places)
'''


def layer_code(module: nn.Module) -> str | None:
    """The call that makes such a layer, ``nn.Conv2d(3, 24, 3, bias=False)``.

    None for other modules, and for layers with hooks or state that the call would not give them.
    """
    if type(module) not in _LAYERS:
        return None
    places = sum(module._buffers.get(name) is not None for name in PLACES)
    if len(module._forward_hooks) + len(module._forward_pre_hooks) != places:
        return None
    positional, keywords = _arguments(module)
    made = type(module)(*positional, **keywords, device="meta")
    if _shapes(made) != _shapes(module):
        return None
    given = [*map(_text, positional), *(f"{k}={_text(v)}" for k, v in keywords.items())]
    return f"nn.{type(module).__name__}({', '.join(given)})"


def expression(model: nn.Module, name: str) -> str:
    """How a module is reached from ``model``: ``model.layer1[0].conv1``."""
    text, module = "model", model
    for part in name.split(".") if name else []:
        if _is_index(module, part):
            text += f"[{part}]"
        elif part.isidentifier():
            text += f".{part}"
        else:
            text += f".get_submodule({part!r})"
        module = module.get_submodule(part)
    return text


def statement(model: nn.Module, name: str, code: str) -> str:
    """The line that puts ``code`` in the place of a module."""
    parent, _, leaf = name.rpartition(".")
    module = model.get_submodule(parent)
    if not name or leaf.isidentifier() or _is_index(module, leaf):
        return f"{expression(model, name)} = {code}"
    return f"{expression(model, parent)}.register_module({leaf!r}, {code})"


def new_tensor(tensor: Tensor) -> str:
    """A parameter, or a buffer, of that shape and dtype without values."""
    size = ", ".join(map(str, tensor.shape)) if tensor.dim() else "()"
    empty = f"torch.empty({size}{_dtype_argument(tensor)})"
    if not isinstance(tensor, nn.Parameter):
        return empty
    return f"nn.Parameter({empty}{'' if tensor.requires_grad else ', requires_grad=False'})"


def literal(tensor: Tensor) -> str:
    """A tensor with its values; they are exact, since every float is one of Python's, too."""
    values = repr(tensor.detach().cpu().tolist())
    values = values.replace("nan", "float('nan')").replace("inf", "float('inf')")
    return f"torch.tensor({values}, dtype={tensor.dtype})"


def _arguments(module: nn.Module) -> tuple[list[Any], dict[str, Any]]:
    """What to call the class with: the attributes named as its arguments, without defaults."""
    positional, keywords = [], {}
    for name, parameter in list(inspect.signature(type(module).__init__).parameters.items())[1:]:
        if name in ("device", "dtype", "init"):
            continue
        value = module.bias is not None if name == "bias" else _plain(getattr(module, name))
        if parameter.default is inspect.Parameter.empty:
            positional.append(value)
        elif value != parameter.default:
            keywords[name] = value
    dtypes = {x.dtype for x in module.parameters(recurse=False)} - {torch.float32}
    if len(dtypes) == 1:
        keywords["dtype"] = dtypes.pop()
    return positional, keywords


def _plain(value: Any) -> Any:
    """A number for a tuple of equal numbers."""
    if isinstance(value, tuple) and value and len(set(value)) == 1:
        return value[0]
    return value


def _text(value: Any) -> str:
    return str(value) if isinstance(value, torch.dtype) else repr(value)


def _shapes(module: nn.Module) -> dict[str, Any]:
    own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    return {n: (tuple(x.shape), x.dtype) for n, x in own if n not in PLACES}


def _dtype_argument(tensor: Tensor) -> str:
    return "" if tensor.dtype == torch.float32 else f", dtype={tensor.dtype}"


def _is_index(parent: nn.Module, part: str) -> bool:
    """Whether a child is reached as an element: its name is its number."""
    if not isinstance(parent, nn.Sequential | nn.ModuleList) or not part.isdecimal():
        return False
    return list(parent._modules).index(part) == int(part)
