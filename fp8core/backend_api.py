"""The contract between fp8core and a backend: plain tensors, small frozen descriptors, few verbs.

Every matrix product in the library has one form, with the contraction last and float32
accumulation::

    d[m, n] = a[m, k] @ b[n, k].T

and every operand ``[rows, k]`` is quantized along the dimension that the product contracts. An
operand is *rowwise* when it is made from ``x [rows, k]`` itself, *columnwise* when it is made from
``x.T``: columnwise(x) has the shape of ``x.T``. Shape is the contract; strides belong to the
backend that made the operand.

A backend is described by a :class:`BackendSpec`, registered by a plug-in's
``fp8core_register_backends`` hook, and implements :class:`Backend`. It sees no module, recipe,
autograd graph, process group or global state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import pluggy
import torch

from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.formats import FormatSpec

__all__ = [
    "API_VERSION",
    "OPS",
    "Alignment",
    "AmaxDesc",
    "Backend",
    "BackendSpec",
    "DequantizeDesc",
    "FormatSpec",
    "GemmDesc",
    "GroupedGemmDesc",
    "OpDesc",
    "Operand",
    "OperandError",
    "OperandSpec",
    "QuantizeDesc",
    "Quantized",
    "RecipeError",
    "ScaleUpdateDesc",
    "UnsupportedError",
    "hookimpl",
]

API_VERSION = (1, 0)
"""(major, minor). A backend written for another major, or a newer minor, is not loaded."""

hookimpl = pluggy.HookimplMarker("fp8core")
"""Marks the functions of a plug-in module that implement a hook of :mod:`fp8core.hookspecs`."""


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
        words = [self.format, f"block={self.block}".replace(" ", "")]
        words += [self.scale_format] if self.scale_format != "float32" else []
        words += [name for name in ("power_of_two", "delayed", "stochastic") if getattr(self, name)]
        words += [self.transform] if self.transform else []
        return " ".join(words)


class Operand(NamedTuple):
    """One operand ``[rows, k]`` of a GEMM: flat plain tensors, so that autograd can save them.

    Quantized, ``data`` is uint8: ``[rows, k]`` codes, or ``[rows, k / 2]`` for a 4-bit format,
    where element ``2 i`` is in the low half of byte ``i``. ``scale_inv`` is ``[ceil(rows / br),
    ceil(k / bk)]`` in float32, or uint8 codes of the scale format. ``global_scale_inv`` is
    ``[1, 1]`` float32 for two-level scales, else None. In a grouped operand the groups' operands
    are concatenated, data and scales alike, along rows for a rowwise operand and along k for a
    columnwise one.

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
    """``quantize(x, group_offsets=None, *, scale=None, amax_out=None, rng=None) -> Quantized``.

    ``x [rows, cols]`` has ``dtype``, any strides, and is on the device the op was bound for.
    ``group_offsets`` (int64 ``[groups + 1]``, 0 to rows) is given if and only if ``grouped``:
    each group is then a tensor of its own, with its own amax and blocks. ``scale`` (float32,
    one entry, or one a group; a multiplier) and ``amax_out`` (likewise; ``amax_out = max(amax_out,
    amax(x))``, NaN elements ignored; None to record nothing) belong to delayed specs alone.
    ``rng`` (int64 ``[2]`` on the CPU: seed and offset) belongs to stochastic specs alone; the same
    ``rng`` gives the same rounding.

    Raises nothing for values: NaN keeps its place, inf saturates, zero blocks get scale 1.
    """

    op: ClassVar[str] = "quantize"
    low_precision: ClassVar[bool] = True
    dtype: torch.dtype
    rowwise: OperandSpec | None
    columnwise: OperandSpec | None
    grouped: bool = False

    def halves(self) -> tuple[QuantizeDesc, QuantizeDesc]:
        """Return the descriptors of the rowwise and of the columnwise half alone."""
        return replace(self, columnwise=None), replace(self, rowwise=None)

    def __str__(self) -> str:
        grouped = ", grouped" if self.grouped else ""
        return (
            f"QuantizeDesc({_dtype(self.dtype)} -> rowwise={self.rowwise}, "
            f"columnwise={self.columnwise}{grouped})"
        )


@dataclass(frozen=True, slots=True)
class DequantizeDesc:
    """``dequantize(operand) -> x [rows, k]`` in ``dtype``; rounds once, from float32."""

    op: ClassVar[str] = "dequantize"
    operand: OperandSpec
    dtype: torch.dtype = torch.float32
    low_precision: ClassVar[bool] = True

    def __str__(self) -> str:
        return f"DequantizeDesc({self.operand} -> {_dtype(self.dtype)})"


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
        return f"{type(self).__name__}(a={self.a}, b={self.b}, out={_dtype(self.out_dtype)})"


