"""Quantize, dequantize and amax: amax of a block -> scale -> elements, in float32 throughout.

A columnwise operand is quantized in the layout of ``x`` with the block transposed, and returned as
a transposed view, which costs no copy: a backend chooses the strides of its operands.
"""

from __future__ import annotations

import itertools

import torch

from fp8core import formats
from fp8core.backend_api import (
    GROUP_STEP,
    TRANSFORMS,
    AmaxDesc,
    Amaxes,
    DequantizeDesc,
    Operand,
    OperandSpec,
    QuantizeByAmaxDesc,
    Quantized,
    QuantizeDesc,
    amax_extent,
    amax_of_groups,
    has_amax,
    scale_inverses,
    shares_amax,
    split_amax,
)
from fp8core_backends.reference import blocks, four_over_six, rounding
from fp8core_backends.reference.operations import computes, float_problem, spec_problem

FLOAT32_MAX = torch.finfo(torch.float32).max
_UNIT = torch.ones((), dtype=torch.float32, device="cpu")
_FROM_X = Amaxes(None, None)  # no amax is given


def _cast_problem(desc: QuantizeDesc) -> str | None:
    halves = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
    if len({spec.delayed for spec in halves}) > 1:
        return "one orientation is delayed, the other is not"
    if desc.grouped and any(spec.row_scaled for spec in halves):
        return "no groups with an outer scale a row"
    if desc.padded and desc.offsets_on_device:
        return "groups of device sizes lie apart already"
    return float_problem(desc.dtype) or next(filter(None, map(spec_problem, halves)), None)


def _no_amax_problem(desc: QuantizeDesc) -> str | None:
    return None if has_amax(desc) else "scales follow from their blocks alone: there is no amax"


def _amax_problem(desc: AmaxDesc) -> str | None:
    quantize = desc.quantize
    if type(quantize) is not QuantizeDesc:
        return f"no amax of {type(quantize).__name__}"
    return _cast_problem(quantize) or _no_amax_problem(quantize)


def _cast_by_amax_problem(desc: QuantizeByAmaxDesc) -> str | None:
    is_delayed = any(spec is not None and spec.delayed for spec in (desc.rowwise, desc.columnwise))
    if is_delayed:
        return "a delayed scale is given: it follows from no amax of the tensor"
    return _cast_problem(desc) or _no_amax_problem(desc)


def _dequantize_problem(desc: DequantizeDesc) -> str | None:
    return float_problem(desc.dtype) or spec_problem(desc.operand)


