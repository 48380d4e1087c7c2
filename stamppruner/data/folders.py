"""Trees of image files, one folder a class, decoded once into an array."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from stamppruner.data.arrays import ArrayDataset, Statistics
from stamppruner.errors import DataError
from stamppruner.optional import require

logger = logging.getLogger("stamppruner")

PHOTO_MEAN = (0.485, 0.456, 0.406)
PHOTO_STD = (0.229, 0.224, 0.225)
"""Mean and spread of ImageNet's photographs, the usual choice for photographs at large."""

EXTENSIONS = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"})


def image_folder(
    path: str | os.PathLike[str],
    size: int = 32,
    limit_per_class: int | None = None,
    cache: str | os.PathLike[str] | None = None,
    *,
    mean: Statistics = PHOTO_MEAN,
    std: Statistics = PHOTO_STD,
) -> ArrayDataset:
    """Images ``(N, size, size, 3)`` uint8 of a tree ``path/<class>/**/<image>``.

    Classes are numbered in the order of their names, as torchvision's ``ImageFolder`` does. Each
    image is converted to RGB, and fitted to a square by scaling and a centre crop.

    Args:
        path: the folder that holds one folder a class.
        size: pixels a side.
        limit_per_class: takes the first so many files of each class, by name; ``None`` takes all.
        cache: a folder for the decoded array, one ``.npy`` for each set of files (by their names,
            sizes and times of change), size and limit; made if missing.
        mean: subtracted from images in ``[0, 1]``, one number a channel.
        std: what they are then divided by, one number a channel.

    Raises:
        DataError: a missing path, no classes or only one, a class without images, a file that
            cannot be decoded, or a size or limit below 1.
        MissingExtraError: Pillow is not installed.
    """
    root = Path(path).absolute()
    if size < 1 or (limit_per_class is not None and limit_per_class < 1):
        raise DataError(
            f"image_folder: size is {size} and limit_per_class {limit_per_class}; "
            "they must be at least 1"
        )
    classes = class_folders(root)
    files = [_image_files(root / name)[:limit_per_class] for name in classes]
    labels = np.repeat(np.arange(len(classes)), [len(names) for names in files])
    flat = [file for names in files for file in names]
    images = _decode(flat, size) if cache is None else _cached(flat, size, Path(cache))
    return ArrayDataset(images, labels, mean=mean, std=std, classes=classes)


def class_folders(root: Path) -> list[str]:
    """Sorted names of the class folders of ``root``; hidden ones do not count.

    Raises:
        DataError: ``root`` is missing, or holds fewer than two.
    """
    if not root.is_dir():
        raise DataError(f"{root}: no such folder; give the folder that holds one folder a class")
    names = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise DataError(f"{root}: no class folders; put the images of each class in its own folder")
    if len(names) == 1:
        raise DataError(f"{root}: only one class, {names[0]!r}; at least two are needed")
    return names


def _image_files(folder: Path) -> list[str]:
    files = sorted(
        os.path.join(parent, name)
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if os.path.splitext(name)[1].lower() in EXTENSIONS
    )
    if not files:
        raise DataError(
            f"{folder}: no images in this class; add some ({', '.join(sorted(EXTENSIONS))}) "
            "or remove the folder"
        )
    return files


def _decode(files: Sequence[str], size: int) -> npt.NDArray[np.uint8]:
    """``(N, size, size, 3)`` from files; raises DataError that names the first that fails."""
    remedy = "pip install pillow"
    image_module = require("PIL.Image", "reading image files", remedy)
    fit = require("PIL.ImageOps", "reading image files", remedy).fit
    images = np.empty((len(files), size, size, 3), dtype=np.uint8)
    # disable=None: no bar unless the output is a terminal.
    for index, file in enumerate(tqdm(files, "decoding", unit="image", disable=None)):
        try:
            with image_module.open(file) as opened:
                image = opened.convert("RGB")
        except (OSError, SyntaxError, ValueError, image_module.DecompressionBombError) as error:
            raise DataError(
                f"{file}: cannot be read as an image ({error}); replace or remove it"
            ) from error
        if image.size != (size, size):
            image = fit(image, (size, size), image_module.Resampling.BICUBIC)
        images[index] = image
    return images


def _cached(files: Sequence[str], size: int, folder: Path) -> npt.NDArray[np.uint8]:
    """The array of :func:`_decode`, read from ``folder`` if these very files are there."""
    digest = hashlib.sha256(str(size).encode())
    for file in files:
        stat = os.stat(file)
        digest.update(f"\0{file}\0{stat.st_size}\0{stat.st_mtime_ns}".encode())
    target = folder / f"images-{digest.hexdigest()[:24]}.npy"
    if target.is_file():
        try:
            with open(target, "rb") as stream:
                found = np.lib.format.read_array(stream, allow_pickle=False)
            if found.shape == (len(files), size, size, 3) and found.dtype == np.uint8:
                return np.asarray(found, dtype=np.uint8)
        except (OSError, ValueError):
            pass
        logger.warning("%s is not a cache of these images; decoding them again", target)
    images = _decode(files, size)
    folder.mkdir(parents=True, exist_ok=True)
    # A whole file or none: another process may read the cache while it is written.
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    with open(partial, "wb") as stream:
        np.save(stream, images, allow_pickle=False)
    os.replace(partial, target)
    return images
