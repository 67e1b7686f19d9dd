"""What an operand holds, told from its spec alone: its scales, its groups, its transform.

Re-exported by :mod:`fp8core.backend_api`: these are definitions, the same for every backend.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from fp8core import formats
from fp8core.backend_api.descriptors import Operand, OperandSpec

__all__ = ["GROUP_STEP", "TRANSFORMS", "Parts", "hadamard16", "scale_inverses", "split_groups"]

GROUP_STEP = 32
"""Elements that the groups of a columnwise operand begin at multiples of, where only the device
knows the offsets: as nobody else can pad them, the cast does. Kernels that copy 16 bytes at a time
read FP8 and FP4 from there, and it is a whole block of MX."""


class Parts(Protocol):
    """A rowwise operand ``[rows, k]`` that is made while it is read, once, some rows at a time.

    Iterating yields ``(start, end, operand)``, the operand of rows ``start`` to ``end``, which is
    good until the next is asked for. Together they are all rows, in order. The columnwise operand
    is whole when there are no more.
    """

    rows: int

    def __iter__(self) -> Iterator[tuple[int, int, Operand]]: ...


_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""The fixed signs of the transform. Source: docs/numerics.md 3.5, RHT."""


@functools.lru_cache(maxsize=16)
def _signs(device: torch.device) -> torch.Tensor:
    """Return the signs over 16: no sum of 16 numbers of bfloat16 overflows then, and none is
    rounded otherwise, as multiples of 2^-133 have 16 bits left down to float32's last."""
    signs = [sign / 16 for sign in _SIGNS]
    return torch.tensor(signs, dtype=torch.float32, device="cpu").to(device)


def hadamard16(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Transform every 16 elements along ``dim`` by ``diag(signs) H / 4``; bf16 in and out.

    The matrix is orthogonal, so a GEMM over two operands transformed along k is unchanged but for
    rounding. Sums are float32, of two at a time in a fixed order, so that every device makes the
    same bits; inf is a result beyond bfloat16 alone. Source: docs/numerics.md, NVFP4BlockScaling.
    """
    rows, cols = x.shape
    values = x.to(torch.bfloat16).to(torch.float32)
    # Signs made of a tensor subclass (fake while tracing) must not outlive its mode.
    make = _signs if type(x) is torch.Tensor else _signs.__wrapped__
    shape = (rows // 16, 16, cols) if dim == 0 else (rows, cols // 16, 16)
    along = 1 if dim == 0 else 2
    signs = make(x.device)
    signed = values.reshape(shape) * (signs[:, None] if dim == 0 else signs)
    parts = list(signed.unbind(along))
    for half in (1, 2, 4, 8):  # H of 2 h elements is [[H, H], [H, -H]] of h
        for first in range(16):
            if not first & half:
                second = first | half
                one, other = parts[first], parts[second]
                parts[first], parts[second] = one + other, one - other
    turned = torch.stack(parts, along) * 4
    return turned.reshape(rows, cols).to(torch.bfloat16)


TRANSFORMS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {"hadamard16": hadamard16}
"""``f(x [rows, cols], dim) -> [rows, cols]`` by the name that :class:`OperandSpec` has for it."""


def scale_inverses(spec: OperandSpec, operand: Operand) -> torch.Tensor:
    """Return the factor of each block of ``operand``, float32, both levels multiplied.

    ``value = decode(data) * factor``; the shape is that of ``operand.scale_inv``.
    """
    assert operand.scale_inv is not None
    scale_inv = operand.scale_inv
    if spec.scale_format != "float32":
        scale_inv = formats.by_name(spec.scale_format).decode(scale_inv)
    if operand.global_scale_inv is not None:
        scale_inv = scale_inv * operand.global_scale_inv
    return scale_inv


def split_groups(
    spec: OperandSpec | None, operand: Operand, bounds: Sequence[int], dim: int, step: int = 1
) -> list[Operand]:
    """Split an operand grouped along ``dim`` into the operands of its groups, as views.

    ``bounds`` are the values of ``group_offsets``; ``dim`` is 0 for a rowwise operand, 1 for a
    columnwise one, whose groups follow one another along k. ``spec`` None: a tensor in high
    precision. A group may be empty, and may end with a partial block. ``step`` is 1, or, where only
    the device knows the offsets, ``GROUP_STEP``; what the operand then holds between groups and
    beyond the last one is left out.
    """
    sizes = [end - start for start, end in itertools.pairwise(bounds)]
    if spec is None:
        return [Operand(part) for part in _split(operand.data, sizes, dim)]
    assert operand.scale_inv is not None
    per_byte = 8 // formats.by_name(spec.format).bits if dim == 1 else 1
    block = spec.block[dim]
    scale_sizes = [-(-size // block) if block else 1 for size in sizes]
    held = [-(-size // step) * step if dim == 1 else size for size in sizes]
    whole = _split(operand.data, [size // per_byte for size in held], dim)
    data = [part.narrow(dim, 0, size // per_byte) for part, size in zip(whole, sizes, strict=True)]
    scales = _split(operand.scale_inv, scale_sizes, dim)
    if operand.global_scale_inv is None:
        return [Operand(*parts) for parts in zip(data, scales, strict=True)]
    globals_ = torch.split(operand.global_scale_inv, 1, dim)
    return [Operand(*parts) for parts in zip(data, scales, globals_, strict=True)]


def _split(x: torch.Tensor, sizes: list[int], dim: int) -> Sequence[torch.Tensor]:
    """Return parts of these sizes along ``dim``, without what is beyond the last."""
    used = sum(sizes)
    return torch.split(x if used == x.shape[dim] else x.narrow(dim, 0, used), sizes, dim)
