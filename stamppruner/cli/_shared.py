"""What commands have in common: arguments, folders of images, and what is printed where."""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from stamppruner.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import nn

    from stamppruner.data import ArrayDataset, CropFlip
    from stamppruner.pruner import STAMPPruner


def add_output(parser: argparse.ArgumentParser, shown: str) -> None:
    """``--json`` and ``--quiet``."""
    parser.add_argument("--json", action="store_true", help=f"print a record instead of {shown}")
    parser.add_argument("--quiet", action="store_true", help=f"print {shown} or the record alone")


def add_model(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """``--model`` and ``--model-args``."""
    text = "vgg19, resnet18 (of stamppruner.models), torchvision:NAME or timm:NAME"
    known = "" if required else "; by default what the file names"
    parser.add_argument("--model", required=required, metavar="FACTORY", help=text + known)
    parser.add_argument(
        "--model-args",
        type=json_object,
        default={},
        metavar="JSON",
        help="arguments of the factory, such as '{\"width\": 0.5}'",
    )


def add_folders(parser: argparse.ArgumentParser, *, test: bool = True) -> None:
    """``--data`` and, where something is measured besides, ``--test``."""
    add = parser.add_argument
    add("--data", required=True, metavar="FOLDER", help="one sub-folder of images a class")
    if test:
        add("--test", metavar="FOLDER", help="other images, of the same classes, to measure on")


def add_statistics(parser: argparse.ArgumentParser, default: str) -> None:
    """``--mean`` and ``--std``."""
    add = parser.add_argument
    add("--mean", nargs=3, type=float, metavar=("R", "G", "B"), help="subtracted from images in "
        f"[0, 1] (default: {default})")  # fmt: skip
    add("--std", nargs=3, type=float, metavar=("R", "G", "B"), help="what they are divided by")


def check_apart(**files: str | None) -> None:
    """Raise ConfigError where two arguments name one file, so that one would replace the other."""
    seen: dict[str, str] = {}
    for argument, file in files.items():
        if file is None:
            continue
        place = os.path.realpath(file)
        if place in seen:
            one, two = (n if n.isupper() else f"--{n}" for n in (seen[place], argument))
            raise ConfigError(f"{one} and {two} are the same file {file!r}: name another")
        seen[place] = argument


def json_object(text: str) -> dict[str, Any]:
    """A JSON object; anything else is bad usage."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error})") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON object such as '{{\"width\": 0.5}}'")
    return found


def show(arguments: argparse.Namespace, text: str, record: Mapping[str, Any]) -> None:
    """The result, on standard output; of several ranks, the first one's."""
    if getattr(arguments, "silent", False):
        return
    print(json.dumps(record, indent=2) if arguments.json else text)


def shifted_and_mirrored(side: int) -> CropFlip:
    """What ``--augment`` does to images of ``side`` pixels."""
    from stamppruner.data import CropFlip

    return CropFlip(padding=max(1, side // 8))


def say(arguments: argparse.Namespace, line: str) -> None:
    """What is good to know besides, on standard error."""
    if not arguments.quiet:
        print(line, file=sys.stderr)


@contextmanager
def known_warnings() -> Iterator[None]:
    """Warnings that are in the record as well are not shown twice."""
    from stamppruner.pruner import NotMetaFittedWarning, UnlikeImagesWarning

    with warnings.catch_warnings():
        for kind in (NotMetaFittedWarning, UnlikeImagesWarning):
            warnings.simplefilter("ignore", kind)
        yield


def loaded_pruner(arguments: argparse.Namespace) -> tuple[STAMPPruner, Sequence[int]]:
    """The pruner of a file, and the ``(C, H, W)`` of its images."""
    from stamppruner.named import named_model
    from stamppruner.pruner import STAMPPruner
    from stamppruner.pruner_file import model_in

    tensors, shape = model_in(arguments.pruner)
    model = None
    if arguments.model is not None:
        model = named_model(arguments.model, arguments.model_args, tensors)
    return STAMPPruner.load(arguments.pruner, model), shape


def images_in(
    folder: str,
    shape: Sequence[int],
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    **settings: Any,
) -> ArrayDataset:
    """The images of a folder, for a network that takes ``(C, H, W)``.

    Raises:
        ConfigError: the network takes other images than RGB squares.
        DataError: the folder cannot be used.
    """
    from stamppruner.data import image_folder
    from stamppruner.data.folders import PHOTO_MEAN, PHOTO_STD

    if len(shape) != 3 or shape[0] != 3 or shape[1] != shape[2]:
        raise ConfigError(
            f"the network is for images of {tuple(shape)}, folders are read as RGB squares: use "
            "the Python interface with a loader of yours"
        )
    return image_folder(folder, shape[1], mean=mean or PHOTO_MEAN, std=std or PHOTO_STD, **settings)


def check_same_classes(folder: str, found: Sequence[str], expected: Sequence[str], of: str) -> None:
    """Raise DataError unless a folder has the classes that it must have."""
    if list(found) == list(expected):
        return
    missing = [name for name in expected if name not in found]
    extra = [name for name in found if name not in expected]
    kinds = {"lacks": missing, "has besides": extra}
    differences = [f"{kind} {shortened(names)}" for kind, names in kinds.items() if names]
    how = " and ".join(differences) or "has another order"
    raise DataError(
        f"{folder} {how}, beside the {len(expected)} classes of {of}: give both the same "
        "sub-folders"
    )


def normalisation(record: Mapping[str, Any]) -> str:
    """What a server must do to pixels, from the record of a file; empty where it does not say."""
    images = record.get("images") or {}
    if not images.get("mean") or not images.get("std"):
        return ""
    mean, std = (", ".join(f"{x:.3g}" for x in images[key]) for key in ("mean", "std"))
    return f"pixels in [0, 1], minus ({mean}), over ({std})"


def shortened(names: Sequence[str], most: int = 5) -> str:
    """Some names, and how many more there are.

    >>> shortened(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def pair_of_folders(
    arguments: argparse.Namespace, shape: Sequence[int], pruner: STAMPPruner
) -> tuple[ArrayDataset, ArrayDataset | None]:
    """The images to prune for and, where ``--test`` names some, those to measure on.

    They are normalised as the reference was, if the pruner knows how.
    """
    known = pruner.normalisation
    mean, std = (getattr(arguments, k) or getattr(known, k, None) for k in ("mean", "std"))
    data = images_in(arguments.data, shape, mean, std)
    if arguments.test is None:
        return data, None
    test = images_in(arguments.test, shape, mean, std)
    check_same_classes(arguments.test, test.classes, data.classes, arguments.data)
    return data, test


def images_for(
    record: Mapping[str, Any], folder: str, arguments: argparse.Namespace
) -> ArrayDataset:
    """A folder of images, read as the slim network of a record wants them."""
    facts = record.get("images") or {}
    mean, std = (getattr(arguments, key, None) or facts.get(key) for key in ("mean", "std"))
    if mean is None or std is None:
        print(
            f"warning: {arguments.slim} does not say how pixels were normalised, so the images of "
            f"{folder} are normalised as photographs are: if the network was pruned for others, "
            "pass their --mean and --std",
            file=sys.stderr,
        )
    return images_in(folder, record.get("input_shape") or (), mean, std)


def labelled_for(
    record: Mapping[str, Any], folder: str, arguments: argparse.Namespace
) -> ArrayDataset:
    """The same, where the folder must have the classes of the record, if that names some."""
    data = images_for(record, folder, arguments)
    if expected := (record.get("images") or {}).get("classes"):
        check_same_classes(folder, data.classes, expected, arguments.slim)
    return data


def loaded_slim(arguments: argparse.Namespace) -> nn.Module:
    """The slim network of a file, of the full one that ``--model`` names or the file."""
    from stamppruner.factory import Factory
    from stamppruner.slim import load_slim

    named = arguments.model is not None
    make = Factory(arguments.model, arguments.model_args).make if named else None
    return load_slim(arguments.slim, make)
