"""The fewest bytes that a memory-bound operation moves: each input read, each result written once.

Scales that depend on more than the kernel's tile, those of a tensor that are not delayed and those
of whole columns, need the amax first: such an operation reads its inputs twice. A fused producer
computes its result in both passes, as reading two inputs again costs less than writing and reading
the result. Smaller tensors may find the second pass in the L2 cache and so beat their ideal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fp8core import formats
from fp8core.backend_api import GATED, OperandSpec
from fp8core.recipe.plan import TensorPlan

__all__ = [
    "HIGH_PRECISION_RESULT",
    "OpBytes",
    "activation",
    "activation_backward",
    "cast",
    "column_sums",
    "dequantize",
    "layer",
    "norm",
    "norm_backward",
    "transformer_layer",
]

ACTIVATION_BYTES, STATISTIC_BYTES, SCALE_BYTES = 2, 4, 4
"""Of a bfloat16 element, a float32 statistic, a float32 scale."""

TWO_LEVELS = "e4m3"
"""The format of scales that are themselves scaled, by one factor of the whole tensor."""

HIGH_PRECISION_RESULT = TensorPlan(None, None)
"""Of a result that is written in bfloat16."""


class OpBytes(NamedTuple):
    """An operation and the bytes that it has to read and write."""

    op: str
    bytes: int


def operand_bytes(spec: OperandSpec, rows: int, k: int) -> int:
    """Return the bytes of the codes and scales of an operand ``[rows, k]``."""
    codes = rows * k * formats.by_name(spec.format).bits // 8
    block_rows, block_k = (block or size for block, size in zip(spec.block, (rows, k), strict=True))
    blocks = -(-rows // block_rows) * -(-k // block_k)
    return codes + blocks * (SCALE_BYTES if spec.scale_format == "float32" else 1)


def result_bytes(plan: TensorPlan, rows: int, columns: int) -> int:
    """Return the bytes of a tensor written as ``plan`` asks: bfloat16 if it is not quantized."""
    if plan == HIGH_PRECISION_RESULT:
        return rows * columns * ACTIVATION_BYTES
    total = 0
    if plan.rowwise is not None:
        total += operand_bytes(plan.rowwise, rows, columns)
    if plan.columnwise is not None:
        total += operand_bytes(plan.columnwise, columns, rows)
    return total


def passes(plan: TensorPlan) -> int:
    """Return how often the inputs are read: twice if a scale is of the whole tensor or of whole
    columns, as their amax comes first. Two levels of scales have one of the whole tensor."""
    row, column = (_free_extents(spec) for spec in plan)
    return 2 if row == 2 or column > 0 else 1


def _free_extents(spec: OperandSpec | None) -> int:
    """Return along how many of its dimensions a scale covers all of the operand."""
    if spec is None or spec.delayed:
        return 0
    return 2 if spec.scale_format == TWO_LEVELS else spec.block.count(0)


def cast(rows: int, columns: int, plan: TensorPlan) -> int:
    """Return the bytes of quantizing a bfloat16 tensor."""
    source = rows * columns * ACTIVATION_BYTES
    return passes(plan) * source + result_bytes(plan, rows, columns)


def dequantize(rows: int, columns: int, spec: OperandSpec) -> int:
    """Return the bytes of turning an operand into bfloat16."""
    return operand_bytes(spec, rows, columns) + rows * columns * ACTIVATION_BYTES


def column_sums(rows: int, columns: int) -> int:
    """Return the bytes of the float32 sums of a bfloat16 tensor's columns."""
    return rows * columns * ACTIVATION_BYTES + columns * STATISTIC_BYTES


def norm(
    kind: str,
    rows: int,
    columns: int,
    plan: TensorPlan = HIGH_PRECISION_RESULT,
    *,
    residual: bool = False,
) -> int:
    """Return the bytes of a norm that writes its result as ``plan`` asks.

    With ``residual`` it also reads a second tensor and writes the sum, which a second pass reads.
    """
    tensor, vectors = rows * columns * ACTIVATION_BYTES, _vectors(kind)
    parameters = vectors * columns * ACTIVATION_BYTES
    statistics = vectors * rows * STATISTIC_BYTES
    reads = tensor * passes(plan) + (2 * tensor if residual else 0)
    return reads + parameters + statistics + result_bytes(plan, rows, columns)


def norm_backward(
    kind: str, rows: int, columns: int, plan: TensorPlan = HIGH_PRECISION_RESULT
) -> int:
    """Return the bytes of a norm's gradients from grad_output, the input and the statistics."""
    tensor, vectors = rows * columns * ACTIVATION_BYTES, _vectors(kind)
    weight = columns * ACTIVATION_BYTES
    statistics = vectors * rows * STATISTIC_BYTES
    grad_params = vectors * columns * STATISTIC_BYTES
    reads = (2 * tensor + statistics) * passes(plan)
    return reads + weight + grad_params + result_bytes(plan, rows, columns)


def activation(name: str, rows: int, columns: int, plan: TensorPlan = HIGH_PRECISION_RESULT) -> int:
    """Return the bytes of an activation with a result of ``columns``; a gated one reads twice as
    many."""
    source = rows * columns * _width(name) * ACTIVATION_BYTES
    return source * passes(plan) + result_bytes(plan, rows, columns)


