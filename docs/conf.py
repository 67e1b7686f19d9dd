"""The documentation site: ``python -m sphinx -W -n docs build/docs``. Needs no network."""

from __future__ import annotations

import sys
from pathlib import Path

import fp8core

sys.path.insert(0, str(Path(__file__).parent / "extensions"))

project = "fp8core"
author = "fp8core authors"
version = release = fp8core.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "matplotlib.sphinxext.plot_directive",
    "support_matrix",
]
root_doc = "index"
exclude_patterns = ["examples", "extensions", "plots"]
html_theme = "furo"
html_title = "fp8core"
html_copy_source = False

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "dollarmath"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

plot_formats = [("svg", 72)]
plot_html_show_formats = False
plot_html_show_source_link = False

nitpicky = True
# What other projects document: their inventories would have to be fetched.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|collections|pluggy|typing)\..*"),
    ("py:class", r"InitMethod|AmaxAlgorithm|ScalingAlgorithm|Rule"),
]
