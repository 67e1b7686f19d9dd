"""GEMMs through cuBLASLt, and by a kernel of fp8core for few rows: one native object a shape, whose
algorithm was timed on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from fp8core.backend_api import GemmDesc, Operand, OperandError, UnsupportedError
from fp8core_backends.cuda import autotune
from fp8core_backends.cuda.layout import (
    ALIGNMENT,
    ALIGNMENT_OF_ALLOCATIONS,
    BLOCKS,
    DTYPES,
    TILED,
    round_up,
    row_step,
    row_stride,
    scale_mode,
    scale_shape,
    scale_strides,
    scales,
    with_rows,
)
from fp8core_backends.cuda.memory import allocator, allocator_now
from fp8core_backends.cuda.operations import first_problem
from fp8core_backends.cuda.stream import index_of, raw_stream
from fp8core_backends.cuda.transposition import RowsAdjacent

_MAX_PLANS = 4096  # of one descriptor
FEW_ROWS = 64
"""Rows up to which there are kernels that read the weight once."""

_UNSTRIDED = frozenset({"none", "tensor"}) | TILED
"""Modes whose scales are read without strides."""


class _Problem(NamedTuple):
    """The key of a plan: sizes, pitches from one row to the next, of codes in bytes and of other
    tensors in elements, whether there is no bias, and the addresses' alignment in bytes."""

    m: int
    n: int
    k: int
    a_pitch: int
    b_pitch: int
    d_pitch: int
    is_unbiased: bool
    alignment: int


class _Plan(NamedTuple):
    """A problem's native call, its algorithm, and the strides that its scales must have."""

    run: Callable[..., None]
    candidate: int
    workspace_bytes: int
    a_scale_strides: tuple[int, int] | None
    b_scale_strides: tuple[int, int] | None


