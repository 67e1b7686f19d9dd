"""The reference backend's plug-in: pure torch, native on the CPU, on request anywhere else."""

from __future__ import annotations

from collections.abc import Callable

from fp8core.backend_api import API_VERSION, BackendSpec, hookimpl

__all__ = ["fp8core_register_backends"]


@hookimpl
def fp8core_register_backends(register: Callable[[BackendSpec], None]) -> None:
    """Register the reference backend; its code is imported on first use."""
    register(
        BackendSpec(
            name="reference",
            device_types=("cpu", "meta"),
            factory="fp8core_backends.reference.backend:ReferenceBackend",
            priority=0,
            api_version=API_VERSION,
            portable=True,
            preferred_recipe="current",
            operand_fields=("row_scaled", "four_over_six", "scale_max"),
        )
    )
