"""The laws, as functions of a backend and a descriptor, and examples of the operations' calls.

Importing this package fills LAWS, and gives ``arguments`` its examples.
"""

from __future__ import annotations

from fp8core.conformance.calls import arguments
from fp8core.conformance.checks import LAWS
from fp8core.conformance.laws import (  # noqa: F401  each defines laws and examples
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

__all__ = ["LAWS", "arguments"]
