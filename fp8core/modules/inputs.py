"""What a tensor has to be before a layer looks at its sizes: a floating-point matrix in memory."""

from __future__ import annotations

import torch

from fp8core.errors import OperandError
from fp8core.parameter.init import DTYPES

__all__ = ["check_kind"]


def check_kind(label: str, name: str, tensor: torch.Tensor) -> None:
    """Refuse ``tensor``, the ``name`` of the layer ``label``, unless it is dense and of a dtype
    that layers compute in.

    Raises:
        OperandError: it is no tensor, integer, complex, in 8 bits, sparse, nested, or in a layout
            of oneDNN.
    """
    if not isinstance(tensor, torch.Tensor):
        raise OperandError(f"{label}: {name} is {type(tensor).__name__}; expected a torch.Tensor.")
    if tensor.is_nested:
        raise OperandError(
            f"{label}: {name} is a nested tensor; expected a dense one. Give the rows of all parts "
            f"in one, as values() of a jagged one has them, or torch.nested.to_padded_tensor."
        )
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.").lstrip("_")
        raise OperandError(
            f"{label}: {name} {list(tensor.shape)} is in layout {layout}; expected a dense one, "
            f"as to_dense() gives it."
        )
    if tensor.dtype not in DTYPES:
        raise OperandError(
            f"{label}: {name} {list(tensor.shape)} is {tensor.dtype}; "
            f"expected bfloat16, float16 or float32."
        )
