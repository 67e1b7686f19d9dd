"""torch_npu's operators, as this backend calls them: the one module that touches torch_npu.

Every argument is given, as torch_npu's defaults are often not the ones for FP8: without
``output_dtype`` a product is int8, without ``dst_type`` an MX cast is FP4. What the documents of
Ascend 950's operators demand and torch_npu does not check is checked here, before the call.

Codes are uint8 outside of this module. torch_npu holds E4M3 and E5M2 in torch's dtypes and HiFloat8
in bytes, which its dtype argument tells apart.

Source: torch_npu 2.13.0's schemas; the ``aclnn`` documents of CANN's operator repositories.
"""

from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

from fp8core.errors import OperandError, UnsupportedError

__all__ = [
    "BAND",
    "BLOCK_GROUPS",
    "CAUSAL_BOTTOM_RIGHT",
    "CAUSAL_TOP_LEFT",
    "FULL_MASK",
    "HIF8_TARGETS",
    "MX_GROUPS",
    "NO_MASK",
    "QUANTIZABLE",
    "RESULTS",
    "SCALABLE",
    "SQUARE_GROUPS",
    "AttentionMask",
    "BlockRows",
    "Groups",
    "QuantMode",
    "add_quant_gmm_",
    "add_quant_matmul_",
    "block_quant",
    "decode",
    "device_name",
    "dynamic_quant",
    "fast_gelu",
    "fast_gelu_backward",
    "fusion_attention",
    "fusion_attention_grad",
    "geglu",
    "geglu_backward",
    "gelu",
    "gelu_backward",
    "grouped_quant_matmul",
    "layer_norm",
    "layer_norm_backward",
    "load",
    "mx_quant",
    "mx_quant_both",
    "quant_matmul",
    "quant_max",
    "relu",
    "relu_backward",
    "rms_norm",
    "rms_norm_backward",
    "rotary_mul",
    "rotary_mul_backward",
    "silu",
    "silu_backward",
    "swiglu",
    "swiglu_backward",
]

QuantMode = Literal["pertensor", "pertoken", "perchannel"]
BlockRows = Literal[1, 128]

QUANTIZABLE = (torch.bfloat16, torch.float16)
"""The dtypes that the casts take that derive their scales."""
SCALABLE = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that the cast by a given scale takes."""
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that a product of quantized operands may have."""

_FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
HIF8_TARGETS: tuple[float, ...] = (15.0, 56.0, 224.0, 32768.0)
"""What an amax may be scaled to in HiFloat8."""
_BLOCK = 128
Groups = tuple[int, int, int]
MX_GROUPS: Groups = (1, 1, 32)
"""How many rows of x1, columns of x2 and terms share a scale, in MX."""
BLOCK_GROUPS: Groups = (1, _BLOCK, _BLOCK)
"""1 x 128 blocks times 128 x 128 blocks."""
SQUARE_GROUPS: Groups = (_BLOCK, _BLOCK, _BLOCK)
"""128 x 128 blocks on both sides."""
_MX_ROUND_UP = 1  # scale_alg: the exponent of amax / max is rounded up, so that nothing saturates


def load() -> Any:
    """Return the module torch_npu.

    Raises:
        UnsupportedError: it cannot be imported, mostly because CANN's libraries are not in reach.
    """
    try:
        return importlib.import_module("torch_npu")
    except Exception as error:  # torch_npu raises Exception itself where CANN is missing
        raise UnsupportedError(
            f"torch_npu cannot be imported: {error}. Install CANN, and run `source set_env.sh` of "
            f"its folder before Python starts."
        ) from error


def device_name(device: torch.device) -> str:
    """Return the name of the SoC, such as ``Ascend950PR_9599``; without an index, the current."""
    index = load().npu.current_device() if device.index is None else device.index
    return _device_name(index)


@functools.cache
def _device_name(index: int) -> str:
    name: str = load().npu.get_device_name(index)
    return name


def _require(holds: bool, operator: str, text: str) -> None:
    if not holds:
        raise OperandError(f"torch_npu.{operator}: {text}")


