"""Laws of casts by given amaxes: amax is exact, and a cast by the amaxes of x equals quantize."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import (
    AmaxDesc,
    Operand,
    OperandSpec,
    QuantizeByAmaxDesc,
    Quantized,
    QuantizeDesc,
    amax_extent,
    has_amax,
    split_amax,
)
from fp8core.conformance import inputs
from fp8core.conformance.calls import Case, OpCall, arguments, example
from fp8core.conformance.checks import BY_AMAX, law
from fp8core.conformance.compare import require, same_bits, same_tensors
from fp8core.conformance.judged import (
    Judged,
    every_input,
    group_sizes,
    is_nearest,
    same_codes,
    same_scales,
    tensor_of,
)
from fp8core.conformance.operands import (
    group_offsets,
    groups_of,
    offsets_for,
    quantize_keywords,
    quantize_size,
    up,
)
from fp8core.conformance.subject import Subject, on_cpu, storage_step

SIZE = 96
SPLIT = 37  # the length of the first of two parts, before it is rounded up to whole blocks


def amax_of(subject: Subject, desc: QuantizeDesc, *arguments: torch.Tensor) -> torch.Tensor:
    """Return the amaxes of ``x`` and its groups, of the judge if the backend does not take them."""
    amax: torch.Tensor
    if subject.refuses(AmaxDesc(desc)) is None:
        amax = subject.run(AmaxDesc(desc), *arguments)
    else:
        amax = subject.here(subject.judged(AmaxDesc(desc), *arguments))
    return amax


@example(QuantizeByAmaxDesc)
def _quantize_by_amax(subject: Subject, desc: QuantizeByAmaxDesc, case: Case) -> OpCall:
    call = arguments(subject, desc.plain(), case)
    amax = amax_of(subject, desc.plain(), *call.arguments)
    return OpCall(desc, call.arguments, {"amax": amax, **call.keywords})


@example(AmaxDesc)
def _amax(subject: Subject, desc: AmaxDesc, case: Case) -> OpCall:
    return OpCall(desc, arguments(subject, desc.quantize, case).arguments, {})


@law(4, "amax", is_core=True)
def amax_is_exact(subject: Subject, desc: AmaxDesc) -> None:
    """Every amax has the reference's bits: without NaN, with inf, and 0 for an empty tensor."""
    for title, x, sizes in every_input(subject, desc.quantize):
        groups = groups_of(subject, desc.quantize, sizes)
        amax = subject.run(desc, subject.here(x), *groups)
        same_bits(f"amax of {title}", amax, subject.judged(desc, x, *groups))


@law(4, "amax", applies=lambda desc: desc.quantize.offsets_on_device)
def amax_leaves_out_rows_of_no_group(subject: Subject, desc: AmaxDesc) -> None:
    """Rows behind the last group change no group's amax, and their own amaxes are 0."""
    cast = desc.quantize
    step = storage_step(subject, cast.columnwise)
    sizes = group_sizes(subject, cast)
    rows, cols = quantize_size(subject, cast, sum(sizes) + step, 70)
    x = inputs.matrix("decades", rows, cols, cast.dtype).clone()
    x[sum(sizes) :] = torch.finfo(cast.dtype).max
    offsets = group_offsets(sizes)
    amax = subject.run(desc, subject.here(x), offsets_for(subject, cast, sizes))
    same_bits("amax", amax, subject.judged(desc, x, offsets))


@law(2, "amax")
def amax_of_either_half_is_supported(subject: Subject, desc: AmaxDesc) -> None:
    """A backend that takes the amaxes of both orientations in one call also takes either alone."""
    for half in desc.quantize.halves():
        reason = subject.refuses(AmaxDesc(half)) if has_amax(half) else None
        require(reason is None, f"supports {desc}, but not {AmaxDesc(half)}: {reason}")


@law(3, "amax")
def amax_of_both_orientations_equals_two_calls(subject: Subject, desc: AmaxDesc) -> None:
    """A call for both orientations gives the bits of a call for each."""
    cast = desc.quantize
    x, sizes = tensor_of(subject, cast, "decades")
    x, groups = subject.here(x), groups_of(subject, cast, sizes)
    amaxes = split_amax(cast, subject.run(desc, x, *groups), len(x), x.shape[1], len(sizes) or 1)
    for name, half, part in zip(amaxes._fields, cast.halves(), amaxes, strict=True):
        if part is not None:
            same_bits(f"{name} amax", part, subject.run(AmaxDesc(half), x, *groups))


@law(2, BY_AMAX)
def quantize_by_amax_is_supported_besides_quantize(
    subject: Subject, desc: QuantizeByAmaxDesc
) -> None:
    """A backend that quantizes by given amaxes also does so in either orientation, and without."""
    halves = [QuantizeByAmaxDesc.of(half) for half in desc.halves() if has_amax(half)]
    for part in (desc.plain(), *halves):
        reason = subject.refuses(part)
        require(reason is None, f"supports {desc}, but not {part}: {reason}")


