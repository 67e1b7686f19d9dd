"""Norms, activations and the gradients of biases, which layers compute in high precision around
their products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fp8core.backend_api.descriptors import CastShape, QuantizeDesc
from fp8core.backend_api.operand_spec import dtype_text, plain_text, text
from fp8core.backend_api.record import (
    RECORDS,
    ResultShape,
    computing_dtype,
    operation,
    shape_of,
)


@dataclass(frozen=True, slots=True)
class FusedDesc:
    """Optional: a producer and the quantization of its result, in one call.

    Named ``<producer.op>_quantize``. Takes the producer's arguments, then the keywords of
    :class:`QuantizeDesc`; returns the producer's result with a :class:`Quantized` in the place of
    its first tensor. Equals the pair bit for bit; the pair hands over in ``quantize.dtype``, which
    is float32 where the plan does not round before the cast. With ``quantize.sums`` the column sums
    of that tensor in float32 ``[n]`` are appended: a bias gradient.

    With ``quantize.chunked``, of an :class:`ActivationBackwardDesc` and specs that round to
    nearest, chunks of rows are computed and quantized as they are read, and ``grad_output`` may be
    :class:`~fp8core.backend_api.ComputedRows`. A backend that has this has that cast as well.
    """

    low_precision: ClassVar[bool] = True
    producer: NormDesc | NormBackwardDesc | ActivationDesc | ActivationBackwardDesc
    quantize: QuantizeDesc

    @property
    def op(self) -> str:
        """The operation's name."""
        return f"{self.producer.op}_quantize"

    def __str__(self) -> str:
        return text(self, f"{self.producer} then {self.quantize}")


