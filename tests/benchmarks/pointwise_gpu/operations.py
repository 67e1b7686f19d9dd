"""The memory-bound operations: their inputs, their fewest bytes, and their results in float32.

Every result is ``[rows, columns]`` or a gradient of such a tensor's producer; a gated activation
reads ``[rows, 2 columns]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8core.backend_api import (
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    ColumnSumsDesc,
    DequantizeDesc,
    FusedDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    QuantizeDesc,
)
from fp8core.chain.activation import activation_shape
from fp8core.chain.linear.shape import LinearShape
from fp8core.chain.norm import NormShape
from fp8core.chain.shape import LinkShape
from fp8core.inspection.descriptors import record
from fp8core.recipe.plan import TensorPlan
from tests.benchmarks.layers_gpu.cases import HIGH
from tests.benchmarks.layers_gpu.data import ACTIVATION_FUNCTIONS, plan_of
from tests.benchmarks.measuring import ideal_bytes

__all__ = ["EPS", "OPERATIONS", "Inputs", "Operation", "Shape", "exact_results"]

EPS = 1e-5
BF16 = torch.bfloat16
Inputs = tuple[torch.Tensor, ...]
NORMS = ("rmsnorm", "layernorm")
ACTIVATIONS = ("swiglu", "gelu")


class Shape(NamedTuple):
    """Of the result."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation by name: ``kind`` is a norm, an activation, or empty for what has no kinds.

    ``tensor`` is the tensor of a linear that a cast quantizes, in both orientations or in one.
    """

    name: str
    step: str
    kind: str = ""
    tensor: str = "input"
    rowwise: bool = True
    columnwise: bool = True

    @property
    def has_recipe(self) -> bool:
        """Whether it has no form without a recipe: it casts, or undoes a cast."""
        return self.step in ("cast", "dequantize")

    @property
    def quantizes(self) -> bool:
        """Whether it has a form that casts its result."""
        return self.step not in ("dequantize", "column_sums", "add_norm")

    def desc(self, recipe: str) -> OpDesc | None:
        """Return the descriptor of a layer under ``recipe``; None if it asks for none."""
        if recipe == HIGH:
            return None if self.has_recipe else self._plain()
        if not (self.quantizes or self.step == "dequantize"):
            return None
        plan = self.plan(recipe)
        if self.step == "cast":
            return QuantizeDesc(BF16, *plan)
        if self.step == "dequantize":
            return None if plan.rowwise is None else DequantizeDesc(plan.rowwise, BF16)
        return self._fused(recipe)

    def _plain(self) -> OpDesc:
        norm = NormDesc(self.kind, BF16, BF16, EPS)
        if self.step == "column_sums":
            return ColumnSumsDesc(BF16)
        plain: dict[str, OpDesc] = {
            "norm": norm,
            "add_norm": AddNormDesc(norm),
            "norm_backward": NormBackwardDesc(norm),
            "activation": ActivationDesc(self.kind, BF16, BF16),
            "activation_backward": ActivationBackwardDesc(self.kind, BF16, BF16),
        }
        return plain[self.step]

    def _fused(self, recipe: str) -> OpDesc | None:
        """Return the fusion with the cast in both orientations that a layer asks for."""
        linear = LinearShape(1, 1, BF16, None)
        is_norm = self.kind in NORMS
        producer: LinkShape = (
            NormShape(self.kind, 1, EPS, False, BF16) if is_norm else activation_shape(self.kind)
        )
        for request in record([linear, producer, linear], plan_of(recipe), BF16):
            desc = request.desc
            if (
                isinstance(desc, FusedDesc)
                and desc.producer.op == self.step
                and not desc.quantize.sums
                and None not in (desc.quantize.rowwise, desc.quantize.columnwise)
            ):
                return desc
        return None

    def plan(self, recipe: str) -> TensorPlan:
        """Return how the result is quantized."""
        rowwise, columnwise = plan_of(recipe).tensors[self.tensor]
        return TensorPlan(
            rowwise if self.rowwise else None, columnwise if self.columnwise else None
        )

    def ideal_bytes(self, shape: Shape, recipe: str) -> int:
        """Return the fewest bytes of the operation with a result of ``shape``."""
        plan = self.plan(recipe)
        if self.step == "cast":
            return ideal_bytes.cast(*shape, plan)
        if self.step == "dequantize":
            assert plan.rowwise is not None
            return ideal_bytes.dequantize(*shape, plan.rowwise)
        if self.step == "column_sums":
            return ideal_bytes.column_sums(*shape)
        if self.step == "norm_backward":
            return ideal_bytes.norm_backward(self.kind, *shape, plan)
        if self.step == "activation":
            return ideal_bytes.activation(self.kind, *shape, plan)
        if self.step == "activation_backward":
            return ideal_bytes.activation_backward(self.kind, *shape, plan)
        return ideal_bytes.norm(self.kind, *shape, plan, residual=self.step == "add_norm")

    def inputs(self, shape: Shape, device: torch.device) -> Inputs:
        """Return normal inputs in bfloat16, in the order of the descriptor's arguments."""
        rows, columns = shape
        x = _normal((rows, columns * (2 if self.kind in GATED else 1)), device)
        if self.step in ("cast", "dequantize", "column_sums"):
            return (x,)
        grad = _normal((rows, columns), device) * 0.01
        if self.kind in ACTIVATIONS:
            return (grad, x) if self.step == "activation_backward" else (x,)
        weight = 1 + 0.1 * _normal((columns,), device)
        if self.step == "norm_backward":
            mean, rstd = statistics_of(self.kind, x)
            return (grad, x, weight, *mean, rstd)
        parameters = (weight, 0.1 * _normal((columns,), device))[: 1 + (self.kind == "layernorm")]
        return (
            (x, _normal((rows, columns), device), *parameters)
            if (self.step == "add_norm")
            else (x, *parameters)
        )


