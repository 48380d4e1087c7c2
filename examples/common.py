"""What several examples share: options, and images to try them on without a download."""

import argparse
from pathlib import Path

import torch

from stamppruner import STAMPConfig
from stamppruner.data import ArrayDataset, image_folder, render_characters


def options(text: str | None, out: str) -> argparse.ArgumentParser:
    """A parser with the options that all examples have."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="seconds instead of minutes")
    parser.add_argument("--out", type=Path, default=Path(out), help="folder for what is made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def images_or_letters(
    folder: str | None, letters: str, *, per_class: int, size: int, seed: int = 0
) -> ArrayDataset:
    """The images of a folder, or rendered letters where none is given."""
    if folder is not None:
        return image_folder(folder, size=size)
    return render_characters(per_class, size=size, classes=letters, seed=seed)


def config(tiny: bool, **settings: object) -> STAMPConfig:
    """The default settings, or two small iterations."""
    small = {"iterations": 2, "tasks_per_iteration": 1, "weight_steps": 2, "weight_batch": 32}
    return STAMPConfig(**(settings | small if tiny else settings))
