"""The operations that every backend begins with: quantize, dequantize, and the product.

Optional: groups, which are several tensors in one operand, multiplied in one call.

``group_offsets`` is int64 ``[groups + 1]``: the rows at which each group of ``x [rows, cols]``
begins, and the last group ends. An operand of groups is the concatenation of the groups' operands,
of data and of scales: along rows if rowwise, along k if columnwise.

Without ``offsets_on_device`` the offsets are on the CPU and lead from 0 to rows. With it they are
on the device of ``x``; the host neither reads them nor waits for them, the last group may end
before the rows do, and no value of theirs may lead out of a tensor. The sizes of an operand then
follow from ``rows`` and the number of groups alone:

- codes, rowwise: ``rows`` of them, group ``g`` from ``offsets[g]`` on;
- codes, columnwise: ``step * (rows // step + groups)`` along the groups, of ``step = GROUP_STEP``;
  each group begins at the sum of the sizes before it, each rounded up to ``step``;
- scales of blocks of ``b > 1`` elements along the groups: ``rows // b + groups``; each group begins
  at the sum of ``ceil(size / b)`` over the sizes before it;
- one scale a group: ``groups``.

Entries of no group are 0 in codes and 1 in scales.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch

from fp8core.backend_api.operand_spec import Operand, OperandSpec, codes_per_byte, dtype_text, text
from fp8core.backend_api.record import ResultShape, operation


@dataclass(frozen=True, slots=True)
class QuantizeDesc:
    """``quantize(x, group_offsets=None, *, scale=None, amax=None, amax_out=None, rng=None,
    nonfinite_out=None) -> Quantized``.

    ``x [rows, cols]`` has ``dtype``, any strides, and is on the device the op was bound for.
    Every other argument is given for descriptors of one kind alone, so that a backend which denies
    that kind does not take it:

    - ``grouped``: ``group_offsets``. Each group is a tensor with its own amax and its own blocks,
      and rows of no group are not counted; see ``fp8core.backend_api.descriptors``.
    - delayed specs: ``scale`` (float32, one entry, or one a group; a multiplier) and ``amax_out``
      (likewise; becomes ``max(amax_out, amax(x))``, NaN elements ignored; None records nothing).
    - :class:`~fp8core.backend_api.QuantizeByAmaxDesc`: ``amax``.
    - stochastic specs: ``rng`` (int64 ``[2]`` on the CPU: seed and offset; the same values give the
      same rounding).
    - ``counted``: ``nonfinite_out`` (int64 ``[1]`` on ``x``'s device, or None) grows by the number
      of NaN and inf in ``x``, each counted once, also where both orientations are asked for; rows
      of no group are not counted. Optional: without it a pass of its own counts.

    Optional, of casts that are not grouped, for calls outside of graphs:

    - ``sums``: the result is ``(Quantized, sums)``, the latter those of
      :class:`~fp8core.backend_api.ColumnSumsDesc` for ``x``: a gradient's cast, and the gradient of
      a bias, in one reading.
    - ``chunked``, of both orientations: instead of a :class:`Quantized`, the result has
      :class:`~fp8core.backend_api.QuantizedChunks` unless chunks save nothing. The amax, the count
      and the sums are complete when all chunks are read.
    - ``split``, in graphs too, where a fusion with the gradient of a gated activation casts it: its
      two halves are tensors of their own, as the gradients of two linears. ``scale``, ``amax_out``
      and ``nonfinite_out`` come in pairs, and a pair of :class:`Quantized` is in the place of one;
      the sums are those of all columns. Both counts may be one tensor.

    Optional, for calls outside of graphs, and not with ``offsets_on_device``:

    - ``padded``, a number: the columnwise operand is that of ``x`` with rows of zeros behind it, or
      behind each group, up to multiples of ``padded``, where wgrad contracts no other number of
      rows. The rowwise operand is that of ``x``. :func:`padded_offsets` has the offsets of such
      groups.

    What else a bound callable may offer for speed: :mod:`fp8core.backend_api.optional`.

    Raises nothing for values: NaN keeps its place, inf saturates, zero blocks get scale 1."""

    op: ClassVar[str] = "quantize"
    low_precision: ClassVar[bool] = True
    dtype: torch.dtype
    rowwise: OperandSpec | None
    columnwise: OperandSpec | None
    grouped: bool = False
    offsets_on_device: bool = False
    sums: bool = False
    chunked: bool = False
    counted: bool = False
    padded: int = 0
    split: bool = False

    def halves(self) -> tuple[QuantizeDesc, QuantizeDesc]:
        """Return the descriptors of the rowwise and of the columnwise half alone."""
        rowwise = replace(self, columnwise=None, chunked=False)
        return rowwise, replace(self, rowwise=None, chunked=False)

    def __str__(self) -> str:
        start = f"{dtype_text(self.dtype)} -> rowwise={self.rowwise}"
        return text(self, start, f"columnwise={self.columnwise}")


class CastShape(NamedTuple):
    """The shapes of a :class:`Quantized` of ``x``, which has two dimensions of ``size``.

    ``groups`` is 0 for a dense tensor. Where the number of scale blocks depends on the sizes of
    groups, as they may end in the middle of a block, it is an upper bound.
    """

    desc: QuantizeDesc
    size: tuple[int, ...]
    groups: int = 0

    def has_view(self, transposes: bool) -> bool:
        """Return whether the columnwise operand is the transposed view of the rowwise one: where
        blocks are square, both hold the same codes. ``transposes`` is that of the BackendSpec."""
        spec = self.desc.rowwise
        is_square = spec is not None and spec == self.desc.columnwise
        if spec is None or not is_square or spec.block[0] != spec.block[1]:
            return False
        if self.desc.grouped or self.desc.padded or transposes or spec.stochastic:
            return False
        return spec.transform is None and codes_per_byte(spec) == 1

    def shares_scale(self) -> bool:
        """Return whether both operands have the same scale: one for the whole tensor."""
        spec = self.desc.rowwise
        if spec is None or spec != self.desc.columnwise or self.desc.grouped:
            return False
        is_whole = spec.block == (0, 0) and spec.scale_format == "float32"
        return is_whole and spec.transform is None and not spec.row_scaled

    def rowwise(self) -> list[ResultShape]:
        """Return the shapes of the tensors of the rowwise operand."""
        spec = self.desc.rowwise
        return [] if spec is None else operand_shapes(spec, self.size, self.groups, grouped_dim=0)

    def columnwise(self, transposes: bool) -> list[ResultShape]:
        """Return the shapes of the tensors of the columnwise operand, none of a view, and without a
        scale that the rowwise one has."""
        spec = self.desc.columnwise
        if spec is None or self.has_view(transposes):
            return []
        rows, cols = self.size
        if step := self.desc.padded:
            rows = step * (rows // step + self.groups if self.groups else -(-rows // step))
        shapes = operand_shapes(spec, (cols, rows), self.groups, grouped_dim=1)
        if self.desc.offsets_on_device:
            length = GROUP_STEP * (rows // GROUP_STEP + self.groups)
            codes = (cols, length // codes_per_byte(spec))
            shapes[0] = shapes[0]._replace(size=codes)
        is_transposed = not self.groups and not transposes
        if self.shares_scale():
            shapes = shapes[:1]
        return [shape._replace(is_transposed=is_transposed) for shape in shapes]


def operand_shapes(
    spec: OperandSpec, size: tuple[int, ...], groups: int = 0, grouped_dim: int = 0
) -> list[ResultShape]:
    """Return the shapes of the tensors of an operand of ``size (rows, k)``, those of its codes
    first; with ``groups`` along ``grouped_dim`` as in :class:`CastShape`."""
    blocks = [
        -(-extent // block) if block else 1 for extent, block in zip(size, spec.block, strict=True)
    ]
    outer = [size[0] if spec.row_scaled else 1, 1]
    if groups:
        extent, block = size[grouped_dim], spec.block[grouped_dim]
        if not spec.row_scaled:
            outer[grouped_dim] = groups
        if block != 1:  # every group may end with a partial block
            blocks[grouped_dim] = extent // block + groups if block else groups
    scale_dtype = torch.float32 if spec.scale_format == "float32" else torch.uint8
    shapes = [
        ResultShape((size[0], size[1] // codes_per_byte(spec)), torch.uint8),
        ResultShape((blocks[0], blocks[1]), scale_dtype),
    ]
    if spec.scale_format == "e4m3":
        shapes.append(ResultShape((outer[0], outer[1]), torch.float32))
    return shapes


@operation(
    # A saved program has an argument that is newer than others behind them.
    schema="(str operation, Tensor x, Tensor? group_offsets, Tensor? scale, Tensor? amax, "
    "Tensor? rng, Tensor? nonfinite=None, Tensor? by_amax=None) -> Tensor[]",
    order=("x", "group_offsets", "scale", "amax_out", "rng", "nonfinite_out", "amax"),
)
def quantize(
    desc: QuantizeDesc,
    x: torch.Tensor,
    group_offsets: torch.Tensor | None = None,
    *,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    rng: torch.Tensor | None = None,
    nonfinite_out: torch.Tensor | None = None,
) -> CastShape:
    """Return the shapes of both operands."""
    return CastShape(desc, tuple(x.shape), num_groups(group_offsets))


@dataclass(frozen=True, slots=True)
class DequantizeDesc:
    """``dequantize(operand) -> x [rows, k]`` in ``dtype``; rounds once, from float32."""

    op: ClassVar[str] = "dequantize"
    operand: OperandSpec
    dtype: torch.dtype = torch.float32
    low_precision: ClassVar[bool] = True

    def __str__(self) -> str:
        return text(self, f"{self.operand} -> {dtype_text(self.dtype)}")


@operation()
def dequantize(desc: DequantizeDesc, operand: Operand) -> ResultShape:
    """Return the shape of ``x``."""
    rows, stored = operand.data.shape
    return ResultShape((rows, stored * codes_per_byte(desc.operand)), desc.dtype)


@dataclass(frozen=True, slots=True)
class GemmDesc:
    """``gemm(a, b, *, bias=None, out=None) -> d [m, n]`` in ``out_dtype``.

    ``a`` is an :class:`Operand` ``[m, k]`` quantized by spec ``a``, in high precision if that is
    None; ``b`` ``[n, k]`` likewise. ``bias`` is ``[n]``, added in float32 before the one rounding
    to ``out_dtype``. With ``out`` the result is written there, with ``accumulate`` added to it.
    ``fast_accumulation`` allows the device's faster, less exact accumulator.

    Optional, without ``accumulate``, for calls outside of graphs: ``part`` is a product some rows
    at a time, while other rows travel between ranks or are cast. The call takes ``rows`` before
    ``a``, which is a part of an operand of so many rows, and always ``out``. Where the call has the
    same bits in every process, ``out`` has the bits of the same rows of the whole product.
    """

    op: ClassVar[str] = "gemm"
    a: OperandSpec | None
    b: OperandSpec | None
    out_dtype: torch.dtype
    accumulate: bool = False
    fast_accumulation: bool = False
    part: bool = field(default=False, kw_only=True)

    @property
    def low_precision(self) -> bool:
        """Whether an operand is quantized."""
        return self.a is not None or self.b is not None

    def __str__(self) -> str:
        return text(self, f"a={self.a}", f"b={self.b}", f"out={dtype_text(self.out_dtype)}")


@operation(writes=("out",))
def gemm(
    desc: GemmDesc,
    a: Operand,
    b: Operand,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> ResultShape:
    """Return the shape of ``d``."""
    return ResultShape((a.data.shape[0], b.data.shape[0]), desc.out_dtype)


GROUP_STEP = 32
"""With ``offsets_on_device``, groups of a columnwise operand begin at multiples of this, elements:
the cast pads them, because the host does not know their sizes. Kernels that copy 16 bytes at a time
can read FP8 and FP4 there, and it is a whole block of MX."""


@dataclass(frozen=True, slots=True)
class GroupedGemmDesc(GemmDesc):
    """A GEMM for each group, in one call.

    ``contract_groups`` False (fprop, dgrad): ``grouped_gemm(a, b, group_offsets, *, bias=None,
    out=None) -> d [m, n]``, ``a [m, k]`` grouped along its rows, ``b`` and ``bias`` a sequence with
    one entry a group.

    ``contract_groups`` True (wgrad): both operands grouped along k; returns, and takes as ``out``,
    a sequence of ``d [m, n]``, one a group. An empty group gives zeros, or leaves an accumulated
    ``out`` as it is.

    ``offsets_on_device``: rows of ``d`` beyond the last group are zeros, or stay in an accumulated
    ``out``. Nothing is padded: along the groups the alignment must be 1.
    """

    op: ClassVar[str] = "grouped_gemm"
    contract_groups: bool = False
    offsets_on_device: bool = False


@operation(writes=("out",))
def grouped_gemm(
    desc: GroupedGemmDesc,
    a: Operand,
    b: Operand | Sequence[Operand],
    group_offsets: torch.Tensor,
    *,
    bias: Sequence[torch.Tensor] | None = None,
    out: torch.Tensor | Sequence[torch.Tensor] | None = None,
) -> ResultShape | list[ResultShape]:
    """Return the shape of ``d``, or one a group."""
    first = b if isinstance(b, Operand) else b[0]
    shape = ResultShape((a.data.shape[0], first.data.shape[0]), desc.out_dtype)
    return [shape] * num_groups(group_offsets) if desc.contract_groups else shape


def padded_offsets(group_offsets: torch.Tensor, step: int) -> torch.Tensor:
    """Return the offsets of groups, each of which has zeros up to a multiple of ``step`` rows.

    >>> padded_offsets(torch.tensor([0, 5, 5, 69]), 32)
    tensor([ 0, 32, 32, 96])
    """
    sizes = group_offsets.diff()
    ends = (sizes + -sizes % step).cumsum(0)
    return torch.cat((group_offsets[:1], ends))


def num_groups(group_offsets: torch.Tensor | None) -> int:
    """Return the number of groups, 0 for a dense tensor."""
    return 0 if group_offsets is None else group_offsets.shape[0] - 1


def split_groups(
    spec: OperandSpec | None, operand: Operand, bounds: Sequence[int], dim: int, step: int = 1
) -> list[Operand]:
    """Split an operand grouped along ``dim`` into the operands of its groups, as views.

    ``bounds`` are the values of ``group_offsets``; ``dim`` is 0 for a rowwise operand, 1 for a
    columnwise one, whose groups follow one another along k. ``spec`` None: a tensor in high
    precision. A group may be empty, and may end with a partial block. ``step`` is 1, or
    ``GROUP_STEP`` for an operand with ``offsets_on_device``, whose padding is left out.
    """
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    if spec is None:
        return [Operand(part) for part in _split(operand.data, sizes, dim)]
    assert operand.scale_inv is not None
    per_byte = codes_per_byte(spec) if dim == 1 else 1
    block = spec.block[dim]
    scale_sizes = [-(-size // block) if block else 1 for size in sizes]
    padded = [-(-size // step) * step if dim == 1 else size for size in sizes]
    whole = _split(operand.data, [size // per_byte for size in padded], dim)
    data = [part.narrow(dim, 0, size // per_byte) for part, size in zip(whole, sizes, strict=True)]
    scales = _split(operand.scale_inv, scale_sizes, dim)
    if operand.global_scale_inv is None:
        return [Operand(*parts) for parts in zip(data, scales, strict=True)]
    globals_ = torch.split(operand.global_scale_inv, 1, dim)
    return [Operand(*parts) for parts in zip(data, scales, globals_, strict=True)]


def _split(x: torch.Tensor, sizes: list[int], dim: int) -> Sequence[torch.Tensor]:
    """Return parts of these sizes along ``dim``, without the entries beyond the last part."""
    used = sum(sizes)
    return torch.split(x if used == x.shape[dim] else x.narrow(dim, 0, used), sizes, dim)
