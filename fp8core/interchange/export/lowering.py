"""fp8core's operators as functions of operators that torch translates to ONNX.

Quantization becomes QuantizeLinear and DequantizeLinear, a GEMM a MatMul of dequantized values in
float32. Everything else is traced through the reference backend, which is torch's own operators.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.onnx import ops
from torch.overrides import TorchFunctionMode

from fp8core.backend_api import OperandSpec
from fp8core.interchange.export import operands
from fp8core.torch_ops.definition import Tensors, implementation
from fp8core.torch_ops.encoding import decode

__all__ = ["DECOMPOSITIONS", "LOWERED", "operand_specs", "refusal_of"]

_Optional = torch.Tensor | None

# Operators whose arithmetic torch translates.
_TRACED = (
    *("norm", "activation", "rotary", "router", "route"),
    *("dispatch_rows", "combine_rows", "cross_entropy", "column_sums"),
)


def operand_specs(text: str) -> tuple[OperandSpec | None, OperandSpec | None]:
    """Return how the operands of a GEMM are quantized."""
    desc: Any = decode(text).desc
    return desc.a, desc.b


def refusal_of(name: str, arguments: Sequence[Any]) -> str | None:
    """Say why the operator ``name``, called with these, has no translation; None if it has."""
    if name not in LOWERED:
        return f"fp8core.{name} has no translation to ONNX"
    desc: Any = decode(arguments[0]).desc
    if name == "attention":
        return _refusal_of_attention(desc)
    if name == "quantize":
        *_, scale, amax, _, nonfinite, by_amax = (*arguments, None, None)[:8]
        if scale is not None or amax is not None:
            return "delayed scaling changes its scales in every call"
        if nonfinite is not None:
            return 'nonfinite="propagate" counts what a cast meets, and ONNX keeps no counts'
        if by_amax is not None:
            return "an amax that several ranks share needs their collectives"
        if desc.rowwise is None:
            return "a columnwise operand alone belongs to backward"
        return operands.refusal_of(desc.rowwise)
    if name in ("gemm", "grouped_gemm"):
        if desc.accumulate or getattr(desc, "contract_groups", False):
            return "a GEMM of backward has no translation"
        refusals = [operands.refusal_of(spec) for spec in (desc.a, desc.b) if spec is not None]
        return next(filter(None, refusals), None)
    if name == "dequantize":
        return operands.refusal_of(desc.operand)
    return None


def _refusal_of_attention(desc: Any) -> str | None:
    if desc.qkv is not None or desc.s is not None or desc.out is not None:
        return "FP8 attention quantizes within the softmax, which is not translated"
    if desc.dropout:
        return "attention with dropout is training; call model.eval() first"
    return None


def _quantize(
    text: str, x: torch.Tensor, offsets: Sequence[int] | None, *ignored: object
) -> list[torch.Tensor]:
    desc: Any = decode(text).desc
    spec: OperandSpec = desc.rowwise
    if offsets is None:
        return operands.cast(spec, x)
    # ONNX concatenates and splits no FP8, so groups are handed over in float32, dequantized.
    groups = [x[start:end] for start, end in itertools.pairwise(offsets) if end > start]
    values = [operands.dequantized(spec, operands.cast(spec, group)) for group in groups]
    one = x.new_ones((), dtype=torch.float32)
    return [torch.cat(values) if values else x.to(torch.float32), one, one]


def _dequantize(text: str, operand: Tensors) -> torch.Tensor:
    desc: Any = decode(text).desc
    return operands.dequantized(desc.operand, operand).to(desc.dtype)


def _values(spec: OperandSpec | None, operand: Tensors) -> torch.Tensor:
    if spec is not None and operand[0].dtype == operands.held_as(spec):
        return operands.dequantized(spec, operand)
    wide = torch.float64 if operand[0].dtype == torch.float64 else torch.float32
    return operand[0].to(wide)


def _gemm(text: str, a: Tensors, b: Tensors, bias: _Optional) -> torch.Tensor:
    desc: Any = decode(text).desc
    product = _values(desc.a, a) @ _values(desc.b, b).t()  # [m, k] x [n, k] -> [m, n]
    if bias is not None:
        product = product + bias.to(product.dtype)
    return product.to(desc.out_dtype)


def _grouped_gemm(
    text: str, a: Tensors, b: Tensors, offsets: Sequence[int], biases: Tensors
) -> list[torch.Tensor]:
    """One GEMM a group; the sizes of groups are part of the graph."""
    desc: Any = decode(text).desc
    step = len(b) // (len(offsets) - 1)
    products = []
    for group, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start == end:
            continue
        part, bias = [a[0][start:end]], biases[group] if biases else None
        products.append(_gemm(text, part, b[group * step : (group + 1) * step], bias))
    if not products:
        return [a[0].new_zeros(0, b[0].shape[0], dtype=desc.out_dtype)]
    return [torch.cat(products)]


class _SumsInFloat32(TorchFunctionMode):
    """Leaves out conversions to float64, in which the reference backend sums products of float32:
    few runtimes are fast there."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        given = kwargs or {}
        if func is torch.Tensor.to and torch.float64 in (*args[1:2], given.get("dtype")):
            return args[0]
        return func(*args, **given)


def _attention(*arguments: Any) -> Any:
    with _SumsInFloat32():
        return implementation("attention")(*arguments)


LOWERED: dict[str, Callable[..., Any]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "attention": _attention,
    **{name: implementation(name) for name in _TRACED},
}
"""The function of each operator that has a translation, by the operator's name."""


def _sort(
    x: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Sequence[torch.Tensor]:
    """Sort by TopK, which leaves equal values in their order."""
    # Runtimes have TopK of few types; conversions to these keep order and values.
    held = torch.float32 if x.is_floating_point() else torch.int64
    wide = x.dtype if x.dtype == torch.float64 else held
    values, indices = ops.symbolic_multi_out(
        "TopK",
        (x.to(wide), torch.full((1,), x.shape[dim], dtype=torch.int64)),
        {"axis": dim % x.dim(), "largest": int(descending)},
        dtypes=(wide, torch.int64),
        shapes=(x.shape, x.shape),
    )
    return values.to(x.dtype), indices


def _argsort(x: torch.Tensor, **keywords: Any) -> torch.Tensor:
    return _sort(x, **keywords)[1]


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.sort.stable: _sort,
    torch.ops.aten.argsort.stable: _argsort,
}
"""The functions of torch's operators that its exporter does not translate."""
