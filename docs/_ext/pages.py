"""Pages that are made when the site is built: one for each public package."""

import importlib
import inspect
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import stamppruner

PACKAGES = (
    "stamppruner",
    "stamppruner.data",
    "stamppruner.models",
    "stamppruner.baselines",
    "stamppruner.tasks",
    "stamppruner.encoders",
    "stamppruner.posteriors",
    "stamppruner.costs",
    "stamppruner.export",
    "stamppruner.report",
    "stamppruner.errors",
)
"""The public face, and the folders of things that are passed in."""


def names_of(package: str) -> list[str]:
    """Public names of a package; errors have no list of their own, so it is all of its classes."""
    module = importlib.import_module(package)
    own = [name for name, value in vars(module).items() if inspect.isclass(value)]
    return list(getattr(module, "__all__", own))


def api_page(package: str) -> str:
    """reStructuredText: what the package says of itself, a table of its names, each in full."""
    module = importlib.import_module(package)
    names = names_of(package)
    face = set(stamppruner.__all__) if package != "stamppruner" else set()
    own = [name for name in names if name not in face]
    there = [name for name in names if name in face]
    lines = [package, "=" * len(package), "", f".. automodule:: {package}", "   :no-members:", ""]
    if there:
        links = ", ".join(f":py:obj:`stamppruner.{name}`" for name in there)
        lines += [f"Also here, as part of :doc:`the face <stamppruner>`: {links}.", ""]
    lines += [".. autosummary::", "   :nosignatures:", ""]
    lines += [f"   {name}" for name in own] + [""]
    for name in own:
        lines += [f".. auto{_kind(getattr(module, name))}:: {package}.{name}", ""]
    return "\n".join(lines)


def _kind(value: Any) -> str:
    if inspect.isclass(value):
        return "exception" if issubclass(value, BaseException) else "class"
    return "function" if callable(value) else "data"


def write(path: Path, text: str) -> None:
    """Write what changed alone, so that a second build is quick."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.is_file() or path.read_text("utf-8") != text:
        path.write_text(text, "utf-8")


def make(app: Sphinx) -> None:
    for package in PACKAGES:
        write(Path(app.srcdir) / "api" / f"{package}.rst", api_page(package))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("builder-inited", make, priority=100)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
