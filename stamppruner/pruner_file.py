"""Pruners as files: one safetensors file with W, gates, encoder, settings and history."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from torch import Tensor, nn

from stamppruner.channels import ChannelGraph
from stamppruner.errors import CheckpointError, shown
from stamppruner.files import PathLike
from stamppruner.io import parse_record, read_safetensors, write_safetensors
from stamppruner.pruner_record import Saved
from stamppruner.state_dicts import load_state_

FORMAT = "stamppruner.pruner"
VERSION = 1


def write(path: PathLike, parts: Mapping[str, nn.Module], record: Mapping[str, Any]) -> None:
    """Write the state of several modules and a JSON-able record.

    Raises:
        CheckpointError: the path cannot be written.
    """
    tensors = {
        f"{part}.{name}": tensor
        for part, module in parts.items()
        for name, tensor in module.state_dict().items()
    }
    whole = {"format": FORMAT, "version": VERSION, **record}
    write_safetensors(path, tensors, {FORMAT: json.dumps(whole)})


def read(path: PathLike) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and record of a pruner file.

    Raises:
        CheckpointError: the file cannot be read, or is no pruner of a known version.
    """
    tensors, metadata = read_safetensors(path)
    return tensors, parse_record(metadata, FORMAT, VERSION, path, noun="pruner")


def model_in(path: PathLike) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Tensors of the model that a pruner was made for, by name, and its images' ``(C, H, W)``.

    Layers that the pruner put on shortcuts are left out.

    Raises:
        CheckpointError: the file cannot be read, or is no pruner of a known version.
    """
    tensors, record = read(path)
    saved = Saved.of(record, path)
    added = tuple(f"model.{entry['name']}." for entry in saved.projections)
    own = {n: t for n, t in tensors.items() if n.startswith("model.") and not n.startswith(added)}
    return {name.removeprefix("model."): tensor for name, tensor in own.items()}, saved.image_shape


def load_part_(module: nn.Module, part: str, tensors: Mapping[str, Tensor], path: PathLike) -> None:
    """Load one module's state in place.

    Raises:
        CheckpointError: names, shapes or kinds of number differ; the first are listed.
    """
    prefix = part + "."
    state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    load_state_(module, state, path, f"Pass the {part} that was saved", f"the {part}")


def check_parts(
    parts: Mapping[str, nn.Module], tensors: Mapping[str, Tensor], path: PathLike
) -> None:
    """Raise CheckpointError if the file has tensors of other parts than these."""
    strange = sorted(name for name in tensors if name.partition(".")[0] not in parts)
    if strange:
        raise CheckpointError(
            f"{path}: tensor {shown(strange[0])} is of no part of a pruner ({', '.join(parts)}): "
            "the file is damaged"
        )


def group_record(graph: ChannelGraph) -> list[list[Any]]:
    """What of a graph must be the same when a pruner is loaded."""
    return [[group.name, group.size, group.blocks] for group in graph.groups]


def check_groups(graph: ChannelGraph, saved: list[Any], path: PathLike) -> None:
    """Raise CheckpointError, naming the first group that differs, unless the groups are equal."""
    groups = group_record(graph)
    if groups == saved:
        return
    was, now = next(pair for pair in zip_longest(saved, groups) if pair[0] != pair[1])
    raise CheckpointError(
        f"{path}: the model's channel groups are not those that were saved (first: {shown(now)}, "
        f"saved: {shown(was)}): its code or shapes have changed since"
    )
