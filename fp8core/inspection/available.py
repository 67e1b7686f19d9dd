"""Whether the selected backend runs a recipe's products, with Transformer Engine's names."""

from __future__ import annotations

from typing import Literal, overload

import torch

from fp8core.inspection.explain import explain
from fp8core.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)


@overload
def is_fp8_available(return_reason: Literal[False] = False) -> bool: ...
@overload
def is_fp8_available(return_reason: Literal[True]) -> tuple[bool, str]: ...
@overload
def is_fp8_available(return_reason: bool) -> bool | tuple[bool, str]: ...
def is_fp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Say whether the selected backend multiplies FP8 with one scale a tensor on its device.

    With ``return_reason`` the answer and why not, an empty text if it does. The ``reference``
    backend does on any device. :func:`fp8core.explain` says more.
    """
    return _answer(Float8CurrentScaling(), return_reason)


def is_fp8_block_scaling_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Say so of FP8 with scales of 128 elements; as :func:`is_fp8_available`."""
    return _answer(Float8BlockScaling(), return_reason)


def is_mxfp8_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Say so of MXFP8; as :func:`is_fp8_available`."""
    return _answer(MXFP8BlockScaling(), return_reason)


def is_nvfp4_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Say so of NVFP4; as :func:`is_fp8_available`."""
    return _answer(NVFP4BlockScaling(), return_reason)


def is_bf16_available(return_reason: bool = False) -> bool | tuple[bool, str]:
    """Return True: every backend computes in bfloat16 where a recipe leaves a product alone."""
    return (True, "") if return_reason else True


def get_device_compute_capability() -> tuple[int, int]:
    """Return the compute capability of the current CUDA device; ``(0, 0)`` without one."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def get_cudnn_version() -> tuple[int, int, int]:
    """Return the version of cuDNN that torch uses; ``(0, 0, 0)`` without one."""
    encoded: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]  # torch's
    return _decoded(encoded or 0)


def _decoded(encoded: int) -> tuple[int, int, int]:
    """Return major, minor and patch; cuDNN 9 has five digits, 8 had four.

    >>> _decoded(91002), _decoded(8907)
    ((9, 10, 2), (8, 9, 7))
    """
    major, rest = divmod(encoded, 10000 if encoded >= 90000 else 1000)
    return major, *divmod(rest, 100)


def _answer(recipe: Recipe, return_reason: bool) -> bool | tuple[bool, str]:
    refusals = [line.refusal for line in explain("gemm", recipe).lines if line.choice is None]
    reason = next((refusal for refusal in refusals if refusal), "")
    return (not refusals, reason) if return_reason else not refusals
