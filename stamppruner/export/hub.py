"""Slim networks on the Hugging Face Hub, and in folders of the same layout.

A folder holds ``model.safetensors`` (a slim file, see slim.py), ``config.json``, the model card
``README.md`` and, where it is known, the report as ``report.json``. Reading one needs the slim file
alone, and nothing is ever unpickled or imported because a file says so.

Source: https://huggingface.co/docs/huggingface_hub/guides/integrations
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from stamppruner.errors import CheckpointError, ConfigError
from stamppruner.export._card import card
from stamppruner.files import PathLike, atomic_write, check_folder
from stamppruner.optional import require
from stamppruner.result import PruneResult
from stamppruner.slim import describe, load_slim

WEIGHTS, CONFIG, CARD, REPORT = "model.safetensors", "config.json", "README.md", "report.json"

Source = PruneResult | str | os.PathLike[str]

_REMEDY = 'pip install "stamppruner[hub]"'


def save_pretrained(
    source: Source, folder: PathLike, *, repo_id: str | None = None, license: str | None = None
) -> Path:
    """Write a slim network with its model card to a folder; huggingface_hub is not needed.

    Args:
        source: what pruning gave back, or a file of :meth:`PruneResult.save`, which knows the
            budget but no report.
        folder: made if missing. Other files in it are left alone, but for an older report.
        repo_id: under which the card says it will be found; by default the folder.
        license: of the weights, for the card, such as ``"apache-2.0"``.

    Returns:
        The folder.

    Raises:
        CheckpointError: the file cannot be read or is no slim file, or the folder not be written.

    Example:
        >>> import tempfile, warnings
        >>> from stamppruner.baselines import Magnitude
        >>> from stamppruner import Budget
        >>> from stamppruner.models import ResNet
        >>> data = [(torch.randn(6, 3, 8, 8), torch.arange(6) % 3)]
        >>> result = Magnitude().prune(ResNet((1, 1), (8, 8), 3), data, Budget(macs=0.5))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     sorted(path.name for path in save_pretrained(result, folder).iterdir())
        ['README.md', 'config.json', 'model.safetensors', 'report.json']
    """
    report = source.report if isinstance(source, PruneResult) else None
    if not isinstance(source, PruneResult):
        describe(source)
    where = check_folder(folder, [WEIGHTS, CONFIG, CARD, REPORT])
    if isinstance(source, PruneResult):
        source.save(where / WEIGHTS)
    elif Path(source).resolve() != (where / WEIGHTS).resolve():
        atomic_write(where / WEIGHTS, _bytes(source))
    record = describe(where / WEIGHTS)
    _write_json(where / CONFIG, _config(record))
    if report is not None:
        _write_json(where / REPORT, report.to_json())
    else:
        (where / REPORT).unlink(missing_ok=True)
    text = card(record, report, repo_id or os.fspath(folder), license)
    atomic_write(where / CARD, text.encode("utf-8", errors="replace"))
    return where


def push_to_hub(
    source: Source,
    repo_id: str,
    *,
    license: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    branch: str | None = None,
    create_pr: bool = False,
    commit_message: str = "Push a slim network using stamppruner.",
) -> str:
    """Put a slim network with its model card on the Hub.

    Args:
        source: what pruning gave back, a file of :meth:`PruneResult.save`, or a folder of
            :func:`save_pretrained`, whose four files are sent as they are.
        repo_id: ``"owner/name"``; made if missing.
        license: of the weights, for the card; not of a folder, which has its card.
        private: whether a repository that is made here is; by default as the owner's settings say.
        token: by default the one that ``hf auth login`` stored.
        branch: to commit to; by default ``main``.
        create_pr: open a pull request instead.
        commit_message: first line of it.

    Returns:
        Address of the commit.

    Raises:
        MissingExtraError: huggingface_hub is not installed.
        ConfigError: no name of a repository.
        CheckpointError: the source cannot be read, or the Hub refuses it.

    Example:
        >>> push_to_hub(result, "me/my-net", private=True)  # doctest: +SKIP
    """
    hub = require("huggingface_hub", "push_to_hub", _REMEDY)
    try:
        require("huggingface_hub.utils", "push_to_hub", _REMEDY).validate_repo_id(repo_id)
    except ValueError as error:
        raise ConfigError(f"repo_id is {repo_id!r}: give 'owner/name' ({error})") from error
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        if not isinstance(source, PruneResult) and Path(source).is_dir():
            folder = Path(source)
            describe(folder / WEIGHTS)
        else:
            save_pretrained(source, folder, repo_id=repo_id, license=license)
        try:
            api = hub.HfApi(library_name="stamppruner", token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            info = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                allow_patterns=[WEIGHTS, CONFIG, CARD, REPORT],
                commit_message=commit_message,
                revision=branch,
                create_pr=create_pr,
            )
        except Exception as error:  # of the network, the Hub or the client
            raise CheckpointError(
                f"cannot push to {repo_id!r} ({_reason(error)}): check the name and the network, "
                "and log in with: hf auth login"
            ) from error
    return str(info.commit_url)


def from_pretrained(
    source: PathLike,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: PathLike | None = None,
    force_download: bool = False,
    local_files_only: bool = False,
    device: torch.device | str = "cpu",
) -> nn.Module:
    """A slim network from a folder of :func:`save_pretrained`, or from the Hub.

    Args:
        source: an existing folder, which needs no network and no huggingface_hub; else
            ``"owner/name"`` on the Hub.
        model: a full model or a function that makes one, as for
            :func:`~stamppruner.load_slim`; None where the file names a function of torchvision,
            timm or this package.
        revision: branch, tag or commit.
        token: by default the one that ``hf auth login`` stored.
        cache_dir: for downloads; by default the Hub client's own.
        force_download: even if it is there already.
        local_files_only: take it from the cache, without the network.
        device: of the result.

    Returns:
        The slim model, in evaluation mode.

    Raises:
        MissingExtraError: it is not a folder, and huggingface_hub is not installed.
        CheckpointError: it is not found, cannot be read, or does not fit the model.

    Example:
        >>> net = from_pretrained("my-net")  # a folder  # doctest: +SKIP
        >>> net = from_pretrained("me/my-net", revision="v1")  # doctest: +SKIP
    """
    if Path(source).is_dir():
        return load_slim(Path(source) / WEIGHTS, model, device=device)
    if os.fspath(source).count("/") != 1:
        raise CheckpointError(
            f"{os.fspath(source)!r} is no folder, and no name of a repository (owner/name): "
            "check the spelling"
        )
    hub = require(
        "huggingface_hub", f"{os.fspath(source)!r} is no folder, and a repository", _REMEDY
    )
    try:
        path = hub.hf_hub_download(
            os.fspath(source),
            WEIGHTS,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            force_download=force_download,
            local_files_only=local_files_only,
            library_name="stamppruner",
        )
    except Exception as error:  # of the network, the Hub or the client
        raise CheckpointError(
            f"{os.fspath(source)!r} is no folder, and no repository with a {WEIGHTS} that can be "
            f"fetched ({_reason(error)}): check the name, the network and hf auth login"
        ) from error
    return load_slim(path, model, device=device)


def _config(record: dict[str, Any]) -> dict[str, Any]:
    """What a reader of the repository wants to know, without the long lists."""
    hidden = ("kept", "widths", "projections")
    facts = {key: value for key, value in record.items() if key not in hidden}
    return {"library_name": "stamppruner", "weights": WEIGHTS, **facts}


def _write_json(path: Path, value: Any) -> None:
    atomic_write(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def _bytes(path: PathLike) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {os.fspath(path)!r} ({error}): check it") from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
