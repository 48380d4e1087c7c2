"""A slim network as lines of Python: what to change in a network of the user's own class.

Layers of ``torch.nn`` are made anew with their new widths; other modules get new parameters,
buffers and widths in place, so they keep what else their class gave them. Rewired layers (see
rewire.py) get hooks that the lines define themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations as class_of

from stamppruner.calls import copied_module
from stamppruner.errors import ExportError, StampError
from stamppruner.export._code import (
    HOOKS,
    SETTINGS,
    expression,
    layer_code,
    literal,
    new_tensor,
    statement,
)
from stamppruner.layers import channel_axis
from stamppruner.projection import apply_projections, projections
from stamppruner.rewire import FILL, GATHER, PLACES, SCATTER

_HOOKED = {
    GATHER: "{module}.register_forward_pre_hook(gathering({axis}))",
    FILL: "{module}.register_forward_pre_hook(filling({axis}))",
    SCATTER: "{module}.register_forward_hook(scattering({axis}))",
}

_LONGEST = 4096
"""Elements of a buffer outside the state dict that are written out as numbers."""


def recipe(model: nn.Module, full_model: nn.Module | Callable[[], nn.Module]) -> str:
    """Python code that turns ``model = MyNet()`` into the slim network's structure.

    It needs torch alone, but for shortcuts that were spliced into a ``forward``: then stamppruner,
    too. Load the weights afterwards, with ``model.load_state_dict(load_file(path))``. The code was
    run on a copy of ``full_model`` before it is given back.

    Args:
        model: the slim network; it is not changed.
        full_model: a network as the class makes it, which is not changed, or a function that
            makes one. Its weights do not matter.

    Returns:
        Lines of code about a variable ``model``; a comment alone where nothing differs.

    Raises:
        ExportError: the networks differ by more than widths, or a changed buffer outside the state
            dict is too long to be written out.
        UnsupportedModelError: the full model cannot be copied.

    Example:
        >>> full = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1))
        >>> slim = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 1))
        >>> print(recipe(slim, full))
        import torch
        from torch import nn
        <BLANKLINE>
        model[0] = nn.Conv2d(3, 5, 3)
        model[2] = nn.Conv2d(5, 4, 1)
    """
    full = full_model if isinstance(full_model, nn.Module) else full_model()
    found = projections(model)
    record = found if any("sum" in entry for entry in found) else []
    lines = []
    base = copied_module(full)
    if record:
        base = _projected(base, record)
        lines = ["from stamppruner import apply_projections", ""]
        lines += [f"model = apply_projections(model, {record!r})"]
    body = list(_body(model, base))
    if any(name in line for line in body for name in PLACES):
        lines = [*lines, "", "", *HOOKS.strip().splitlines(), "", ""]
    elif body and not record:
        lines = [""]
    head = ["import torch", "from torch import nn"] if body or record else ["# nothing to change"]
    code = "\n".join([*head, *lines, *body])
    _check(code, model, full)
    return code


def _projected(base: nn.Module, record: list[dict[str, object]]) -> nn.Module:
    try:
        return apply_projections(base, record)
    except StampError as error:
        raise ExportError(f"the full model is not of the slim one's class: {error}") from error


def _body(model: nn.Module, base: nn.Module) -> Iterator[str]:
    others = dict(base.named_modules())
    made: set[int] = set()
    changed: set[int] = set()
    for name, module in model.named_modules():
        other = others.get(name)
        code = layer_code(module)
        if code is not None and (other is None or code != layer_code(other)):
            yield statement(model, name, code)
            made.add(id(module))
            changed.update(map(id, module.parameters(recurse=False)))
            yield from _frozen(module, expression(model, name))
        elif other is None or not _same_class(module, other):
            raise ExportError(
                f"{name or 'the model'} is a {type(module).__name__} in the slim model and "
                f"{'missing' if other is None else 'a ' + type(other).__name__} in the full one: "
                "pass a full model of the same class"
            )
        elif code is None:
            yield from _edits(module, other, expression(model, name), changed)
        yield from _places(module, other, expression(model, name))
        yield from _unsaved(module, other, expression(model, name))
    yield from _shared(model, made, changed)


def _same_class(one: nn.Module, two: nn.Module) -> bool:
    """Whether the modules are of one class; every graph module has a class of its own.

    So has every module with parametrizations.
    """
    if isinstance(one, fx.GraphModule) and isinstance(two, fx.GraphModule):
        return one.code == two.code
    return class_of(one) is class_of(two)


def _edits(module: nn.Module, other: nn.Module, at: str, changed: set[int]) -> Iterator[str]:
    """Widths, parameters and buffers, in place."""
    for name in SETTINGS:
        value = vars(module).get(name)
        if isinstance(value, int | tuple) and value != vars(other).get(name):
            yield f"{at}.{name} = {value!r}"
    own, before = _tensors(module), _tensors(other)
    for name, tensor in own.items():
        if name in PLACES or name in module._non_persistent_buffers_set:
            continue
        old = before.get(name)
        if tensor is None or (old is not None and _like(tensor, old)):
            if tensor is None and old is not None:
                yield f"{at}.{name} = None"
            continue
        yield f"{at}.{name} = {new_tensor(tensor)}"
        changed.add(id(tensor))


def _frozen(module: nn.Module, at: str) -> Iterator[str]:
    for name, parameter in module.named_parameters(recurse=False):
        if not parameter.requires_grad:
            yield f"{at}.{name}.requires_grad_(False)"


def _places(module: nn.Module, other: nn.Module | None, at: str) -> Iterator[str]:
    """Buffers and hooks of a rewired layer."""
    for name in PLACES:
        places = module._buffers.get(name)
        if places is None:
            continue
        yield f'{at}.register_buffer("{name}", torch.empty({len(places)}, dtype=torch.int64))'
        if other is None or other._buffers.get(name) is None:
            yield _HOOKED[name].format(module=at, axis=channel_axis(module, 0))


def _unsaved(module: nn.Module, other: nn.Module | None, at: str) -> Iterator[str]:
    """Buffers that no state dict holds, with their values."""
    for name in sorted(module._non_persistent_buffers_set):
        tensor = module._buffers[name]
        old = None if other is None else other._buffers.get(name)
        if tensor is None or (old is not None and _equal(tensor, old)):
            continue
        if tensor.numel() > _LONGEST:
            raise ExportError(
                f"{at}.{name} was cut, is in no state dict, and has {tensor.numel()} values: use "
                "save_slim, or make it a persistent buffer"
            )
        yield f"{at}.{name} = {literal(tensor)}"


def _shared(model: nn.Module, made: set[int], changed: set[int]) -> Iterator[str]:
    """Modules and parameters that have several names."""
    first: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if id(module) in first and id(module) in made:
            yield statement(model, name, expression(model, first[id(module)]))
        first.setdefault(id(module), name)
    first.clear()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, leaf = name.rpartition(".")
        text = f"{expression(model, owner)}.{leaf}"
        if id(parameter) in first and id(parameter) in changed:
            yield f"{text} = {first[id(parameter)]}"
        first.setdefault(id(parameter), text)


def _check(code: str, model: nn.Module, full: nn.Module) -> None:
    """Run the recipe on a copy of the full model, and compare what comes out."""
    scope: dict[str, nn.Module] = {"model": copy.deepcopy(full)}
    try:
        with torch.random.fork_rng([]):
            exec(compile(code, "<recipe>", "exec"), scope)  # type: ignore[arg-type]
        built = scope["model"]
        built.load_state_dict(model.state_dict(), strict=True)
    except (RuntimeError, AttributeError, TypeError, ValueError, StampError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise ExportError(
            f"no recipe makes {type(model).__name__} of the full model given ({reason}): pass one "
            "of the class and code version that was pruned"
        ) from error
    wrong = sorted(
        name
        for name, one, two in _pairs(model, built)
        if two is None or layer_code(one) != layer_code(two) or not _same_state(one, two)
    )
    if wrong:
        raise ExportError(
            f"the recipe does not rebuild {wrong[0] or 'the model'}: pass a full model of the "
            "class and code version that was pruned"
        )


def _pairs(model: nn.Module, built: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    others = dict(built.named_modules(remove_duplicate=False))
    for name, module in model.named_modules(remove_duplicate=False):
        yield name, module, others.get(name)


def _same_state(one: nn.Module, two: nn.Module) -> bool:
    own, other = _tensors(one), _tensors(two)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in (one, two)]
    settings = [[vars(m).get(name) for name in SETTINGS] for m in (one, two)]
    if own.keys() != other.keys() or hooks[0] != hooks[1] or settings[0] != settings[1]:
        return False
    for name, tensor in own.items():
        match = other[name]
        if tensor is None or match is None:
            if tensor is not match:
                return False
        elif not _equal(tensor, match):
            return False
    return True


def _tensors(module: nn.Module) -> dict[str, Tensor | None]:
    return {**module._parameters, **module._buffers}


def _like(one: Tensor, two: Tensor) -> bool:
    return one.shape == two.shape and one.dtype == two.dtype


def _equal(one: Tensor, two: Tensor) -> bool:
    a, b = one.detach().cpu(), two.detach().cpu()
    return _like(a, b) and torch.equal(a.nan_to_num(), b.nan_to_num())
