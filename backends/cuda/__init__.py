"""The CUDA backend's plug-in: cuBLASLt and kernels of fp8core, or torch's where none are built.

Nothing here touches a device or a compiler; both wait for the first operation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8core.backend_api import API_VERSION, BackendSpec, hookimpl
from fp8core_backends.cuda import cudnn_frontend, native, tiers

__all__ = ["fp8core_doctor", "fp8core_register_backends"]


def _probe() -> str | None:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else "no CUDA device is visible"


@hookimpl
def fp8core_register_backends(register: Callable[[BackendSpec], None]) -> None:
    """Register the CUDA backend."""
    register(
        BackendSpec(
            name="cuda",
            device_types=("cuda",),
            factory="fp8core_backends.cuda.backend:CudaBackend",
            builder="fp8core_backends.cuda.build:build",
            probe=_probe,
            priority=10,
            api_version=API_VERSION,
            preferred_recipe="current",
            environment=(
                *("FP8CORE_AUTOTUNE", "FP8CORE_BUILD", "FP8CORE_CACHE_DIR"),
                "FP8CORE_TRANSFERS",
            ),
            transposes=True,
        )
    )


@hookimpl
def fp8core_doctor(report: Callable[[str, str], None]) -> None:
    """Report which native library is in use, and whether cuDNN's attention is, and why."""
    if _probe() is None:
        report("compute capability", tiers.status())
        report("cuda native library", native.status())
        report("cuDNN's attention by its frontend", cudnn_frontend.missing() or "in use")
