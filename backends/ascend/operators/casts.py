"""Casts to codes and scales, and back."""

from __future__ import annotations

from typing import Any, Literal

import torch

from fp8core_backends.ascend.operators.arguments import (
    BLOCK,
    FLOAT8,
    HIF8_TARGETS,
    SCALABLE,
    check_input,
    check_scale,
    codes_of,
    dtype_of,
    require,
)
from fp8core_backends.ascend.operators.library import load

QuantMode = Literal["pertensor", "pertoken", "perchannel"]
BlockRows = Literal[1, 128]

_MX_ROUND_UP = 1  # scale_alg: the exponent of amax / max is rounded up, so that nothing saturates


def dynamic_quant(
    x: torch.Tensor, format: str, target: float, mode: QuantMode
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``x [rows, cols]`` and its scales ``amax / target``, float32: one
    (``[1]``), one a row (``[rows]``) or one a column (``[cols]``).

    ``target`` is the largest value of E4M3 or E5M2, or one of HiFloat8's 15, 56, 224 and 32768.
    """
    operator = "npu_dynamic_quant"
    check_input(operator, x)
    require(mode in ("pertensor", "pertoken", "perchannel"), operator, f"quant_mode {mode!r}")
    dtype = dtype_of(operator, format, allowed=("e4m3", "e5m2", "hif8"))
    codes, scale = load().npu_dynamic_quant(
        x,
        smooth_scales=None,
        group_index=None,
        dst_type=dtype,
        quant_mode=mode,
        dst_type_max=_target(operator, format, target),
    )
    return codes_of(codes), scale


def _target(operator: str, format: str, target: float) -> float:
    """Return ``dst_type_max``: 0 where the format's largest value is meant."""
    if format == "hif8":
        expected = f"target {target} of hif8, expected one of {HIF8_TARGETS}"
        require(target in HIF8_TARGETS, operator, expected)
        return target
    largest = torch.finfo(FLOAT8[format]).max
    require(target == largest, operator, f"target {target} of {format}, expected {largest}")
    return 0.0


def quant_max(
    x: torch.Tensor, scale: torch.Tensor, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``x * scale``, and the amax of ``x``, ``[1]`` in its dtype.

    ``scale`` is float32 ``[1]``.
    """
    operator = "npu_quant_max"
    check_input(operator, x, SCALABLE)
    check_scale(operator, "scale", scale, (1,))
    codes, amax = load().npu_quant_max(
        x,
        scale,
        round_mode="round" if format == "hif8" else "rint",
        dst_dtype=dtype_of(operator, format, allowed=("e4m3", "e5m2", "hif8")),
        group_list=None,
    )
    return codes_of(codes), amax


def block_quant(x: torch.Tensor, format: str, rows: BlockRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``x [m, k]`` and its scales ``amax / max``, float32 ``[ceil(m / rows),
    ceil(k / 128)]``, of blocks of ``rows`` by 128."""
    operator = "npu_dynamic_block_quant"
    check_input(operator, x)
    require(rows in (1, BLOCK), operator, f"blocks of {rows} rows, expected 1 or {BLOCK}")
    codes, scale = load().npu_dynamic_block_quant(
        x,
        min_scale=0.0,
        round_mode="rint",
        dst_type=dtype_of(operator, format, allowed=("e4m3", "e5m2")),
        row_block_size=rows,
        col_block_size=BLOCK,
        dst_type_max=0.0,
    )
    return codes_of(codes), scale


def mx_quant(x: torch.Tensor, format: str, axis: Literal[-1, -2]) -> tuple[Any, Any]:
    """Return the codes of ``x [m, k]`` in blocks of 32 along ``axis``, and its exponents.

    Exponents are uint8 in pairs: ``[m, ceil(k / 64), 2]`` along -1, ``[ceil(m / 64), k, 2]`` along
    -2; where the number of blocks is odd, the last pair ends with 0.
    """
    operator = "npu_dynamic_mx_quant"
    check_input(operator, x)
    codes, scale = load().npu_dynamic_mx_quant(
        x,
        axis=axis,
        round_mode="rint",
        dst_type=dtype_of(operator, format, allowed=("e4m3", "e5m2")),
        block_size=32,
        scale_alg=_MX_ROUND_UP,
        dst_type_max=0.0,
        max_low_bound=0.0,
    )
    return codes_of(codes), scale


def mx_quant_both(x: torch.Tensor, format: str) -> tuple[torch.Tensor, ...]:
    """Return codes and exponents of :func:`mx_quant` along -1, then along -2, in one reading."""
    operator = "npu_dynamic_mx_quant_with_dual_axis"
    check_input(operator, x)
    row, row_scale, column, column_scale = load().npu_dynamic_mx_quant_with_dual_axis(
        x,
        round_mode="rint",
        dst_type=dtype_of(operator, format, allowed=("e4m3", "e5m2")),
        scale_alg=_MX_ROUND_UP,
        dst_type_max=0.0,
    )
    return codes_of(row), row_scale, codes_of(column), column_scale


def decode(codes: torch.Tensor, format: str) -> torch.Tensor:
    """Return the values of uint8 codes in float32."""
    if format != "hif8":
        return codes.view(FLOAT8[format]).to(torch.float32)
    npu = load()
    values: torch.Tensor = npu.npu_dtype_cast(
        codes.contiguous(), torch.float32, input_dtype=npu.hifloat8
    )
    return values
