"""Backends that use the freedom that the API leaves them, and break no law."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import Alignment, GemmDesc, Operand, QuantizeDesc
from fp8core.conformance.checks import BY_AMAX, EVERY_OP
from fp8core_backends.reference.gemm import gemm, grouped_gemm
from fp8core_backends.reference.quantize import quantize
from tests.conformance.broken import GivesFusedChunks, Sound, operands


class Aligned(Sound):
    """Its products take multiples of 16, 8 and 32 only, as its alignment says."""

    def alignment(self, desc: GemmDesc) -> Alignment:
        return Alignment(16, 8, 32)

    def gemm(self, desc: GemmDesc, a: Operand, b: Operand, **given: Any) -> Any:
        made = gemm(desc, a, b, **given)
        sizes = (*made.shape, self._k(desc, a))
        assert all(size % step == 0 for size, step in zip(sizes, (16, 8, 32), strict=True)), sizes
        return made

    def grouped_gemm(self, desc: Any, a: Operand, b: Any, offsets: Any, **given: Any) -> Any:
        step = 32 if desc.contract_groups else 16
        assert all(size % step == 0 for size in offsets.diff().tolist()), offsets
        return grouped_gemm(desc, a, b, offsets, **given)

    def _k(self, desc: GemmDesc, a: Operand) -> int:
        is_packed = desc.a is not None and desc.a.format == "e2m1"
        return a.data.shape[1] * (2 if is_packed else 1)


class Copies(Sound):
    """Stores both orientations row by row."""

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        made = quantize(desc, x, *groups, **given)
        return operands(
            made,
            lambda one: Operand(*(part if part is None else part.contiguous() for part in one)),
        )


class Padded(Sound):
    """Stores every row with a gap behind it."""

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        made = quantize(desc, x, *groups, **given)
        return operands(made, lambda one: Operand(*map(_with_gaps, one)))


def _with_gaps(part: torch.Tensor | None) -> torch.Tensor | None:
    if part is None:
        return None
    rows, cols = part.shape
    wide = torch.full((rows, cols + 3), 0x7F, dtype=torch.uint8).to(part.dtype)
    wide[:, :cols] = part
    return wide[:, :cols]


_QUANTIZING = (
    *("quantize", BY_AMAX, "norm_quantize", "norm_backward_quantize"),
    *("activation_quantize", "activation_backward_quantize"),
)
_PRODUCTS = ("gemm", "grouped_gemm")
SOUND: dict[type[Sound], tuple[str, ...]] = {
    GivesFusedChunks: EVERY_OP,
    Aligned: _PRODUCTS,
    Copies: _QUANTIZING + _PRODUCTS,
    Padded: _QUANTIZING + _PRODUCTS,
}
"""The operations of each whose calls differ from the reference's."""
