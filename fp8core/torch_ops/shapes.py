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

from fp8core.backend_api import OperandSpec
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