def _check_input(
    operator: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = QUANTIZABLE
) -> None:
    _require(x.dim() == 2, operator, f"x {list(x.shape)} has {x.dim()} dimensions, expected 2")
    _require(x.dtype in dtypes, operator, f"x is {x.dtype}, expected one of {dtypes}")
    _require(x.numel() > 0, operator, f"x {list(x.shape)} is empty")
    _require(x.is_contiguous(), operator, f"x has the strides {x.stride()}, expected contiguous")


def _dtype(operator: str, format: str, *, allowed: tuple[str, ...]) -> Any:
    _require(format in allowed, operator, f"format {format!r}, expected one of {allowed}")
    return load().hifloat8 if format == "hif8" else _FLOAT8[format]


def _codes(codes: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.uint8)


# --- casts ---


def dynamic_quant(
    x: torch.Tensor, format: str, target: float, mode: QuantMode
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``x [rows, cols]`` and its scales ``amax / target``, float32: one
    (``[1]``), one a row (``[rows]``) or one a column (``[cols]``).

    ``target`` is the largest value of E4M3 or E5M2, or one of HiFloat8's 15, 56, 224 and 32768.
    """
    operator = "npu_dynamic_quant"
    _check_input(operator, x)
    _require(mode in ("pertensor", "pertoken", "perchannel"), operator, f"quant_mode {mode!r}")
    dtype = _dtype(operator, format, allowed=("e4m3", "e5m2", "hif8"))
    codes, scale = load().npu_dynamic_quant(
        x,
        smooth_scales=None,
        group_index=None,
        dst_type=dtype,
        quant_mode=mode,
        dst_type_max=_target(operator, format, target),
    )
    return _codes(codes), scale


def _target(operator: str, format: str, target: float) -> float:
    """Return ``dst_type_max``: 0 where the format's largest value is meant."""
    if format == "hif8":
        expected = f"target {target} of hif8, expected one of {HIF8_TARGETS}"
        _require(target in HIF8_TARGETS, operator, expected)
        return target
    largest = torch.finfo(_FLOAT8[format]).max
    _require(target == largest, operator, f"target {target} of {format}, expected {largest}")
    return 0.0


def quant_max(
    x: torch.Tensor, scale: torch.Tensor, format: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``x * scale``, and the amax of ``x``, ``[1]`` in its dtype.

    ``scale`` is float32 ``[1]``.
    """
    operator = "npu_quant_max"
    _check_input(operator, x, SCALABLE)
    _check_scale(operator, "scale", scale, (1,))
    codes, amax = load().npu_quant_max(
        x,
        scale,
        round_mode="round" if format == "hif8" else "rint",
        dst_dtype=_dtype(operator, format, allowed=("e4m3", "e5m2", "hif8")),
        group_list=None,
    )
    return _codes(codes), amax


def block_quant(x: torch.Tensor, format: str, rows: BlockRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of ``x [m, k]`` and its scales ``amax / max``, float32 ``[ceil(m / rows),
    ceil(k / 128)]``, of blocks of ``rows`` by 128."""
    operator = "npu_dynamic_block_quant"
    _check_input(operator, x)
    _require(rows in (1, _BLOCK), operator, f"blocks of {rows} rows, expected 1 or {_BLOCK}")
    codes, scale = load().npu_dynamic_block_quant(
        x,
        min_scale=0.0,
        round_mode="rint",
        dst_type=_dtype(operator, format, allowed=("e4m3", "e5m2")),
        row_block_size=rows,
        col_block_size=_BLOCK,
        dst_type_max=0.0,
    )
    return _codes(codes), scale


def mx_quant(x: torch.Tensor, format: str, axis: Literal[-1, -2]) -> tuple[Any, Any]:
    """Return the codes of ``x [m, k]`` in blocks of 32 along ``axis``, and its exponents.

    Exponents are uint8 in pairs: ``[m, ceil(k / 64), 2]`` along -1, ``[ceil(m / 64), k, 2]`` along
    -2; where the number of blocks is odd, the last pair ends with 0.
    """
    operator = "npu_dynamic_mx_quant"
    _check_input(operator, x)
    codes, scale = load().npu_dynamic_mx_quant(
        x,
        axis=axis,
        round_mode="rint",
        dst_type=_dtype(operator, format, allowed=("e4m3", "e5m2")),
        block_size=32,
        scale_alg=_MX_ROUND_UP,
        dst_type_max=0.0,
        max_low_bound=0.0,
    )
    return _codes(codes), scale


def mx_quant_both(x: torch.Tensor, format: str) -> tuple[torch.Tensor, ...]:
    """Return codes and exponents of :func:`mx_quant` along -1, then along -2, in one reading."""
    operator = "npu_dynamic_mx_quant_with_dual_axis"
    _check_input(operator, x)
    row, row_scale, column, column_scale = load().npu_dynamic_mx_quant_with_dual_axis(
        x,
        round_mode="rint",
        dst_type=_dtype(operator, format, allowed=("e4m3", "e5m2")),
        scale_alg=_MX_ROUND_UP,
        dst_type_max=0.0,
    )
    return _codes(row), row_scale, _codes(column), column_scale


def decode(codes: torch.Tensor, format: str) -> torch.Tensor:
    """Return the values of uint8 codes in float32."""
    if format != "hif8":
        return codes.view(_FLOAT8[format]).to(torch.float32)
    npu = load()
    values: torch.Tensor = npu.npu_dtype_cast(
        codes.contiguous(), torch.float32, input_dtype=npu.hifloat8
    )
    return values


# --- products ---


def _check_scale(operator: str, name: str, scale: torch.Tensor, shape: tuple[int, ...]) -> None:
    is_right = scale.dtype == torch.float32 and tuple(scale.shape) == shape
    found = f"{name} is {scale.dtype} {list(scale.shape)}, expected float32 {list(shape)}"
    _require(is_right, operator, found)


def _check_exponents(operator: str, scale: torch.Tensor, shape: tuple[int, ...]) -> None:
    is_right = scale.dtype == torch.uint8 and tuple(scale.shape) == shape
    found = f"exponents {scale.dtype} {list(scale.shape)}, expected uint8 {list(shape)}"
    _require(is_right, operator, found)


def _check_scales(
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
            _check_exponents(operator, scale, shape)
    elif groups is not None:
        blocks = -(-k // _BLOCK)
        _check_scale(operator, "the scale of x1", first, (-(-m // groups[0]), blocks))
        _check_scale(operator, "the scale of x2", second, (blocks, -(-n // _BLOCK)))
    else:
        _check_scale(operator, "the scale of x1", first, (1,) if first.numel() == 1 else (m,))
        _check_scale(operator, "the scale of x2", second, (1,) if second.numel() == 1 else (n,))


def _check_product(
    operator: str, x1: torch.Tensor, x2: torch.Tensor, formats: tuple[str, str]
) -> None:
    is_product = x1.dim() == x2.dim() == 2 and x1.shape[1] == x2.shape[0]
    _require(is_product, operator, f"{list(x1.shape)} times {list(x2.shape)}")
    _require(x1.numel() > 0 and x2.numel() > 0, operator, "an operand is empty")
    codes = x1.dtype == x2.dtype == torch.uint8
    _require(codes, operator, f"codes are {x1.dtype} and {x2.dtype}, expected uint8")
    mixed = ("hif8" in formats) and formats != ("hif8", "hif8")
    _require(not mixed, operator, f"{formats[0]} times {formats[1]}: hif8 goes with hif8 alone")


def _operands(
    x1: torch.Tensor, x2: torch.Tensor, formats: tuple[str, str]
) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """Return both operands in the dtypes that torch_npu takes, and HiFloat8's dtype or None."""
    if formats == ("hif8", "hif8"):
        return x1, x2, load().hifloat8
    return x1.view(_FLOAT8[formats[0]]), x2.view(_FLOAT8[formats[1]]), None


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
    _check_product(operator, x1, x2, formats)
    _require(dtype in RESULTS, operator, f"output_dtype {dtype}, expected one of {RESULTS}")
    sizes = (x1.shape[0], x2.shape[1], x1.shape[1])
    _check_scales(operator, sizes, scales, groups)
    if bias is not None:
        _check_scale(operator, "bias", bias, (x2.shape[1],))
        has_blocks = groups not in (None, MX_GROUPS)
        _require(not has_blocks, operator, "a bias does not go with blocks of 128")
    npu = load()
    first, second, hif8 = _operands(x1, x2, formats)
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
    _check_product(operator, x1, x2, formats)
    is_turned = x1.t().is_contiguous() and x2.is_contiguous()
    strides = f"strides {x1.stride()} and {x2.stride()}, expected x1 transposed, x2 not"
    _require(is_turned, operator, strides)
    _check_scale(operator, "out", out, (x1.shape[0], x2.shape[1]))
    _require(out.is_contiguous(), operator, f"out has the strides {out.stride()}")
    sizes = (x1.shape[0], x2.shape[1], x1.shape[1])
    _check_scales(operator, sizes, scales, groups)
    npu = load()
    first, second, hif8 = _operands(x1, x2, formats)
    is_mx = groups == MX_GROUPS
    is_one = scales[0].numel() == scales[1].numel() == 1
    _require(is_mx or (hif8 is not None and is_one), operator, "takes MX or tensorwise hif8")
    exponents = npu.float8_e8m0fnu if is_mx else None
    npu.npu_add_quant_matmul_(
        out,
        first,
        second,
        scales[1],
        x1_scale=scales[0],
        group_sizes=list(MX_GROUPS) if is_mx else [0, 0, 0],
        x1_dtype=hif8,
        x2_dtype=hif8,
        x1_scale_dtype=exponents,
        x2_scale_dtype=exponents,
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
    _check_product(operator, x1, x2, formats)
    is_turned = x1.t().is_contiguous() and x2.is_contiguous()
    strides = f"strides {x1.stride()} and {x2.stride()}, expected x1 transposed, x2 not"
    _require(is_turned, operator, strides)
    _check_ends(operator, ends)
    (m, k), n, count = x1.shape, x2.shape[1], ends.numel()
    for name, scale, size in zip(("x1", "x2"), scales, (m, n), strict=True):
        if groups == MX_GROUPS:
            _check_exponents(operator, scale, (k // 64 + count, size, 2))
        else:
            _require(groups is None, operator, f"groups of {groups} along the terms")
            shape = (count,) if scale.dim() == 1 else (count, size)
            _check_scale(operator, f"the scale of {name}", scale, shape)


def _check_ends(operator: str, ends: torch.Tensor) -> None:
    is_right = ends.dtype == torch.int64 and ends.dim() == 1 and 0 < ends.numel() <= 1024
    found = f"ends of groups {ends.dtype} {list(ends.shape)}, expected int64 [1] to [1024]"
    _require(is_right, operator, found)


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
    _require(x2.dim() == 3, operator, f"{list(x1.shape)} times {list(x2.shape)}")
    _require(x1.is_contiguous(), operator, f"strides {x1.stride()} of x1, expected contiguous")
    _check_product(operator, x1, x2[0], formats)
    _check_ends(operator, ends)
    _require(len(x2) == ends.numel(), operator, f"{len(x2)} weights, {ends.numel()} groups")
    (m, _), n, count = x1.shape, x2.shape[2], ends.numel()
    first, second = scales
    if groups is None:
        _check_scale(operator, "the scale of x1", first, (m,) if first.numel() == m else (count,))
        shape = (count,) if second.dim() == 1 else (count, n)
        _check_scale(operator, "the scale of x2", second, shape)
        _require(first.numel() == m or count != m, operator, "as many groups as rows")
        return
    _require(groups in (MX_GROUPS, BLOCK_GROUPS), operator, f"groups of {groups}")
    _require(len(second) == count, operator, f"scales of {len(second)} weights, {count} groups")
    _check_scales(operator, (m, n, x1.shape[1]), (first, second[0]), groups)


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
    _require(dtype in RESULTS, operator, f"output_dtype {dtype}, expected one of {RESULTS}")
    npu = load()
    first, second, hif8 = _operands(x1, x2, formats)
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
    _check_scale(operator, "out", out, (ends.numel(), x1.shape[0], x2.shape[1]))
    _require(out.is_contiguous(), operator, f"out has the strides {out.stride()}")
    npu = load()
    first, second, hif8 = _operands(x1, x2, formats)
    is_mx = groups == MX_GROUPS
    is_one = scales[0].dim() == scales[1].dim() == 1
    _require(is_mx or (hif8 is not None and is_one), operator, "takes MX or tensorwise hif8")
    exponents = npu.float8_e8m0fnu if is_mx else None
    npu.npu_add_quant_gmm_(
        out,
        first,
        second,
        scales[1],
        ends,
        x1_scale=scales[0],
        group_list_type=0,
        group_sizes=None,
        x1_dtype=hif8,
        x2_dtype=hif8,
        x1_scale_dtype=exponents,
        x2_scale_dtype=exponents,
    )


# --- norms and activations ---


def _check_rows(operator: str, *tensors: torch.Tensor) -> None:
    for x in tensors:
        _require(x.numel() > 0, operator, f"a tensor {list(x.shape)} is empty")
        _require(x.is_contiguous(), operator, f"strides {x.stride()}, expected contiguous")
        _require(x.dtype == tensors[0].dtype, operator, f"{x.dtype} next to {tensors[0].dtype}")


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x * rstd * weight`` and float32 ``rstd [rows, 1]``; x and weight have one dtype."""
    _check_rows("npu_rms_norm", x, weight)
    y, rstd = load().npu_rms_norm(x, weight, epsilon=eps)
    return y, rstd


def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of ``x``, and that of the weight in float32."""
    _check_rows("npu_rms_norm_backward", x, grad, weight)
    grad_x, grad_weight = load().npu_rms_norm_backward(grad, x, weight, rstd)
    return grad_x, grad_weight


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ``(x - mean) * rstd * weight + bias``, and float32 mean and rstd ``[rows, 1]``.

    ``weight`` and ``bias`` are float32 or have the dtype of ``x [rows, n]``, both the same.
    """
    _check_layer_norm("native_layer_norm", x, weight, bias)
    y, mean, rstd = torch.ops.aten.native_layer_norm(x, weight.shape, weight, bias, eps)
    return y, mean, rstd


def layer_norm_backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x``, of the weight and of a bias, those two in the weight's dtype.

    ``mean`` and ``rstd`` are float32 ``[rows, 1]``.
    """
    operator = "native_layer_norm_backward"
    _check_layer_norm(operator, x, weight, None)
    _check_rows(operator, x, grad)
    for statistic in (mean, rstd):
        _check_scale(operator, "a statistic", statistic, (x.shape[0], 1))
    grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
        grad, x, weight.shape, mean, rstd, weight, weight, [True, True, True]
    )
    return grad_x, grad_weight, grad_bias


def _check_layer_norm(
    operator: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> None:
    _check_rows(operator, x)
    parameters = [weight] if bias is None else [weight, bias]
    _check_rows(operator, *parameters)
    is_known = weight.dtype in (x.dtype, torch.float32)
    _require(is_known, operator, f"parameters in {weight.dtype} next to {x.dtype}")
    sizes = [list(one.shape) for one in parameters]
    is_row = all(size == [x.shape[-1]] for size in sizes)
    _require(is_row, operator, f"parameters {sizes} for {list(x.shape)}")


def silu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x * sigmoid(x)``."""
    _check_rows("silu", x)
    y: torch.Tensor = torch.ops.aten.silu(x)
    return y


def silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``."""
    _check_rows("silu_backward", x, grad)
    grad_x: torch.Tensor = torch.ops.aten.silu_backward(grad, x)
    return grad_x


def relu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` where it is positive, else 0."""
    _check_rows("relu", x)
    y: torch.Tensor = torch.ops.aten.relu(x)
    return y


def relu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``."""
    _check_rows("threshold_backward", x, grad)
    grad_x: torch.Tensor = torch.ops.aten.threshold_backward(grad, x, 0)
    return grad_x


def fast_gelu(x: torch.Tensor) -> torch.Tensor:
    """Return ``x * sigmoid(1.702 * x)``."""
    _check_rows("npu_fast_gelu", x)
    y: torch.Tensor = load().npu_fast_gelu(x)
    return y


def fast_gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``."""
    _check_rows("npu_fast_gelu_backward", x, grad)
    grad_x: torch.Tensor = load().npu_fast_gelu_backward(grad, x)
    return grad_x


def geglu(x: torch.Tensor) -> torch.Tensor:
    """Return ``gelu(a) * b`` of the halves of ``x [rows, 2 n]``, with GELU in its tanh form."""
    _check_rows("npu_geglu", x)
    y: torch.Tensor = load().npu_geglu(x, dim=-1, approximate=1, activate_left=True)[0]
    return y


def geglu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``, for which ``gelu(a)`` is computed again."""
    _check_rows("npu_geglu_grad", x, grad)
    activated = gelu(x[..., : x.shape[-1] // 2].contiguous())
    grad_x: torch.Tensor = load().npu_geglu_grad(
        grad, x, activated, dim=-1, approximate=1, activate_left=True
    )
    return grad_x


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """Return ``silu(a) * b`` of the halves of ``x [rows, 2 n]``."""
    _check_rows("npu_swiglu", x)
    y: torch.Tensor = load().npu_swiglu(x, dim=-1)
    return y


def swiglu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``."""
    _check_rows("npu_swiglu_backward", x, grad)
    grad_x: torch.Tensor = load().npu_swiglu_backward(grad, x, dim=-1)
    return grad_x


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh form."""
    _check_rows("npu_gelu", x)
    y: torch.Tensor = load().npu_gelu(x, approximate="tanh")
    return y


def gelu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the gradient of ``x``."""
    _check_rows("npu_gelu_backward", x, grad)
    grad_x: torch.Tensor = load().npu_gelu_backward(grad, x, approximate="tanh")
    return grad_x


# --- attention ---

NO_MASK, FULL_MASK, CAUSAL_TOP_LEFT, CAUSAL_BOTTOM_RIGHT, BAND = 0, 1, 2, 3, 4
"""What ``sparse_mode`` says of a mask: none; bool ``[b, heads, s_q, s_kv]``, True excludes; for the
others bool ``[2048, 2048]``, True above the diagonal. A band counts from the lower right corner."""


class AttentionMask(Protocol):
    """Which keys a query looks at: the mode, its mask, how many keys ``before`` and ``after`` the
    query's own are in a band, and in the layout TND where sequences end."""

    @property
    def mode(self) -> int:
        """One of the modes above."""

    @property
    def mask(self) -> torch.Tensor | None:
        """The mask of the mode."""

    @property
    def before(self) -> int:
        """Keys before the query's own."""

    @property
    def after(self) -> int:
        """Keys after the query's own."""

    @property
    def query_ends(self) -> Sequence[int] | None:
        """Where the queries of each sequence end, for TND."""

    @property
    def key_ends(self) -> Sequence[int] | None:
        """Where the keys of each sequence end, for TND."""


def _check_attention(
    operator: str, tensors: tuple[torch.Tensor, ...], layout: str, mask: AttentionMask
) -> None:
    _check_rows(operator, *tensors)
    dims = {"SBH": 3, "BSND": 4, "TND": 3}
    _require(layout in dims, operator, f"layout {layout!r}, expected one of {[*dims]}")
    for x in tensors:
        shape = f"{list(x.shape)} in {layout}"
        _require(x.dim() == dims[layout], operator, shape)
        _require(x.dtype in QUANTIZABLE, operator, f"{x.dtype}, expected bfloat16 or float16")
    _check_sequences(operator, tensors, layout, mask)
    if mask.mode == NO_MASK:
        _require(mask.mask is None, operator, "a mask, but sparse_mode 0")
        return
    is_bool = mask.mask is not None and mask.mask.dtype == torch.bool
    _require(is_bool, operator, "sparse_mode without a bool mask")
    if mask.mode != FULL_MASK and mask.mask is not None:
        compressed = f"a mask {list(mask.mask.shape)}, expected [2048, 2048]"
        _require(tuple(mask.mask.shape) == (2048, 2048), operator, compressed)


def _check_sequences(
    operator: str, tensors: tuple[torch.Tensor, ...], layout: str, mask: AttentionMask
) -> None:
    ends = (mask.query_ends, mask.key_ends)
    if layout != "TND":
        _require(ends == (None, None), operator, f"ends of sequences in {layout}")
        return
    lengths = []
    for x, of_all in zip(tensors, ends, strict=False):  # queries, then keys
        _require(of_all is not None, operator, "no ends of sequences in TND")
        assert of_all is not None
        lengths.append([end - start for start, end in itertools.pairwise((0, *of_all))])
        is_whole = min(lengths[-1], default=0) > 0 and of_all[-1] == len(x)
        _require(is_whole, operator, f"sequences end at {[*of_all]} of {len(x)} tokens")
    _require(len(lengths[0]) == len(lengths[1]), operator, "other sequences of keys than queries")
    if mask.mode == CAUSAL_BOTTOM_RIGHT:
        is_seen = all(q <= kv for q, kv in zip(*lengths, strict=True))
        _require(is_seen, operator, "queries before the first key of their sequence")
    _require(mask.mode != FULL_MASK, operator, "a mask of its own in TND")


def fusion_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    heads: int,
    layout: str,
    scale: float,
    mask: AttentionMask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, and the maximum and the sum of each query's exponentials, float32
    ``[b, heads, s, 8]`` of equal entries. ``layout`` is ``SBH``, ``BSND`` or ``TND``, whose
    statistics have the shape ``[t, heads, 8]`` and hold ``[heads, s, 8]`` of each sequence."""
    _check_attention("npu_fusion_attention", (q, k, v), layout, mask)
    result = load().npu_fusion_attention(
        q,
        k,
        v,
        heads,
        layout,
        pse=None,
        padding_mask=None,
        atten_mask=mask.mask,
        scale=scale,
        keep_prob=1.0,
        pre_tockens=mask.before,
        next_tockens=mask.after,
        inner_precise=0,
        prefix=None,
        actual_seq_qlen=mask.query_ends,
        actual_seq_kvlen=mask.key_ends,
        sparse_mode=mask.mode,
        gen_mask_parallel=True,
        sync=False,
    )
    out, largest, total = result[:3]
    return out, largest, total


def fusion_attention_grad(
    grad: torch.Tensor,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor,
    softmax: tuple[torch.Tensor, torch.Tensor],
    *,
    heads: int,
    layout: str,
    scale: float,
    mask: AttentionMask,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v; ``softmax`` are the maximum and the sum of forward."""
    operator = "npu_fusion_attention_grad"
    _check_attention(operator, (*qkv, grad, out), layout, mask)
    for statistic in softmax:
        shape = tuple(statistic.shape)
        _check_scale(operator, "a statistic of the softmax", statistic, (*shape[:-1], 8))
    result = load().npu_fusion_attention_grad(
        *qkv,
        grad,
        heads,
        layout,
        pse=None,
        padding_mask=None,
        atten_mask=mask.mask,
        softmax_max=softmax[0],
        softmax_sum=softmax[1],
        softmax_in=None,
        attention_in=out,
        scale_value=scale,
        keep_prob=1.0,
        pre_tockens=mask.before,
        next_tockens=mask.after,
        inner_precise=0,
        seed=0,
        offset=0,
        numels=0,
        prefix=None,
        actual_seq_qlen=mask.query_ends,
        actual_seq_kvlen=mask.key_ends,
        sparse_mode=mask.mode,
        gen_mask_parallel=True,
        sync=False,
    )
    grad_q, grad_k, grad_v = result[:3]
    return grad_q, grad_k, grad_v


def rotary_mul(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Return ``x * cos + turned(x) * sin``; ``cos`` and ``sin`` have 1 where ``x`` has heads."""
    _check_rows("npu_rotary_mul", x, cos, sin)
    y: torch.Tensor = load().npu_rotary_mul(
        x, cos, sin, rotary_mode="interleave" if interleaved else "half", rotate=None
    )
    return y


def rotary_mul_backward(
    grad: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool
) -> torch.Tensor:
    """Return the transposed map of :func:`rotary_mul`."""
    _check_rows("npu_rotary_mul_backward", grad, cos, sin)
    mode = "interleave" if interleaved else "half"
    grad_x: torch.Tensor = load().npu_rotary_mul_backward(grad, grad, cos, sin, rotary_mode=mode)[0]
    return grad_x
