"""Sphinx settings: ``sphinx-build -n -W --keep-going docs docs/_build``."""

import re
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

import stamppruner  # noqa: E402, F401  (autodoc documents this checkout, not an installed copy)

project = "stamppruner"
copyright = "the stamppruner authors, Apache-2.0"
release = re.search(r'^version = "(.*)"', (HERE.parent / "pyproject.toml").read_text(), re.M)[1]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "mathml",
    "pages",
    "reports",
]
exclude_patterns = ["_build"]
nitpicky = True

html_theme = "furo"
html_title = "stamppruner"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"  # no script, no request
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
pygments_style = "friendly"
pygments_dark_style = "github-dark"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
autosummary_ignore_module_all = False
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False

nitpick_ignore_regex = [
    # Other libraries: an inventory of their names would have to be fetched.
    (r"py:.*", r"(torch|numpy|collections|os|abc|pathlib|typing|matplotlib|Figure)\b.*"),
    # What autodoc makes of annotations that it cannot evaluate, and of private bases.
    (r"py:class", r".*[\[~].*"),
    (r"py:class", r"stamppruner(\.\w+)*\._.*"),
]
