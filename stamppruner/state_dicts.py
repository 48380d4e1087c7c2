"""Whether the tensors of a file are those of a module, told in one line."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor, nn

from stamppruner.errors import CheckpointError, shown
from stamppruner.files import PathLike
from stamppruner.io import same_kind

_LISTED = 5


def misfit(
    own: Mapping[str, Tensor],
    given: Mapping[str, Tensor],
    *,
    optional: Mapping[str, Tensor] = MappingProxyType({}),
    widths_may_differ: bool = False,
) -> str | None:
    """What differs between a module's tensors and those of a file; None if they fit.

    Args:
        own: of the module, by name.
        given: of the file.
        optional: of the module, that the file may lack.
        widths_may_differ: compare numbers of axes in place of shapes.
    """
    known = {**own, **optional}
    both = [(name, known[name], given[name]) for name in sorted(known.keys() & given.keys())]
    shapes = [
        f"{plain(n)} ({tuple(b.shape)} in the file, {tuple(a.shape)} in the model)"
        for n, a, b in both
        if (a.dim() != b.dim() if widths_may_differ else a.shape != b.shape)
    ]
    empty = [plain(n) for n, a, b in both if a.numel() and not b.numel()]
    kinds = [
        f"{plain(n)} ({b.dtype} in the file, {a.dtype} in the model)"
        for n, a, b in both
        if not same_kind(a.dtype, b.dtype)
    ]
    groups = {
        "the file lacks": [plain(name) for name in sorted(own.keys() - given.keys())],
        "the model lacks": [plain(name) for name in sorted(given.keys() - known.keys())],
        "other number of axes:" if widths_may_differ else "other shape:": shapes,
        "other kind of numbers:": kinds,
        "no values in the file:": empty if widths_may_differ else [],
    }
    texts = [
        f"{what} {', '.join(names[:_LISTED])}"
        + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
        for what, names in groups.items()
        if names
    ]
    return "; ".join(texts) or None


def load_state_(
    module: nn.Module, tensors: Mapping[str, Tensor], path: PathLike, remedy: str, name: str = ""
) -> None:
    """Load a module's state in place, all of it or nothing.

    Args:
        module: changed.
        tensors: of the file, by name.
        path: of the file, for the message.
        remedy: what to do where they do not fit.
        name: of the module, by default its class.

    Raises:
        CheckpointError: names, shapes or kinds of number differ; the first of each are listed. Or
            the module refuses them.
    """
    name = name or type(module).__name__
    if (text := misfit(module.state_dict(), tensors)) is not None:
        raise CheckpointError(f"{path} does not fit {name}: {text}. {remedy}")
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:  # a module's own rules of loading
        text = " ".join(str(error).split())
        raise CheckpointError(f"{path} does not fit {name}: {shown(text)}. {remedy}") from error


def plain(name: str) -> str:
    """A name of a file that is safe to print."""
    return name if name.isprintable() and len(name) < 200 else shown(name)
