"""Activations and their derivatives with the cast of their result: one pass over the tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import (
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    ColumnSumsDesc,
    FusedDesc,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
)
from fp8core_backends.cuda.activation import (
    Activation,
    ActivationBackward,
    activation_problem,
    native_activation,
)
from fp8core_backends.cuda.column_sums import ColumnSums
from fp8core_backends.cuda.fused_chunked import FusedCall, RunChunked, comes_in_chunks
from fp8core_backends.cuda.layout import Slots, adjacent_columns, scale_mode, slots_of
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.microscaling import ByteScaled
from fp8core_backends.cuda.operations import first_problem
from fp8core_backends.cuda.quantize import Quantize
from fp8core_backends.cuda.stream import index_of, raw_stream

# The kernels' casts, and of how many columns each of two halves is a multiple.
_MODES = {"tensor": 1, "row": 1, "vec128": 128, "mx32": 32, "nv16": 1}
_HALVES = (torch.bfloat16, torch.float16)
_VECTOR = 8  # elements that a kernel reads at once: 16 bytes
# The casts with which the halves of a gradient may be tensors of their own.
_SPLIT_MODES = ("tensor", "vec128")


def has_two_parts(producer: object) -> bool:
    """Whether the result is the gradient of a gated activation, of two halves."""
    return isinstance(producer, ActivationBackwardDesc) and producer.name in GATED


def fused_activation_problem(desc: FusedDesc, spec: OperandSpec) -> str | None:
    """Say why no kernel computes ``desc`` and casts by ``spec``, or None."""
    producer = desc.producer
    assert isinstance(producer, ActivationDesc | ActivationBackwardDesc)
    is_backward = isinstance(producer, ActivationBackwardDesc)
    rounds = producer.out_dtype == producer.dtype
    has_halves = has_two_parts(producer)
    reason = first_problem(
        (producer.dtype not in _HALVES, f"no fusion from {producer.dtype}"),
        (
            producer.out_dtype != desc.quantize.dtype,
            f"the cast takes {desc.quantize.dtype}, the activation gives {producer.out_dtype}",
        ),
        (
            not rounds and (producer.out_dtype != torch.float32 or has_halves),
            f"no fusion of {producer.name} from {producer.dtype} by way of {producer.out_dtype}",
        ),
        (
            scale_mode(spec) not in _MODES,
            f"no fusion with {spec.scale_format} scales of blocks of {spec.block}",
        ),
        (
            spec.delayed == rounds and not (spec.delayed and has_halves),
            "a fusion rounds before the cast unless the scale is delayed",
        ),
        (not is_backward and spec.format == "e5m2", f"no fusion to {spec.format} in forward"),
        (not is_backward and desc.quantize.sums, "no column sums in forward"),
        (
            desc.quantize.chunked and not (is_backward and comes_in_chunks(desc.quantize)),
            f"no chunks of {desc.op} by {spec}",
        ),
        (
            desc.quantize.split and (scale_mode(spec) not in _SPLIT_MODES or desc.quantize.chunked),
            f"no halves of {desc.op} by {spec} apart, and none in chunks",
        ),
    )
    return reason or activation_problem(producer)


class _Fused:
    """Base of both directions: the cast, and the native call."""

    __slots__ = ("_cast", "_dtype", "_index", "_native_fused", "_step", "kernel")

    def __init__(self, desc: FusedDesc, device: torch.device, native: Any) -> None:
        spec = desc.quantize.rowwise or desc.quantize.columnwise
        assert spec is not None
        assert isinstance(desc.producer, ActivationDesc | ActivationBackwardDesc)
        self._dtype = desc.producer.dtype
        self._index = index_of(device)
        activation = native_activation(desc.producer, self._index, native)
        mode = scale_mode(spec)
        assert mode is not None
        self._cast: Quantize | ByteScaled
        if mode in ("mx32", "nv16"):
            fused_type = {
                "mx32": native.QuantizeActivationMxfp8,
                "nv16": native.QuantizeActivationNvfp4,
            }[mode]
            self._cast = ByteScaled(desc.quantize, device, native)
        else:
            fused_type = native.QuantizeActivation
            self._cast = Quantize(desc.quantize, spec, device, native)
        self._native_fused = fused_type(activation, self._cast.native_cast)
        self.kernel = self._cast.kernel
        # The number of columns is a multiple of this; two halves are cast in whole blocks each.
        self._step = max(_VECTOR, _MODES[mode]) if has_two_parts(desc.producer) else _VECTOR

    def _results(
        self, rows: int, cols: int, slots: Slots, rng: torch.Tensor | None
    ) -> tuple[Quantized, tuple[int, ...], torch.Tensor | None]:
        """Allocate what the cast fills; see ``Quantize.results``."""
        if isinstance(self._cast, ByteScaled):
            return self._cast.results(rows, cols, slots, rng)
        return self._cast.results(rows, cols, slots)

    def _quantize(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        nonfinite_out: torch.Tensor | None,
        rng: torch.Tensor | None,
    ) -> Quantized:
        """Cast what was computed in a step of its own."""
        if isinstance(self._cast, ByteScaled):
            return self._cast(x, rng=rng, nonfinite_out=nonfinite_out)
        return self._cast(x, scale=scale, amax_out=amax_out, nonfinite_out=nonfinite_out)


class FusedActivation(_Fused):
    """``(quantized y,)`` from ``x``; see FusedDesc."""

    __slots__ = ("_activation", "_num_parts")

    def __init__(self, desc: FusedDesc, device: torch.device, native: Any) -> None:
        super().__init__(desc, device, native)
        assert isinstance(desc.producer, ActivationDesc)
        self._activation = Activation(desc.producer, device, native)
        self._num_parts = 2 if desc.producer.name in GATED else 1

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
        rng: torch.Tensor | None = None,
    ) -> tuple[Quantized]:
        """Activate ``x`` and quantize the result.

        Raises:
            OperandError: ``x`` has another dtype than was bound.
        """
        rows, cols = x.shape
        n = cols // self._num_parts
        x, stride = adjacent_columns(x)
        address = x.data_ptr()
        is_whole = rows and n and not n % self._step and x.dtype == self._dtype
        if not is_whole or stride % _VECTOR or address % 16:
            y = self._activation(x)
            return (self._quantize(y, scale, amax_out, nonfinite_out, rng),)
        slots = slots_of(scale, amax_out, nonfinite_out)
        quantized, results, _workspace = self._results(rows, n, slots, rng)
        self._native_fused(
            (
                *(address, rows, cols, stride),
                *(0, 0),  # no gradient
                *(0, 0),  # no sums
                *(0, rows, n, n),  # the result, which has no memory
                *results,
            ),
            raw_stream(self._index),
        )
        return (quantized,)


class _Inputs(NamedTuple):
    """The native call's arguments of ``x`` and of the gradient, and the tensors, held until it is
    enqueued."""

    addresses: tuple[int, ...]
    tensors: tuple[torch.Tensor, torch.Tensor]


class FusedActivationBackward(_Fused):
    """``(quantized grad_x,)`` from ``grad_output`` and ``x``, and column sums if asked for."""

    __slots__ = ("_backward", "_column_sums", "_empty", "_has_sums", "_num_parts")

    def __init__(self, desc: FusedDesc, device: torch.device, native: Any) -> None:
        super().__init__(desc, device, native)
        assert isinstance(desc.producer, ActivationBackwardDesc)
        self._backward = ActivationBackward(desc.producer, device, native)
        self._column_sums = ColumnSums(ColumnSumsDesc(desc.quantize.dtype), device, native)
        self._empty = allocator(self._index)
        self._has_sums = desc.quantize.sums
        self._num_parts = 2 if desc.producer.name in GATED else 1

    def in_chunks(self, cast: QuantizeDesc, native: Any) -> RunChunked:
        """Return the call whose result comes in chunks of ``cast``."""
        assert cast.rowwise is not None
        mode = scale_mode(cast.rowwise)
        assert mode is not None
        call = FusedCall(
            self.__call__,
            self._native_fused,
            native,
            self._index,
            self._dtype,
            mode,
            self._num_parts,
            self._step,
            self._has_sums,
        )
        return RunChunked(call)

    def __call__(
        self,
        grad_output: torch.Tensor,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
        rng: torch.Tensor | None = None,
    ) -> tuple[Quantized] | tuple[Quantized, torch.Tensor]:
        """Differentiate at ``x``, and quantize the result.

        Raises:
            OperandError: ``grad_output`` or ``x`` has another dtype than was bound, or their
                shapes are not those of one activation.
        """
        inputs = self._inputs(grad_output, x)
        if inputs is None:
            return self._in_two_steps(grad_output, x, scale, amax_out, nonfinite_out, rng)
        (rows, cols), slots = x.shape, slots_of(scale, amax_out, nonfinite_out)
        quantized, results, _workspace = self._results(rows, cols, slots, rng)
        sums, addresses, _tile_sums = self._sums(rows, cols)
        # The result of the activation has no memory.
        arguments = (*inputs.addresses, *addresses, 0, rows, cols, cols, *results)
        self._native_fused(arguments, raw_stream(self._index))
        return (quantized,) if sums is None else (quantized, sums)

    def _inputs(self, grad_output: torch.Tensor, x: torch.Tensor) -> _Inputs | None:
        """Return the tensors as the kernel reads them, None if it does not read such."""
        rows, cols = x.shape
        n = cols // self._num_parts
        x, stride = adjacent_columns(x)
        grad_output, grad_stride = adjacent_columns(grad_output)
        address, grad_address = x.data_ptr(), grad_output.data_ptr()
        is_whole = rows and n and not n % self._step
        is_whole = is_whole and x.dtype == grad_output.dtype == self._dtype
        is_whole = is_whole and grad_output.shape == (rows, n) and n * self._num_parts == cols
        if not is_whole or (stride | grad_stride) % _VECTOR or (address | grad_address) % 16:
            return None
        addresses = (address, rows, cols, stride, grad_address, grad_stride)
        return _Inputs(addresses, (x, grad_output))

    def _sums(
        self, rows: int, cols: int
    ) -> tuple[torch.Tensor | None, tuple[int, int], torch.Tensor | None]:
        """Allocate the column sums, if they are asked for, and those of tiles, which the caller
        holds until they are enqueued; with the addresses of both."""
        if not self._has_sums:
            return None, (0, 0), None
        sums = self._empty((cols,), (1,), torch.float32)
        size = self._native_fused.tile_sums_floats(rows, cols)
        tile_sums = self._empty((size,), (1,), torch.float32)
        return sums, (sums.data_ptr(), tile_sums.data_ptr()), tile_sums

    def _in_two_steps(
        self,
        grad_output: torch.Tensor,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        nonfinite_out: torch.Tensor | None,
        rng: torch.Tensor | None,
    ) -> tuple[Quantized] | tuple[Quantized, torch.Tensor]:
        grad_x = self._backward(grad_output, x)
        quantized = self._quantize(grad_x, scale, amax_out, nonfinite_out, rng)
        return (quantized, self._column_sums(grad_x)) if self._has_sums else (quantized,)


Pair: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None]"
"""A tensor of each half."""


class FusedHalves(FusedActivationBackward):
    """``((quantized, quantized),)`` from ``grad_output`` and ``x``: the gradients of the two halves
    of ``x``, each cast by itself; and the sums of all columns if asked for."""

    __slots__ = ("_has_one_scale",)

    def __init__(self, desc: FusedDesc, device: torch.device, native: Any) -> None:
        super().__init__(desc, device, native)
        spec = desc.quantize.rowwise or desc.quantize.columnwise
        assert spec is not None
        self._has_one_scale = scale_mode(spec) == "tensor"

    def __call__(  # type: ignore[override]  # pairs
        self,
        grad_output: torch.Tensor,
        x: torch.Tensor,
        *,
        scale: Pair = (None, None),
        amax_out: Pair = (None, None),
        nonfinite_out: Pair = (None, None),
    ) -> tuple[Any, ...]:
        """Differentiate at ``x``, and quantize both halves of the result.

        Raises:
            OperandError: as the call for one tensor.
        """
        assert isinstance(self._cast, Quantize)
        first, second = zip(scale, amax_out, nonfinite_out, strict=True)
        rows, cols = x.shape
        n = cols // 2
        inputs = self._inputs(grad_output, x)
        if inputs is None:
            grad_x = self._backward(grad_output, x)
            parts = (grad_x[:, :n], first), (grad_x[:, n:], second)
            pair = tuple([self._quantize(part, *each, None) for part, each in parts])
            return (pair, self._column_sums(grad_x)) if self._has_sums else (pair,)
        quantized, results, workspace = self._results(rows, cols, slots_of(*first), None)
        sums, addresses, _tile_sums = self._sums(rows, cols)
        scale_inv, scale_address, workspace_address = None, 0, 0
        if self._has_one_scale:
            scale_inv = self._empty((1, 1), (1, 1), torch.float32)
            scale_address = scale_inv.data_ptr()
        if workspace is not None:
            behind = self._empty((workspace.shape[0],), (1,), torch.float32)
            workspace_address = behind.data_ptr()
        slots = (scale_address, *slots_of(*second), workspace_address)
        arguments = (*slots, *inputs.addresses, *addresses, 0, rows, cols, cols, *results)
        self._native_fused.halves(arguments, raw_stream(self._index))
        pair = _halves(quantized, n, scale_inv)
        return (pair,) if sums is None else (pair, sums)


def _halves(both: Quantized, n: int, scale_inv: torch.Tensor | None) -> tuple[Quantized, Quantized]:
    """Return the operands of the first ``n`` columns and of the others, with the latter's
    ``scale_inv``; None: scales are of blocks, which lie as their elements."""

    def parts(operand: Operand | None, dim: int) -> tuple[Operand | None, Operand | None]:
        if operand is None:
            return None, None
        codes, scales, _ = operand
        assert scales is not None
        of_parts = scales.chunk(2, dim) if scale_inv is None else (scales, scale_inv)
        first, second = map(Operand, torch.split(codes, n, dim), of_parts)
        return first, second

    rows, columns = parts(both.rowwise, 1), parts(both.columnwise, 0)
    first, second = map(Quantized, rows, columns)
    return first, second


def bind_fused_activation(
    desc: FusedDesc, device: torch.device, native: Any
) -> Callable[..., tuple[Any, ...]]:
    """Return the callable of ``desc``."""
    if isinstance(desc.producer, ActivationDesc):
        return FusedActivation(desc, device, native)
    if desc.quantize.split:
        return FusedHalves(desc, device, native)
    backward = FusedActivationBackward(desc, device, native)
    return backward.in_chunks(desc.quantize, native) if desc.quantize.chunked else backward
