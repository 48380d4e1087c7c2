"""Every public name says what it is, what goes in, what comes out, what it raises, and how."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import stamppruner
import stamppruner.errors

PACKAGES = (
    "data", "models", "baselines", "tasks", "encoders", "posteriors", "costs", "export", "bench"
)  # fmt: skip
FACE = {name: getattr(stamppruner, name) for name in stamppruner.__all__}
REPORT = importlib.import_module("stamppruner.report")
EVERYTHING = {
    f"{package.__name__}.{name}": getattr(package, name)
    for package in (
        stamppruner,
        REPORT,
        *(importlib.import_module(f"stamppruner.{name}") for name in PACKAGES),
    )
    for name in package.__all__
}
DATA = {
    name
    for name, value in EVERYTHING.items()
    if not (inspect.isclass(value) or inspect.isfunction(value))
}
"""Constants and aliases of types, which have no docstring at run time."""

ERRORS = {name for name, value in vars(stamppruner.errors).items() if inspect.isclass(value)}


def callables(name: str, value: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """A function; or the constructor of a class and its public methods."""
    if not inspect.isclass(value):
        yield name, value
        return
    for attribute, member in vars(value).items():
        function = getattr(member, "__func__", member)  # of class and static methods
        if inspect.isfunction(function) and not attribute.startswith("_"):
            yield f"{name}.{attribute}", function


def documented(doc: str, parameter: str) -> bool:
    return re.search(rf"(^|\W){re.escape(parameter)}(\W|$)", doc) is not None


@pytest.mark.parametrize("name", sorted(set(EVERYTHING) - DATA))
def test_each_has_a_docstring_of_its_own(name: str) -> None:
    value = EVERYTHING[name]
    doc = inspect.getdoc(value) or ""
    first = doc.splitlines()[0] if doc else ""
    assert len(first) >= 8, f"{name} has no docstring"
    assert first.rstrip().endswith((".", ":")) or "\n\n" in doc, f"{name}: {first!r}"
    for method, function in callables(name, value):
        assert inspect.getdoc(function), f"{method} has no docstring"


@pytest.mark.parametrize("name", sorted(FACE))
def test_parameters_are_explained(name: str) -> None:
    """Of functions and of classes that users make, each is named in the docstring."""
    value = FACE[name]
    doc = inspect.getdoc(value) or ""
    if inspect.isclass(value) and issubclass(value, BaseException):
        return
    for parameter in inspect.signature(value).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        assert documented(doc, parameter.name), f"{name}: {parameter.name} is not explained"


@pytest.mark.parametrize("name", sorted(FACE))
def test_each_has_an_example_that_runs(name: str) -> None:
    """``pytest --doctest-modules`` runs it."""
    doc = inspect.getdoc(FACE[name]) or ""
    assert ">>> " in doc, f"{name} has no example"


def raised(function: Callable[..., Any]) -> set[str]:
    """Errors of this package that the function's own code raises by name."""
    try:
        source = inspect.getsource(function)
    except OSError:  # made by dataclass
        return set()
    return ERRORS & set(re.findall(r"raise (\w+)\(", source))


@pytest.mark.parametrize("name", sorted(set(EVERYTHING) - DATA))
def test_errors_that_are_raised_are_named(name: str) -> None:
    value = EVERYTHING[name]
    own = inspect.getdoc(value) or ""
    for method, function in callables(name, value):
        doc = (inspect.getdoc(function) or "") + own
        missing = [error for error in raised(function) if error not in doc]
        assert not missing, f"{method} raises {missing} and does not say so"
    if inspect.isclass(value):
        for special in ("__init__", "__post_init__"):
            function = vars(value).get(special)
            if inspect.isfunction(function):
                missing = [error for error in raised(function) if error not in own]
                assert not missing, f"{name}: {special} raises {missing} and does not say so"


def test_every_public_package_is_in_the_reference() -> None:
    """Which makes a page of each, with all of its names."""
    root = Path(__file__).parents[1] / "docs"
    made = re.findall(r'^    "(stamppruner[.\w]*)",$', (root / "_ext/pages.py").read_text(), re.M)
    index = (root / "api/index.md").read_text().split()
    public = [f"stamppruner.{name}" for name in (*PACKAGES, "report", "errors")]
    assert sorted(made) == sorted(["stamppruner", *public])
    assert set(made) <= set(index)
