"""The code of README.md and of every page of the documentation runs; links lead somewhere.

Blocks of a page run one after the other, in an empty folder. What the README takes for granted (a
model, folders of images) is made here. Sizes of learning are cut down to a step; nothing else is
changed.
"""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import stamppruner.meta
import stamppruner.result
import stamppruner.swap
from stamppruner.cli import main
from stamppruner.data import ArrayDataset, digits, render_characters
from stamppruner.io import write_safetensors
from stamppruner.models import ResNet, resnet18
from stamppruner.report import Report

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")

NOT_RUN = (
    "pip ",
    "python ",
    "sphinx-build ",
    "ruff ",
    "pre-commit ",
    "pytest ",
    ".ci/run",
    "stamppruner demo",
)
"""Commands that install, check this repository, repeat a benchmark, or have tests of their own."""

SMALL = {"meta-fit": ["--iterations", "1", "--weight-steps", "1", "--tasks", "1", "--shots", "4"]}
"""Added to commands; of options that are given twice the last one counts."""


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    return [(kind, text) for kind, text in BLOCK.findall(page.read_text("utf-8"))
            if kind in languages]  # fmt: skip


WITH_CODE = [page for page in PAGES if blocks(page, "python", "bash")]


def folders(data: ArrayDataset, root: str) -> None:
    for i, (pixels, label) in enumerate(zip(data.images, data.targets, strict=True)):
        folder = Path(root, f"{int(label):02d}")
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{i}.png")


def scope_of_readme() -> dict[str, Any]:
    """A backbone, a reference, and data sets called birds and parts, as the README names them."""

    def make_model() -> ResNet:
        return ResNet((1, 1), (8, 16), num_classes=12)

    reference = render_characters(per_class=64, size=16, classes="ABCDEFGHIJKL")
    train, test = digits(6, size=16)
    test = test.subset(range(60))
    parts = render_characters(per_class=12, size=16, classes="XYZ")
    folders(reference.subset(range(0, 768, 8)), "reference")
    folders(train, "birds")
    folders(test, "birds-test")
    return {
        "model": make_model(),
        "make_model": make_model,
        "reference": reference,
        "target_loader": train,
        "test_loader": test,
        "birds": train,
        "birds_test": test,
        "parts": parts,
        "parts_test": parts,
        "example_inputs": torch.zeros(1, 3, 16, 16),
        "images": test.tensors()[0][:8],
    }


def scope_of_baselines() -> dict[str, Any]:
    return {
        "model": ResNet((1, 1), (32, 64), num_classes=10),
        "loader": [(torch.randn(20, 3, 16, 16), torch.arange(20) % 10)],
    }


def scope_of_meta_fitting() -> dict[str, Any]:
    scope = scope_of_readme()
    write_safetensors("backbone.safetensors", resnet18(100, width=0.125).state_dict())
    return scope


