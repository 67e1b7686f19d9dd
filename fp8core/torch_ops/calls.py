"""Operators with the signatures of the backend API, for layers in captured graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp8core.backend_api import (
    AddNormDesc,
    FusedDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
)
from fp8core.torch_ops import fused, operators, shapes
from fp8core.torch_ops.attention import attention_backward_call, attention_call
from fp8core.torch_ops.derived import OPERATORS
from fp8core.torch_ops.encoding import Operation, encode
from fp8core.torch_ops.training import adam_call

__all__ = ["call_of"]

Call = Callable[..., Any]


def call_of(operation: Operation) -> Call:
    """Return the operator of ``operation`` as a callable of the backend API's signature."""
    text, op = encode(operation), operation.desc.op
    return partial(OPERATORS[op], text) if op in OPERATORS else _CALLS[op](text, operation)


def _flat(operand: Operand) -> list[torch.Tensor]:
    return [tensor for tensor in operand if tensor is not None]


def _take(spec: OperandSpec | None, flat: list[torch.Tensor]) -> Operand | None:
    """Remove the tensors of one operand from the front of ``flat``, and return the operand."""
    if spec is None:
        return None
    number = 3 if spec.scale_format == "e4m3" else 2
    taken = [flat.pop(0) for _ in range(number)]
    return Operand(*taken)


def _quantized(desc: QuantizeDesc, transposes: bool, flat: list[torch.Tensor]) -> Quantized:
    rowwise = _take(desc.rowwise, flat)
    if shapes.hands_both_as_one(desc, transposes):
        assert rowwise is not None
        return Quantized(rowwise, Operand(*(None if t is None else t.t() for t in rowwise)))  # type: ignore[arg-type]  # data is there
    return Quantized(rowwise, _take(desc.columnwise, flat))


def _record(
    amax_out: torch.Tensor | None, nonfinite_out: torch.Tensor | None, flat: list[torch.Tensor]
) -> None:
    for out in (nonfinite_out, amax_out):  # the last result first
        if out is not None:
            out.copy_(flat.pop())


def _quantize(text: str, operation: Operation) -> Call:
    desc: Any = operation.desc

    def run(
        x: torch.Tensor,
        group_offsets: torch.Tensor | None = None,
        *,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        rng: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized:
        given = (x, group_offsets, scale, amax_out, rng)
        flat = list(operators._quantize(text, *given, nonfinite_out, amax))
        _record(amax_out, nonfinite_out, flat)
        return _quantized(desc, operation.transposes, flat)

    return run


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
            result: torch.Tensor = operators._gemm(text, _flat(a), _flat(b), bias)
            return result
        operators._gemm_out(text, _flat(a), _flat(b), bias, out)
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
        flat_b = [tensor for operand in operands for tensor in _flat(operand)]
        arguments = (text, _flat(a), flat_b, group_offsets, list(bias or ()))
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


def _fused(text: str, operation: Operation) -> Call:
    desc = operation.desc
    assert isinstance(desc, FusedDesc)

    def run(
        *arguments: torch.Tensor | None,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        rng: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        given = (list(arguments), scale, amax_out, rng)
        flat = list(fused._fused(text, *given, nonfinite_out))
        _record(amax_out, nonfinite_out, flat)
        first = _quantized(desc.quantize, operation.transposes, flat)
        sums = [flat.pop()] if desc.sums else []
        if isinstance(desc.producer, NormDesc):
            return (first, *_with_mean(desc.producer, flat), *sums)
        if isinstance(desc.producer, NormBackwardDesc):
            return (first, *_with_grad_bias(desc.producer, flat), *sums)
        return (first, *flat, *sums)

    return run


def _add_norm(text: str, operation: Operation) -> Call:
    desc = operation.desc
    assert isinstance(desc, AddNormDesc)
    return lambda x, residual, weight, bias=None: _with_mean(
        desc.norm, fused._add_norm(text, x, residual, weight, bias)
    )


_CALLS: dict[str, Callable[[str, Operation], Call]] = {
    "quantize": _quantize,
    "scale_update": _scale_update,
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "attention": attention_call,
    "attention_backward": attention_backward_call,
    "norm_quantize": _fused,
    "norm_backward_quantize": _fused,
    "activation_quantize": _fused,
    "activation_backward_quantize": _fused,
    "add_norm": _add_norm,
    "adam": lambda text, operation: adam_call(text),
}
