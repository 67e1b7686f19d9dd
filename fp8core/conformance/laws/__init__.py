"""The laws, as functions of a backend and a descriptor; importing this package fills LAWS."""

from __future__ import annotations

from fp8core.conformance.checks import LAWS
from fp8core.conformance.laws import (  # noqa: F401  each defines its laws when it is imported
    amax,
    attention,
    declaration,
    every_op,
    fused,
    gemm,
    memory,
    nonfinite,
    optimizers,
    pointwise,
    quantize,
    router,
)

__all__ = ["LAWS"]
