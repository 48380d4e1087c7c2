"""Pruners as files: one safetensors file with W, gates, encoder, settings and history."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from stamppruner.channels import ChannelGraph
from stamppruner.errors import CheckpointError, ConfigError
from stamppruner.factory import Factory
from stamppruner.io import PathLike, parse_record, read_safetensors, write_safetensors

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
    try:
        shape = tuple(int(n) for n in record["image_shape"])
        added = tuple(f"model.{entry['name']}." for entry in record.get("projections", []))
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: its record is damaged ({error!r})") from error
    own = {n: t for n, t in tensors.items() if n.startswith("model.") and not n.startswith(added)}
    return {name.removeprefix("model."): tensor for name, tensor in own.items()}, shape


def made(record: Mapping[str, Any], path: PathLike) -> nn.Module:
    """The model that the pruner was made for, by the function that its file names.

    Raises:
        CheckpointError: it names none, or one that is not on the list.
        MissingExtraError: the library of the function is not installed.
    """
    try:
        return Factory.of_file(record, path).make()
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def load_part_(module: nn.Module, part: str, tensors: Mapping[str, Tensor], path: PathLike) -> None:
    """Load one module's state in place.

    Raises:
        CheckpointError: names or shapes differ; all are listed.
    """
    prefix = part + "."
    state = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit the {part}: {error}") from error


def group_record(graph: ChannelGraph) -> list[list[Any]]:
    """What of a graph must be the same when a pruner is loaded."""
    return [[group.name, group.size, group.blocks] for group in graph.groups]


def check_groups(graph: ChannelGraph, saved: Any, path: PathLike) -> None:
    """Raise CheckpointError, naming the first group that differs, unless the groups are equal."""
    groups = group_record(graph)
    if groups == saved:
        return
    changed = [g for g in saved if g not in groups] or [g for g in groups if g not in saved]
    raise CheckpointError(
        f"{path}: the model's channel groups are not those that were saved (first: "
        f"{changed[0] if changed else 'their order'}): its code or shapes have changed since"
    )