@dataclass(frozen=True, slots=True)
class GroupedGemmDesc(GemmDesc):
    """One GEMM a group in one call; ``group_offsets`` is int64 ``[groups + 1]``.

    ``contract_groups`` False (fprop, dgrad): ``grouped_gemm(a, b, group_offsets, *, bias=None,
    out=None) -> d [m, n]``, ``a [m, k]`` grouped along its rows, ``b`` and ``bias`` a sequence with
    one entry a group.

    ``contract_groups`` True (wgrad): both operands grouped along k; returns, and takes as ``out``,
    a sequence of ``d [m, n]``, one a group. An empty group gives zeros, or leaves an accumulated
    ``out`` as it is.
    """

    op: ClassVar[str] = "grouped_gemm"
    contract_groups: bool = False

    __str__ = GemmDesc.__str__


@dataclass(frozen=True, slots=True)
class AmaxDesc:
    """``amax(x) -> float32 [1]``: the largest magnitude, NaN elements ignored, 0 for empty x."""

    op: ClassVar[str] = "amax"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"AmaxDesc({_dtype(self.dtype)})"


@dataclass(frozen=True, slots=True)
class ScaleUpdateDesc:
    """``scale_update(histories, scales, targets) -> None``: delayed scales, all modules at once.

    For every slot ``s`` of every state, ``histories[i] [length, slots]`` and ``scales[i] [slots]``
    in float32, updated in place: entry 0 of the history holds the newest amax, rows 1 to
    length - 1 the older ones, the oldest first. See numerics.md's table of DelayedScaling: the amax
    of the window is taken first, then the window rolls and entry 0 becomes 0; ``scale = target /
    amax``, unless amax is 0 or not finite (then nothing of that slot changes but entry 0).
    ``algorithm`` is ``"max"`` or ``"most_recent"``.
    """

    op: ClassVar[str] = "scale_update"
    low_precision: ClassVar[bool] = False
    algorithm: str

    def __str__(self) -> str:
        return f"ScaleUpdateDesc({self.algorithm})"


OpDesc: TypeAlias = QuantizeDesc | DequantizeDesc | GemmDesc | AmaxDesc | ScaleUpdateDesc

OPS: tuple[str, ...] = (
    "amax",
    "dequantize",
    "gemm",
    "grouped_gemm",
    "quantize",
    "scale_update",
)
"""Names of the operations a backend can provide, as ``FP8CORE_OP_BACKEND`` spells them."""


class Backend(Protocol):
    """What a backend class implements, besides one method an op (see the descriptors).

    The method named ``desc.op`` takes the descriptor first: ``gemm(desc, a, b, *, bias, out)``.
    """

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        """Say why ``desc`` cannot run on ``device``, or None if it can.

        Default deny: a descriptor that is not understood is unsupported. Touches no tensor and
        no device memory. Whoever supports a descriptor supports either half of it.
        """

    def alignment(self, desc: GemmDesc) -> Alignment:
        """Say what the sizes of a supported GEMM must be multiples of."""

    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        """Return the callable that runs ``desc``; called once a descriptor, never in the hot path.

        :func:`bind_method` does for a backend that has nothing to prepare.
        """


def bind_method(backend: Backend, desc: OpDesc) -> Callable[..., Any]:
    """Return ``backend``'s method for ``desc`` with the descriptor filled in."""
    method: Callable[..., Any] = getattr(backend, desc.op)
    return partial(method, desc)


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """A backend as its plug-in registers it: cheap, nothing heavy is imported yet.

    Attributes:
        name: what ``FP8CORE_BACKEND`` and ``use_backend`` call it.
        device_types: torch device types it runs natively, the preferred one first.
        factory: ``"package.module:Class"``, imported and called once, on first use.
        probe: returns why the backend cannot be used on this machine, or None; cheap, touches no
            device.
        priority: the highest wins among backends of a device.
        portable: it also runs on any other device type, as an emulation that must be asked for.
        preferred_recipe: what ``get_default_recipe()`` gives when this backend is selected.
        environment: the ``FP8CORE_*`` names that only this backend reads.
        api_version: the :data:`API_VERSION` it was written for.
    """

    name: str
    device_types: Sequence[str]
    factory: str
    probe: Callable[[], str | None] = lambda: None
    priority: int = 0
    portable: bool = False
    preferred_recipe: str = "current"
    environment: Sequence[str] = ()
    api_version: tuple[int, int] = API_VERSION


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