def _operations() -> Iterable[Operation]:
    for kind in NORMS:
        yield Operation(kind, "norm", kind)
        yield Operation(f"{kind}_residual", "add_norm", kind)
        yield Operation(f"{kind}_backward", "norm_backward", kind, "grad_output")
    for kind in ACTIVATIONS:
        yield Operation(kind, "activation", kind)
        yield Operation(f"{kind}_backward", "activation_backward", kind, "grad_output")
    yield Operation("cast", "cast")
    yield Operation("cast_rowwise", "cast", columnwise=False)
    yield Operation("cast_columnwise", "cast", rowwise=False)
    yield Operation("cast_weight", "cast", tensor="weight")
    yield Operation("cast_gradient", "cast", tensor="grad_output")
    yield Operation("dequantize", "dequantize")
    yield Operation("column_sums", "column_sums")


OPERATIONS = {operation.name: operation for operation in _operations()}


def _normal(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    values: torch.Tensor = torch.randn(shape, device=device, dtype=BF16)
    return values


def statistics_of(kind: str, x: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Return ``((mean,), rstd)`` in float32; without a mean for an RMSNorm."""
    wide = x.float()
    if kind == "rmsnorm":
        return (), (wide.square().mean(-1) + EPS).rsqrt()
    mean = wide.mean(-1)
    return (mean,), ((wide - mean[:, None]).square().mean(-1) + EPS).rsqrt()


def exact_results(operation: Operation, inputs: Inputs) -> torch.Tensor:
    """Return the first tensor of ``[rows, columns]`` that the operation computes, in float32.

    That is the normalized, activated or dequantized tensor, or the gradient; of column sums, these.
    """
    wide = [tensor.float() for tensor in inputs]
    if operation.step == "column_sums":
        return wide[0].sum(0)
    if operation.step in ("cast", "dequantize"):
        return wide[0]
    return FORMULAS[operation.step](operation.kind, *wide)


def _norm(kind: str, x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
    mean, rstd = statistics_of(kind, x)
    centered = x - mean[0][:, None] if mean else x
    y = centered * rstd[:, None] * weight
    return y + bias[0] if bias else y


def _add_norm(
    kind: str, x: torch.Tensor, residual: torch.Tensor, *rest: torch.Tensor
) -> torch.Tensor:
    return _norm(kind, (x + residual).bfloat16().float(), *rest)


def _norm_backward(
    kind: str, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, *statistics: torch.Tensor
) -> torch.Tensor:
    *mean, rstd = statistics
    normalized = (x - mean[0][:, None] if mean else x) * rstd[:, None]
    scaled = grad * weight
    projected = normalized * (scaled * normalized).mean(-1, keepdim=True)
    if mean:
        scaled = scaled - scaled.mean(-1, keepdim=True)
    return (scaled - projected) * rstd[:, None]


def _activation_backward(kind: str, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    if kind == "gelu":
        product: torch.Tensor = torch.ops.aten.gelu_backward(grad, x, approximate="tanh")
        return product
    activated, factor = x.chunk(2, dim=-1)
    sigmoid = activated.sigmoid()
    silu = activated * sigmoid
    slope = sigmoid * (1 + activated * (1 - sigmoid))
    return torch.cat([grad * factor * slope, grad * silu], dim=-1)


FORMULAS: dict[str, Callable[..., torch.Tensor]] = {
    "norm": _norm,
    "add_norm": _add_norm,
    "norm_backward": _norm_backward,
    "activation": lambda kind, x: ACTIVATION_FUNCTIONS[kind](x),
    "activation_backward": _activation_backward,
}
