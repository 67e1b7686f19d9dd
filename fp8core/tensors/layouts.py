"""The layouts in which Transformer Engine holds codes and scales of blocks, from ours and to ours.

Here an operand ``[rows, k]`` has a scale for each block, ``[ceil(rows / br), ceil(k / bk)]``, the
columnwise one of a tensor ``[n, k]`` being ``[k, n]``. There scales are padded, those of blocks of
one row stand transposed in some formats, and those of square blocks below a float32 scale are
repeated for every row.

Source: Transformer Engine 2.20, get_scale_shape of the quantizers of blocks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fp8core.backend_api import Operand, OperandSpec
from fp8core.errors import OperandError, UnsupportedError
from fp8core.formats import dtype_of
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.operand_tensor import OperandTensor
from fp8core.tensors.storage import is_square


class Layout(NamedTuple):
    """How scales ``[rows, blocks]`` of an operand lie there: padded to multiples of ``steps``, and
    transposed, if the rowwise or the columnwise ones are ``turned``. Those of blocks of several
    rows ``repeat`` for each row."""

    steps: tuple[int, int]
    turned: tuple[bool, bool] = (False, False)
    repeats: bool = True


def layout_of(spec: OperandSpec) -> Layout:
    """Return the layout of the scales of blocks of ``spec``."""
    if spec.scale_format != "float32":
        return Layout((128, 4), (False, spec.scale_format == "e8m0"))
    return Layout((1, 4), repeats=False) if spec.block[0] > 1 else Layout((4, 1), (True, True))


def scale_sizes(
    spec: OperandSpec, sizes: tuple[int, int], *, columnwise: bool
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the size there of the scales of a matrix of ``sizes``, and that with the padding."""
    layout = layout_of(spec)
    rows, k = sizes[::-1] if columnwise else sizes
    counts = (rows if layout.repeats else -(-rows // spec.block[0]), -(-k // spec.block[1]))
    height, width = (-(-n // step) * step for n, step in zip(counts, layout.steps, strict=True))
    if layout.turned[columnwise]:
        return (counts[1], counts[0]), (width, height)
    return counts, (height, width)


def scales_from(
    owner: str, scales: Any, spec: OperandSpec, sizes: tuple[int, int], *, columnwise: bool
) -> torch.Tensor:
    """Return ``scales`` of a matrix of ``sizes``, of that layout, as ours.

    Raises:
        OperandError: they have another size, or differ within a block.
    """
    size, padded = scale_sizes(spec, sizes, columnwise=columnwise)
    if not isinstance(scales, torch.Tensor) or tuple(scales.shape) not in (size, padded):
        shown = list(scales.shape) if isinstance(scales, torch.Tensor) else repr(scales)
        raise OperandError(
            f"{owner}: scales {shown}; expected {list(size)}, or padded {list(padded)}."
        )
    layout, rows = layout_of(spec), spec.block[0]
    cropped = scales[: size[0], : size[1]]
    cropped = cropped.t() if layout.turned[columnwise] else cropped
    if not (layout.repeats and rows > 1):
        return cropped.contiguous()
    first = cropped[::rows]
    whole = first.repeat_interleave(rows, 0)[: cropped.shape[0]]
    if not scales.is_meta and not torch.equal(whole.view(torch.uint8), cropped.view(torch.uint8)):
        raise OperandError(
            f"{owner}: scales differ within a block of {rows} x {spec.block[1]}, which its "
            f"quantizer makes. Give a quantizer of blocks of one row, or none."
        )
    return first.contiguous()


def scales_to(operand: Operand, spec: OperandSpec, *, columnwise: bool) -> torch.Tensor:
    """Return the scales of ``operand`` in that layout, without padding."""
    assert operand.scale_inv is not None
    layout, scales = layout_of(spec), operand.scale_inv
    if layout.repeats and spec.block[0] > 1:
        scales = scales.repeat_interleave(spec.block[0], 0)[: operand.data.shape[0]]
    return scales.t() if layout.turned[columnwise] else scales


def outer_scale(spec: OperandSpec, amax: torch.Tensor) -> torch.Tensor:
    """Return the scale above those of blocks that a cast takes where ``amax`` is that of the tensor
    or, one for each, of its rows. Source: docs/numerics.md 3.5."""
    wide = amax.to(torch.float32)
    encode = torch.full_like(wide, spec.scale_max * spec.target) / wide
    encode = encode.clamp(max=torch.finfo(torch.float32).max)
    encode = torch.where((wide == 0) | torch.isinf(wide), 1.0, encode)
    return torch.ones_like(encode) / encode


def amax_of(spec: OperandSpec, scale: torch.Tensor) -> torch.Tensor:
    """Return an amax for which :func:`outer_scale` gives ``scale``, or, where there is none, one
    that is off by a unit in the last place."""
    scale = scale.reshape(-1)
    near = scale * (spec.scale_max * spec.target)
    bits = near.view(torch.int32)
    amax = near
    for step in (1, -1, 2, -2, 3, -3):  # three roundings lie between the two
        beside = (bits + step).view(torch.float32)
        is_better = (outer_scale(spec, amax) != scale) & (outer_scale(spec, beside) == scale)
        amax = torch.where(is_better, beside, amax)
    return amax


def kind_of(spec: OperandSpec) -> str | None:
    """Return which class of Transformer Engine's stores operands of ``spec``; None: none does."""
    if spec.scale_format != "float32":
        return {"e8m0": "MXFP8Tensor", "e4m3": "NVFP4Tensor"}.get(spec.scale_format)
    if spec.block == (0, 0):
        return "Float8Tensor"
    return "Float8BlockwiseQTensor" if spec.block in ((1, 128), (128, 128)) else None


def is_hybrid(plan: TensorPlan) -> bool:
    """Say whether the two orientations of ``plan`` are in different formats."""
    formats = [(spec.format, spec.block[1], spec.scale_format) for spec in plan if spec is not None]
    return len(set(formats)) > 1


def arguments_of(tensor: OperandTensor, quantizer: Any) -> dict[str, Any]:
    """Return the keyword arguments by which the class of :func:`kind_of` makes ``tensor`` again, in
    its memory where the layouts agree; ``quantizer`` is one of them.

    Raises:
        UnsupportedError: no class of Transformer Engine's stores it.
    """
    spec = tensor.plan.rowwise or tensor.plan.columnwise
    assert spec is not None
    kind = kind_of(spec)
    if kind is None:
        raise UnsupportedError(
            f"get_metadata of {tensor}: no class of Transformer Engine's has a tensor that is "
            f"stored so. Take its operands, and QuantizedTensor.from_codes()."
        )
    row, column = tensor.operands
    if row is not None and is_square(spec) and tensor.stored[1] is None:
        column = None  # a view of the other
    both: Any = tensor.get_data_tensors()
    pairs = zip(both, (row, column), strict=True)
    codes = [None if operand is None else data for data, operand in pairs]
    dtype = dtype_of(spec.format)
    if kind == "Float8Tensor":
        scale = (row or column).scale_inv.view(1)
        return {
            "data": codes[0],
            "fp8_scale_inv": scale,
            "fp8_dtype": dtype,
            "data_transpose": codes[1],
            "quantizer": quantizer,
        }
    arguments: dict[str, Any] = {}
    amaxes: dict[str, Any] = {}
    ways = zip(("rowwise", "columnwise"), (row, column), tensor.plan, codes, strict=True)
    for way, operand, planned, data in ways:
        scales = amax = None
        if operand is not None and planned is not None:
            scales = scales_to(operand, planned, columnwise=way == "columnwise")
            if operand.global_scale_inv is not None:
                amax = amax_of(planned, operand.global_scale_inv)
        arguments |= {f"{way}_data": data, f"{way}_scale_inv": scales}
        amaxes[f"amax_{way}"] = amax
    arguments |= amaxes if kind == "NVFP4Tensor" else {}
    arguments["fp4_dtype" if kind == "NVFP4Tensor" else "fp8_dtype"] = dtype
    arguments["quantizer"] = quantizer
    if kind == "Float8BlockwiseQTensor":
        return {**arguments, "is_2D_scaled": spec.block[0] > 1}
    return {**arguments, "with_gemm_swizzled_scales": False}


def shape_of(data: torch.Tensor, *, is_turned: bool, per_byte: int = 1) -> tuple[int, ...]:
    """Return the shape of the tensor of codes ``data``, ``per_byte`` in a byte along the last
    dimension, which is another one's where they are those of a transposed matrix."""
    sizes = (*data.shape[:-1], data.shape[-1] * per_byte)
    return (*sizes[1:], sizes[0]) if is_turned else sizes
