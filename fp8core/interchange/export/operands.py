"""Quantized operands in ONNX, and fp8core's operators on them.

An operand of an exported graph is ``[values, scale_inv]`` or ``[values, scale_inv,
global_scale_inv]``: ``values [rows, k]`` of torch's FP8 dtypes, ONNX's FLOAT8E4M3FN and FLOAT8E5M2,
and float32 scales of the shapes that the contract of backends gives. e2m1, which runtimes lack, is
held in e4m3, which has all its values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.onnx import ops
from torch.overrides import TorchFunctionMode

from fp8core import formats
from fp8core.backend_api import OperandSpec
from fp8core.backend_api.record import RECORDS
from fp8core.torch_ops.definition import Tensors, implementation
from fp8core.torch_ops.encoding import decode

_SMALLEST_NORMAL = 2.0**-126


def largest_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two up to each ``x`` (float32, not negative, finite), and 0 where
    ``x`` is below 2^-126: the float32 without the bits of its mantissa."""
    power = torch.full_like(x, _SMALLEST_NORMAL)
    # The exponent above -126 is found bit by bit: 2^128 is no float32, so it takes two factors.
    for factors in ((2.0**64, 2.0**64), *((2.0**bit,) for bit in (64, 32, 16, 8, 4, 2, 1))):
        larger = power
        for factor in factors:
            larger = larger * factor
        power = torch.where(larger <= x, larger, power)
    return torch.where(x < _SMALLEST_NORMAL, 0.0, power)


