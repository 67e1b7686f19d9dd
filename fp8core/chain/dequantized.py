"""A linear whose backward dequantizes what fprop multiplied: ``backward_override="dequantized"``.

Forward saves the rowwise operands of the input and of the weight. Backward decodes each right
before the GEMM that reads it, and turns it: dgrad and wgrad contract another dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from fp8core.backend_api import DequantizeDesc, Operand, OperandSpec, split_groups
from fp8core.chain.shape import BindContext
from fp8core.errors import UnsupportedError

Decode: TypeAlias = "Callable[..., Operand]"
"""``f(operand [rows, k], *groups) -> operand [k, rows]`` in high precision."""


def bind_decode(
    tensor: str, context: BindContext, *, is_grouped: bool = False, offsets_on_device: bool = False
) -> Decode | None:
    """Return what decodes the operand of ``tensor``, input or weight; None if backward takes what
    forward made for it.

    Raises:
        UnsupportedError: its groups have scales that cannot be told apart on the host.
    """
    plan = context.gemm_plan
    spec, columnwise = plan.tensors[tensor]
    if not plan.dequantizes or spec is None or columnwise is not None:
        return None
    run = context.resolve(f"{tensor} dequantized", DequantizeDesc(spec, context.dtype)).run
    # Scales of single rows are decoded for all groups at once.
    if not is_grouped or (spec.block[0] == 1 and spec.scale_format != "e4m3"):
        return lambda operand, *groups: Operand(run(operand).t())
    if offsets_on_device:
        raise UnsupportedError(
            f"{context.owner}: backward_override='dequantized' with scales of {spec} needs "
            f"m_splits on the CPU, where each group is decoded with its own scale. Give a list, or "
            f"choose backward_override='high_precision'."
        )
    return _by_group(spec, run)


def _by_group(spec: OperandSpec, run: Callable[..., Any]) -> Decode:
    def decode(operand: Operand, offsets: torch.Tensor) -> Operand:
        parts = split_groups(spec, operand, offsets.tolist(), 0)
        return Operand(torch.cat([run(part) for part in parts]).t())

    return decode
