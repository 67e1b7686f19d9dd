"""The laws, as functions of a backend and a descriptor; importing this package fills LAWS."""

from __future__ import annotations

from fp8core.testing.checks import LAWS
from fp8core.testing.laws import (  # noqa: F401  each defines its laws when it is imported
    alone,
    amax,
    attention,
    attention_parts,
    declaration,
    every_op,
    fused,
    gemm,
    grouped,
    memory,
    nonfinite,
    out,
    overflow,
    parts,
    pointwise,
    quantize,
    rotary,
    sizes,
    stochastic,
    training,
)

__all__ = ["LAWS"]