def smallest_power_of_two(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two from each ``x`` (float32, not negative) on, between 2^-127
    and 2^127: the value of an e8m0 code that is rounded up."""
    low = largest_power_of_two(x.clamp(max=2.0**127))
    power = torch.where(low < x, low * 2, low).clamp(max=2.0**127)
    return torch.where(x <= 2.0**-127, 2.0**-127, power.clamp(min=_SMALLEST_NORMAL))


def reciprocal(x: torch.Tensor) -> torch.Tensor:
    """Return ``1 / x`` by a division: runtimes approximate ONNX's Reciprocal."""
    return torch.ones_like(x) / x


def round_to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Return float32 ``x`` rounded to the values of e2m1, ties to even; saturates, and NaN is 6."""
    # 0 0.5 1 1.5 2 | 3 4 | 6: the step is 0.5 below 2, 1 below 4, 2 above.
    magnitude = x.abs()
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    rounded = (torch.round(magnitude / step) * step).clamp(max=6.0)
    rounded = torch.where(x.isnan(), 6.0, rounded)
    return torch.where(x < 0, -rounded, rounded)


_FLOAT32_MAX = torch.finfo(torch.float32).max
_VALUE_DTYPES = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e2m1": torch.float8_e4m3fn,
}
_ONNX_TYPES = {torch.float8_e4m3fn: 17, torch.float8_e5m2: 19}  # of TensorProto.DataType


def refusal_of(spec: OperandSpec) -> str | None:
    """Say why ONNX cannot hold an operand of ``spec``; None if it can."""
    if spec.format not in _VALUE_DTYPES:
        return f"ONNX has no type that holds {spec.format}; of the formats it has e4m3 and e5m2"
    if spec.delayed:
        return "delayed scaling changes its scales in every call, and a file holds none that change"
    if spec.stochastic:
        return "stochastic rounding takes random numbers, and ONNX defines none bit for bit"
    if spec.transform is not None:
        return f"the transform {spec.transform} is not translated"
    if spec.four_over_six is not None:
        return "four_over_six chooses between two scales a block, which is not translated"
    return None


def stored(spec: OperandSpec, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return an operand of a backend, codes and scales as bytes, as exported graphs hold it."""
    data, scale_inv, *outer = tensors
    if formats.by_name(spec.format).bits == 4:  # hhhhllll, the even element is the low half
        codes = torch.stack((data & 0x0F, data >> 4), dim=-1).flatten(-2)
        values = formats.by_name(spec.format).decode(codes).to(_VALUE_DTYPES[spec.format])
    else:
        values = data.contiguous().view(_VALUE_DTYPES[spec.format])
    if spec.scale_format != "float32":
        scale_inv = formats.by_name(spec.scale_format).decode(scale_inv)
    return [values, scale_inv.contiguous(), *outer]


def cast(spec: OperandSpec, x: torch.Tensor) -> list[torch.Tensor]:
    """Quantize ``x [rows, k]``; the codes and scales are those of the reference backend."""
    scale_inv, multiplier, outer = _scales(spec, x)
    x, dtype = x.to(torch.float32), _VALUE_DTYPES[spec.format]
    is_e2m1 = spec.format == "e2m1"
    if not is_e2m1 and (spec.power_of_two or spec.scale_format == "e8m0"):
        # Dividing by a power of two is exact, as multiplying by its reciprocal is.
        scale, attributes = _linear_scale(spec, x.shape, scale_inv)
        return [_quantize_linear(x, scale, dtype, **attributes), scale_inv, *outer]
    scaled = _in_blocks(spec, x, multiplier)
    scaled = round_to_e2m1(scaled) if is_e2m1 else scaled
    return [_quantize_linear(scaled, _unit_scale(x), dtype), scale_inv, *outer]


def dequantized(spec: OperandSpec, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of an operand, float32 ``[rows, k]``."""
    values, scale_inv, *outer = tensors
    for more in outer:
        scale_inv = scale_inv * more
    scale, attributes = _linear_scale(spec, values.shape, scale_inv)
    result: torch.Tensor = ops.symbolic(
        "DequantizeLinear",
        (values, scale),
        {**attributes},
        dtype=torch.float32,
        shape=values.shape,
    )
    return result


def _quantize_linear(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, **attributes: int
) -> torch.Tensor:
    options: dict[str, Any] = {**attributes, "output_dtype": _ONNX_TYPES[dtype], "saturate": 1}
    result: torch.Tensor = ops.symbolic(
        "QuantizeLinear", (x, scale), options, dtype=dtype, shape=x.shape
    )
    return result


def _unit_scale(x: torch.Tensor) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=x.device)


def _linear_scale(
    spec: OperandSpec, size: Sequence[int], scale: torch.Tensor
) -> tuple[torch.Tensor, dict[str, int]]:
    """Return the scale in the shape of QuantizeLinear, and the attributes of its blocks."""
    if spec.block == (0, 0):
        return scale.reshape(()), {}
    if spec.block[1] == 0:
        return scale.reshape(-1), {"axis": 0}
    # ONNX's blocks cover one row: each row of a block of several has the same scales.
    return _rows(spec, size, scale), {"axis": 1, "block_size": spec.block[1]}


def _rows(spec: OperandSpec, size: Sequence[int], of_blocks: torch.Tensor) -> torch.Tensor:
    """Return an entry a block ``[rows / br, k / bc]`` as one a row ``[rows, k / bc]``."""
    height = spec.block[0]
    if height == 1:
        return of_blocks
    bands, columns = of_blocks.shape
    spread = of_blocks[:, None].expand(bands, height, columns).reshape(bands * height, columns)
    return spread[: size[0]]


def _padded(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return ``x`` with zeros up to whole blocks."""
    rows, k = x.shape
    height, width = block
    # Rows may be symbolic: no remainder of their number is asked for where none is needed.
    missing = (0, -k % width, 0, -rows % height if height > 1 else 0)
    return torch.nn.functional.pad(x, missing) if any(missing) else x


def _in_blocks(spec: OperandSpec, x: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """Return float32 ``x`` with every block multiplied by its entry of ``factors``."""
    if spec.block[1] == 0:
        return x * factors  # [1, 1] or [rows, 1]
    rows, k = x.shape
    width = spec.block[1]
    wide = _padded(x, (1, width)).reshape(rows, math.ceil(k / width), width)
    product = wide * _rows(spec, x.shape, factors)[:, :, None]
    return product.reshape(rows, math.ceil(k / width) * width)[:, :k]


def _amax(x: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Return each block's largest magnitude, 0 for a tensor without rows; NaNs are ignored."""
    magnitude = torch.where(x.isnan(), 0.0, x.to(torch.float32)).abs()
    if block == (0, 0):
        if isinstance(x.shape[0], int) and x.shape[0] == 0:  # not the free number of rows
            return magnitude.new_zeros(1, 1)
        return magnitude.amax((0, 1), keepdim=True)
    if block[1] == 0:
        return magnitude.amax(1, keepdim=True)
    whole = _padded(magnitude, block)
    rows, k = whole.shape
    height, width = block
    return whole.reshape(rows // height, height, k // width, width).amax((1, 3))


def _scales(
    spec: OperandSpec, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Return the inverse scale of each block, the scale, and the outer level of two."""
    amax = _amax(x, spec.block)
    if spec.scale_format == "e4m3":
        return _two_level_scales(spec, x, amax)
    if spec.scale_format == "e8m0":
        scale_inv = smallest_power_of_two(amax * (1 / spec.target))
        return scale_inv, reciprocal(scale_inv), []
    scale = _float32_scale(spec, amax, x.dtype)
    return reciprocal(scale), scale, []


def _float32_scale(spec: OperandSpec, amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``target / amax``; 1 where amax is 0 or inf. Source: docs/numerics.md 3.2, 3.4."""
    floored = amax
    if spec.amax_epsilon:  # by a maximum: ONNX's Clip without an upper bound makes inf finite
        floored = torch.maximum(amax, torch.full_like(amax, spec.amax_epsilon))
    scale = torch.full_like(floored, spec.target) / floored
    largest = _FLOAT32_MAX if spec.block[1] == 0 else torch.finfo(dtype).max
    scale = torch.where(scale.isinf(), largest, scale)
    scale = torch.where((floored == 0) | floored.isinf(), 1.0, scale)
    return largest_power_of_two(scale) if spec.power_of_two else scale


def _two_level_scales(
    spec: OperandSpec, x: torch.Tensor, amax: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """An e4m3 scale a block under one float32 scale. Source: docs/numerics.md 3.5."""
    outer_amax = _amax(x, (1, 0) if spec.row_scaled else (0, 0))
    encode = torch.full_like(outer_amax, spec.scale_max * spec.target) / outer_amax
    encode = encode.clamp(max=_FLOAT32_MAX)
    encode = torch.where((outer_amax == 0) | outer_amax.isinf(), 1.0, encode)
    decode = reciprocal(encode)
    scale = amax * (encode * (1 / spec.target))
    e4m3 = torch.float8_e4m3fn
    unit = _unit_scale(x)
    codes = _quantize_linear(scale, unit, e4m3)
    scale_inv = ops.symbolic(
        "DequantizeLinear", (codes, unit), dtype=torch.float32, shape=scale.shape
    )
    return scale_inv, reciprocal(scale_inv * decode).clamp(max=_FLOAT32_MAX), [decode]


# Operators whose arithmetic torch translates: those of forward in high precision.
_TRACED = [
    op
    for op, record in RECORDS.items()
    if not (record.is_optional or record.writes or record.desc.low_precision)
    and not op.endswith("backward")
    and op != "amax"
]


def refusal_of_call(name: str, arguments: Sequence[Any]) -> str | None:
    """Say why the operator ``name``, called with these, has no translation; None if it has."""
    if name not in LOWERED:
        return f"fp8core.{name} has no translation to ONNX"
    desc: Any = decode(arguments[0]).desc
    if name == "attention":
        if desc.qkv is not None or desc.s is not None or desc.out is not None:
            return "FP8 attention quantizes within the softmax, which is not translated"
        dropout = "attention with dropout is training; call model.eval() first"
        return dropout if desc.dropout else None
    if name == "quantize":
        *_, scale, amax, _, nonfinite, by_amax = (*arguments, None, None)[:8]
        if scale is not None or amax is not None:
            return "delayed scaling changes its scales in every call"
        if nonfinite is not None:
            return 'nonfinite="propagate" counts what a cast meets, and ONNX keeps no counts'
        if by_amax is not None:
            return "an amax that several ranks share needs their collectives"
        if desc.rowwise is None:
            return "a columnwise operand alone belongs to backward"
        return refusal_of(desc.rowwise)
    if name in ("gemm", "grouped_gemm"):
        if desc.accumulate or getattr(desc, "contract_groups", False):
            return "a GEMM of backward has no translation"
        refusals = [refusal_of(spec) for spec in (desc.a, desc.b) if spec is not None]
        return next(filter(None, refusals), None)
    if name == "dequantize":
        return refusal_of(desc.operand)
    return None


def _quantize(
    text: str, x: torch.Tensor, offsets: Sequence[int] | None, *ignored: object
) -> list[torch.Tensor]:
    desc: Any = decode(text).desc
    spec: OperandSpec = desc.rowwise
    if offsets is None:
        return cast(spec, x)
    # ONNX concatenates and splits no FP8, so groups are handed over in float32, dequantized.
    groups = [x[start:end] for start, end in itertools.pairwise(offsets) if end > start]
    values = [dequantized(spec, cast(spec, group)) for group in groups]
    unit = x.new_ones((), dtype=torch.float32)
    return [torch.cat(values) if values else x.to(torch.float32), unit, unit]


def _dequantize(text: str, operand: Tensors) -> torch.Tensor:
    desc: Any = decode(text).desc
    return dequantized(desc.operand, operand).to(desc.dtype)


def _values(spec: OperandSpec | None, operand: Tensors) -> torch.Tensor:
    if spec is not None and operand[0].dtype == _VALUE_DTYPES[spec.format]:
        return dequantized(spec, operand)
    wide = torch.float64 if operand[0].dtype == torch.float64 else torch.float32
    return operand[0].to(wide)


def _gemm(text: str, a: Tensors, b: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
    desc: Any = decode(text).desc
    product = _values(desc.a, a) @ _values(desc.b, b).t()  # [m, k] x [n, k] -> [m, n]
    if bias is not None:
        product = product + bias.to(product.dtype)
    return product.to(desc.out_dtype)


def _grouped_gemm(
    text: str, a: Tensors, b: Tensors, offsets: Sequence[int], biases: Tensors
) -> list[torch.Tensor]:
    """Compute a GEMM for each group; the sizes of groups are part of the graph."""
    desc: Any = decode(text).desc
    step = len(b) // (len(offsets) - 1)
    products = []
    for group, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start == end:
            continue
        part, bias = [a[0][start:end]], biases[group] if biases else None
        products.append(_gemm(text, part, b[group * step : (group + 1) * step], bias))
    if not products:
        return [a[0].new_zeros(0, b[0].shape[0], dtype=desc.out_dtype)]
    return [torch.cat(products)]


class _SumsInFloat32(TorchFunctionMode):
    """Leaves out conversions to float64, in which the reference backend sums products of float32:
    few runtimes are fast there."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        if func is torch.Tensor.to and torch.float64 in (*args[1:2], keywords.get("dtype")):
            return args[0]
        return func(*args, **keywords)


def _attention(*arguments: Any) -> Any:
    with _SumsInFloat32():
        return implementation("attention")(*arguments)


LOWERED: dict[str, Callable[..., Any]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "attention": _attention,
    **{name: implementation(name) for name in _TRACED},
}
"""The function of each operator that has a translation, by the operator's name."""


def _sort(
    x: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Sequence[torch.Tensor]:
    """Sort by TopK, which leaves equal values in their order."""
    # Runtimes have TopK of few types; conversions to these keep order and values.
    narrow = torch.float32 if x.is_floating_point() else torch.int64
    wide = x.dtype if x.dtype == torch.float64 else narrow
    values, indices = ops.symbolic_multi_out(
        "TopK",
        (x.to(wide), torch.full((1,), x.shape[dim], dtype=torch.int64)),
        {"axis": dim % x.dim(), "largest": int(descending)},
        dtypes=(wide, torch.int64),
        shapes=(x.shape, x.shape),
    )
    return values.to(x.dtype), indices


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.sort.stable: _sort,
    torch.ops.aten.argsort.stable: lambda x, **keywords: _sort(x, **keywords)[1],
}
"""The functions of torch's operators that its exporter does not translate."""
