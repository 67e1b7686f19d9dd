"""Rotary position embedding: one launch for all heads, forward and for the gradient, also where
values are copied beside rotated queries and keys."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.backend_api import ATTENTION_LAYOUTS, OperandError, PackedRotaryDesc, RotaryDesc
from fp8core_backends.cuda.layout import DTYPES
from fp8core_backends.cuda.memory import allocator
from fp8core_backends.cuda.operations import runs
from fp8core_backends.cuda.stream import index_of, raw_stream


def _problem(desc: RotaryDesc) -> str | None:
    """Say why there is no kernel for ``desc``, or None."""
    if desc.layout not in ATTENTION_LAYOUTS:
        return f"no layout {desc.layout!r}"
    return None if desc.dtype in DTYPES else f"no rotary embedding of {desc.dtype}"


@runs(RotaryDesc, PackedRotaryDesc, refuses=_problem)
class Rotary:
    """``y`` of the shape of ``x``, or with the heads of all; tensors are read where they are,
    whatever their strides.

    An element is two products and a sum, each rounded to float32, of a sine and a cosine with an
    error of at most 2 ulps: within ``2^-22`` of the sum of magnitudes of its pair before the last
    rounding. Source: CUDA C++ Programming Guide, mathematical functions, of ``sincosf``.
    """

    __slots__ = ("_desc", "_empty", "_index", "_native_rotary", "kernel")

    def __init__(self, desc: RotaryDesc, device: torch.device, native: Any) -> None:
        self.kernel = "fp8core::rotate_heads"
        self._desc = desc
        self._index = index_of(device)
        self._empty = allocator(self._index)
        self._native_rotary = native.Rotary(
            native.RotaryLayout.__members__[desc.layout],
            desc.interleaved,
            desc.inverse,
            native.InputType.__members__[DTYPES[desc.dtype]],
            self._index,
        )

    def __call__(
        self,
        x: torch.Tensor,
        freqs: torch.Tensor,
        *,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        start_positions: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Rotate ``x``; see the backend API.

        Raises:
            OperandError: a tensor of another dtype, shape or device than the kernel reads.
        """
        sizes, strides = _by_rows(self._desc, x)
        self._check_angles(x, freqs)
        sequences = self._check_sequences(x, start_positions, cu_seqlens)
        shape = tuple(x.shape)
        beside: tuple[int, ...] = ()
        if isinstance(self._desc, PackedRotaryDesc):
            shape, beside = self._beside(x, k, v)
        y = self._empty(shape, _contiguous(shape), self._desc.dtype)
        # Copies, if there are any, are held until the kernel is enqueued.
        freqs = freqs.contiguous()
        starts = None if start_positions is None else start_positions.contiguous()
        bounds = None if cu_seqlens is None else cu_seqlens.contiguous()
        arguments = (
            x.data_ptr(),
            *sizes,
            *strides,
            freqs.data_ptr(),
            freqs.shape[0],
            freqs.shape[3],
            0 if starts is None else starts.data_ptr(),
            0 if bounds is None else bounds.data_ptr(),
            sequences,
            y.data_ptr(),
            *beside,
        )
        self._native_rotary(arguments, raw_stream(self._index))
        return y

    def _beside(
        self, x: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape of the result for all heads, and what the kernel is given of the keys
        and values."""
        *tokens, heads, size = x.shape
        numbers: list[int] = []
        for name, part in (("k", k), ("v", v)):
            if (
                part is None
                or part.dim() != x.dim()
                or not heads * part.shape[-2]
                or (part.dtype, part.device) != (x.dtype, x.device)
                or (*part.shape[:-2], part.shape[-1]) != (*tokens, size)
            ):
                shown = None if part is None else f"{part.dtype} {list(part.shape)}"
                raise OperandError(
                    f"rotary: {name} is {shown}; expected {x.dtype} "
                    f"{[*tokens, 'heads', size]} on {x.device}, as of x."
                )
            sizes, strides = _by_rows(self._desc, part)
            numbers += (part.data_ptr(), *sizes, *strides)
            heads += sizes[2]
        return (*tokens, heads, size), tuple(numbers)

    def _check_angles(self, x: torch.Tensor, freqs: torch.Tensor) -> None:
        if x.dtype != self._desc.dtype:
            raise OperandError(f"rotary of {x.dtype}; bound for {self._desc.dtype}.")
        shape = tuple(freqs.shape)
        is_table = len(shape) == 4 and shape[1:3] == (1, 1) and freqs.dtype == torch.float32
        if not is_table or freqs.device != x.device or shape[3] % 2 or shape[3] > x.shape[-1]:
            raise OperandError(
                f"rotary: freqs is {freqs.dtype} {list(shape)} on {freqs.device}; expected "
                f"torch.float32 [positions, 1, 1, r] on {x.device}, r even and at most "
                f"{x.shape[-1]}."
            )

    def _check_sequences(
        self, x: torch.Tensor, starts: torch.Tensor | None, cu_seqlens: torch.Tensor | None
    ) -> int:
        """Return the number of sequences."""
        layout = self._desc.layout
        if (cu_seqlens is None) == (layout == "thd"):
            said = "without cu_seqlens" if cu_seqlens is None else "with cu_seqlens"
            raise OperandError(f"rotary of {layout} {said}; expected them in thd, and there alone.")
        if cu_seqlens is None:
            batch = x.shape[layout.index("b")]
        else:
            batch = cu_seqlens.numel() - 1
            _check_integers("cu_seqlens", cu_seqlens, max(batch, 0) + 1, x.device)
        if starts is not None:
            _check_integers("start_positions", starts, batch, x.device)
        return batch


def _check_integers(name: str, x: torch.Tensor, count: int, device: torch.device) -> None:
    if x.dtype == torch.int32 and x.shape == (count,) and x.device == device:
        if count == 0 or x.data_ptr() != 0:  # which the kernel takes for None
            return
        raise OperandError(f"rotary: {name} has the address 0: a tensor without memory of its own.")
    raise OperandError(
        f"rotary: {name} is {x.dtype} {list(x.shape)} on {x.device}; expected "
        f"torch.int32 [{count}] on {device}."
    )


def _by_rows(desc: RotaryDesc, x: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return sizes and strides of ``x`` with four dimensions: in thd, the second one is 1.

    Raises:
        OperandError: ``x`` has another number of dimensions than its layout.
    """
    sizes, strides = tuple(x.shape), x.stride()
    if len(sizes) != len(desc.layout):
        raise OperandError(
            f"rotary: x is {list(sizes)}; expected {len(desc.layout)} dimensions, {desc.layout}."
        )
    if desc.layout != "thd":
        return sizes, strides
    return (sizes[0], 1, *sizes[1:]), (strides[0], 0, *strides[1:])


def _contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
