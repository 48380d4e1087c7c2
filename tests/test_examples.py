"""The examples run, in their smallest form, on images made here."""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from stamppruner import describe, load_slim
from stamppruner.models import resnet18, vgg19

EXAMPLES = Path(__file__).parent.parent / "examples"


def write_tree(root: Path, classes: int, images: int) -> Path:
    """``train`` and ``test`` folders of noise, each class around a colour of its own."""
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for label in range(classes):
            folder = root / split / f"class{label:02d}"
            folder.mkdir(parents=True)
            colour = rng.integers(40, 215, 3)
            for i in range(images):
                pixels = np.clip(rng.normal(colour, 25, (32, 32, 3)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return root


@pytest.mark.parametrize(("name", "make"), [("vgg19_cifar", vgg19), ("resnet18_cifar", resnet18)])
def test_cifar_examples_end_with_a_slim_file(name, make, tmp_path, monkeypatch, capsys):
    reference = write_tree(tmp_path / "reference", 10, 4)
    target = write_tree(tmp_path / "target", 3, 8)
    out = tmp_path / "out"
    options = {
        "--data": target,
        "--reference": reference,
        "--width": 0.125,
        "--epochs": 1,
        "--iterations": 1,
        "--tasks": 1,
        "--shots": 4,
        "--macs": 0.5,
        "--finetune-epochs": 1,
        "--out": out,
        "--device": "cpu",
    }
    argv = [name, *(str(part) for pair in options.items() for part in pair)]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "slim.safetensors" in capsys.readouterr().out
    slim = load_slim(out / "slim.safetensors", make(10, width=0.125))
    figures = json.loads((out / "figures.json").read_text())
    assert sum(p.numel() for p in slim.parameters()) == figures["report"]["after"]["params"]
    assert figures["report"]["reached"]["macs"] <= 0.5
    assert describe(out / "slim.safetensors")["budget"] == {"macs": 0.5}