def activation_backward(
    name: str, rows: int, columns: int, plan: TensorPlan = HIGH_PRECISION_RESULT
) -> int:
    """Return the bytes of the gradient of an activation's input, of ``columns`` of its result."""
    reads = rows * columns * (1 + _width(name)) * ACTIVATION_BYTES
    return reads * passes(plan) + result_bytes(plan, rows, columns * _width(name))


def _vectors(kind: str) -> int:
    """Return how many statistics a row has, and how many parameters a column: the reciprocal
    deviation and the weight, for a LayerNorm also the mean and the bias."""
    return 2 if kind == "layernorm" else 1


def _width(name: str) -> int:
    return 2 if name in GATED else 1


def layer(
    tokens: int,
    linears: tuple[tuple[int, int], ...],
    *,
    norm_kind: str | None,
    activation_name: str | None,
    plan: dict[str, TensorPlan],
) -> Iterator[OpBytes]:
    """Yield each memory-bound operation of a forward and backward, in order.

    The layer is a norm, if ``norm_kind`` is given, and ``linears`` of ``(in, out)`` features with
    the activation between them. ``plan`` says how ``input``, ``weight`` and ``grad_output`` of a
    linear are quantized; each weight is quantized once. Products are not among them: they move
    their bytes while they compute.
    """
    x, weight, grad = plan["input"], plan["weight"], plan["grad_output"]
    is_low = x != HIGH_PRECISION_RESULT
    (hidden, _), *rest = linears
    if norm_kind is not None:
        name = f"{norm_kind} + cast" if is_low else norm_kind
        yield OpBytes(name, norm(norm_kind, tokens, hidden, x))
    elif is_low:
        yield OpBytes("input cast", cast(tokens, hidden, x))
    for number, (k, n) in enumerate(linears, 1):
        if is_low:
            suffix = str(number) if len(linears) > 1 else ""
            yield OpBytes(f"weight{suffix} cast", cast(n, k, weight))
    then = " + cast" if is_low else ""
    for k, _ in rest:
        assert activation_name is not None
        yield OpBytes(activation_name + then, activation(activation_name, tokens, k, x))
    if is_low:
        yield OpBytes("grad_output cast", cast(tokens, linears[-1][1], grad))
    for k, _ in rest:
        assert activation_name is not None
        name = f"{activation_name} backward{then}"
        yield OpBytes(name, activation_backward(activation_name, tokens, k, grad))
    if norm_kind is not None:
        yield OpBytes(f"{norm_kind} backward", norm_backward(norm_kind, tokens, hidden))


def transformer_layer(
    tokens: int,
    linears: tuple[tuple[int, int], ...],
    *,
    norm_kind: str,
    activation_name: str,
    has_bias: bool,
    plan: dict[str, TensorPlan],
) -> Iterator[OpBytes]:
    """Yield each memory-bound operation of a pre-LN Transformer layer, forward and backward.

    ``linears`` are those of ``layer``, of attention's projections and of the MLP. A norm adds the
    residual before it and writes the sum, its backward the gradient of the residual. Attention
    itself, and what writes its operands and their gradients, is not among them, as products are
    not. ``has_bias``: gradients in high precision are summed where no cast reads them.
    """
    x, weight, grad = plan["input"], plan["weight"], plan["grad_output"]
    is_low = x != HIGH_PRECISION_RESULT
    then = " + cast" if is_low else ""
    (hidden, packed), (_, _), (_, _), (ffn, _) = linears
    tensor = tokens * hidden * ACTIVATION_BYTES
    yield OpBytes(f"{norm_kind}{then}", norm(norm_kind, tokens, hidden, x))
    if is_low:
        for number, (k, n) in enumerate(linears, 1):
            yield OpBytes(f"weight{number} cast", cast(n, k, weight))
        yield OpBytes("attention's result cast", cast(tokens, hidden, x))
    sum_and_norm = norm(norm_kind, tokens, hidden, x, residual=True)
    yield OpBytes(f"sum + {norm_kind}{then}", sum_and_norm)
    yield OpBytes(activation_name + then, activation(activation_name, tokens, ffn, x))
    yield OpBytes("sum", 3 * tensor)
    if is_low:
        yield OpBytes("grad_output cast", cast(tokens, hidden, grad))
    elif has_bias:
        yield OpBytes("sums for biases", column_sums(tokens, packed + 3 * hidden))
    backward = activation_backward(activation_name, tokens, ffn, grad)
    yield OpBytes(f"{activation_name} backward{then}", backward)
    # It writes the gradient for the residual, too.
    backward = norm_backward(norm_kind, tokens, hidden) + tensor
    projected = result_bytes(grad, tokens, hidden) if is_low else 0
    yield OpBytes(f"{norm_kind} backward + sum{then}", backward + projected)
    if is_low:
        yield OpBytes("gradient of q, k, v cast", cast(tokens, packed, grad))
    yield OpBytes(f"{norm_kind} backward + sum", backward)
