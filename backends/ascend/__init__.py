"""The Ascend plug-in: the number format HiFloat8 and the recipe that trains in it.

Both work on every machine, where the ``reference`` backend emulates them; nothing here imports
``torch_npu``.
"""

from __future__ import annotations

from collections.abc import Callable

from fp8core.backend_api import hookimpl
from fp8core.formats import FormatSpec
from fp8core.recipe import Float8CurrentScaling, Recipe
from fp8core_backends.ascend.hif8 import HIF8

__all__ = ["fp8core_register_formats", "fp8core_register_recipes"]


@hookimpl
def fp8core_register_formats(register: Callable[[FormatSpec], None]) -> None:
    """Register HiFloat8 as ``Format.HIF8``."""
    register(HIF8)


@hookimpl
def fp8core_register_recipes(register: Callable[[str, Callable[[], Recipe]], None]) -> None:
    """Register current scaling in HiFloat8 as ``hif8``."""
    register("hif8", lambda: Float8CurrentScaling(fp8_format=HIF8.name))