SCOPES: dict[str, Callable[[], dict[str, Any]]] = {
    "README.md": scope_of_readme,
    "baselines.md": scope_of_baselines,
    "meta-fitting.md": scope_of_meta_fitting,
}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of meta-fitting, one epoch of training, whatever a page asks for; no Hub."""
    ready = stamppruner.meta.MetaLearner.__post_init__

    def one_step(learner: Any) -> None:
        learner.config = dataclasses.replace(
            learner.config, iterations=1, tasks_per_iteration=1, weight_steps=1
        )
        ready(learner)

    monkeypatch.setattr(stamppruner.meta.MetaLearner, "__post_init__", one_step)
    train = stamppruner.result.finetune

    def one_epoch(model: Any, loader: Any, *, epochs: int, **settings: Any) -> Any:
        return train(model, loader, epochs=min(epochs, 1), **settings)

    for module in (stamppruner.result, stamppruner.swap):
        monkeypatch.setattr(module, "finetune", one_epoch)

    def save(result: Any, repo_id: str) -> None:
        stamppruner.save_pretrained(result, "pushed", repo_id=repo_id)

    monkeypatch.setattr(stamppruner, "push_to_hub", save)  # as far as it goes without a network


def run_command(line: str) -> None:
    words = shlex.split(line, comments=True)
    for start in [i for i, word in enumerate(words) if word == "stamppruner"]:
        end = words.index("&&", start) if "&&" in words[start:] else len(words)
        command, *rest = words[start + 1 : end]
        rest = ["vgg19" if word.startswith("torchvision:") else word for word in rest]
        if "--pretrained" in rest:  # nothing is fetched here
            place = rest.index("--pretrained")
            rest[place : place + 1] = ["--train", "1"]
        for option in ("--train", "--finetune", "--epochs"):  # one epoch is as good as many
            if option in rest:
                rest[rest.index(option) + 1] = "1"
        model = ["--model-args", '{"width": 0.125}'] if command == "meta-fit" else []
        assert main([command, *rest, *model, *SMALL.get(command, [])]) == 0, line


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_code_runs(
    page: Path, small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["page"])
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        scope = SCOPES.get(page.name, dict)()
        for number, (kind, text) in enumerate(blocks(page, "python", "bash")):
            if kind == "python":
                if "_inductor" in text:  # minutes: a slow test of the page does it
                    continue
                exec(compile(text, f"{page}, block {number}", "exec"), scope)
                continue
            for line in text.replace("\\\n", " ").splitlines():
                if line.strip() and not line.startswith((*NOT_RUN, "#")):
                    assert "stamppruner" in line, f"nobody runs {line!r}"
                    run_command(line)


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub and the documentation make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)
    return set(plain)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text("utf-8")):
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}"


def test_named_files_exist() -> None:
    """Paths of this repository that pages name in code."""
    for page in PAGES:
        named = re.findall(r"`((?:examples|benchmarks|docs)/[\w/.-]+\.\w+)`", page.read_text())
        missing = [name for name in named if not (ROOT / name).exists()]
        assert not missing, f"{page.name} names {missing}"


def test_pictures_are_those_that_the_script_draws(tmp_path: Path) -> None:
    """So the one with figures shows those of the benchmark's record."""
    place = ROOT / "docs" / "pictures"
    drawn = runpy.run_path(str(place / "draw.py"))
    drawn["Picture"].write.__globals__["OUT"] = tmp_path
    for draw in drawn["PICTURES"]:
        draw()
    assert {path.name for path in tmp_path.iterdir()} == {p.name for p in place.glob("*.svg")}
    for path in tmp_path.iterdir():
        assert path.read_text() == (place / path.name).read_text(), f"{path.name} is out of date"


RECORDS = ROOT / "docs" / "records"


def test_what_an_example_printed_was_recorded_of_its_code() -> None:
    """And every example has a record, which the page of examples shows."""
    recorder = runpy.run_path(str(RECORDS / "record.py"))
    page = (ROOT / "docs" / "examples.md").read_text()
    helpers = {"common", "cifar"}
    assert {p.stem for p in (ROOT / "examples").glob("*.py")} - helpers == set(recorder["RUNS"])
    for name in recorder["RUNS"]:
        record = json.loads((RECORDS / "examples" / f"{name}.json").read_text())
        again = f"run python docs/records/record.py {name}"
        assert record["code"] == recorder["digest"](name), again
        assert record["command"].split()[:2] == ["python", f"examples/{name}.py"]
        assert record["output"].strip()
        assert f"```{{include-run}} {name}\n```\n" in page
    assert recorder["on_screen"]("a\r\n1%\r50%\r100%\r\nb\n") == "a\n100%\nb\n"


def test_a_page_shows_what_an_example_printed_and_its_picture() -> None:
    pytest.importorskip("docutils", reason="comes with the docs extra; the site's build needs it")
    directives = runpy.run_path(str(ROOT / "docs" / "_ext" / "reports.py"))
    kinds = {}
    for path in sorted((RECORDS / "examples").glob("*.json")):
        record = json.loads(path.read_text())
        kinds[path.stem] = record["kind"]
        shown = directives["picture"](record)
        assert bool(shown) == bool(record["kind"])
        for node in shown:
            assert "<svg" in node.astext(), path.stem
            assert "<h2>" not in node.astext()  # they would stand beside those of the page
    assert kinds["quickstart"] == "report"
    assert kinds["many_targets"] == "comparison"


def test_the_report_that_a_page_shows_is_a_record_of_this_format() -> None:
    record = json.loads((ROOT / "docs" / "records" / "start.json").read_text())
    assert Report.from_json(record).to_json() == record