@operation(
    *("activation_backward_quantize", "activation_quantize"),
    *("norm_backward_quantize", "norm_quantize"),
    is_optional=True,
    schema="(str operation, Tensor?[] arguments, Tensor? scale, Tensor? amax, Tensor? rng, "
    "Tensor? nonfinite=None, Tensor? second_scale=None, Tensor? second_amax=None) "
    "-> Tensor[]",
    order=(
        *("arguments", "scale", "amax_out", "rng", "nonfinite_out"),
        *("second_scale", "second_amax_out"),
    ),
)
def fused(
    desc: FusedDesc,
    *arguments: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    second_scale: torch.Tensor | None = None,
    second_amax_out: torch.Tensor | None = None,
    rng: torch.Tensor | None = None,
    nonfinite_out: torch.Tensor | None = None,
) -> tuple[CastShape | ResultShape | None, ...]:
    """Return the shapes of the producer's results, the first one cast, and of the sums.

    Of a ``split`` one both halves are results, and what the call has in pairs is an argument for
    each.
    """
    results = RECORDS[desc.producer.op].shapes(desc.producer, *arguments)
    first, *rest = results if type(results) is tuple else (results,)
    sums = [ResultShape((first.size[1],), torch.float32)] if desc.quantize.sums else []
    rows, columns = first.size
    casts = [CastShape(desc.quantize, (rows, columns))]
    if desc.quantize.split:
        casts = [CastShape(desc.quantize, (rows, columns // 2))] * 2
    return *casts, *rest, *sums


@dataclass(frozen=True, slots=True)
class AddNormDesc:
    """Optional: ``add_norm(x, residual, weight, bias=None) -> (sum, y, mean, rstd)``.

    The sum is rounded to ``norm.dtype`` before it is normalized, as the pair does.
    """

    op: ClassVar[str] = "add_norm"
    low_precision: ClassVar[bool] = False
    norm: NormDesc
    __str__ = plain_text


@operation(is_optional=True)
def add_norm(
    desc: AddNormDesc,
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> tuple[ResultShape, ResultShape, ResultShape | None, ResultShape]:
    """Return the shapes of ``sum``, ``y``, ``mean`` and ``rstd``."""
    return shape_of(x, desc.norm.dtype), *norm(desc.norm, x, weight, bias)


@dataclass(frozen=True, slots=True)
class NormDesc:
    """``norm(x, weight, bias=None) -> (y, mean, rstd)``; mean is None for ``"rmsnorm"``.

    ``x [rows, n]`` in ``dtype``, ``weight [n]`` and ``bias [n]`` in any float dtype, ``y`` in
    ``out_dtype``, statistics float32 ``[rows]``; computed in float32. ``kind`` is ``"layernorm"``:
    ``(x - mean) * rstd * weight + bias``, or ``"rmsnorm"``: ``x * rstd * weight``, with
    ``rstd = 1 / sqrt(mean square + eps)``; ``zero_centered``: the weight is ``1 + weight``.
    """

    op: ClassVar[str] = "norm"
    low_precision: ClassVar[bool] = False
    kind: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    eps: float
    zero_centered: bool = False

    def __str__(self) -> str:
        start = f"{self.kind} {dtype_text(self.dtype)} -> {dtype_text(self.out_dtype)}"
        return text(self, start, f"eps={self.eps}")


@operation()
def norm(
    desc: NormDesc, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[ResultShape, ResultShape | None, ResultShape]:
    """Return the shapes of ``y``, ``mean`` and ``rstd``."""
    rows, n = x.shape
    statistic = ResultShape((rows,), computing_dtype(desc.dtype))
    mean = statistic if desc.kind == "layernorm" else None
    return ResultShape((rows, n), desc.out_dtype), mean, statistic


@dataclass(frozen=True, slots=True)
class NormBackwardDesc:
    """``norm_backward(grad_output, x, weight, mean, rstd) -> (grad_x, grad_weight, grad_bias)``.

    ``grad_x`` in ``norm.dtype``, the other two float32 ``[n]`` (grad_bias None for ``"rmsnorm"``).

    Optional: with ``added`` the call takes by that name another gradient of ``x``, as that of a
    residual, of the shape and dtype of ``grad_x``, and returns their sum in its place. ``grad_x``
    is rounded, and then the sum.
    """

    op: ClassVar[str] = "norm_backward"
    low_precision: ClassVar[bool] = False
    norm: NormDesc
    added: bool = False
    __str__ = plain_text


@operation(
    # A saved program has no argument behind rstd.
    schema="(str operation, Tensor grad_output, Tensor x, Tensor weight, Tensor? mean, "
    "Tensor rstd, Tensor? added=None) -> Tensor[]",
)
def norm_backward(
    desc: NormBackwardDesc,
    grad_output: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    *,
    added: torch.Tensor | None = None,
) -> tuple[ResultShape, ResultShape, ResultShape | None]:
    """Return the shapes of ``grad_x``, ``grad_weight`` and ``grad_bias``."""
    rows, n = x.shape
    parameter = ResultShape((n,), computing_dtype(desc.norm.dtype))
    bias = parameter if desc.norm.kind == "layernorm" else None
    return ResultShape((rows, n), desc.norm.dtype), parameter, bias


@dataclass(frozen=True, slots=True)
class ActivationDesc:
    """``activation(x) -> y`` in ``out_dtype``, in float32 from ``x [rows, n]`` in ``dtype``.

    ``name`` is one of :data:`ACTIVATIONS`. A gated one takes ``[rows, 2 n]``: the first half is
    activated and multiplied by the second. ``params`` are ``(limit, alpha, offset)`` of
    ``clamped_swiglu``, else empty.
    """

    op: ClassVar[str] = "activation"
    low_precision: ClassVar[bool] = False
    name: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    params: tuple[float, ...] = ()

    def __str__(self) -> str:
        return text(self, f"{self.name} {dtype_text(self.dtype)} -> {dtype_text(self.out_dtype)}")


@operation()
def activation(desc: ActivationDesc, x: torch.Tensor) -> ResultShape:
    """Return the shape of ``y``; a gated activation halves the columns."""
    rows, columns = x.shape
    return ResultShape((rows, columns // 2 if desc.name in GATED else columns), desc.out_dtype)


@dataclass(frozen=True, slots=True)
class ActivationBackwardDesc:
    """``activation_backward(grad_output, x) -> grad_x`` in ``out_dtype``, computed in float32."""

    op: ClassVar[str] = "activation_backward"
    low_precision: ClassVar[bool] = False
    name: str
    dtype: torch.dtype
    out_dtype: torch.dtype
    params: tuple[float, ...] = ()

    def __str__(self) -> str:
        return text(self, f"{self.name} {dtype_text(self.dtype)} -> {dtype_text(self.out_dtype)}")


@operation()
def activation_backward(
    desc: ActivationBackwardDesc, grad_output: torch.Tensor, x: torch.Tensor
) -> ResultShape:
    """Return the shape of ``grad_x``."""
    return shape_of(x, desc.out_dtype)


@dataclass(frozen=True, slots=True)
class ColumnSumsDesc:
    """``column_sums(x) -> float32 [n]``: the sum over the rows of ``x [rows, n]``, which has
    ``dtype``; float64 of float64. The gradient of a bias.

    Added in float32 in any order, the same each time: within ``(rows + 4) * 2^-24 * sum(|x|)`` of
    the exact sum. Zeros without rows; a NaN or inf is summed as it is.
    """

    op: ClassVar[str] = "column_sums"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    __str__ = plain_text


@operation()
def column_sums(desc: ColumnSumsDesc, x: torch.Tensor) -> ResultShape:
    """Return the shape of the sums."""
    _, n = x.shape
    return ResultShape((n,), computing_dtype(desc.dtype))


ACTIVATIONS: tuple[str, ...] = (
    *("gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu"),
    *("silu", "swiglu", "clamped_swiglu", "erfgelu"),
)
"""Transformer Engine's activations, where gelu is the tanh approximation, and GELU itself."""

GATED = frozenset({"geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu"})
"""The gated functions of :data:`ACTIVATIONS`."""
