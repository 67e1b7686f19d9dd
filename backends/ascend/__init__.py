"""The Ascend plug-in: its backend, the number format HiFloat8, and the recipe that trains in it.

Format and recipe work on every machine, where the ``reference`` backend emulates them. torch_npu is
imported when the backend is first used, never by the probe.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from importlib import metadata

from fp8core.backend_api import API_VERSION, BackendSpec, hookimpl
from fp8core.formats import FormatSpec
from fp8core.recipe import Float8CurrentScaling, Recipe
from fp8core_backends.ascend.hif8 import HIF8

__all__ = ["fp8core_register_backends", "fp8core_register_formats", "fp8core_register_recipes"]

_VERSION = "2.13"


def _probe() -> str | None:
    if importlib.util.find_spec("torch_npu") is None:
        return "torch_npu is not installed"
    version = metadata.version("torch_npu")
    if not version.startswith(f"{_VERSION}."):
        return f"torch_npu is {version}, and the backend is written for {_VERSION}"
    if "torch_npu" not in sys.modules:
        return (
            "torch_npu is installed, but not imported. torch imports it, unless "
            "TORCH_DEVICE_BACKEND_AUTOLOAD=0; write `import torch_npu`"
        )
    return None


@hookimpl
def fp8core_register_backends(register: Callable[[BackendSpec], None]) -> None:
    """Register the backend of Ascend NPUs."""
    register(
        BackendSpec(
            name="ascend",
            device_types=("npu",),
            factory="fp8core_backends.ascend.backend:AscendBackend",
            probe=_probe,
            priority=10,
            api_version=API_VERSION,
            preferred_recipe="current",
            selftest="fp8core_backends.ascend.selftest:run",
        )
    )


@hookimpl
def fp8core_register_formats(register: Callable[[FormatSpec], None]) -> None:
    """Register HiFloat8 as ``Format.HIF8``."""
    register(HIF8)


@hookimpl
def fp8core_register_recipes(register: Callable[[str, Callable[[], Recipe]], None]) -> None:
    """Register current scaling in HiFloat8 as ``hif8``."""
    register("hif8", lambda: Float8CurrentScaling(fp8_format=HIF8.name))
