"""The hooks that a plug-in may implement, as its author imports them."""

from __future__ import annotations

from fp8core.backend_api.hooks import (
    fp8core_doctor,
    fp8core_register_backends,
    fp8core_register_formats,
    fp8core_register_recipes,
    fp8core_select_backend,
)

__all__ = [
    "fp8core_doctor",
    "fp8core_register_backends",
    "fp8core_register_formats",
    "fp8core_register_recipes",
    "fp8core_select_backend",
]