@computes(AmaxDesc, refuses=_amax_problem)
def amax(
    desc: AmaxDesc, x: torch.Tensor, group_offsets: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the amaxes that the scales of ``x [rows, cols]`` follow from; see the backend API."""
    row, column = desc.quantize.rowwise, desc.quantize.columnwise
    rows = x.shape[0]
    groups = [x]
    if group_offsets is not None:
        bounds = bounds_of(group_offsets, rows)
        groups = [x[start:end] for start, end in itertools.pairwise(bounds)]
    parts: list[torch.Tensor] = []
    if row is not None and amax_extent(row) is not None:
        parts += [_amax_of(row, group, dim=1) for group in groups]
        if amax_extent(row) == "row":
            parts.append(x.new_zeros(rows - sum(map(len, groups)), dtype=torch.float32))
    if column is not None and amax_extent(column) is not None and not shares_amax(desc.quantize):
        parts += [_amax_of(column, group, dim=0) for group in groups]
    return torch.cat(parts)


def _amax_of(spec: OperandSpec, x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the amaxes of one tensor in one orientation, whose GEMM contracts ``dim`` of it."""
    block = (0, 0)
    if amax_extent(spec) == "row":
        block = (1, 0) if dim == 1 else (0, 1)
    x = x if spec.transform is None else TRANSFORMS[spec.transform](x, dim)
    return blocks.amax(x, block).reshape(-1)


@computes(QuantizeDesc, refuses=_cast_problem)
@computes(QuantizeByAmaxDesc, refuses=_cast_by_amax_problem)
def quantize(
    desc: QuantizeDesc,
    x: torch.Tensor,
    group_offsets: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    rng: torch.Tensor | None = None,
    nonfinite_out: torch.Tensor | None = None,
) -> Quantized:
    """Quantize ``x [rows, cols]`` in the orientations of ``desc``; see the backend API."""
    if group_offsets is None:
        _count_nonfinite(x, nonfinite_out)
        return _quantize_tensor(desc, x, scale, amax, amax_out, rng)
    bounds = bounds_of(group_offsets, x.shape[0])
    _count_nonfinite(x[: bounds[-1]], nonfinite_out)
    amaxes = None if amax is None else amax_of_groups(desc, amax, bounds, *x.shape)
    parts = []
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        entry = slice(group, group + 1)
        group_rng = None if rng is None else rng + torch.tensor([0, group], device="cpu")
        parts.append(
            _quantize_tensor(
                desc,
                x[start:end],
                None if scale is None else scale[entry],
                None if amaxes is None else amaxes[group],
                None if amax_out is None else amax_out[entry],
                group_rng,
            )
        )
    columnwise = [part.columnwise for part in parts]
    if desc.offsets_on_device and desc.columnwise is not None:
        step = GROUP_STEP // (8 // formats.by_name(desc.columnwise.format).bits)
        columnwise = [_pad(part, step) for part in columnwise if part is not None]
    quantized = Quantized(
        _concatenate([part.rowwise for part in parts], dim=0), _concatenate(columnwise, dim=1)
    )
    if not desc.offsets_on_device:
        return quantized
    specs, groups = (desc.rowwise, desc.columnwise), len(bounds) - 1
    filled = (
        None if operand is None or spec is None else _fill(spec, operand, x.shape[0], groups, dim)
        for dim, (spec, operand) in enumerate(zip(specs, quantized, strict=True))
    )
    return Quantized(*filled)


def _count_nonfinite(x: torch.Tensor, total: torch.Tensor | None) -> None:
    """Add the number of NaN and inf in ``x`` to ``total`` without waiting for the device."""
    if total is not None:
        total += x.numel() - torch.isfinite(x).sum()


def bounds_of(group_offsets: torch.Tensor, rows: int) -> list[int]:
    """Return where groups begin and end, read back: from 0, never less, never beyond ``rows``."""
    ends = itertools.accumulate((min(end, rows) for end in group_offsets.tolist()[1:]), max)
    return [0, *(max(end, 0) for end in ends)]


def _fill(spec: OperandSpec, operand: Operand, rows: int, groups: int, dim: int) -> Operand:
    """Fill up to the sizes that operands of unknown groups have: codes 0, scales 1."""
    data, scale_inv, global_scale_inv = operand
    assert scale_inv is not None
    block, per_byte = spec.block[dim], 8 // formats.by_name(spec.format).bits if dim else 1
    count = groups if block == 0 else rows if block == 1 else rows // block + groups
    unit = (
        1.0 if spec.scale_format == "float32" else formats.by_name(spec.scale_format).encode(_UNIT)
    )
    length = GROUP_STEP * (rows // GROUP_STEP + groups) if dim else rows
    data = _grow(data, length // per_byte, dim, 0)
    return Operand(data, _grow(scale_inv, count, dim, float(unit)), global_scale_inv)


def _pad(operand: Operand, step: int) -> Operand:
    return operand._replace(
        data=_grow(operand.data, -(-operand.data.shape[1] // step) * step, 1, 0)
    )


def _grow(x: torch.Tensor, size: int, dim: int, value: float) -> torch.Tensor:
    missing = size - x.shape[dim]
    padding = (0, 0, 0, missing) if dim == 0 else (0, missing)
    return torch.nn.functional.pad(x, padding, value=value) if missing else x


def _concatenate(operands: list[Operand | None], dim: int) -> Operand | None:
    present = [operand for operand in operands if operand is not None]
    if not present:
        return None

    def join(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
        present_parts = [part for part in parts if part is not None]
        if dim == 0 or not present_parts:
            return torch.cat(present_parts) if present_parts else None
        # Columnwise parts are transposed views: joined as they lie in memory, each group keeps the
        # strides that it has alone, and a GEMM over it the order of its sums.
        return torch.cat([part.t() for part in present_parts]).t()

    columns = zip(*present, strict=True)  # data, scale_inv, global_scale_inv
    data, scale_inv, global_scale_inv = (join(list(parts)) for parts in columns)
    assert data is not None
    return Operand(data, scale_inv, global_scale_inv)


def _quantize_tensor(
    desc: QuantizeDesc,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    rng: torch.Tensor | None,
) -> Quantized:
    amaxes = _FROM_X if amax is None else split_amax(desc, amax, *x.shape)
    if amax_out is not None:
        torch.maximum(amax_out, blocks.amax(x, (0, 0)).reshape(1), out=amax_out)
    row, column = desc.rowwise, desc.columnwise
    depends_on_direction = row is not None and (row.stochastic or row.transform is not None)
    is_square = row is not None and row.block[0] == row.block[1]
    is_seen_twice = row == column and is_square and not depends_on_direction
    if row is not None and is_seen_twice and not desc.padded:
        # A square block holds the same elements both ways: one quantization, seen twice.
        operand = _orient(row, x, scale, amaxes.rowwise, rng, transposed=False)
        if formats.by_name(row.format).bits != 4:
            return Quantized(operand, _transpose(operand))
        return Quantized(operand, _orient(row, x, scale, amaxes.columnwise, rng, transposed=True))
    rowwise = columnwise = None
    if row is not None:
        rowwise = _orient(row, x, scale, amaxes.rowwise, rng, transposed=False)
    if column is not None:
        if desc.padded:
            x = _grow(x, x.shape[0] + -x.shape[0] % desc.padded, 0, 0)
        columnwise = _orient(column, x, scale, amaxes.columnwise, rng, transposed=True)
    return Quantized(rowwise, columnwise)


def _transpose(operand: Operand) -> Operand:
    data, scale_inv, global_scale_inv = operand
    return Operand(
        data.t(),
        None if scale_inv is None else scale_inv.t(),
        None if global_scale_inv is None else global_scale_inv.t(),
    )


def _orient(
    spec: OperandSpec,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    rng: torch.Tensor | None,
    *,
    transposed: bool,
) -> Operand:
    """Return the rowwise operand of ``x``, or, ``transposed``, the columnwise one."""
    dim = 0 if transposed else 1  # the dimension of x that the GEMM contracts
    block = (spec.block[1], spec.block[0]) if transposed else spec.block
    if spec.transform is not None:
        x = TRANSFORMS[spec.transform](x, dim)
    multiplier, scale_inv, global_scale_inv = _scales(spec, x, block, scale, amax, dim)
    scaled = blocks.multiply(x, multiplier, block)
    element = formats.by_name(spec.format)
    if spec.stochastic:
        scaled = rounding.stochastically(scaled, rng, dim)
    codes = element.encode(scaled)
    data = rounding.pack(codes, dim) if element.bits == 4 else codes
    operand = Operand(data, scale_inv, global_scale_inv)
    return _transpose(operand) if transposed else operand


def _scales(
    spec: OperandSpec,
    x: torch.Tensor,
    block: tuple[int, int],
    scale: torch.Tensor | None,
    amax: torch.Tensor | None,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return the multiplier of each block (float32), and the tensors that are stored to undo it.

    ``amax`` holds given amaxes of this orientation, None where they are those of ``x``.
    """
    if spec.delayed:
        assert scale is not None
        multiplier = scale.reshape(1, 1)
        return multiplier, _reciprocal(multiplier), None
    if spec.scale_format == "e4m3":
        return _two_level_scales(spec, x, block, amax, dim)
    if amax is None:
        block_amax = blocks.amax(x, block)
    else:
        block_amax = amax.reshape(-1, 1) if block[1] == 0 else amax.reshape(1, -1)
    if spec.scale_format == "e8m0":
        return *_e8m0_scales(spec, block_amax), None
    multiplier = _float32_scale(spec, block_amax, x.dtype)
    return multiplier, _reciprocal(multiplier), None


def _float32_scale(spec: OperandSpec, block_amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``target / amax``; 1 where amax is 0 or inf. Source: docs/numerics.md 3.2, 3.4."""
    floored = block_amax.clamp(min=spec.amax_epsilon)
    # Divide tensor by tensor: torch computes python_scalar / tensor as a rounded reciprocal times
    # the scalar, which is one ulp off the correctly rounded quotient.
    scale = torch.full_like(floored, spec.target) / floored
    largest = FLOAT32_MAX if spec.block[1] == 0 else torch.finfo(dtype).max
    scale = torch.where(torch.isinf(scale), largest, scale)
    scale = torch.where((floored == 0) | torch.isinf(floored), 1.0, scale)
    if spec.power_of_two:
        # s eeeeeeee mmm...m -> s eeeeeeee 000...0: clearing the mantissa rounds down.
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return scale


def _e8m0_scales(spec: OperandSpec, block_amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The byte is the exponent of ``amax / target`` rounded up. Source: docs/numerics.md 3.3."""
    codes = formats.by_name("e8m0").encode(block_amax * (1 / spec.target), rounding="up")
    exponent = codes.to(torch.int32)
    # 2^(127 - e) = 0 (254 - e) 000...0 as bits; e = 254 is the subnormal 2^-127, 255 is NaN.
    bits = torch.where(exponent == 254, 0x00400000, (254 - exponent) << 23)
    bits = torch.where(exponent == 255, 0x7FC00000, bits)
    return bits.view(torch.float32), codes


def _two_level_scales(
    spec: OperandSpec,
    x: torch.Tensor,
    block: tuple[int, int],
    amax: torch.Tensor | None,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """An e4m3 scale a block under one float32 scale a tensor, or a row. Source: docs/numerics.md
    3.5."""
    e4m3 = formats.by_name("e4m3")
    block_amax = blocks.amax(x, block)
    outer = ((1, 0) if dim == 1 else (0, 1)) if spec.row_scaled else (0, 0)
    if amax is None:
        outer_amax = blocks.amax(x, outer)
    else:
        outer_amax = amax.reshape(-1, 1) if dim == 1 else amax.reshape(1, -1)
    encode = torch.full_like(outer_amax, spec.scale_max * spec.target) / outer_amax
    encode = encode.clamp(max=FLOAT32_MAX)
    encode = torch.where((outer_amax == 0) | torch.isinf(outer_amax), 1.0, encode)
    decode = _reciprocal(encode)

    def multiplier_of(codes: torch.Tensor) -> torch.Tensor:
        return _reciprocal(e4m3.decode(codes) * decode).clamp(max=FLOAT32_MAX)

    if spec.four_over_six is None:
        codes = e4m3.encode(block_amax * (encode * (1 / spec.target)))
        return multiplier_of(codes), codes, decode
    to_six = block_amax / torch.full_like(block_amax, spec.target) * encode
    six, four = e4m3.encode(to_six), e4m3.encode(to_six * 1.5)
    if not x.numel():
        return multiplier_of(six), six, decode
    errors = [
        four_over_six.error(
            spec,
            x,
            block,
            multiplier=multiplier_of(codes),
            scale=e4m3.decode(codes),
            outer_amax=outer_amax,
            dim=dim,
        )
        for codes in (four, six)
    ]
    codes = torch.where(errors[0] < errors[1], four, six)
    return multiplier_of(codes), codes, decode


def _reciprocal(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x) / x


@computes(DequantizeDesc, refuses=_dequantize_problem)
def dequantize(desc: DequantizeDesc, operand: Operand) -> torch.Tensor:
    """Return the values of ``operand``, ``[rows, k]`` in ``desc.dtype``."""
    return dequantize_float32(desc.operand, operand).to(desc.dtype)


def dequantize_float32(spec: OperandSpec, operand: Operand) -> torch.Tensor:
    """Return the values of ``operand`` ``[rows, k]`` in float32; a transform is not undone."""
    element = formats.by_name(spec.format)
    data = rounding.unpack(operand.data) if element.bits == 4 else operand.data
    return blocks.multiply(element.decode(data), scale_inverses(spec, operand), spec.block)
