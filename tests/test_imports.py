"""Imports run one way; optional and heavy packages stay where they belong."""

from __future__ import annotations

import ast
import importlib
import os
import pkgutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import stamppruner

ROOT = Path(stamppruner.__file__).parent
MODULES = sorted(
    [name for _, name, _ in pkgutil.walk_packages([str(ROOT)], "stamppruner.")] + ["stamppruner"]
)


def source(module: str) -> Path:
    path = ROOT.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _for_annotations(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@cache
def imported(module: str) -> frozenset[str]:
    """Modules that a file imports, anywhere in it but for annotations alone, as full names."""
    tree = ast.parse(source(module).read_text())
    tree.body = [node for node in tree.body if not _for_annotations(node)]
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in inner if name in MODULES} or {str(node.module)}
    return frozenset(found)


def importers(target: str) -> set[str]:
    inside = (target, target + ".")
    return {
        module.removeprefix("stamppruner.")
        for module in MODULES
        if any(name == inside[0] or name.startswith(inside[1]) for name in imported(module))
    }


def test_the_package_was_found() -> None:
    assert len(MODULES) > 40
    assert "stamppruner.tasks.sampler" in imported("stamppruner.tasks")
    assert "stamppruner.pruner" in imported("stamppruner")


def test_only_the_face_and_the_programs_import_the_pruner() -> None:
    allowed = {"stamppruner", "demo", "cli", "bench"}
    assert {"stamppruner", "demo"} <= importers("stamppruner.pruner")
    found = {name.split(".")[0] for name in importers("stamppruner.pruner")}
    assert found <= allowed


def test_nothing_imports_the_programs() -> None:
    assert {name.split(".")[0] for name in importers("stamppruner.cli")} <= {"__main__", "cli"}
    assert {name.split(".")[0] for name in importers("stamppruner.demo")} <= {"cli"}


def test_the_face_is_not_imported_from_inside() -> None:
    names = {"stamppruner"}
    assert [m for m in MODULES if names & imported(m)] == []


@pytest.mark.parametrize("kind", ["posteriors", "encoders", "costs", "baselines", "export"])
def test_siblings_do_not_import_each_other(kind: str) -> None:
    package = f"stamppruner.{kind}"
    siblings = [m for m in MODULES if m.startswith(package + ".") and "._" not in m]
    assert len(siblings) >= 1
    for module in siblings:
        assert not imported(module) & (set(siblings) | {package}), module


FOUNDATIONS = [
    "errors",
    "channels",
    "layers",
    "io",
    "progress",
    "history",
    "config",
    "slim",
    "posteriors",
    "encoders",
    "tasks",
    "models",
    "gates",
    "surgery",
]
ABOVE = {
    "pruner",
    "result",
    "meta",
    "baselines",
    "demo",
    "cli",
    "objective",
    "gated",
    "report",
    "export",
}


@pytest.mark.parametrize("name", FOUNDATIONS)
def test_what_lies_below_knows_nothing_of_what_lies_above(name: str) -> None:
    start = {
        m for m in MODULES if m == f"stamppruner.{name}" or m.startswith(f"stamppruner.{name}.")
    }
    reached, todo = set(start), list(start)
    while todo:
        for other in imported(todo.pop()):
            if other in MODULES and other not in reached:
                reached.add(other)
                todo.append(other)
    tops = {m.split(".")[1] for m in reached if m != "stamppruner"}
    assert not tops & ABOVE


def test_imports_are_free_of_cycles() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for other in sorted(imported(module) & set(MODULES)):
                visit(other, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("torch_pruning", {"surgery"}),
        ("safetensors", {"io"}),
        ("tqdm", {"progress", "data.folders"}),
        ("argparse", {"cli"}),
    ],
)
def test_each_outside_package_has_one_door(package: str, allowed: set[str]) -> None:
    assert {
        name.split(".")[0] if name.startswith("cli") else name for name in importers(package)
    } == allowed


def test_everything_in_the_face_exists() -> None:
    assert sorted(set(stamppruner.__all__)) == sorted(stamppruner.__all__)
    for name in stamppruner.__all__:
        value = getattr(stamppruner, name)
        assert callable(value), name  # a class or a function, not the module of that name
        assert value.__doc__, name


@pytest.mark.parametrize("module", [m for m in MODULES if not m.endswith("__main__")])
def test_every_module_has_a_docstring_and_loads(module: str) -> None:
    assert importlib.import_module(module).__doc__


OPTIONAL = [
    "torch_pruning",
    "matplotlib",
    "sklearn",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "huggingface_hub",
    "timm",
]


def test_the_package_loads_without_what_only_some_parts_need() -> None:
    blocked = "".join(f"sys.modules[{name!r}] = None\n" for name in OPTIONAL)
    parts = "stamppruner.slim, stamppruner.cli, stamppruner.export"
    code = f"import sys\n{blocked}import {parts}\nprint('ok')"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
    )
    assert run.stdout.strip() == "ok", run.stderr
