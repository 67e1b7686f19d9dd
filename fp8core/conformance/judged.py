"""Tensors quantized by the backend and by the judge: the kit's inputs, and the comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fp8core import formats
from fp8core.backend_api import Numerics, Operand, OperandSpec, Quantized, QuantizeDesc
from fp8core.conformance import inputs
from fp8core.conformance.compare import require, same_bits, same_form, within
from fp8core.conformance.operands import group_offsets, quantize_keywords, quantize_size, up
from fp8core.conformance.subject import Subject, on_cpu, storage_step

SHAPES = ((5, 7), (33, 70), (130, 200), (0, 5), (5, 0))
LARGE = (260, 1030)  # more than one kernel's tile in both directions
LONG = ((4100, 40), (40, 4100))
VERY_LONG = ((66000, 16), (16, 66000))  # above 65535; in bfloat16 alone, which costs less
MANY_GROUPS = (0, 2, 1, 33, 0, 1, 1) * 10


class Judged(NamedTuple):
    """A tensor ``x``, whose groups have ``sizes`` rows, quantized by the backend and by the
    judge, all on the CPU."""

    ours: Quantized
    theirs: Quantized
    amaxes: tuple[torch.Tensor | None, torch.Tensor | None]
    x: torch.Tensor
    sizes: Sequence[int] = ()


def both(subject: Subject, desc: QuantizeDesc, x: torch.Tensor, *sizes: int) -> Judged:
    """Quantize ``x``, which is on the CPU, with both; ``sizes`` are the rows of its groups."""
    keywords = [quantize_keywords(subject, desc, max(len(sizes), 1)) for _ in range(2)]
    keywords[1] = on_cpu(keywords[1])
    groups = (group_offsets(sizes),) if sizes else ()
    ours = subject.run(desc, *subject.here((x, *groups)), **keywords[0])
    theirs = subject.judging(desc)(x, *groups, **keywords[1])
    amaxes = (keywords[0].get("amax_out"), keywords[1].get("amax_out"))
    return Judged(on_cpu(ours), theirs, amaxes, x, sizes)


def group_sizes(subject: Subject, desc: QuantizeDesc) -> tuple[int, ...]:
    """Return sizes of groups: two empty ones, one longer than a block, a step, and one between."""
    step = storage_step(subject, desc.columnwise)
    return tuple(up(size, step) for size in (0, 130, 1, 0, 33))


def tensor_of(
    subject: Subject, desc: QuantizeDesc, kind: str
) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Return ``x`` of one of the kit's kinds, on the CPU, and the rows of its groups, if any."""
    sizes = group_sizes(subject, desc) if desc.grouped else ()
    shape = quantize_size(subject, desc, sum(sizes) or 33, 70)
    return inputs.matrix(kind, *shape, desc.dtype), sizes


def every(subject: Subject, desc: QuantizeDesc) -> Iterator[tuple[str, Judged]]:
    """Yield every input of the kit, quantized by both, and its title; kept for the next law."""
    last, judged = subject.results.get("every", (None, []))
    if last != desc:
        judged = [
            (title, both(subject, desc, x, *sizes))
            for title, x, sizes in every_input(subject, desc)
        ]
        subject.results["every"] = (desc, judged)
    yield from judged


def every_input(
    subject: Subject, desc: QuantizeDesc
) -> Iterator[tuple[str, torch.Tensor, Sequence[int]]]:
    """Yield every input of the kit on the CPU: title, x and the sizes of its groups."""
    sizes: Sequence[int]
    shapes: list[tuple[tuple[int, int], Sequence[int]]]
    if desc.grouped:
        sizes = group_sizes(subject, desc)
        shapes = [(quantize_size(subject, desc, sum(sizes), 70), sizes)]
    else:
        sizes_of_backend = subject.sizes("quantize", *SHAPES, LARGE)
        shapes = [(quantize_size(subject, desc, rows, cols), ()) for rows, cols in sizes_of_backend]
    for shape, sizes in shapes:
        is_large = not all(shape) or shape[0] * shape[1] >= LARGE[0] * LARGE[1]
        for kind in ("decades",) if is_large else inputs.KINDS:
            yield f"{kind} {list(shape)}", inputs.matrix(kind, *shape, desc.dtype), sizes
    for shape, sizes in _long_shapes(subject, desc):
        yield f"late amax {list(shape)}", inputs.late(*shape, desc.dtype), sizes


def _long_shapes(
    subject: Subject, desc: QuantizeDesc
) -> Iterator[tuple[tuple[int, int], Sequence[int]]]:
    """Yield shapes of many rows or columns, or of many groups and of wide ones with their sizes."""
    if not desc.grouped:
        very = VERY_LONG if desc.dtype == torch.bfloat16 else ()
        for shape in () if subject.sizes("quantize") else (*LONG, *very):
            yield quantize_size(subject, desc, *shape), ()
        return
    step = storage_step(subject, desc.columnwise)
    wide = (group_sizes(subject, desc), 264)
    for groups, cols in ((MANY_GROUPS, 40), ((3, LONG[0][0], 1), 40), wide):
        sizes = [up(size, step) for size in groups]
        yield quantize_size(subject, desc, sum(sizes), cols), sizes


def operands(
    desc: QuantizeDesc, ours: Quantized, theirs: Quantized
) -> Iterator[tuple[str, OperandSpec, Operand, Operand]]:
    """Yield orientation, spec and both operands for every orientation in ``desc``."""
    for name in Quantized._fields:
        spec, operand, reference = (getattr(source, name) for source in (desc, ours, theirs))
        _both_or_none(f"the {name} operand", operand, spec)
        if spec is not None:
            yield name, spec, operand, reference


