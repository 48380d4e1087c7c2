"""The API reference: a page for each public package, and names that docstrings mention."""

import argparse
import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon.docstring import GoogleDocstring
from sphinx.util.nodes import make_refnode

import stamppruner
from stamppruner import cli

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
    "stamppruner.bench",
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


def commands_page() -> str:
    """The help of every command, as the terminal shows it."""
    os.environ["COLUMNS"] = "90"  # of argparse's text
    parser = cli._parser()
    (group,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    lines = ["Commands", "========", "", "``stamppruner COMMAND --help`` shows the same.", ""]
    for name, command in [("", parser), *group.choices.items()]:
        title = f"stamppruner {name}".strip()
        lines += [title, "-" * len(title), "", ".. code-block:: text", ""]
        lines += [f"   {line}".rstrip() for line in command.format_help().splitlines()] + [""]
    return "\n".join(lines)


def make(app: Sphinx) -> None:
    folder = Path(app.srcdir) / "api"
    for package in PACKAGES:
        write(folder / f"{package}.rst", api_page(package))
    write(folder / "commands.rst", commands_page())


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, text: nodes.TextElement
) -> nodes.Element | None:
    """Names as docstrings write them: of their own module, or of one that has no page.

    A name that is nowhere in the package stays unresolved, which is an error of the build.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    found = {
        name: entry
        for name, entry in env.get_domain("py").objects.items()
        if f".{name}".endswith(f".{target}") and not entry.aliased
    }
    if len(found) == 1:
        ((name, entry),) = found.items()
        return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, text, name)
    return text if found or _exists(target) else None


def _exists(target: str) -> bool:
    """Whether it is a module of this package, or a name in one."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1) if parts[0] == "stamppruner" else ():
        try:
            value: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part, None)
        return value is not None
    modules = [m for name, m in sys.modules.items() if name.startswith("stamppruner.")]
    return len(parts) == 1 and any(hasattr(module, target) for module in modules)


def apart(app: Sphinx, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    """``a, b: text`` among attributes or arguments, as two entries; napoleon reads a type there."""
    found: list[str] = []
    for line in lines:
        if match := re.match(r"( +)(\w+(?:, \w+)+): \S", line):
            *others, last = match[2].split(", ")
            found += [f"{match[1]}{other}: see ``{last}``." for other in others]
            line = line.replace(match[2], last, 1)
        found.append(line)
    lines[:] = found


def setup(app: Sphinx) -> dict[str, bool]:
    # Napoleon takes what stands before a colon in the docstring of a property for a type.
    GoogleDocstring._parse_attribute_docstring = lambda _self: []
    app.connect("builder-inited", make, priority=100)
    app.connect("autodoc-process-docstring", apart, priority=400)  # before napoleon
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
