"""The laws, as functions of a backend and a descriptor; importing this package fills LAWS."""

from __future__ import annotations

from fp8core.conformance.checks import LAWS
from fp8core.conformance.laws import (  # noqa: F401  each defines its laws when it is imported
    alone,
    amax,
    attention,
    attention_parts,
    cross_entropy,
    declaration,
    every_op,
    fused,
    gemm,
    grouped,
    memory,
    nonfinite,
    optimizers,
    out,
    overflow,
    parts,
    permutation,
    pointwise,
    quantize,
    rotary,
    router,
    sizes,
    stochastic,
)

__all__ = ["LAWS"]
