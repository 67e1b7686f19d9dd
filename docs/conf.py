"""The documentation site: ``python -m sphinx -W -n docs build/docs``. Needs no network."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

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
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["site.css"]

myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence", "dollarmath"]

# Frameworks that the documentation is built without; those of the tests are there as themselves.
autodoc_mock_imports = ["lightning", "lightning_utilities", "megatron", "torchtitan"]
autodoc_mock_imports += [
    name for name in ("safetensors", "transformers") if importlib.util.find_spec(name) is None
]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

plot_formats = [("svg", 72)]
plot_html_show_formats = False
plot_html_show_source_link = False

nitpicky = True
# Names that other projects document; links to them would need their inventories from the network.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|collections|os|pathlib|pluggy|typing"
        r"|fp8core\.(modules\.calls\.inputs|inspection\.monitoring\.record|tensors\.quantizer))\..*",
    ),
    (
        "py:class",
        r"InitMethod|Filter|ReduceAmax|AmaxAlgorithm|ScalingAlgorithm|Rule|CachedKeys|(Non)?PagedKVCacheManager",
    ),
]


def show_fields(
    app: Sphinx, kind: str, name: str, obj: Any, options: Any, signature: str, returns: str
) -> tuple[str, str] | None:
    """Return the signature of a dataclass's fields, which the ``__new__`` of a recipe hides."""
    if kind != "class" or not dataclasses.is_dataclass(obj):
        return None
    fields = list(inspect.signature(obj.__init__).parameters.values())[1:]
    text = stringify_signature(
        inspect.Signature(fields), show_annotation=False, show_return_annotation=False
    )
    return text, returns


def skip_field_numbers(
    app: Sphinx, kind: str, name: str, obj: Any, is_skipped: bool, options: Any
) -> bool | None:
    """Leave out the docstring that Python gives every field of a named tuple."""
    return True if (getattr(obj, "__doc__", "") or "").startswith("Alias for field") else None


def setup(app: Sphinx) -> None:
    """Register the functions that autodoc calls."""
    app.connect("autodoc-process-signature", show_fields)
    app.connect("autodoc-skip-member", skip_field_numbers)
