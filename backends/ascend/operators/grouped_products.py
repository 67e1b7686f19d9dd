"""Products of quantized operands whose rows, or whose terms, are in groups."""

from __future__ import annotations

import torch

from fp8core_backends.ascend.operators.arguments import (
    BLOCK_GROUPS,
    MX_GROUPS,
    RESULTS,
    Groups,
    check_exponents,
    check_scale,
    require,
)
from fp8core_backends.ascend.operators.library import load
from fp8core_backends.ascend.operators.products import (
    check_product,
    check_scales,
    check_sum,
    check_terms,
    operands_of,
    operands_to_add,
)


def _check_grouped(
    operator: str,
    x1: torch.Tensor,
    x2: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    formats: tuple[str, str],
    *,
    groups: Groups | None,
) -> None:
    """Check ``[m, k]`` times ``[k, n]`` whose terms are in groups that end at ``ends [g]``."""
    check_product(operator, x1, x2, formats)
    check_terms(operator, x1, x2)
    _check_ends(operator, ends)
    (m, k), n, count = x1.shape, x2.shape[1], ends.numel()
    for name, scale, size in zip(("x1", "x2"), scales, (m, n), strict=True):
        if groups == MX_GROUPS:
            check_exponents(operator, scale, (k // 64 + count, size, 2))
        else:
            require(groups is None, operator, f"groups of {groups} along the terms")
            shape = (count,) if scale.dim() == 1 else (count, size)
            check_scale(operator, f"the scale of {name}", scale, shape)


def _check_ends(operator: str, ends: torch.Tensor) -> None:
    is_right = ends.dtype == torch.int64 and ends.dim() == 1 and 0 < ends.numel() <= 1024
    message = f"ends of groups {ends.dtype} {list(ends.shape)}, expected int64 [1] to [1024]"
    require(is_right, operator, message)


def _check_rows_of_groups(
    operator: str,
    x1: torch.Tensor,
    x2: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    formats: tuple[str, str],
    *,
    groups: Groups | None,
) -> None:
    """Check ``[m, k]``, whose rows are in groups, times ``[g, k, n]``."""
    require(x2.dim() == 3, operator, f"{list(x1.shape)} times {list(x2.shape)}")
    require(x1.is_contiguous(), operator, f"strides {x1.stride()} of x1, expected contiguous")
    check_product(operator, x1, x2[0], formats)
    _check_ends(operator, ends)
    require(len(x2) == ends.numel(), operator, f"{len(x2)} weights, {ends.numel()} groups")
    (m, _), n, count = x1.shape, x2.shape[2], ends.numel()
    first, second = scales
    if groups is None:
        check_scale(operator, "the scale of x1", first, (m,) if first.numel() == m else (count,))
        shape = (count,) if second.dim() == 1 else (count, n)
        check_scale(operator, "the scale of x2", second, shape)
        require(first.numel() == m or count != m, operator, "as many groups as rows")
        return
    require(groups in (MX_GROUPS, BLOCK_GROUPS), operator, f"groups of {groups}")
    require(len(second) == count, operator, f"scales of {len(second)} weights, {count} groups")
    check_scales(operator, (m, n, x1.shape[1]), (first, second[0]), groups)


def grouped_quant_matmul(
    x1: torch.Tensor,
    x2: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    formats: tuple[str, str],
    dtype: torch.dtype,
    *,
    groups: Groups | None = None,
    has_terms: bool = False,
) -> torch.Tensor:
    """Return the products of groups that end at ``ends``, int64 ``[g]``, in ``dtype``.

    Groups of rows: ``x1 [m, k]`` times ``x2 [g, k, n]`` is ``[m, n]``. With ``has_terms`` groups of
    terms: ``x1 [m, k]``, a transposed view, times ``x2 [k, n]`` is ``[g, m, n]``; that of a group
    without terms may be undefined. Scales are those of :func:`quant_matmul`, with a first dimension
    g for x2; along terms ``[g]``, ``[g, rows]`` or exponents ``[k / 64 + g, rows, 2]``.
    """
    operator = "npu_grouped_matmul"
    check = _check_grouped if has_terms else _check_rows_of_groups
    check(operator, x1, x2, scales, ends, formats, groups=groups)
    require(dtype in RESULTS, operator, f"output_dtype {dtype}, expected one of {RESULTS}")
    npu = load()
    first, second, hif8 = operands_of(x1, x2, formats)
    exponents = npu.float8_e8m0fnu if groups == MX_GROUPS else None
    (product,) = npu.npu_grouped_matmul(
        [first],
        [second],
        bias=None,
        scale=[scales[1]],
        offset=None,
        antiquant_scale=None,
        antiquant_offset=None,
        per_token_scale=[scales[0]],
        group_list=ends,
        activation_input=None,
        activation_quant_scale=None,
        activation_quant_offset=None,
        split_item=3,  # one tensor
        group_type=2 if has_terms else 0,
        group_list_type=0,  # where groups end
        act_type=0,
        tuning_config=None,
        output_dtype=dtype,
        x_dtype=hif8,
        weight_dtype=hif8,
        scale_dtype=exponents,
        per_token_scale_dtype=exponents,
    )
    return product  # type: ignore[no-any-return]  # of a list of tensors


def add_quant_gmm_(
    out: torch.Tensor,
    x1: torch.Tensor,
    x2: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor],
    ends: torch.Tensor,
    formats: tuple[str, str],
    *,
    groups: Groups | None = None,
) -> None:
    """Add the products of :func:`grouped_quant_matmul` along terms to the float32 ``out [g, m,
    n]``: of MX operands, and of HiFloat8 with one scale a group."""
    operator = "npu_add_quant_gmm_"
    _check_grouped(operator, x1, x2, scales, ends, formats, groups=groups)
    check_sum(operator, out, (ends.numel(), x1.shape[0], x2.shape[1]))
    is_tensorwise = scales[0].dim() == scales[1].dim() == 1
    first, second, keywords = operands_to_add(
        operator, x1, x2, scales, formats, is_mx=groups == MX_GROUPS, is_tensorwise=is_tensorwise
    )
    load().npu_add_quant_gmm_(
        out, first, second, scales[1], ends, group_list_type=0, group_sizes=None, **keywords
    )
