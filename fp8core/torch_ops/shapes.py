"""Sizes, dtypes and strides of results, from the descriptor and the shapes of the inputs alone.

Fake kernels return empty tensors of these shapes; :func:`settle` gives the real results the same
sizes and strides. Sizes may be symbolic, and none depends on the values of a tensor. Where the
number of scale blocks does (groups that end in the middle of a block), it is an upper bound, and
:func:`trim` removes the rest.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from fp8core.backend_api import OperandSpec, QuantizeDesc
from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.backend_api.record import ResultShape
from fp8core.errors import OperandError
from fp8core.torch_ops.private import is_traced


def settle(result: torch.Tensor, shape: ResultShape) -> torch.Tensor:
    """Return ``result`` with the strides of ``shape``, padded with zeros to its size.

    Raises:
        OperandError: a backend returned another dtype or a larger size.
    """
    missing = [wanted - size for wanted, size in zip(shape.size, result.shape, strict=True)]
    if result.dtype != shape.dtype or any(size < 0 for size in missing):
        raise OperandError(
            f"a backend returned {result.dtype} {list(result.shape)}, expected {shape.dtype} "
            f"{list(shape.size)}."
        )
    if any(missing):
        result = torch.nn.functional.pad(result, (0, missing[1], 0, missing[0]))
    return result.t().contiguous().t() if shape.is_transposed else result.contiguous()


def hands_both_as_one(desc: QuantizeDesc, transposes: bool) -> bool:
    """Return whether the columnwise operand is the transposed view of the rowwise one: where blocks
    are square, both hold the same codes.
    """
    spec = desc.rowwise
    is_square = spec is not None and spec == desc.columnwise and spec.block[0] == spec.block[1]
    if spec is None or not is_square or desc.grouped or transposes:
        return False
    return not spec.stochastic and spec.transform is None and codes_per_byte(spec) == 1


def quantize_shapes(
    desc: QuantizeDesc, size: Sequence[int], groups: int, transposes: bool
) -> list[ResultShape]:
    """Return the shapes of the rowwise operand of ``x [rows, cols]``, then of the columnwise one.

    ``groups`` is 0 for a dense tensor.
    """
    rows, cols = size
    shapes = []
    if desc.rowwise is not None:
        shapes += _operand(desc.rowwise, (rows, cols), groups, grouped_dim=0)
    if desc.columnwise is not None and not hands_both_as_one(desc, transposes):
        transposed = _operand(desc.columnwise, (cols, rows), groups, grouped_dim=1)
        is_view = not groups and not transposes
        shapes += [shape._replace(is_transposed=is_view) for shape in transposed]
    return shapes


def _operand(
    spec: OperandSpec, size: tuple[int, int], groups: int, grouped_dim: int
) -> list[ResultShape]:
    blocks = [
        -(-extent // block) if block else 1 for extent, block in zip(size, spec.block, strict=True)
    ]
    one = [1, 1]
    if groups:
        extent, block = size[grouped_dim], spec.block[grouped_dim]
        one[grouped_dim] = groups
        if block != 1:  # every group may end with a partial block
            blocks[grouped_dim] = extent // block + groups if block else groups
    scale_dtype = torch.float32 if spec.scale_format == "float32" else torch.uint8
    shapes = [
        ResultShape((size[0], size[1] // codes_per_byte(spec)), torch.uint8),
        ResultShape((blocks[0], blocks[1]), scale_dtype),
    ]
    if spec.scale_format == "e4m3":
        outer = (size[0], 1) if spec.row_scaled else (one[0], one[1])
        shapes.append(ResultShape(outer, torch.float32))
    return shapes


def with_records(
    results: list[ResultShape], amax: torch.Tensor | None, nonfinite: torch.Tensor | None
) -> list[ResultShape]:
    """Append the shapes of the new amax and of the new count, if they are recorded."""
    records = [
        ResultShape((one.shape[0],), one.dtype) for one in (amax, nonfinite) if one is not None
    ]
    return [*results, *records]


def trim(
    spec: OperandSpec | None, parts: Sequence[torch.Tensor], offsets: Sequence[int], dim: int
) -> list[torch.Tensor]:
    """Remove the scales that :func:`settle` added to an operand grouped along ``dim``."""
    if spec is None or not spec.block[dim]:
        return list(parts)
    block = spec.block[dim]
    count = sum(-(-(end - start) // block) for start, end in itertools.pairwise(offsets))
    data, scale_inv, *rest = parts
    if scale_inv.shape[dim] != count:
        scale_inv = scale_inv.narrow(dim, 0, count).contiguous()
    return [data, scale_inv, *rest]


def is_captured(x: torch.Tensor) -> bool:
    """Say whether torch is capturing a graph, and ``x`` stands for a tensor of it."""
    return torch.compiler.is_compiling() or type(x) not in _REAL or is_traced()


_REAL = (torch.Tensor, torch.nn.Parameter)