def _both_or_none(name: str, ours: object, expected: object) -> None:
    # The message names no value: formatting a tensor costs more than computing it.
    require((ours is None) or (expected is not None), f"{name} is not asked for, but returned")
    require((expected is None) or (ours is not None), f"{name} is missing")


class _InRange(NamedTuple):
    """Which scales, and which elements, belong to blocks in the declared range of amaxes; and
    which elements to blocks of zeros."""

    scales: torch.Tensor
    elements: torch.Tensor
    zeros: torch.Tensor


def _in_range(
    numerics: Numerics, spec: OperandSpec, judged: Judged, orientation: str
) -> _InRange | None:
    """Return which blocks the declared bounds hold for, None if for all."""
    if numerics.amax_range == Numerics().amax_range:
        return None
    low, high = numerics.amax_range
    dim = 0 if orientation == "rowwise" else 1
    x = (judged.x if dim == 0 else judged.x.t()).double().abs()
    sizes = list(judged.sizes or (x.shape[dim],))
    parts = [_amaxes(part, spec.block) for part in torch.split(x, sizes, dim)]
    amaxes, spread = (torch.cat(of_all, dim) for of_all in zip(*parts, strict=True))
    scales, elements = (
        (magnitudes >= low) & (magnitudes <= high) for magnitudes in (amaxes, spread)
    )
    return _InRange(scales, elements, spread == 0)


def _amaxes(x: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the amax of each block of magnitudes, NaN of one with NaN; and for each element, that
    of its block."""
    rows, cols = (extent or max(size, 1) for extent, size in zip(block, x.shape, strict=True))
    sizes = [-(-x.shape[0] // rows) if block[0] else 1, -(-x.shape[1] // cols) if block[1] else 1]
    if x.numel() == 0:
        return x.new_zeros(sizes), x
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))
    tiles = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)
    amaxes = tiles.amax((1, 3))
    spread = amaxes.repeat_interleave(rows, 0).repeat_interleave(cols, 1)
    return amaxes, spread[: x.shape[0], : x.shape[1]]


def finite_values(spec: OperandSpec) -> list[float]:
    """Return the finite values of the format of ``spec``, in their order."""
    return sorted(set(filter(math.isfinite, formats.by_name(spec.format).values)))


def same_codes(subject: Subject, desc: QuantizeDesc, title: str, judged: Judged) -> float:
    """Require the judge's codes, or codes within the backend's declared error.

    Returns the largest error as a share of the declared one.
    """
    numerics = subject.numerics(desc)
    allowed = numerics.code_steps
    worst = 0.0
    for name, spec, ours, theirs in operands(desc, judged.ours, judged.theirs):
        where = f"{title}: {name} data"
        same_form(where, ours.data, theirs.data)
        if torch.equal(ours.data, theirs.data):
            continue
        elements = [subject.elements(spec, operand) for operand in (ours, theirs)]
        in_range = _in_range(numerics, spec, judged, name)
        if in_range is not None:
            zeros = elements[0][in_range.zeros]
            same_bits(f"{where}: blocks of zeros", zeros.abs(), torch.zeros_like(zeros))
            elements = [element[in_range.elements] for element in elements]
        if allowed == 0:
            same_bits(where, *elements)
            continue
        same_bits(f"{where}: NaN", *(element.isnan() for element in elements))
        grid = torch.tensor(finite_values(spec))
        ranks = [torch.bucketize(element.contiguous(), grid).double() for element in elements]
        bound = torch.full_like(ranks[1], allowed)
        worst = max(worst, within(f"{where} in steps of the format", ranks[0], ranks[1], bound))
    return worst


def same_scales(subject: Subject, desc: QuantizeDesc, title: str, judged: Judged) -> float:
    """Require the judge's scales, or scales within the backend's declared error.

    Returns the largest error as a share of the declared one.
    """
    numerics = subject.numerics(desc)
    allowed = numerics.scale_ulps
    worst = 0.0
    for name, spec, ours, theirs in operands(desc, judged.ours, judged.theirs):
        in_range = _in_range(numerics, spec, judged, name)
        for part in ("scale_inv", "global_scale_inv"):
            result, reference = getattr(ours, part), getattr(theirs, part)
            where = f"{title}: {name} {part}"
            _both_or_none(where, result, reference)
            if result is None:
                continue
            same_form(where, result, reference)
            if in_range is not None and part == "scale_inv":
                result, reference = result[in_range.scales], reference[in_range.scales]
            if allowed == 0:
                same_bits(where, result, reference)
                continue
            bits = [
                on.contiguous().view(torch.int32 if on.dtype == torch.float32 else torch.uint8)
                for on in (result, reference)
            ]
            bound = torch.full_like(bits[1], allowed, dtype=torch.float64)
            worst = max(worst, within(f"{where} in ulps", bits[0], bits[1].double(), bound))
    return worst


def has_both(desc: QuantizeDesc) -> bool:
    """Whether ``desc`` casts in both orientations."""
    return desc.rowwise is not None and desc.columnwise is not None


def is_nearest(desc: QuantizeDesc) -> bool:
    """Whether every element is rounded to the nearest."""
    return not any(spec is not None and spec.stochastic for spec in (desc.rowwise, desc.columnwise))