@law(6, BY_AMAX, is_core=True)
def quantize_by_its_amaxes_equals_quantize(subject: Subject, desc: QuantizeByAmaxDesc) -> None:
    """quantize(x, amax=amax(x)) has the bits of quantize(x)."""
    plain = desc.plain()
    for title, x, sizes in every_input(subject, plain):
        arguments = (subject.here(x), *groups_of(subject, plain, sizes))
        keywords = quantize_keywords(subject, plain)
        amax = amax_of(subject, plain, *arguments)
        ours = subject.run(desc, *arguments, amax=amax, **keywords)
        same_tensors(title, ours, subject.run(plain, *arguments, **keywords))


@law(1, BY_AMAX, applies=is_nearest)
def quantize_by_amax_takes_no_amax_from_x(
    subject: Subject, desc: QuantizeByAmaxDesc
) -> Iterator[float]:
    """Scales follow from the given amaxes, larger or smaller than those of x."""
    plain = desc.plain()
    x, sizes = tensor_of(subject, plain, "decades")
    offsets = groups_of(subject, plain, sizes)
    for factor in (0.3, 5.0, 0.0, math.inf):
        amax = subject.judged(AmaxDesc(plain), x, *offsets) * factor
        amax = amax.nan_to_num(0.0, posinf=math.inf)
        ours = subject.run(desc, subject.here(x), *offsets, amax=subject.here(amax))
        theirs = subject.judged(desc, x, *offsets, amax=amax)
        judged = Judged(on_cpu(ours), theirs, (None, None), x, sizes)
        title = f"amax times {factor}"
        yield same_codes(subject, desc, title, judged)
        yield same_scales(subject, desc, title, judged)


@law(6, BY_AMAX, applies=lambda desc: not desc.grouped)
def quantize_by_the_amaxes_of_the_whole_gives_its_part(
    subject: Subject, desc: QuantizeByAmaxDesc
) -> None:
    """Two parts of a tensor have the bits of the whole, by the larger of their amaxes."""
    plain = desc.plain()
    size = quantize_size(subject, plain, SIZE, SIZE)
    for dim, kind in itertools.product((0, 1), ("decades", "outlier", "nonfinite")):
        x = inputs.matrix(kind, *size, plain.dtype)
        at = _split_position(subject, plain, dim)
        parts = [subject.here(part) for part in torch.split(x, [at, size[dim] - at], dim)]
        amaxes = [amax_of(subject, plain, part) for part in parts]
        _reduce(plain, parts, amaxes, dim)
        keywords = quantize_keywords(subject, plain)
        whole = on_cpu(subject.run(plain, subject.here(x), **keywords))
        for part, amax, start in zip(parts, amaxes, (0, at), strict=True):
            ours = on_cpu(subject.run(desc, part, amax=amax, **keywords))
            expected = _part_of(plain, whole, dim, start, start + part.shape[dim])
            if not is_nearest(desc):  # an element's noise depends on its position in x
                ours, expected = _without_codes(ours), _without_codes(expected)
            same_tensors(f"{kind}, from {start} on along dimension {dim}", ours, expected)


def _split_position(subject: Subject, desc: QuantizeDesc, dim: int) -> int:
    """Return a position along ``dim`` that splits no block, and no byte of two codes."""
    steps = [storage_step(subject, desc.columnwise if dim == 0 else desc.rowwise)]
    for turned, spec in enumerate((desc.rowwise, desc.columnwise)):
        steps.append((spec is not None and spec.block[dim ^ turned]) or 1)
    step = math.lcm(*steps)
    return up(SPLIT, step)


def _reduce(
    desc: QuantizeDesc, parts: list[torch.Tensor], amaxes: list[torch.Tensor], dim: int
) -> None:
    """Write the larger amax of two parts along ``dim`` into both.

    Amaxes of single rows stay as they are if the two parts have different rows.
    """
    views = [split_amax(desc, amax, *x.shape) for amax, x in zip(amaxes, parts, strict=True)]
    for turned, spec in enumerate((desc.rowwise, desc.columnwise)):
        first, second = (view[turned] for view in views)
        is_separate = amax_extent(spec) == "row" and dim == turned
        if first is not None and second is not None and not is_separate:
            first.copy_(torch.maximum(first, second))
            second.copy_(first)


def _part_of(desc: QuantizeDesc, whole: Quantized, dim: int, start: int, end: int) -> Quantized:
    """Return the operands' part from ``start`` to ``end`` along dimension ``dim`` of the tensor."""

    def part(spec: OperandSpec | None, operand: Operand | None, along: int) -> Operand | None:
        if spec is None or operand is None:
            return None
        assert operand.scale_inv is not None
        per_byte = 8 // formats.by_name(spec.format).bits if along == 1 else 1
        data = operand.data.narrow(along, start // per_byte, (end - start) // per_byte)
        scale_inv, block = operand.scale_inv, spec.block[along]
        if block:
            scale_inv = scale_inv.narrow(along, start // block, -(-(end - start) // block))
        outer = operand.global_scale_inv
        if outer is not None and spec.row_scaled and along == 0:
            outer = outer.narrow(0, start, end - start)
        return Operand(data, scale_inv, outer)

    return Quantized(
        part(desc.rowwise, whole.rowwise, dim), part(desc.columnwise, whole.columnwise, 1 - dim)
    )


def _without_codes(quantized: Any) -> Quantized:
    return Quantized(
        *(
            None if operand is None else operand._replace(data=operand.data[:0])
            for operand in quantized
        )
    )
