"""Results of backends in the sizes and strides that a graph expects."""

from __future__ import annotations

import torch

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


def is_captured(x: torch.Tensor) -> bool:
    """Say whether torch is capturing a graph, and ``x`` stands for a tensor of it."""
    return torch.compiler.is_compiling() or type(x) not in _REAL or is_traced()


_REAL = (torch.Tensor, torch.nn.Parameter)
