"""The kinds of operands that an Ascend 950 quantizes and multiplies, and which go together."""

from __future__ import annotations

from enum import Enum

from fp8core import formats
from fp8core.backend_api import OperandSpec
from fp8core_backends.ascend.operators.arguments import (
    BLOCK_GROUPS,
    HIF8_TARGETS,
    MX_GROUPS,
    SQUARE_GROUPS,
    Groups,
)


class Kind(Enum):
    """Which elements share a scale; a delayed scale is one for the tensor."""

    TENSOR = (0, 0)
    ROW = (1, 0)
    BLOCK = (1, 128)
    SQUARE = (128, 128)
    MX = (1, 32)


_FP8 = ("e4m3", "e5m2")
_GROUPS: dict[tuple[Kind, Kind], Groups | None] = {
    (Kind.TENSOR, Kind.TENSOR): None,
    (Kind.TENSOR, Kind.ROW): None,
    (Kind.ROW, Kind.TENSOR): None,
    (Kind.ROW, Kind.ROW): None,
    (Kind.BLOCK, Kind.SQUARE): BLOCK_GROUPS,
    (Kind.SQUARE, Kind.SQUARE): SQUARE_GROUPS,
    (Kind.MX, Kind.MX): MX_GROUPS,
}


def kind_of(spec: OperandSpec) -> Kind:
    """Return the kind of a spec that :func:`refusal` does not refuse."""
    return Kind(spec.block)


def groups_of(a: OperandSpec, b: OperandSpec) -> Groups | None:
    """Return how many elements share a scale in a product that is not refused."""
    return _GROUPS[kind_of(a), kind_of(b)]


def refusal(spec: OperandSpec) -> str | None:
    """Return why Ascend has no cast to ``spec``, or None."""
    if spec.format == "e2m1" or spec.scale_format == "e4m3":
        return "it has no NVFP4 (two-level scales); use Float8BlockScaling or MXFP8BlockScaling"
    if spec.scale_format not in ("float32", "e8m0"):
        return f"its scales are float32 or e8m0, not {spec.scale_format}"
    if spec.power_of_two:
        return (
            "its float32 scales are not rounded to powers of two; use "
            "Float8BlockScaling(use_f32_scales=True), or leave use_power_2_scales"
        )
    plain = OperandSpec(
        spec.format,
        spec.block,
        spec.target,
        spec.scale_format,
        delayed=spec.delayed,
        cast_first=spec.cast_first,  # decided before the cast
    )
    if spec != plain:
        return f"{spec} has an option that it does not have"
    if spec.format not in (*_FP8, "hif8"):
        return f"its formats are e4m3, e5m2 and hif8, not {spec.format}"
    if spec.block not in {kind.value for kind in Kind}:
        if spec.block == (32, 32):
            return "its cast to 32 x 32 blocks rounds scales down; leave enable_2d_quantization"
        return f"it has no scale for blocks of {spec.block}"
    if spec.format == "hif8" and spec.block != (0, 0):
        return "HiFloat8 has one scale a tensor; use Float8CurrentScaling or DelayedScaling"
    if (spec.scale_format == "e8m0") != (spec.block == (1, 32)):
        return f"blocks of {spec.block} do not go with scales in {spec.scale_format}"
    return None if spec.delayed else _refused_target(spec)


def _refused_target(spec: OperandSpec) -> str | None:
    """Return why a derived scale cannot lead to the spec's target, or None."""
    is_hif8 = spec.format == "hif8"
    targets = HIF8_TARGETS if is_hif8 else (formats.by_name(spec.format).max,)
    return None if spec.target in targets else f"{spec.format} is scaled to {targets} alone"


def refused_product(a: OperandSpec, b: OperandSpec) -> str | None:
    """Return why Ascend has no product of two operands that it has casts to, or None."""
    if (a.format == "hif8") != (b.format == "hif8"):
        return f"HiFloat8 goes with HiFloat8 alone, not {a.format} with {b.format}"
    kinds = kind_of(a), kind_of(b)
    if kinds in _GROUPS:
        return None
    if kinds == (Kind.BLOCK, Kind.BLOCK):
        return (
            "1 x 128 blocks go with 128 x 128 blocks alone; use "
            "Float8BlockScaling(x_wgrad_block_scaling_dim=2) for the weight gradient"
        )
    return f"it has no product of blocks of {a.block} with blocks of {b.block}"
