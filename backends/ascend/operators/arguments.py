"""Arguments that operators take: their dtypes, and checks that torch_npu leaves out."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.errors import OperandError
from fp8core_backends.ascend.operators.library import load

QUANTIZABLE = (torch.bfloat16, torch.float16)
"""The dtypes that the casts take that derive their scales."""
SCALABLE = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that the cast by a given scale takes."""
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes that a product of quantized operands may have."""

FLOAT8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
"""Torch's dtypes of the formats that have one."""
HIF8_TARGETS: tuple[float, ...] = (15.0, 56.0, 224.0, 32768.0)
"""What an amax may be scaled to in HiFloat8."""
BLOCK = 128
"""The elements of a block along the terms of a product, where scales are float32."""
Groups = tuple[int, int, int]
MX_GROUPS: Groups = (1, 1, 32)
"""How many rows of x1, columns of x2 and terms share a scale, in MX."""
BLOCK_GROUPS: Groups = (1, BLOCK, BLOCK)
"""1 x 128 blocks times 128 x 128 blocks."""
SQUARE_GROUPS: Groups = (BLOCK, BLOCK, BLOCK)
"""128 x 128 blocks on both sides."""


def require(holds: bool, operator: str, text: str) -> None:
    """Raise OperandError with ``text`` unless ``holds``."""
    if not holds:
        raise OperandError(f"torch_npu.{operator}: {text}")


def check_input(
    operator: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...] = QUANTIZABLE
) -> None:
    """Raise unless ``x`` is a contiguous matrix of one of ``dtypes``, with elements."""
    require(x.dim() == 2, operator, f"x {list(x.shape)} has {x.dim()} dimensions, expected 2")
    require(x.dtype in dtypes, operator, f"x is {x.dtype}, expected one of {dtypes}")
    require(x.numel() > 0, operator, f"x {list(x.shape)} is empty")
    require(x.is_contiguous(), operator, f"x has the strides {x.stride()}, expected contiguous")


def dtype_of(operator: str, format: str, *, allowed: tuple[str, ...]) -> Any:
    """Return what torch_npu calls ``format``, one of ``allowed``."""
    require(format in allowed, operator, f"format {format!r}, expected one of {allowed}")
    return load().hifloat8 if format == "hif8" else FLOAT8[format]


def codes_of(codes: torch.Tensor) -> torch.Tensor:
    """Return ``codes`` as uint8."""
    return codes.view(torch.uint8)


def check_scale(operator: str, name: str, scale: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless ``scale`` is float32 of ``shape``; a message calls it ``name``."""
    is_right = scale.dtype == torch.float32 and tuple(scale.shape) == shape
    message = f"{name} is {scale.dtype} {list(scale.shape)}, expected float32 {list(shape)}"
    require(is_right, operator, message)


def check_exponents(operator: str, scale: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise unless ``scale`` has exponents, uint8, of ``shape``."""
    is_right = scale.dtype == torch.uint8 and tuple(scale.shape) == shape
    message = f"exponents {scale.dtype} {list(scale.shape)}, expected uint8 {list(shape)}"
    require(is_right, operator, message)


def check_rows(operator: str, *tensors: torch.Tensor) -> None:
    """Raise unless ``tensors`` are contiguous, of one dtype, and with elements."""
    for x in tensors:
        require(x.numel() > 0, operator, f"a tensor {list(x.shape)} is empty")
        require(x.is_contiguous(), operator, f"strides {x.stride()}, expected contiguous")
        require(x.dtype == tensors[0].dtype, operator, f"{x.dtype} next to {tensors[0].dtype}")
