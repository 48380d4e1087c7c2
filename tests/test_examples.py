"""The examples run, in their smallest form, on images made here."""

import importlib.util
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from stamppruner import describe, load_slim
from stamppruner.data import digits
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


def ran(name, monkeypatch, *options):
    """Run an example as a user would, in the folder that the test is in."""
    monkeypatch.setattr(sys, "argv", [name, *map(str, options)])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with torch.random.fork_rng([]):
        return runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")


def slim_in(folder, make=None):
    net = load_slim(folder / "slim.safetensors", make)
    assert sum(p.numel() for p in net.parameters()) > 0
    return net


def test_timm_folder(tmp_path, monkeypatch, capsys):
    folder = write_tree(tmp_path / "photos", 3, 6)
    options = ["--tiny", "--model", "test_resnet", "--out", tmp_path]
    data = ["--data", folder / "train", "--test", folder / "test"]
    ran("timm_folder", monkeypatch, *options, *data)
    assert describe(tmp_path / "slim.safetensors")["images"]["classes"] == [
        "class00", "class01", "class02"
    ]  # fmt: skip
    assert "relative difference to the model" in capsys.readouterr().out
    session = onnxruntime.InferenceSession(tmp_path / "slim.onnx")
    images = torch.randn(2, 3, 32, 32)
    (logits,) = session.run(None, {"images": images.numpy()})
    found = slim_in(tmp_path)(images)
    assert torch.allclose(torch.from_numpy(logits), found, atol=1e-3 * float(found.abs().max()))


def test_mobilenet_latency(tmp_path, monkeypatch, capsys):
    ran("mobilenet_latency", monkeypatch, "--tiny", "--out", tmp_path)
    out = capsys.readouterr().out
    before, after = (float(x) for x in re.search(r"measured ([\d.]+) -> ([\d.]+) ms", out).groups())
    assert after <= 0.86 * before
    slim_in(tmp_path)


def test_many_targets(tmp_path, monkeypatch, capsys):
    scope = ran("many_targets", monkeypatch, "--tiny", "--out", tmp_path)
    lines = capsys.readouterr().out.splitlines()
    assert len([line for line in lines if "%" in line]) == scope["TARGETS"] + 1
    assert len(list(tmp_path.glob("slim-*.safetensors"))) == scope["TARGETS"] + 1
    page = (tmp_path / "customers.html").read_text()
    assert 'data-key="digits.metrics.accuracy_after_finetune"' in page


def test_segmentation(tmp_path, monkeypatch, capsys):
    scope = ran("segmentation", monkeypatch, "--tiny", "--out", tmp_path)
    out = capsys.readouterr().out
    after = float(re.search(r"after fine-tuning +([\d.]+)", out)[1])
    left = float(re.search(r"([\d.]+)% of the MACs", out)[1])
    assert left <= 25.0
    assert 0 <= after <= 1
    slim = slim_in(tmp_path, lambda: scope["UNet"](8))
    assert slim(torch.zeros(1, 3, 16, 16)).shape == (1, 1, 16, 16)


def test_detection(tmp_path, monkeypatch, capsys):
    ran("detection", monkeypatch, "--tiny", "--out", tmp_path)
    out = capsys.readouterr().out
    assert float(re.search(r"([\d.]+)% of the backbone", out)[1]) <= 50.0
    losses = [float(x) for x in re.findall(r"loss of the \w+ detector +([\d.]+)", out)]
    assert len(losses) == 2
    assert all(0 < loss < 100 for loss in losses)
    assert len(re.findall(r"\d of 4 squares are found", out)) == 2
    assert all(t.isfinite().all() for t in load_file(tmp_path / "detector.safetensors").values())


def test_onnx_serving(tmp_path, monkeypatch, capsys):
    scope = ran("onnx_serving", monkeypatch, "--tiny", "--out", tmp_path)
    assert "images a second in batches of 64" in capsys.readouterr().out
    classify = scope["Classifier"](tmp_path / "slim.onnx", tmp_path / "slim.json")
    train, _ = digits(2)
    images = train.tensors()[0]
    net = slim_in(tmp_path)
    with torch.no_grad():
        wanted = net(images).softmax(1)
    found = classify(train.images.permute(0, 2, 3, 1).numpy())
    assert [int(name) for name, _ in found] == wanted.argmax(1).tolist()
    assert [share for _, share in found] == pytest.approx(wanted.amax(1).tolist(), abs=1e-3)
    # A file of the user's own is served as well.
    shutil.copy(tmp_path / "slim.safetensors", tmp_path / "mine.safetensors")
    ran(
        "onnx_serving",
        monkeypatch,
        "--tiny",
        "--out",
        tmp_path,
        "--slim",
        tmp_path / "mine.safetensors",
    )


@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_training_libraries(library, tmp_path, monkeypatch, capsys):
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed: pip install {library}")
    ran(f"{library}_finetune", monkeypatch, "--tiny", "--device", "cpu", "--out", tmp_path)
    assert "accuracy after fine-tuning" in capsys.readouterr().out
    assert slim_in(tmp_path)(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_lightning_in_two_processes(tmp_path):
    """Each prunes for itself; unless they come to one network, averaging its gradients fails."""
    pytest.importorskip("lightning")
    options = ["--tiny", "--device", "cpu", "--devices", "2", "--out", tmp_path]
    done = subprocess.run(
        [sys.executable, EXAMPLES / "lightning_finetune.py", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("accuracy after fine-tuning") == 1
    assert slim_in(tmp_path)(torch.zeros(1, 3, 32, 32)).shape == (1, 10)


def test_every_example_is_listed_and_compiles():
    """So that the two that need other libraries do not rot, and none is left out of the pages."""
    listed = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    helpers = {"common", "cifar"}
    for path in EXAMPLES.glob("*.py"):
        compile(path.read_text(), str(path), "exec")
        assert path.stem in helpers or f"`{path.name}`" in listed, path.name


def test_every_example_can_be_repeated():
    """First weights come from torch's global generator, which each example seeds."""
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        assert "torch.manual_seed(" in text or "from cifar import" in text or path.stem == "common"
