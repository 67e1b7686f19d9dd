"""Operands of any spec on the device under test, for products and casts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import (
    GROUP_STEP,
    GemmDesc,
    GroupedGemmDesc,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
)
from fp8core.conformance import inputs
from fp8core.conformance.subject import Subject, storage_step

SEED = 11  # the default seed of quantize_keywords


def up(size: int, step: int) -> int:
    """Return the smallest multiple of ``step`` that is not below ``size``."""
    return -(-size // step) * step


def quantize_size(subject: Subject, desc: QuantizeDesc, rows: int, cols: int) -> tuple[int, int]:
    """Return ``rows`` and ``cols``, rounded up to sizes that operands of ``desc`` can have."""
    row_step = storage_step(subject, desc.columnwise)
    return up(rows, row_step), up(cols, storage_step(subject, desc.rowwise))


def quantize_keywords(
    subject: Subject, desc: QuantizeDesc, groups: int = 1, seed: int = SEED
) -> dict[str, Any]:
    """Return the keywords that the specs of ``desc`` need: ``scale`` and ``amax_out``, or ``rng``,
    or none."""
    specs = [spec for spec in (desc.rowwise, desc.columnwise) if spec is not None]
    if any(spec.delayed for spec in specs):
        scale = torch.arange(1, groups + 1) * (0.37 * seed / SEED)
        return {
            "scale": subject.here(scale),
            "amax_out": torch.full((groups,), 0.5, device=subject.device),
        }
    if any(spec.stochastic for spec in specs):
        return {"rng": torch.tensor([seed, 3])}
    return {}


def group_offsets(sizes: Sequence[int]) -> torch.Tensor:
    """Return the offsets ``[groups + 1]`` of groups of these sizes, on the CPU."""
    return torch.tensor([0, *sizes], device="cpu").cumsum(0)


def offsets_for(
    subject: Subject, desc: QuantizeDesc | GroupedGemmDesc, sizes: Sequence[int]
) -> torch.Tensor:
    """Return the offsets of groups of these sizes: on the device under test with
    ``desc.offsets_on_device``, else on the CPU."""
    offsets = group_offsets(sizes)
    if not desc.offsets_on_device:
        return offsets
    on_device: torch.Tensor = subject.here(offsets)
    return on_device


def groups_of(
    subject: Subject, desc: QuantizeDesc, sizes: Sequence[int]
) -> tuple[torch.Tensor, ...]:
    """Return the arguments of a cast that follow ``x``: the offsets of groups of these sizes, or
    nothing if there are no groups."""
    return (offsets_for(subject, desc, sizes),) if sizes else ()


def step_of(desc: QuantizeDesc | GroupedGemmDesc) -> int:
    """Return the step of :func:`split_groups` for operands of ``desc``."""
    return GROUP_STEP if desc.offsets_on_device else 1


def operand(
    subject: Subject,
    spec: OperandSpec | None,
    x: torch.Tensor,
    *offsets: torch.Tensor,
    columnwise: bool = False,
    seed: int = SEED,
    on_device: bool = False,
) -> Operand:
    """Quantize ``x``, a tensor on the device under test, in one orientation; with ``offsets``,
    which may be ``on_device``, in groups of rows.

    Where the backend does not support the cast, the judge quantizes and the operand is copied to
    the device. If ``spec`` is None, the operand is ``x`` itself, or a view of its transpose.
    """
    if spec is None:
        return Operand(x.t() if columnwise else x)
    row, column = (None, spec) if columnwise else (spec, None)
    desc = QuantizeDesc(x.dtype, row, column, bool(offsets), on_device)
    groups = len(offsets[0]) - 1 if offsets else 1
    run = subject.quantizer(desc)
    quantized: Quantized = run(desc, x, *offsets, **quantize_keywords(subject, desc, groups, seed))
    result = quantized[columnwise]
    assert result is not None
    return result


def source_dtype(desc: GemmDesc) -> torch.dtype:
    """Return the dtype of the tensors that operands of ``desc`` are made of."""
    return torch.float32 if desc.low_precision else desc.out_dtype


def aligned(subject: Subject, desc: GemmDesc, m: int, n: int, k: int) -> tuple[int, int, int]:
    """Return ``m``, ``n`` and ``k``, rounded up to sizes that the backend takes."""
    align = subject.alignment(desc)
    return up(m, align.m), up(n, align.n), up(k, align.k)


def gemm_operands(
    subject: Subject,
    desc: GemmDesc,
    m: int,
    n: int,
    k: int,
    *,
    columnwise: bool = False,
    seed: int = 0,
) -> tuple[Operand, Operand]:
    """Return operands ``a [m, k]`` and ``b [n, k]``, with sizes rounded up by :func:`aligned`.

    With ``columnwise`` these are the columnwise operands of tensors ``[k, m]`` and ``[k, n]``.
    """
    m, n, k = aligned(subject, desc, m, n, k)
    dtype = source_dtype(desc)
    operands = []
    for spec, rows, first in ((desc.a, m, 20), (desc.b, n, 40)):
        x = subject.here(inputs.moderate(rows, k, dtype, first + 100 * seed))
        x = x.t().contiguous() if columnwise else x
        operands.append(operand(subject, spec, x, columnwise=columnwise, seed=SEED + seed))
    return operands[0], operands[1]


class Groups(NamedTuple):
    """The arguments of a grouped GEMM, the rows of each group, and the result's size ``[m, n]``."""

    arguments: tuple[Any, ...]
    sizes: list[int]
    m: int
    n: int


def grouped_operands(
    subject: Subject,
    desc: GroupedGemmDesc,
    rows: Sequence[int] = (0, 150, 1, 0, 35),
    size: tuple[int, int, int] = (6, 10, 160),
    *,
    seed: int = 0,
    behind: int = 0,
    change: Callable[[torch.Tensor, list[int]], torch.Tensor] = lambda x, sizes: x,
) -> Groups:
    """Return operands of groups with these ``rows``, rounded up to the backend's alignment.

    The default has empty groups, a group of one step and a group longer than a block. ``size`` is
    ``(m, n, k)`` of one product; of the dimension along which the groups lie, ``rows`` gives the
    size instead. ``behind`` rows that belong to no group follow the last group. A grouped tensor
    ``x`` is quantized as ``change(x, sizes)``.
    """
    align = subject.alignment(desc)
    step = align.k if desc.contract_groups else align.m
    sizes = [up(count, step) for count in rows]
    total = sum(sizes) + behind
    offsets = offsets_for(subject, desc, sizes)
    m, n = up(size[0], align.m), up(size[1], align.n)
    dtype = source_dtype(desc)

    def grouped(spec: OperandSpec | None, x: torch.Tensor) -> Operand:
        here = subject.here(change(x, sizes))
        ways = {"columnwise": desc.contract_groups, "on_device": desc.offsets_on_device}
        return operand(subject, spec, here, offsets, **ways)

    if desc.contract_groups:
        a, b = (
            grouped(spec, inputs.moderate(total, cols, dtype, first + 100 * seed))
            for spec, cols, first in ((desc.a, m, 20), (desc.b, n, 40))
        )
        return Groups((a, b, offsets), sizes, m, n)
    k = up(size[2], align.k)
    a = grouped(desc.a, inputs.moderate(total, k, dtype, 20 + 100 * seed))
    weights = [
        operand(subject, desc.b, subject.here(inputs.moderate(n, k, dtype, first + 100 * seed)))
        for first in range(40, 40 + len(sizes))
    ]
    return Groups((a, weights, offsets), sizes, total, n)
