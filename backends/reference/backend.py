"""The judge of the other backends: every operation in plain torch, on any device.

``docs/numerics.md`` defines the results; the vectors in ``tests/golden`` decide.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import (
    Alignment,
    GemmDesc,
    GroupedGemmDesc,
    OpDesc,
    OperandSpec,
    PackedRotaryDesc,
    bind_method,
    variant_of,
)
from fp8core_backends.reference import (  # noqa: F401  each computes operations
    attention,
    gemm,
    layers,
    quantize,
    scaling,
    training,
)
from fp8core_backends.reference.operations import FUNCTIONS, REFUSALS


class ReferenceBackend:
    """Implements every operation of the backend API, each by the function of its name."""

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        """Return the reason why ``desc`` cannot run, or None."""
        problem = REFUSALS.get(type(desc))
        if problem is None:
            return f"unknown descriptor {desc}"
        variant = variant_of(desc)
        if variant not in (None, "padded", "counted", "packed"):
            return f"no {desc.op} with {variant}"
        # Low precision runs here only if it is asked for by name; high precision runs unasked.
        is_unasked = isinstance(desc, GroupedGemmDesc) and not desc.low_precision
        if is_unasked and device.type != "cpu" and getattr(desc, "offsets_on_device", False):
            return "in high precision it would wait for the sizes of groups on the device"
        return problem(desc)

    def alignment(self, desc: GemmDesc) -> Alignment:
        """Return 1 for m and n, and for k the size of whole blocks and bytes."""
        specs = [spec for spec in (desc.a, desc.b) if spec is not None]
        return Alignment(k=math.lcm(*map(_whole_block, specs)))

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        """Return the method that runs ``desc``."""
        if isinstance(desc, PackedRotaryDesc):
            return partial(layers.packed_rotary, desc)
        return bind_method(self, desc)


def _whole_block(spec: OperandSpec) -> int:
    """Return the number of which k must be a multiple: operands with byte scales have no partial
    blocks, and e2m1 packs pairs."""
    per_byte = 8 // formats.by_name(spec.format).bits
    return per_byte if spec.scale_format == "float32" else math.lcm(per_byte, spec.block[1])


for _op, _function in FUNCTIONS.items():
    setattr(ReferenceBackend, _op, staticmethod(_function))