class LowPrecisionGemm:
    """``d[m, n] = a[m, k] @ b[n, k].T``, both operands quantized, or ``b`` alone; see GemmDesc."""

    __slots__ = (
        "_a_type",
        "_desc",
        "_device",
        "_empty",
        "_index",
        "_modes",
        "_native",
        "_now",
        "_out_dtype",
        "_plans",
        "_row_step",
        "_rows_adjacent",
        "_whole_rows",
        "_wide",
        "kernel",
    )

    def __init__(
        self,
        desc: GemmDesc,
        device: torch.device,
        native: Any,
        whole_rows: int = 0,
        a_dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """``whole_rows``: the products are parts of one of so many rows; 0: they are whole.
        ``a_dtype``: of an ``a`` in high precision, of which there are products of few rows alone.
        """
        assert desc.b is not None
        self._desc = desc
        self._out_dtype = desc.out_dtype
        self._index = index_of(device)
        self._device = torch.device("cuda", self._index)
        self._empty = allocator(self._index)
        self._now = allocator_now(self._index)
        self._native = native
        self._a_type = DTYPES[a_dtype] if desc.a is None else desc.a.format
        modes = ("none" if desc.a is None else scale_mode(desc.a), scale_mode(desc.b))
        assert modes[0] is not None
        assert modes[1] is not None
        self._modes: tuple[str, str] = (modes[0], modes[1])
        # By the fields of a _Problem; None: the bias is added after the product.
        self._plans: dict[tuple[int, ...], _Plan | None] = {}
        self._rows_adjacent = RowsAdjacent(device, native)
        self._wide: LowPrecisionGemm | None = None
        self._row_step = row_step(modes[0])
        self._whole_rows = round_up(whole_rows, self._row_step)
        self.kernel = f"cublasLtMatmul, {modes[0]} x {modes[1]} scales"
        is_e4m3 = self._a_type == desc.b.format == "e4m3" and not TILED.intersection(self._modes)
        if is_e4m3 and not desc.accumulate:
            self.kernel += ", or fp8core::multiply_few_rows where it is faster"

    def __call__(
        self,
        a: Operand,
        b: Operand,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply; see the backend API."""
        a_data, a_scale_inv, _ = a
        b_data, b_scale_inv, _ = b
        m, k = a_data.shape
        n, b_k = b_data.shape
        plan = self._plans.get((m, n, k, k, b_k, n, True, ALIGNMENT_OF_ALLOCATIONS))
        if plan is None or out is not None or bias is not None or a_scale_inv is None or b_k != k:
            return self._arrange(a, b, bias, out)
        run, candidate, workspace_bytes, a_strides, b_strides = plan
        if (
            not (a_data.is_contiguous() and b_data.is_contiguous())
            or not (a_strides is None or a_scale_inv.stride() == a_strides)
            or not (b_strides is None or b_scale_inv.stride() == b_strides)  # type: ignore[union-attr]  # quantized
        ):
            return self._arrange(a, b, bias, out)
        a_at, a_scale_at = a_data.data_ptr(), a_scale_inv.data_ptr()
        b_at, b_scale_at = b_data.data_ptr(), b_scale_inv.data_ptr()  # type: ignore[union-attr]  # quantized
        if (a_scale_at | b_scale_at) % ALIGNMENT or (a_at | b_at) % ALIGNMENT_OF_ALLOCATIONS:
            return self._arrange(a, b, bias, out)
        empty = self._now()
        d = empty((m, n), (n, 1), self._out_dtype)
        addresses: tuple[int, ...] = (a_at, a_scale_at, b_at, b_scale_at, 0, d.data_ptr())
        if workspace_bytes:  # from torch's allocator, as in _run
            workspace = empty((workspace_bytes,), (1,), torch.uint8)
            addresses = (*addresses, workspace.data_ptr(), workspace_bytes)
        run(candidate, addresses, raw_stream(self._index))
        return d

    def _run(self, plan: _Plan, addresses: autotune.Addresses) -> None:
        size = plan.workspace_bytes
        if not size:
            plan.run(plan.candidate, addresses, raw_stream(self._index))
            return
        # From torch's allocator: safe on every stream, and in a captured graph.
        workspace = self._empty((size,), (1,), torch.uint8)
        arguments = (*addresses, workspace.data_ptr(), size)
        plan.run(plan.candidate, arguments, raw_stream(self._index))

    def _arrange(
        self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply operands that have to be laid out anew, with a bias, into ``out``, or of a shape
        that no plan was made for yet."""
        desc = self._desc
        (m, k), n = a.data.shape, b.data.shape[0]
        self._check(a, b, bias, out)
        if not (m and n and k):
            return _empty_product(desc, (m, n), bias, out, a.data)
        if m % self._row_step:
            return self._of_whole_steps(a, b, bias, out)
        if bias is not None and not self._takes_bias(bias):
            return self._add_bias_after(a, b, bias, out)
        d_pitch = n if out is None else _pitch_of_result(out)
        if out is not None and d_pitch is None:
            total = out.clone(memory_format=torch.contiguous_format) if desc.accumulate else None
            return out.copy_(self(a, b, bias=bias, out=total))
        d = out
        if d is None:
            d = self._empty((m, n), (n, 1), desc.out_dtype)
            if desc.accumulate:
                d.zero_()
        assert b.scale_inv is not None
        (a_data, a_pitch), (b_data, b_pitch) = map(self._readable, (a.data, b.data))
        a_mode, b_mode = self._modes
        a_scale_inv = None if a.scale_inv is None else scales(a_mode, a.scale_inv)
        b_scale_inv = scales(b_mode, b.scale_inv)
        addresses = (
            a_data.data_ptr(),
            0 if a_scale_inv is None else a_scale_inv.data_ptr(),
            b_data.data_ptr(),
            b_scale_inv.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            d.data_ptr(),
        )
        bits = addresses[0] | addresses[2] | addresses[4] | addresses[5]  # all but the scales'
        alignment = ALIGNMENT if bits % ALIGNMENT_OF_ALLOCATIONS else ALIGNMENT_OF_ALLOCATIONS
        assert d_pitch is not None
        problem = _Problem(m, n, k, a_pitch, b_pitch, d_pitch, bias is None, alignment)
        plans = self._plans
        plan = plans[problem] if problem in plans else self._plan(problem, addresses, d)
        if plan is None:
            assert bias is not None
            return self._add_bias_after(a, b, bias, out)
        self._run(plan, addresses)
        if out is not None:
            increment_version(out)  # torch does not see cuBLASLt's write
        return d

    def _readable(self, codes: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return ``codes`` as cuBLASLt reads them, and the bytes from one row to the next."""
        pitch = row_stride(codes)
        if pitch is None or (pitch | codes.data_ptr()) % ALIGNMENT:
            codes = self._rows_adjacent(codes)
            pitch = codes.shape[1]
        return codes, pitch

    def _of_whole_steps(
        self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply whole steps of rows, and return those of ``a``: the others are products of
        whatever lies behind it."""
        desc, empty = self._desc, self._empty
        m, n = a.data.shape[0], b.data.shape[0]
        rows = round_up(m, self._row_step)
        total = None
        if desc.accumulate and out is not None:
            total = empty((rows, n), (n, 1), out.dtype)
            total[:m] = out
        product = self(self._with_rows(a, rows), b, bias=bias, out=total)[:m]
        return product if out is None else out.copy_(product)

    def _with_rows(self, a: Operand, rows: int) -> Operand:
        """Return ``a`` with as many rows: its own, and after them whatever lies behind it."""
        (mode, _), k, scale_inv = self._modes, a.data.shape[1], a.scale_inv
        shape = None if mode == "tensor" else scale_shape(mode, rows, 0)  # tiles are of 128 rows
        if scale_inv is not None and shape is not None:
            strides = scale_strides(mode, rows, k)
            scale_inv = with_rows(scale_inv, shape[0], strides, self._empty)
        return Operand(with_rows(a.data, rows, (k, 1), self._empty), scale_inv)

    def planned_rows(self, rows: int) -> int:
        """Return how many rows are multiplied of a group of ``rows``, so that not every size has a
        plan: up to ``ALIGNMENT`` more, but few of a group that has few."""
        return round_up(rows, self._row_step if rows <= FEW_ROWS else ALIGNMENT)

    def with_rows_behind(
        self, a: Operand, b: Operand, out: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        """Multiply ``a``, and as many rows behind it, of anything, as ``out`` has more."""
        self(self._with_rows(a, out.shape[0]), b, bias=bias, out=out)

    def _check(
        self, a: Operand, b: Operand, bias: torch.Tensor | None, out: torch.Tensor | None
    ) -> None:
        """Refuse shapes with which the product would read or write beyond a tensor's end."""
        (m, k), (n, b_k) = a.data.shape, b.data.shape
        scale_shapes = [
            _scale_shapes(operand, mode)
            for operand, mode in zip((a, b), self._modes, strict=True)
            if mode not in TILED  # checked where they were brought into tiles
        ]
        if (
            b_k == k
            and all([shape == expected for shape, expected in scale_shapes])
            and (bias is None or bias.shape == (n,))
            and (out is None or (out.shape == (m, n) and out.dtype == self._out_dtype))
        ):
            return
        shapes = [f"a {list(a.data.shape)}", f"b {list(b.data.shape)}"]
        shapes += [f"scales {shape}, expected {expected}" for shape, expected in scale_shapes]
        if bias is not None:
            shapes.append(f"bias {list(bias.shape)}")
        if out is not None:
            shapes.append(f"out {list(out.shape)} {out.dtype}")
        raise OperandError(
            f"{self._desc}: {', '.join(shapes)}; expected a [m, k], b [n, k], bias [n] and "
            f"out [m, n] of {self._out_dtype}."
        )

    def _takes_bias(self, bias: torch.Tensor) -> bool:
        """Whether cuBLASLt adds it: of the result's dtype, or bfloat16 to a float32 result."""
        out = self._desc.out_dtype
        dtype = torch.bfloat16 if out == torch.float32 else out
        return bias.dtype == dtype and bias.is_contiguous() and bias.data_ptr() % ALIGNMENT == 0

    def _add_bias_after(
        self, a: Operand, b: Operand, bias: torch.Tensor, out: torch.Tensor | None
    ) -> torch.Tensor:
        """Add a bias that cuBLASLt does not take, or not at these sizes, to the float32 product."""
        if self._wide is None:
            desc = dataclasses.replace(self._desc, out_dtype=torch.float32, accumulate=False)
            self._wide = LowPrecisionGemm(
                desc, self._device, self._native, self._whole_rows, a.data.dtype
            )
        return store(self._wide(a, b), self._desc, bias, out)

    def _plan(
        self, problem: _Problem, addresses: autotune.Addresses, d: torch.Tensor
    ) -> _Plan | None:
        """Return the plan of a problem, None for one that cuBLASLt has without the bias alone."""
        try:
            plan = self._timed_plan(problem, addresses, d)
        except UnsupportedError as error:
            if problem.is_unbiased:
                raise
            if self._whole_rows:
                autotune.warn_of_parts(str(self._desc), error)
            plan = None
        if not torch.cuda.is_current_stream_capturing():  # a capture could not time: ask again
            if len(self._plans) >= _MAX_PLANS:  # ragged sizes without end
                self._plans.pop(next(iter(self._plans)), None)
            self._plans[problem] = plan
        return plan

    def _timed_plan(
        self, problem: _Problem, addresses: autotune.Addresses, d: torch.Tensor
    ) -> _Plan:
        m, n, k = problem[:3]
        desc = self._desc
        gemm = self._native_gemm(problem)
        if self._whole_rows and autotune.takes_the_first():
            # The bits of the whole product's rows.
            whole = self._native_gemm(problem._replace(m=self._whole_rows))
            candidate = autotune.same_algorithm(gemm, whole, str(desc))
        else:
            like = problem._replace(m=autotune.bucket(m), k=autotune.bucket(k), d_pitch=n)
            name = str(self._describe(like._replace(a_pitch=like.k, b_pitch=like.k)))
            # Timing runs many times, so it must not run on the caller's sum.
            accumulated = d if desc.accumulate else None
            candidate = autotune.choose(gemm, name, addresses, d.device, accumulated)
        strides = [
            None if mode in _UNSTRIDED else scale_strides(mode, rows, k)
            for mode, rows in zip(self._modes, (m, n), strict=True)
        ]
        return _Plan(gemm.run, candidate, gemm.workspace_bytes(candidate), *strides)

    def _native_gemm(self, problem: _Problem) -> Any:
        described = self._describe(problem)
        try:
            return self._native.Gemm(
                described, self._index, autotune.MAX_WORKSPACE, autotune.NUM_CANDIDATES
            )
        except ValueError as error:
            m, n, k = problem[:3]
            raise UnsupportedError(f"{self._desc} with m={m}, n={n}, k={k}: {error}") from None

    def _describe(self, problem: _Problem) -> Any:
        """Return the native descriptor of a product."""
        native, desc = self._native, self._desc
        types, modes = native.ElementType.__members__, native.ScaleMode.__members__
        per_byte = 2 if self._a_type == "e2m1" else 1
        assert desc.b is not None
        elements, pitches = (self._a_type, desc.b.format), (problem.a_pitch, problem.b_pitch)
        operands = [
            native.OperandDesc(types[element], modes[mode], True, per_byte * pitch)
            for element, mode, pitch in zip(elements, self._modes, pitches, strict=True)
        ]
        out = types[DTYPES[desc.out_dtype]]
        bias = types["bfloat16"] if desc.out_dtype == torch.float32 else out
        # Block-scaled kernels add up every 128 elements in float32: there is nothing faster.
        is_fast = desc.fast_accumulation and not (BLOCKS | TILED).intersection(self._modes)
        return native.GemmDesc(
            problem.m,
            problem.n,
            per_byte * problem.k,
            *operands,
            out,
            not problem.is_unbiased,
            bias,
            desc.accumulate,
            is_fast,
            problem.alignment,
            problem.d_pitch,
        )


def _scale_shapes(
    operand: Operand, mode: str
) -> tuple[tuple[int, ...] | None, tuple[int, int] | None]:
    """Return the shape of an operand's scales, and the one that they must have; None: no scales."""
    (rows, k), scale_inv = operand.data.shape, operand.scale_inv
    shape = None if scale_inv is None else tuple(scale_inv.shape)
    return shape, scale_shape(mode, rows, -(-k // 128))


def _pitch_of_result(out: torch.Tensor) -> int | None:
    """Return the elements between rows of ``out``, None if cuBLASLt cannot write it."""
    pitch = row_stride(out)
    if pitch is None or out.data_ptr() % ALIGNMENT:
        return None
    return pitch if pitch == out.shape[1] or pitch * out.itemsize % ALIGNMENT == 0 else None


def parts_problem(desc: GemmDesc) -> str | None:
    """Say why the product of ``desc`` has no parts with the bits of the whole, or None."""
    return first_problem(
        (type(desc) is not GemmDesc or desc.accumulate, "no parts of groups, and none of a sum"),
        (desc.a is None, "no parts of a product in high precision"),
        (
            desc.a is not None and scale_mode(desc.a) in TILED,
            f"no parts of a product with the scales of {desc.a}",
        ),
    )


class ProductInParts:
    """A product some rows at a time, by the algorithm of the whole product; see GemmDesc."""

    __slots__ = ("_desc", "_device", "_native", "_parts", "_whole", "kernel")

    def __init__(self, desc: GemmDesc, device: torch.device, native: Any) -> None:
        self._desc = dataclasses.replace(desc, part=False)
        self._device = device
        self._native = native
        self._whole = LowPrecisionGemm(self._desc, device, native)
        self._parts: dict[int, LowPrecisionGemm] = {}
        self.kernel = self._whole.kernel

    def __call__(
        self,
        rows: int,
        a: Operand,
        b: Operand,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Multiply some of ``rows`` rows."""
        if not autotune.takes_the_first():  # an algorithm that is timed is that of the part's size
            return self._whole(a, b, bias=bias, out=out)
        parts = self._parts.get(rows)
        if parts is None:
            parts = LowPrecisionGemm(self._desc, self._device, self._native, rows)
            self._parts[rows] = parts
        return parts(a, b, bias=bias, out=out)


def high_precision_gemm(
    desc: GemmDesc,
    a: Operand,
    b: Operand,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply unquantized operands with torch's kernels, which accumulate in float32.

    What is multiplied in its own dtype, and is not added to ``out``, torch writes where it is due,
    by operators that a recorder repeats.
    """
    same = a.data.dtype == b.data.dtype == desc.out_dtype
    if same and not desc.accumulate and (bias is None or bias.dtype == desc.out_dtype):
        columns = b.data.t()  # [k, n]
        if bias is None:
            return torch.mm(a.data, columns, out=out)
        return torch.addmm(bias, a.data, columns, out=out)
    if a.data.dtype == b.data.dtype and a.data.dtype in (torch.bfloat16, torch.float16):
        product = torch.mm(a.data, b.data.t(), out_dtype=torch.float32)
    else:
        wide = torch.float64 if desc.out_dtype == torch.float64 else torch.float32
        product = a.data.to(wide) @ b.data.to(wide).t()
    return store(product, desc, bias, out)


def store(
    product: torch.Tensor, desc: GemmDesc, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """Add the bias to a float32 product, and round it once, into ``out`` if there is one."""
    if bias is not None:
        product = product.add_(bias)
    if out is None:
        return product.to(desc.out_dtype)
    return out.copy_(product.add_(out) if desc.accumulate else product)


def _empty_product(
    desc: GemmDesc,
    shape: tuple[int, int],
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    like: torch.Tensor,
) -> torch.Tensor:
    """Return a product that has no elements or contracts none: zeros plus the bias."""
    product = torch.zeros(shape, dtype=torch.float32, device=like.device)
    return store(product, desc, bias, out)
