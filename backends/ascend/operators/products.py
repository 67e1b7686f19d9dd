"""Products of quantized operands."""

from __future__ import annotations

from typing import Any

import torch

from fp8core_backends.ascend.operators.arguments import (
    BLOCK,
    FLOAT8,
    MX_GROUPS,
    RESULTS,
    Groups,
    check_exponents,
    check_scale,
    require,
)
from fp8core_backends.ascend.operators.library import load


def check_scales(
    operator: str,
    sizes: tuple[int, int, int],
    scales: tuple[torch.Tensor, torch.Tensor],
    groups: Groups | None,
) -> None:
    """Check the scales of ``[m, k]`` times ``[k, n]``."""
    m, n, k = sizes
    first, second = scales
    if groups == MX_GROUPS:
        shapes = ((m, -(-k // 64), 2), (-(-k // 64), n, 2))
        for scale, shape in zip(scales, shapes, strict=True):
            check_exponents(operator, scale, shape)
    elif groups is not None:
        blocks = -(-k // BLOCK)
        check_scale(operator, "the scale of x1", first, (-(-m // groups[0]), blocks))
        check_scale(operator, "the scale of x2", second, (blocks, -(-n // BLOCK)))
    else:
        check_scale(operator, "the scale of x1", first, (1,) if first.numel() == 1 else (m,))
        check_scale(operator, "the scale of x2", second, (1,) if second.numel() == 1 else (n,))


def check_product(
    operator: str, x1: torch.Tensor, x2: torch.Tensor, formats: tuple[str, str]
) -> None:
    """Check the codes of ``[m, k]`` times ``[k, n]``."""
    is_product = x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0]
    require(is_product, operator, f"{list(x1.shape)} times {list(x2.shape)}")
    require(x1.numel() > 0 and x2.numel() > 0, operator, "an operand is empty")
    codes = x1.dtype == x2.dtype == torch.uint8
    require(codes, operator, f"codes are {x1.dtype} and {x2.dtype}, expected uint8")
    mixed = ("hif8" in formats) and formats != ("hif8", "hif8")
    require(not mixed, operator, f"{formats[0]} times {formats[1]}: hif8 goes with hif8 alone")


def check_terms(operator: str, x1: torch.Tensor, x2: torch.Tensor) -> None:
    """Check that the terms of ``[m, k]`` times ``[k, n]`` lie one after the other in memory."""
    is_turned = x1.t().is_contiguous() and x2.is_contiguous()
    strides = f"strides {x1.stride()} and {x2.stride()}, expected x1 transposed, x2 not"
    require(is_turned, operator, strides)


def check_sum(operator: str, out: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Check what a product is added to: float32, contiguous."""
    check_scale(operator, "out", out, shape)
    require(out.is_contiguous(), operator, f"out has the strides {out.stride()}")


def operands_of(
    x1: torch.Tensor, x2: torch.Tensor, formats: tuple[str, str]
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return both operands in the dtypes that torch_npu takes, and HiFloat8's dtype or None."""
    if formats == ("hif8", "hif8"):
        return x1, x2, load().hifloat8
    return x1.view(FLOAT8[formats[0]]), x2.view(FLOAT8[formats[1]]), None


def operands_to_add(
    operator: str,
    x1: torch.Tensor,
    x2: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    formats: tuple[str, str],
    *,
    is_mx: bool,
    is_tensorwise: bool,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Return both operands of an operator that adds a product, and its keywords of their scales;
    ``is_tensorwise``: each has one, or one a group."""
    first, second, hif8 = operands_of(x1, x2, formats)
    is_supported = is_mx or (hif8 is not None and is_tensorwise)
    require(is_supported, operator, "takes MX or tensorwise hif8")
    exponents = load().float8_e8m0fnu if is_mx else None
    keywords = {
        "x1_scale": scales[0],
        "x1_dtype": hif8,
        "x2_dtype": hif8,
        "x1_scale_dtype": exponents,
        "x2_scale_dtype": exponents,
    }
    return first, second, keywords


def quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    formats: tuple[str, str],
    dtype: torch.dtype,
    *,
    groups: Groups | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``x1 [m, k]`` times ``x2 [k, n]``, ``[m, n]`` in ``dtype``.

    The scales of x1 and of x2 are, without ``groups``, float32 ``[1]`` or ``[m]``, and ``[1]`` or
    ``[n]``; with ``groups`` of ``(g, 128, 128)`` float32 ``[ceil(m / g), ceil(k / 128)]`` and
    ``[ceil(k / 128), ceil(n / 128)]``; with ``MX_GROUPS`` exponents ``[m, ceil(k / 64), 2]`` and
    ``[ceil(k / 64), n, 2]``, whose strides follow those of the codes. ``bias [n]`` is float32, and
    does not go with blocks of 128.
    """
    operator = "npu_quant_matmul"
    check_product(operator, x1, x2, formats)
    require(dtype in RESULTS, operator, f"output_dtype {dtype}, expected one of {RESULTS}")
    sizes = (x1.shape[0], x2.shape[1], x1.shape[1])
    check_scales(operator, sizes, scales, groups)
    if bias is not None:
        check_scale(operator, "bias", bias, (x2.shape[1],))
        has_blocks = groups not in (None, MX_GROUPS)
        require(not has_blocks, operator, "a bias does not go with blocks of 128")
    npu = load()
    first, second, hif8 = operands_of(x1, x2, formats)
    exponents = npu.float8_e8m0fnu if groups == MX_GROUPS else None
    product: torch.Tensor = npu.npu_quant_matmul(
        first,
        second,
        scales[1],
        offset=None,
        pertoken_scale=scales[0],
        bias=bias,
        output_dtype=dtype,
        x1_dtype=hif8,
        x2_dtype=hif8,
        pertoken_scale_dtype=exponents,
        scale_dtype=exponents,
        group_sizes=None if groups is None else list(groups),
        y_scale=None,
    )
    return product


def add_quant_matmul_(
    out: torch.Tensor,
    x1: torch.Tensor,
    x2: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    formats: tuple[str, str],
    *,
    groups: Groups | None = None,
) -> None:
    """Add ``x1 [m, k]`` times ``x2 [k, n]`` to the float32 ``out [m, n]``, in float32.

    For MX operands and for HiFloat8 with one scale a tensor; x1 is a transposed view, x2 is not.
    """
    operator = "npu_add_quant_matmul_"
    check_product(operator, x1, x2, formats)
    check_terms(operator, x1, x2)
    check_sum(operator, out, (x1.shape[0], x2.shape[1]))
    check_scales(operator, (x1.shape[0], x2.shape[1], x1.shape[1]), scales, groups)
    is_mx = groups == MX_GROUPS
    is_tensorwise = scales[0].numel() == scales[1].numel() == 1
    first, second, keywords = operands_to_add(
        operator, x1, x2, scales, formats, is_mx=is_mx, is_tensorwise=is_tensorwise
    )
    sizes = list(MX_GROUPS) if is_mx else [0, 0, 0]
    load().npu_add_quant_matmul_(out, first, second, scales[1], group_sizes=sizes, **keywords)
