"""What one operation is, as a small frozen value; :mod:`fp8core.backend_api` says what for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, TypeAlias

import torch

from fp8core.backend_api.descriptor_text import dtype_text, spec_text, text


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """How one operand ``[rows, k]`` of one GEMM is quantized: one cell of a linear layer's plan.

    ``value = decode(data) * scale_inv`` (times ``global_scale_inv`` with two-level scales), where
    one scale covers ``block = (rows, k)`` elements and 0 stands for the whole dimension: ``(0, 0)``
    tensorwise, ``(1, 0)`` rowwise, ``(1, 128)`` and ``(128, 128)`` DeepSeek blocks, ``(1, 32)`` MX,
    ``(1, 16)`` NVFP4. The last block of a row may be partial. A float32 scale that overflows
    becomes the largest float32; with blocks along k, the largest value of x's dtype.

    Attributes:
        format: name of the element format.
        block: extent of a scale block, elements.
        scale_format: ``"float32"``, ``"e8m0"`` (a byte, power of two, rounded up), or ``"e4m3"``
            (a byte, under a second, tensorwise float32 scale).
        target: the value that a block's amax maps to; the format's maximum unless the recipe
            says otherwise.
        power_of_two: a float32 scale is rounded down to a power of two.
        amax_epsilon: lower bound of amax in a float32 scale, absolute.
        delayed: the scale is handed in and the amax handed out, instead of being derived.
        stochastic: round the elements stochastically instead of to the nearest, ties to even.
        transform: name of the transform applied along k before quantization, or None.
        cast_first: the value is rounded to the layer's activation dtype before amax and cast; if
            not, a fused producer hands over its float32 value.
    """

    format: str
    block: tuple[int, int]
    target: float
    scale_format: str = "float32"
    power_of_two: bool = False
    amax_epsilon: float = 0.0
    delayed: bool = False
    stochastic: bool = False
    transform: str | None = None
    cast_first: bool = True

    def __str__(self) -> str:
        return spec_text(self)


class Operand(NamedTuple):
    """One operand ``[rows, k]`` of a GEMM: flat plain tensors, so that autograd can save them.

    Quantized, ``data`` is uint8: ``[rows, k]`` codes, or ``[rows, k / 2]`` for a 4-bit format,
    where element ``2 i`` is in the low half of byte ``i``. ``scale_inv`` is ``[ceil(rows / br),
    ceil(k / bk)]`` in float32, or uint8 codes of the scale format. ``global_scale_inv`` is
    ``[1, 1]`` float32 for two-level scales, else None. In a grouped operand the groups' operands
    are concatenated, data and scales alike, along rows for a rowwise operand and along k for a
    columnwise one. With offsets on the device the host does not know how many scales they have: for
    blocks of more than one element along the groups there is room for ``rows // block + groups``,
    filled group by group as ever. Codes of a columnwise group begin at a multiple of ``step =
    GROUP_STEP``, ``step * (rows // step + groups)`` in all. Unused codes are 0, scales 1.

    In high precision (a descriptor's spec is None), ``data`` is the tensor itself, without scales.
    """

    data: torch.Tensor
    scale_inv: torch.Tensor | None = None
    global_scale_inv: torch.Tensor | None = None


class Quantized(NamedTuple):
    """The orientations of one tensor ``x [rows, cols]`` that were asked for, None for the other.

    ``rowwise`` has the shape of ``x``, ``columnwise`` that of ``x.T``.
    """

    rowwise: Operand | None
    columnwise: Operand | None


class Alignment(NamedTuple):
    """What ``m``, ``n`` and ``k`` of a GEMM must be multiples of, elements. 1 takes any size."""

    m: int = 1
    n: int = 1
    k: int = 1


@dataclass(frozen=True, slots=True)
class QuantizeDesc:
    """``quantize(x, group_offsets=None, *, scale=None, amax_out=None, rng=None, nonfinite_out=None)
    -> Quantized``.

    ``x [rows, cols]`` has ``dtype``, any strides, and is on the device the op was bound for.
    ``group_offsets`` (int64 ``[groups + 1]`` on the CPU, 0 to rows) is given if and only if
    ``grouped``: each group is then a tensor of its own, with its own amax and blocks. With
    ``offsets_on_device`` it is on ``x``'s device, and the host neither reads it nor waits for it.
    It may then end before the rows do; no value of it may lead out of a tensor. ``scale`` (float32,
    one entry, or one a group; a multiplier) and ``amax_out`` (likewise; ``max(amax_out, amax(x))``,
    NaN elements ignored; None to record nothing) belong to delayed specs alone. ``rng`` (int64
    ``[2]`` on the CPU: seed and offset; the same gives the same rounding) belongs to stochastic
    specs alone. ``nonfinite_out`` (int64 ``[1]`` on ``x``'s device, or None) grows by the number of
    NaN and inf in ``x``: each once, whichever orientations are made, none in rows of no group.

    A bound callable of both orientations may have a method ``in_parts(x, **keywords)``: as the call
    of one dense tensor, but ``rowwise`` may be :class:`fp8core.backend_api.Parts`. And it may have
    ``beside(callable)``, which returns the call of two dense tensors at once, the second as
    ``callable`` does it, or None: ``f(x, other, *, scale=(None, None), ...) -> (Quantized,
    Quantized)``, each keyword a pair.

    Raises nothing for values: NaN keeps its place, inf saturates, zero blocks get scale 1."""

    op: ClassVar[str] = "quantize"
    low_precision: ClassVar[bool] = True
    dtype: torch.dtype
    rowwise: OperandSpec | None
    columnwise: OperandSpec | None
    grouped: bool = False
    offsets_on_device: bool = False

    def halves(self) -> tuple[QuantizeDesc, QuantizeDesc]:
        """Return the descriptors of the rowwise and of the columnwise half alone."""
        return replace(self, columnwise=None), replace(self, rowwise=None)

    def __str__(self) -> str:
        start = f"{dtype_text(self.dtype)} -> rowwise={self.rowwise}"
        return text(self, start, f"columnwise={self.columnwise}")


@dataclass(frozen=True, slots=True)
class DequantizeDesc:
    """``dequantize(operand) -> x [rows, k]`` in ``dtype``; rounds once, from float32."""

    op: ClassVar[str] = "dequantize"
    operand: OperandSpec
    dtype: torch.dtype = torch.float32
    low_precision: ClassVar[bool] = True

    def __str__(self) -> str:
        return text(self, f"{self.operand} -> {dtype_text(self.dtype)}")


@dataclass(frozen=True, slots=True)
class GemmDesc:
    """``gemm(a, b, *, bias=None, out=None) -> d [m, n]`` in ``out_dtype``.

    ``a`` is an :class:`Operand` ``[m, k]`` made by spec ``a``, in high precision when that is None;
    ``b`` ``[n, k]`` likewise. ``bias`` is ``[n]``, added in float32 before the one rounding to
    ``out_dtype``. With ``out`` the result is written there, with ``accumulate`` added to it.
    ``fast_accumulation`` allows the device's faster, less exact accumulator.
    """

    op: ClassVar[str] = "gemm"
    a: OperandSpec | None
    b: OperandSpec | None
    out_dtype: torch.dtype
    accumulate: bool = False
    fast_accumulation: bool = False

    @property
    def low_precision(self) -> bool:
        """Whether an operand is quantized."""
        return self.a is not None or self.b is not None

    def __str__(self) -> str:
        return text(self, f"a={self.a}", f"b={self.b}", f"out={dtype_text(self.out_dtype)}")


@dataclass(frozen=True, slots=True)
class GroupedGemmDesc(GemmDesc):
    """One GEMM a group in one call; ``group_offsets`` is int64 ``[groups + 1]`` on the CPU.

    ``contract_groups`` False (fprop, dgrad): ``grouped_gemm(a, b, group_offsets, *, bias=None,
    out=None) -> d [m, n]``, ``a [m, k]`` grouped along its rows, ``b`` and ``bias`` a sequence with
    one entry a group.

    ``contract_groups`` True (wgrad): both operands grouped along k; returns, and takes as ``out``,
    a sequence of ``d [m, n]``, one a group. An empty group gives zeros, or leaves an accumulated
    ``out`` as it is.

    ``offsets_on_device``: as in :class:`QuantizeDesc`. Rows of ``d`` beyond the last group are
    zeros, or stay in an accumulated ``out``. Nobody pads: along the groups the alignment must be 1.
    """

    op: ClassVar[str] = "grouped_gemm"
    contract_groups: bool = False
    offsets_on_device: bool = False


@dataclass(frozen=True, slots=True)
class AmaxDesc:
    """``amax(x) -> float32 [1]``: the largest magnitude, NaN elements ignored, 0 for empty x."""

    op: ClassVar[str] = "amax"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"AmaxDesc({dtype_text(self.dtype)})"


@dataclass(frozen=True, slots=True)
class ScaleUpdateDesc:
    """``scale_update(histories, scales, targets, nonfinite=()) -> None``: all modules at once.

    For every slot ``s`` of every state, ``histories[i] [length, slots]`` and ``scales[i] [slots]``
    in float32, updated in place: entry 0 of the history holds the newest amax, rows 1 to
    length - 1 the older ones, the oldest first. See numerics.md's table of DelayedScaling: the amax
    of the window is taken first, then the window rolls and entry 0 becomes 0; ``scale = target /
    amax``, unless amax is 0 or not finite (then nothing of that slot changes but entry 0).
    ``nonfinite[i]``, int64 ``[1]``, grows by the number of newest amaxes that are not finite; an
    empty sequence counts nothing.

    A bound callable may have a method ``prepare(histories, scales, targets, nonfinite=())`` that
    returns the update of these tensors as a function of no arguments, called in every step.
    ``algorithm`` is ``"max"`` or ``"most_recent"``.
    """

    op: ClassVar[str] = "scale_update"
    low_precision: ClassVar[bool] = False
    algorithm: str

    def __str__(self) -> str:
        return f"ScaleUpdateDesc({self.algorithm})"


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


@dataclass(frozen=True, slots=True)
class NormBackwardDesc:
    """``norm_backward(grad_output, x, weight, mean, rstd) -> (grad_x, grad_weight, grad_bias)``.

    ``grad_x`` in ``norm.dtype``, the other two float32 ``[n]`` (grad_bias None for ``"rmsnorm"``).
    """

    op: ClassVar[str] = "norm_backward"
    low_precision: ClassVar[bool] = False
    norm: NormDesc

    def __str__(self) -> str:
        return f"NormBackwardDesc({self.norm})"


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


@dataclass(frozen=True, slots=True)
class FusedDesc:
    """Optional: a producer and the quantization of its result, in one call.

    Named ``<producer.op>_quantize``. Takes the producer's arguments, then the keywords of
    :class:`QuantizeDesc`; returns the producer's result with a :class:`Quantized` in the place of
    its first tensor. Equals the pair bit for bit; the pair hands over in ``quantize.dtype``, which
    is float32 where the plan does not round before the cast. With ``sums`` the column sums of that
    tensor in float32 ``[n]`` are appended: a bias gradient.
    """

    low_precision: ClassVar[bool] = True
    producer: NormDesc | NormBackwardDesc | ActivationDesc | ActivationBackwardDesc
    quantize: QuantizeDesc
    sums: bool = False

    @property
    def op(self) -> str:
        """The operation's name."""
        return f"{self.producer.op}_quantize"

    def __str__(self) -> str:
        return text(self, f"{self.producer} then {self.quantize}")


@dataclass(frozen=True, slots=True)
class AddNormDesc:
    """Optional: ``add_norm(x, residual, weight, bias=None) -> (sum, y, mean, rstd)``.

    The sum is rounded to ``norm.dtype`` before it is normalized, as the pair does.
    """

    op: ClassVar[str] = "add_norm"
    low_precision: ClassVar[bool] = False
    norm: NormDesc

    def __str__(self) -> str:
        return f"AddNormDesc({self.norm})"


ACTIVATIONS: tuple[str, ...] = (
    *("gelu", "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu"),
    *("silu", "swiglu", "clamped_swiglu"),
)
"""Transformer Engine's activations; gelu is the tanh approximation."""

GATED = frozenset({"geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu"})
"""The gated ones of :data:`ACTIVATIONS`."""

OpDesc: TypeAlias = (
    QuantizeDesc
    | DequantizeDesc
    | GemmDesc
    | AmaxDesc
    | ScaleUpdateDesc
    | NormDesc
    | NormBackwardDesc
    | ActivationDesc
    | ActivationBackwardDesc
    | FusedDesc
    | AddNormDesc
)

OPS: tuple[str, ...] = (
    "activation",
    "activation_backward",
    "amax",
    "dequantize",
    "gemm",
    "grouped_gemm",
    "norm",
    "norm_backward",
    "quantize",
    "scale_update",
)
"""Names of the operations every backend's devices need, as ``FP8CORE_OP_BACKEND`` spells them."""

OPTIONAL_OPS: tuple[str, ...] = (
    "activation_backward_quantize",
    "activation_quantize",
    "add_norm",
    "norm_backward_quantize",
    "norm_quantize",
)
"""Fusions that a backend may offer; without them the pair runs."""
