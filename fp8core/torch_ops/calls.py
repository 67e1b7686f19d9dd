"""Operators with the signatures of the backend API, for layers in captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp8core.backend_api import (
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    Operand,
)
from fp8core.torch_ops import operators
from fp8core.torch_ops.attention import attention_backward_call, attention_call
from fp8core.torch_ops.derived import OPERATORS, tensors
from fp8core.torch_ops.encoding import Operation, encode
from fp8core.torch_ops.training import adam_call

__all__ = ["call_of"]

Call = Callable[..., Any]


def call_of(operation: Operation) -> Call:
    """Return the operator of ``operation`` as a callable of the backend API's signature."""
    text, op = encode(operation), operation.desc.op
    return partial(OPERATORS[op], text) if op in OPERATORS else _CALLS[op](text, operation)


def _scale_update(text: str, operation: Operation) -> Call:
    return lambda histories, scales, targets, nonfinite=(): operators._scale_update(
        text, list(histories), list(scales), list(targets), list(nonfinite)
    )


def _gemm(text: str, operation: Operation) -> Call:
    def run(
        a: Operand,
        b: Operand,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if out is None:
            result: torch.Tensor = operators._gemm(text, tensors(a), tensors(b), bias)
            return result
        operators._gemm_out(text, tensors(a), tensors(b), bias, out)
        return out

    return run


def _grouped_gemm(text: str, operation: Operation) -> Call:
    desc = operation.desc
    assert isinstance(desc, GroupedGemmDesc)

    def run(
        a: Operand,
        b: Operand | Sequence[Operand],
        group_offsets: torch.Tensor,
        *,
        bias: Sequence[torch.Tensor] | None = None,
        out: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor | Sequence[torch.Tensor]:
        operands = [b] if isinstance(b, Operand) else b
        flat_b = [tensor for operand in operands for tensor in tensors(operand)]
        arguments = (text, tensors(a), flat_b, group_offsets, list(bias or ()))
        if out is None:
            results: list[torch.Tensor] = operators._grouped_gemm(*arguments)
            return results if desc.contract_groups else results[0]
        operators._grouped_gemm_out(
            *arguments, [out] if isinstance(out, torch.Tensor) else list(out)
        )
        return out

    return run


def _with_mean(desc: NormDesc, results: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    """Return the results with None for the mean of an RMSNorm, before the last one."""
    return tuple(results) if desc.kind == "layernorm" else (*results[:-1], None, results[-1])


def _with_grad_bias(
    desc: NormBackwardDesc, results: list[torch.Tensor]
) -> tuple[torch.Tensor | None, ...]:
    """Return the results with None for the gradient of the bias, which an RMSNorm does not have."""
    return tuple(results) if desc.norm.kind == "layernorm" else (*results, None)


_CALLS: dict[str, Callable[[str, Operation], Call]] = {
    "scale_update": _scale_update,
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "attention": attention_call,
    "attention_backward": attention_backward_call,
    "adam": lambda text, operation: adam_call(text),
}
