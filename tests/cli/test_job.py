"""From a folder of images to a network in other programs, command by command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from test_cli import write_images

import stamppruner
from stamppruner import describe, load_slim
from stamppruner.cli import main
from stamppruner.export import ExportReport, Quantization
from stamppruner.io import write_safetensors
from stamppruner.models import vgg19
from stamppruner.pruner_file import model_in
from stamppruner.slim import save_slim

MODEL = ["--model", "vgg", "--model-args", '{"widths": [[8], [16, 16]], "num_classes": 4}']


def ran(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    """The record of a command that must work, and says nothing else."""
    assert main([*map(str, argv), "--json", "--quiet"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return json.loads(shown.out)


def test_the_whole_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = write_images(tmp_path / "reference", classes=4, per_class=8)
    photos = write_images(tmp_path / "photos", classes=3, per_class=8)
    other = write_images(tmp_path / "other", classes=3, per_class=4)
    pruner, slim, tuned = (tmp_path / f"{n}.safetensors" for n in ("p.stamp", "slim", "tuned"))

    settings = ["--size", 8, "--ways", 2, "--shots", 4, "--iterations", 2, "--train", 2]
    fitted = ran(capsys, "meta-fit", *MODEL, "--data", reference, "--out", pruner, *settings)
    assert len(fitted["history"]) == 2
    assert 0 <= fitted["backbone_accuracy"] <= 1

    report = tmp_path / "slim.html"
    more = ["--data", photos, "--test", other, "--report", report]
    pruned = ran(capsys, "prune", pruner, "--macs", 0.5, *more, "--out", slim)
    assert pruned["reached"]["macs"] <= 0.5 * pruned["before"]["macs"]
    assert "accuracy_after_cut" in pruned["metrics"]
    assert "<html" in report.read_text()
    record = describe(slim)
    assert record["images"]["classes"] == ["class0", "class1", "class2"]
    assert record["factory"]["name"] == "vgg"

    timed = ["--macs", 0.5, "--latency-ms", 1, "--amp", "--finetune", 1, "--json", "--quiet"]
    assert main(["prune", *map(str, (pruner, *timed, *more, "--out", tmp_path / "fast"))]) == 0
    fast = json.loads(capsys.readouterr().out)  # torch's timer may log a line about CUDA
    assert fast["settings"]["latency_amp"]
    assert "amp=True" in report.read_text()

    trained = ran(
        capsys, "finetune", slim, "--data", photos, "--test", other, "--epochs", 3, "--augment",
        "--out", tuned,
    )  # fmt: skip
    assert len(trained["history"]) == 3
    measured = ran(capsys, "evaluate", tuned, "--data", other)
    assert measured == {"accuracy": trained["accuracy_after"], "images": 12, "classes": 3}
    before = ran(capsys, "evaluate", slim, "--data", other)
    assert (
        before["accuracy"] == trained["accuracy_before"] == pruned["metrics"]["accuracy_after_cut"]
    )

    exported = ran(capsys, "export", tuned, "--onnx", tmp_path / "tuned.onnx")
    assert exported["max_relative_difference"] < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "tuned.onnx")
    x = torch.rand(5, 3, 8, 8)
    (found,) = session.run(None, {"images": x.numpy()})
    assert torch.allclose(torch.from_numpy(found), load_slim(tuned)(x), atol=1e-4)

    seen = ran(capsys, "inspect", tuned)
    assert seen == describe(tuned)
    assert seen["kept"] == record["kept"]
    assert ran(capsys, "inspect", pruner)["meta_fitted"] is True
    images = torch.rand(2, 3, 8, 8)
    assert not torch.equal(load_slim(tuned)(images), load_slim(slim)(images))


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, a pruner and a slim network."""
    folder = tmp_path_factory.mktemp("job")
    write_images(folder / "photos")
    write_images(folder / "two", classes=2)
    fit = ["meta-fit", *MODEL, "--data", "photos", "--size", "8", "--shots", "2", "--quiet"]
    fit += ["--iterations", "1", "--train", "1", "--out", "p"]
    prune = ["prune", "p", "--data", "photos", "--macs", "0.6", "--out", "slim", "--quiet"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert main(fit) == 0
        assert main(prune) == 0
    return folder


def test_the_reference_can_be_augmented(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = write_images(tmp_path / "reference", classes=4, per_class=8)
    settings = ["--size", 8, "--ways", 2, "--shots", 4, "--iterations", 2, "--data", reference]

    def fitted(name: str, *more: object) -> tuple[float, list[dict[str, float]]]:
        path = tmp_path / f"{name}.stamp.safetensors"
        record = ran(capsys, "meta-fit", *MODEL, *settings, "--out", path, *more)
        return record["backbone_accuracy"], record["history"]

    plain = fitted("plain", "--train", 1)
    once, again = (fitted(name, "--train", 1, "--augment") for name in ("once", "again"))
    assert once == again
    assert once[1] != plain[1]


def test_images_are_normalised_as_the_reference_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reference = write_images(tmp_path / "reference", classes=4, per_class=8)
    pruner, slim = tmp_path / "p.stamp.safetensors", tmp_path / "slim.safetensors"
    settings = ["--size", 8, "--ways", 2, "--shots", 4, "--iterations", 1, "--train", 1]
    said = ["--mean", 0.5, 0.25, 0.5, "--std", 0.5, 0.5, 0.25]
    ran(capsys, "meta-fit", *MODEL, "--data", reference, "--out", pruner, *settings, *said)
    ran(capsys, "prune", pruner, "--macs", 0.5, "--data", reference, "--out", slim)
    found = describe(slim)["images"]
    assert (found["mean"], found["std"]) == ([0.5, 0.25, 0.5], [0.5, 0.5, 0.25])
    other = ["--mean", 0, 0, 0, "--std", 1, 1, 1]
    ran(capsys, "prune", pruner, "--macs", 0.5, "--data", reference, "--out", slim, *other)
    assert describe(slim)["images"]["mean"] == [0, 0, 0]


def test_a_file_that_does_not_say_how_pixels_were_normalised_is_warned_about(
    job: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, record = load_slim(job / "slim"), describe(job / "slim")
    images = {key: value for key, value in record["images"].items() if key == "classes"}
    save_slim(tmp_path / "silent", model, {**record, "images": images})
    asked = ["evaluate", str(tmp_path / "silent"), "--data", str(job / "photos"), "--quiet"]
    assert main(asked) == 0
    assert "does not say how pixels were normalised" in capsys.readouterr().err
    told = ["--mean", "0", "0", "0", "--std", "1", "1", "1"]
    assert main([*asked, *told]) == 0
    assert capsys.readouterr().err == ""


def test_what_cannot_be_pruned_is_told_before_it_is_trained(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.modules["stamppruner.finetune"], "finetune", lambda *_, **__: 1 / 0)
    fit = ["meta-fit", *MODEL, "--data", str(job / "photos"), "--out", str(tmp_path / "p")]
    fit += ["--size", "8", "--train", "3", "--quiet"]
    for more, named in (
        (["--protect", "zzz"], "zzz"),
        (["--keep", "0"], "keep=0"),
        (["--checkpoint-minutes", "nan"], "checkpoint_minutes=nan"),
        (["--loader-timeout", "0"], "loader_timeout=0"),
    ):
        assert main([*fit, *more]) == 1
        assert named in capsys.readouterr().err


def test_a_backbone_of_other_classes_gets_a_fitted_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights, out = tmp_path / "w.safetensors", tmp_path / "p.safetensors"
    torch.manual_seed(0)
    write_safetensors(weights, vgg19(7, width=0.0625).state_dict())
    reference = write_images(tmp_path / "reference", classes=3, per_class=10)
    fit = ["meta-fit", "--model", "vgg19", "--weights", weights, "--data", reference]
    found = ran(capsys, *fit, "--size", 16, "--shots", 4, "--iterations", 1, "--out", out)
    assert found["backbone_accuracy"] > 0.9  # by ridge regression on the very images
    assert len(model_in(out)[0]["classifier.weight"]) == 3


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["inspect", "slim"], r"slim network +stamppruner\.models\.vgg\.VGG\n.*3 x 8 x 8"),
        (["inspect", "p"], r"pruner of +stamppruner\.models\.vgg\.VGG\n.*\nmeta-fitted +yes"),
        (["evaluate", "slim", "--data", "photos"], r"^accuracy \d+\.\d\d% on 18 images\n$"),
        (["export", "slim", "--program", "slim.pt2"], r"^slim\.pt2: .*batches of 1, 3"),
        (["export", "slim", "--state-dict", "plain"], r"^plain: state dict"),
        (
            ["export", "slim", "--onnx", "slim.onnx", "--int8", "--calibration", "photos"],
            r"int8 against float .* of 18 calibration images",
        ),
    ],
)
def test_what_people_read(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(job)
    assert main(argv) == 0
    shown = capsys.readouterr()
    assert re.search(text, shown.out, re.DOTALL)
    assert shown.err == ""


@pytest.mark.parametrize(("agreement", "warned"), [(0.0, True), (0.94, True), (0.96, False)])
def test_answers_that_8_bits_change_are_warned_about(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    agreement: float,
    warned: bool,
) -> None:
    monkeypatch.chdir(job)
    report = ExportReport("f", "ONNX", 1, {}, (1,), 0.0, Quantization(1, 1, False, 0.0, agreement))
    monkeypatch.setattr("stamppruner.export.export_onnx", lambda *_, **__: report)
    assert main(["export", "slim", "--onnx", "f", "--int8", "--calibration", "photos"]) == 0
    assert ("8 bits change the answer" in capsys.readouterr().err) == warned


FIT = ["meta-fit", *MODEL, "--data", "photos", "--size", "8", "--out", "new"]


@pytest.mark.parametrize(
    ("argv", "kind", "named"),
    [
        (FIT, "ConfigError", "--weights FILE, --pretrained, or --train"),
        ([*FIT, "--pretrained"], "ConfigError", "no pretrained weights"),
        ([*FIT, "--weights", "slim"], "CheckpointError", "is not of this vgg"),
        ([*FIT, "--train", "1", "--ways", "9"], "DataError", "ways"),
        ([*FIT, "--train", "1", "--protect", "nothing"], "ConfigError", "'nothing'"),
        (["prune", "p", "--data", "photos", "--out", "new"], "BudgetError", "pass --macs 0.25"),
        (["prune", "slim", "--data", "photos", "--macs", "1", "--out", "new"], "CheckpointError",
         "it is one of kind 'stamppruner.slim'"),
        (["prune", "p", "--data", "photos", "--macs", "0.5", "--out", "no/new"],
         "CheckpointError", "existing directory"),
        (["prune", "p", "--data", "photos", "--macs", "1e-9", "--out", "new"], "BudgetError",
         "cannot be met"),
        (["prune", "p", "--data", "photos", "--macs", ".5", "--out", "new", "--device", "q"],
         "BudgetError", "device='q'"),
        (["finetune", "slim", "--data", "two", "--epochs", "1", "--out", "new"], "DataError",
         "same sub-folders"),
        (["finetune", "slim", "--data", "photos", "--epochs", "-1", "--out", "new"],
         "ConfigError", "epochs"),
        (["prune", "p", "--data", "photos", "--macs", "0.5", "--out", "p"], "ConfigError",
         "PRUNER and --out are the same file"),
        (["prune", "p", "--data", "photos", "--macs", "0.5", "--out", "new", "--report", "./new"],
         "ConfigError", "--out and --report are the same file"),
        (["prune", "p", "--data", "photos", "--macs", "0.5", "--out", "new", "--finetune", "-5"],
         "ConfigError", "epochs=-5"),
        (["prune", "p", "--data", "photos", "--latency-ms", "1", "--device", "cuda:77", "--out",
          "new"], "BudgetError", "no such device"),
        (["evaluate", "p", "--data", "photos"], "CheckpointError", "not a slim model"),
        (["evaluate", "slim", "--data", "photos", "--model", "lenet"], "ConfigError", "choose"),
        (["evaluate", "slim", "--data", "photos", "--model", "resnet18", "--model-args",
          '{"width": 0.1}'], "CheckpointError", "does not fit ResNet"),
        (["inspect", "photos/class0/0.png"], "CheckpointError", "safetensors"),
        (["inspect", "nowhere"], "CheckpointError", "nowhere"),
        (["export", "slim", "--program", "new", "--int8"], "ConfigError", "are for --onnx"),
        (["export", "slim", "--onnx", "new", "--int8"], "ConfigError", "pass --calibration"),
        (["export", "slim", "--onnx", "no/new"], "CheckpointError", "existing directory"),
        (["export", "slim", "--onnx", "new", "--int8", "--calibration", "no"], "DataError",
         "no such folder"),
        (["export", "p", "--onnx", "new"], "CheckpointError", "not a slim model"),
    ],
)  # fmt: skip
def test_errors_are_one_line_and_leave_nothing(
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    kind: str,
    named: str,
) -> None:
    monkeypatch.chdir(job)
    before = sorted(job.iterdir())
    assert main([*argv, "--quiet"]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"stamppruner: {kind}: ")
    assert shown.err.count("\n") == 1
    assert named in shown.err
    assert sorted(job.iterdir()) == before


def test_a_reader_that_has_enough_is_no_error(job: Path) -> None:
    command = [sys.executable, "-m", "stamppruner", "inspect", str(job / "slim"), "--json"]
    env = {**os.environ, "PYTHONPATH": str(Path(stamppruner.__file__).parents[1])}
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        run.stdout.close()
        assert run.stderr.read() == ""
    assert run.returncode == 141


COMMANDS = ("demo", "meta-fit", "prune", "pareto", "finetune", "evaluate", "inspect", "export")


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main([command, "--help"] if command else ["--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 55
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    if command:
        assert f"example: stamppruner {command} " in text
    else:
        assert all(name in text for name in COMMANDS)
