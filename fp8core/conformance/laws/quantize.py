"""Laws 1 and 3 for ``quantize``.

Codes and scales equal the reference's, also at the edges of a format; stochastic rounding is
compared in distribution. A call for both orientations or in chunks of rows equals the calls for
each orientation and for the whole.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import (
    Chunks,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
    split_groups,
)
from fp8core.conformance import inputs
from fp8core.conformance.calls import Case, OpCall, example
from fp8core.conformance.checks import law
from fp8core.conformance.compare import (
    column_sums_within,
    require,
    same_bits,
    same_form,
    same_tensors,
    within,
)
from fp8core.conformance.judged import (
    LARGE,
    Judged,
    both,
    every,
    finite_values,
    group_sizes,
    has_both,
    is_nearest,
    same_codes,
    same_scales,
    tensor_of,
)
from fp8core.conformance.operands import (
    SEED,
    group_offsets,
    groups_of,
    offsets_for,
    quantize_keywords,
    quantize_size,
    step_of,
    up,
)
from fp8core.conformance.subject import Subject, on_cpu, storage_step

REPEATS, SEEDS = 256, 48
CHANCE = 1e-9
"""The chance that one comparison of means fails although the implementation is right."""


@example(QuantizeDesc)
def _quantize(subject: Subject, desc: QuantizeDesc, case: Case) -> OpCall:
    offsets: tuple[torch.Tensor, ...] = ()
    sizes, (rows, cols) = [0], case.size or (33, 70)
    if desc.grouped:
        step = storage_step(subject, desc.columnwise)
        sizes = [0, up(rows, step), up(1, step), 0, up(9, step)]
        rows = sum(sizes)
        offsets = (offsets_for(subject, desc, sizes),)
    shape = quantize_size(subject, desc, rows, cols)
    x = inputs.matrix("holes", *shape, desc.dtype, case.seed)
    keywords = quantize_keywords(subject, desc, len(sizes), SEED + case.seed)
    return OpCall(desc, (subject.here(x), *offsets), keywords, frozenset({"amax_out"}))


def _is_stochastic(desc: QuantizeDesc) -> bool:
    return not is_nearest(desc)


def _is_dense_and_stochastic(desc: QuantizeDesc) -> bool:
    return not desc.grouped and _is_stochastic(desc)


def _tensors_of(subject: Subject, desc: QuantizeDesc) -> tuple[torch.Tensor, ...]:
    """Return ``x`` of moderate values; if ``desc`` is grouped, ``x`` twice and the offsets."""
    x = inputs.moderate(*quantize_size(subject, desc, 64, 96), desc.dtype)
    if not desc.grouped:
        return (subject.here(x),)
    return subject.here(torch.cat((x, x))), offsets_for(subject, desc, (len(x), len(x)))


def _run(subject: Subject, desc: QuantizeDesc, seed: int, offset: int) -> Quantized:
    quantized: Quantized = on_cpu(
        subject.run(desc, *_tensors_of(subject, desc), rng=torch.tensor([seed, offset]))
    )
    return quantized


def _codes(desc: QuantizeDesc, quantized: Quantized) -> list[tuple[int, torch.Tensor]]:
    """Return the codes that were rounded stochastically, each with its orientation."""
    specs = (desc.rowwise, desc.columnwise)
    return [
        (at, operand.data)
        for at, (spec, operand) in enumerate(zip(specs, quantized, strict=True))
        if spec is not None and spec.stochastic and operand is not None
    ]


@law(1, "quantize", applies=_is_stochastic)
def stochastic_rounding_repeats_with_the_same_rng(subject: Subject, desc: QuantizeDesc) -> None:
    """The same seed and offset give the same codes, and torch's generator does not advance."""
    state = torch.get_rng_state()
    first, again = (_run(subject, desc, 7, 9) for _ in range(2))
    require(torch.equal(torch.get_rng_state(), state), "torch's generator was advanced")
    for (_, mine), (_, yours) in zip(_codes(desc, first), _codes(desc, again), strict=True):
        same_bits("codes of the second call", yours, mine)


@law(1, "quantize", applies=_is_stochastic)
def stochastic_rounding_follows_seed_and_offset(subject: Subject, desc: QuantizeDesc) -> None:
    """Another seed, and another offset, give other codes."""
    first = _run(subject, desc, 7, 9)
    for seed, offset in ((7, 10), (8, 9)):
        changed = _codes(desc, _run(subject, desc, seed, offset))
        for (_, mine), (_, yours) in zip(_codes(desc, first), changed, strict=True):
            message = f"rng ({seed}, {offset}) gives the codes of (7, 9)"
            require(not torch.equal(mine, yours), message)


@law(1, "quantize", applies=lambda desc: desc.grouped and _is_stochastic(desc))
def stochastic_rounding_differs_between_equal_groups(subject: Subject, desc: QuantizeDesc) -> None:
    """Two groups of the same values are rounded independently."""
    for dim, codes in _codes(desc, _run(subject, desc, 7, 9)):
        first, second = codes.chunk(2, dim)
        require(not torch.equal(first, second), "equal groups have equal codes")


@law(1, "quantize", applies=_is_dense_and_stochastic)
def stochastic_rounding_takes_a_neighbour_and_keeps_the_mean(
    subject: Subject, desc: QuantizeDesc
) -> Iterator[float]:
    """An element is a neighbour of its value; its mean over many draws is that of the reference.

    The reference's mean approaches the value.
    """
    halves = desc.halves()
    for name, spec, half in zip(
        Quantized._fields, (desc.rowwise, desc.columnwise), halves, strict=True
    ):
        if spec is not None and spec.stochastic:
            yield _compare_means(subject, spec, half, name)


def _compare_means(subject: Subject, spec: OperandSpec, half: QuantizeDesc, name: str) -> float:
    """Compare the means of each element over REPEATS equal rows and SEEDS draws.

    A draw is one of two values that lie a step apart, so by Hoeffding's inequality the mean of n
    draws is within ``step sqrt(ln(2 / chance) / (2 n))`` of its expectation, here 3 % of a step.
    The bound is twice that distance, as the backend's and the judge's means are both of draws.
    """
    step = storage_step(subject, spec)
    x = inputs.moderate(1, up(96, step), half.dtype).expand(REPEATS, -1)
    x = x if name == "rowwise" else x.t()
    grid = torch.tensor(finite_values(spec))
    draws: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for seed in range(SEEDS):
        rng = torch.tensor([seed, 3])
        results = (subject.run(half, subject.here(x), rng=rng), subject.judged(half, x, rng=rng))
        for draws_of_backend, quantized in zip(draws, results, strict=True):
            draws_of_backend.append(subject.elements(spec, getattr(quantized, name)))
    ours, theirs = (torch.cat(draws_of_backend) for draws_of_backend in draws)  # [samples, values]
    means = [values.double().mean(0) for values in (ours, theirs)]
    above = torch.bucketize(means[1].float(), grid).clamp(1, len(grid) - 1)
    steps = (grid[above] - grid[above - 1]).double()
    bound = 2 * steps * math.sqrt(math.log(2 * len(steps) / CHANCE) / (2 * len(ours)))
    # A transform before the cast hides the exact value; the mean of the judge's draws is near it.
    low, high = (
        torch.bucketize((means[1] + end * bound).float(), grid).clamp(0, len(grid) - 1)
        for end in (-1, 1)
    )
    require(
        bool(((ours >= grid[(low - 1).clamp(min=0)]) & (ours <= grid[high])).all()),
        f"{name}: an element is neither of its two neighbours",
    )
    return within(f"{name}: mean of the elements", means[0], means[1], bound)


def joined(spec: OperandSpec | None, chunks: Chunks | Operand | None, rows: int) -> Operand | None:
    """Return the operand that the chunks make up, each chunk copied before the next overwrites its
    memory. An operand that is not in chunks is returned unchanged."""
    if isinstance(chunks, Operand | None):
        return chunks
    assert spec is not None
    require(chunks.rows == rows, f"the chunks have {chunks.rows} rows, x has {rows}")
    data, scales, at = [], [], 0
    for start, end, part in chunks:
        require(start == at, f"a chunk begins at row {start}, the one before ended at {at}")
        assert part.scale_inv is not None
        data.append(part.data.clone())
        scales.append(part.scale_inv.clone())
        at = end
    require(at == rows, f"the chunks end at row {at} of {rows}")
    return Operand(torch.cat(data), torch.cat(scales) if spec.block[0] else scales[-1])


class ReadOnce:
    """The rows of ``x``, in memory that each call overwrites; a
    :class:`~fp8core.backend_api.ComputedRows`."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape = tuple(x.shape)
        self._x = x
        self._end = 0
        self._buffer: torch.Tensor | None = None

    def rows_of(self, start: int, end: int) -> torch.Tensor:
        """Return rows ``start`` to ``end``.

        Raises:
            Broken: the rows do not follow those of the last call, or are more than in the first.
        """
        require(start == self._end, f"rows from {start} on are read, those before {self._end} were")
        if self._buffer is None:
            self._buffer = torch.empty_like(self._x[start:end])
        limit = len(self._buffer)
        require(end - start <= limit, f"{end - start} rows are read at once, {limit} at first")
        self._end = end
        return self._buffer[: end - start].copy_(self._x[start:end])


SQUARE = 96


def _is_elementwise(desc: QuantizeDesc) -> bool:
    """Say whether a code depends on its own element and scale alone."""
    specs = (desc.rowwise, desc.columnwise)
    return not desc.grouped and not any(
        spec is not None and (spec.stochastic or spec.transform) for spec in specs
    )


@law(1, "quantize", applies=is_nearest, is_core=True)
def quantize_codes_equal_the_reference(subject: Subject, desc: QuantizeDesc) -> float:
    """Every element has the reference's code."""
    return max(same_codes(subject, desc, title, judged) for title, judged in every(subject, desc))


@law(1, "quantize", is_core=True)
def quantize_scales_equal_the_reference(subject: Subject, desc: QuantizeDesc) -> float:
    """Every block has the reference's scale, and the tensor its global scale."""
    return max(same_scales(subject, desc, title, judged) for title, judged in every(subject, desc))


@law(1, "quantize", applies=lambda desc: desc.rowwise is not None and desc.rowwise.delayed)
def quantize_records_the_amax(subject: Subject, desc: QuantizeDesc) -> None:
    """amax_out rises to the amax of x without its NaN, whatever the scale."""
    for title, judged in every(subject, desc):
        ours, theirs = judged.amaxes
        assert ours is not None
        assert theirs is not None
        same_bits(f"{title}: amax_out", ours, theirs)


def _edges(
    subject: Subject, desc: QuantizeDesc, list_values: Callable[[OperandSpec], list[float]]
) -> Iterator[tuple[str, Judged]]:
    """Yield, for each format, the results of the backend and of the judge for a tensor of the
    values ``list_values(spec)``.

    Each block also holds ``spec.target``, so that its scale is 1 unless ``list_values`` has larger
    values.
    """
    for spec in dict.fromkeys(filter(None, (desc.rowwise, desc.columnwise))):
        limits = torch.finfo(desc.dtype)
        values = torch.tensor(list_values(spec), dtype=torch.float64)
        finite = values.isfinite()
        values[finite] = values[finite].clamp(limits.min, limits.max)
        block = spec.block[1] or SQUARE
        size = 2 * max(block, -(-math.isqrt(len(values)) // block) * block)
        x = values.repeat(-(-size * size // len(values)))[: size * size].reshape(size, size)
        x[::block] = spec.target
        x[:, ::block] = spec.target
        keywords = quantize_keywords(subject, desc)
        if "scale" in keywords:
            keywords["scale"].fill_(1.0)
        cast = x.to(desc.dtype)
        theirs = subject.judged(desc, cast, **keywords)
        ours = subject.run(desc, subject.here(cast), **keywords)
        yield spec.format, Judged(on_cpu(ours), theirs, (None, None), cast)


def _midpoints(dtype: torch.dtype) -> Callable[[OperandSpec], list[float]]:
    """Return a function that lists the midpoints between values of a format, and the values of
    ``dtype`` next to each midpoint."""

    def list_values(spec: OperandSpec) -> list[float]:
        middles = [(low + high) / 2 for low, high in itertools.pairwise(finite_values(spec))]
        usable = [x for x in middles if abs(x) <= min(spec.target, torch.finfo(dtype).max)]
        exact = torch.tensor(usable, dtype=torch.float64).to(dtype)
        above, below = (
            torch.nextafter(exact, torch.full_like(exact, end)) for end in (math.inf, -math.inf)
        )
        return torch.cat((exact, above, below)).tolist()

    return list_values


@law(1, "quantize", applies=_is_elementwise, is_core=True)
def quantize_rounds_to_the_nearest_ties_to_even(subject: Subject, desc: QuantizeDesc) -> float:
    """A midpoint goes to the even code, a number next to a midpoint to the nearer code."""
    edges = _edges(subject, desc, _midpoints(desc.dtype))
    return max(
        same_codes(subject, desc, f"midpoints of {format}", judged) for format, judged in edges
    )


@law(1, "quantize", applies=_is_elementwise)
def quantize_saturates_beyond_the_range(subject: Subject, desc: QuantizeDesc) -> float:
    """Values beyond the format's largest, inf included, become the largest."""

    def list_values(spec: OperandSpec) -> list[float]:
        largest = formats.by_name(spec.format).max
        beyond = [largest * factor for factor in (1.0, 1.03, 1.07, 1.2, 2.0, 1e4)]
        return [*beyond, *(-x for x in beyond), math.inf, -math.inf, 1.0]

    edges = _edges(subject, desc, list_values)
    return max(same_codes(subject, desc, f"beyond {format}", judged) for format, judged in edges)


@law(1, "quantize", applies=_is_elementwise)
def quantize_keeps_nan_in_its_place(subject: Subject, desc: QuantizeDesc) -> float:
    """A NaN stays NaN, or the largest value in a format without NaN, and changes no neighbour."""
    edges = list(_edges(subject, desc, lambda spec: [math.nan, 1.0, -2.0, 0.0, -0.0]))
    for format, judged in edges:
        same_scales(subject, desc, f"NaN in {format}", judged)
    return max(same_codes(subject, desc, f"NaN in {format}", judged) for format, judged in edges)


@law(1, "quantize", applies=lambda desc: desc.grouped and is_nearest(desc))
def quantize_stops_blocks_at_group_boundaries(subject: Subject, desc: QuantizeDesc) -> None:
    """Each group has the bits of a call for it alone: no amax and no block spans two groups."""
    sizes = group_sizes(subject, desc)
    rows, cols = quantize_size(subject, desc, sum(sizes), 70)
    x = inputs.matrix("decades", rows, cols, desc.dtype)
    together = both(subject, desc, x, *sizes).ours
    offsets = group_offsets(sizes).tolist()
    dense = QuantizeDesc(desc.dtype, desc.rowwise, desc.columnwise)
    keywords = quantize_keywords(subject, desc, len(sizes))
    split = [
        None if operand is None else split_groups(spec, operand, offsets, dim, step_of(desc))
        for dim, (spec, operand) in enumerate(
            zip((desc.rowwise, desc.columnwise), together, strict=True)
        )
    ]
    for group, (start, end) in enumerate(itertools.pairwise(offsets)):
        of_group = {name: value[group : group + 1].clone() for name, value in keywords.items()}
        alone = subject.quantizer(dense)(dense, subject.here(x[start:end]), **of_group)
        parts = Quantized(*(None if parts is None else parts[group] for parts in split))
        same_tensors(f"group {group}", parts, alone)


@law(1, "quantize", applies=is_nearest)
def quantize_of_zeros_or_nan_alone_equals_the_reference(
    subject: Subject, desc: QuantizeDesc
) -> Iterator[float]:
    """A tensor of nothing but 0, -0 or NaN has the reference's codes and scales."""
    sizes = group_sizes(subject, desc) if desc.grouped else ()
    shape = quantize_size(subject, desc, sum(sizes) or 33, 70)
    for value in (0.0, -0.0, math.nan):
        judged = both(subject, desc, torch.full(shape, value, dtype=desc.dtype), *sizes)
        yield same_codes(subject, desc, f"{value} alone", judged)
        yield same_scales(subject, desc, f"{value} alone", judged)


WILD = ((0, 300, 100), (5, 20, -7, 9), (0, 2**40, 2**62), (-(2**62), 3, 40, 2**31))
"""Group offsets that exceed a tensor's rows, descend, or do not fit in 32 bits."""


@law(1, "quantize", applies=lambda desc: desc.offsets_on_device and is_nearest(desc))
def quantize_takes_offsets_of_any_values(subject: Subject, desc: QuantizeDesc) -> Iterator[float]:
    """Rows of no group have codes of 0 and scales of 1; offsets that lead out of x read nothing."""
    step = storage_step(subject, desc.columnwise)
    sizes = group_sizes(subject, desc)
    rows, cols = quantize_size(subject, desc, sum(sizes) + 2 * step, 70)
    x = inputs.matrix("decades", rows, cols, desc.dtype).clone()
    x[sum(sizes) :] = torch.finfo(desc.dtype).max
    # Where groups have to be of whole steps, other offsets break the contract.
    wild = map(torch.tensor, WILD if step == 1 else ())
    for offsets in (group_offsets(sizes), group_offsets((0, 0)), *wild):
        keywords = [quantize_keywords(subject, desc, len(offsets) - 1) for _ in range(2)]
        # In a layer's delayed state the keywords' tensors are a column of a matrix.
        keywords[0] = {name: inputs.strided(strided) for name, strided in keywords[0].items()}
        ours = subject.run(desc, *subject.here((x, offsets)), **keywords[0])
        keywords[1] = on_cpu(keywords[1])
        theirs = subject.judging(desc)(x, offsets, **keywords[1])
        judged = Judged(on_cpu(ours), theirs, (None, None), x)
        title = f"{rows} rows in groups at {offsets.tolist()}"
        yield same_codes(subject, desc, title, judged)
        yield same_scales(subject, desc, title, judged)
        same_tensors(title, *keywords)


@law(3, "quantize", applies=has_both)
def quantize_both_orientations_equal_two_calls(subject: Subject, desc: QuantizeDesc) -> None:
    """A call for both orientations gives the bits of two calls for one orientation each."""
    for kind in ("decades", "holes", "nonfinite"):
        x, sizes = tensor_of(subject, desc, kind)
        operands = subject.here(x), *groups_of(subject, desc, sizes)

        def run(
            cast: QuantizeDesc, operands: Any = operands, groups: int = len(sizes)
        ) -> Quantized:
            keywords = quantize_keywords(subject, cast, max(groups, 1))
            quantized: Quantized = on_cpu(subject.run(cast, *operands, **keywords))
            return quantized

        rowwise, columnwise = desc.halves()
        halves = Quantized(run(rowwise).rowwise, run(columnwise).columnwise)
        same_tensors(kind, run(desc), halves)


@law(3, "quantize", applies=lambda desc: has_both(desc) and not desc.grouped and is_nearest(desc))
def quantize_chunked_equals_the_whole(subject: Subject, desc: QuantizeDesc) -> None:
    """The chunks make up the rowwise operand; after the last the columnwise operand is complete."""
    run, quantize_chunked = subject.bound(desc), subject.variant(desc, chunked=True)
    if quantize_chunked is None:
        return
    for shape in subject.sizes("quantize", (5, 7), LARGE):
        x = inputs.matrix("decades", *quantize_size(subject, desc, *shape), desc.dtype)
        options = [quantize_keywords(subject, desc) for _ in range(2)]
        rowwise, columnwise = quantize_chunked(subject.here(x), **options[0])
        quantized = Quantized(joined(desc.rowwise, rowwise, len(x)), columnwise)
        expected = run(subject.here(x), **options[1])
        same_tensors(f"{list(shape)}", (quantized, options[0]), (expected, options[1]))


@law(3, "quantize", applies=lambda desc: not desc.offsets_on_device)
def quantize_padded_equals_the_cast_of_padded_rows(subject: Subject, desc: QuantizeDesc) -> None:
    """Columnwise, each group has zeros up to a whole step of rows; rowwise and amaxes have none."""
    for step in (16, 32):
        quantize_padded = subject.variant(desc, padded=step)
        if quantize_padded is not None:
            for kind, sizes in PADDED:
                of_x = sizes if desc.grouped else (sum(sizes),)
                _padded_equals_padding(subject, desc, quantize_padded, kind, of_x, step)


PADDED = (
    ("decades", (5, 0, 33, 128, 1)),
    ("nonfinite", (70, 10)),
    ("decades", (0, 0)),
    ("decades", (48,)),
)
"""Kinds of values, and rows of groups, together of a tensor; multiples of a step or not."""


def _padded_equals_padding(
    subject: Subject,
    desc: QuantizeDesc,
    quantize_padded: Callable[..., Any],
    kind: str,
    sizes: tuple[int, ...],
    step: int,
) -> None:
    x = inputs.matrix(kind, sum(sizes), quantize_size(subject, desc, 1, 70)[1], desc.dtype)
    whole = [up(size, step) for size in sizes]
    parts = [
        torch.nn.functional.pad(part, (0, 0, 0, size - len(part)))
        for part, size in zip(torch.split(x, list(sizes)), whole, strict=True)
    ]
    plain, longer = (
        (subject.here(rows), *groups_of(subject, desc, counts if desc.grouped else ()))
        for rows, counts in ((x, sizes), (torch.cat(parts), whole))
    )
    options = [quantize_keywords(subject, desc, len(sizes)) for _ in range(3)]
    ours = quantize_padded(*plain, **options[0])
    row, column = desc.halves()
    rowwise = columnwise = None
    if desc.rowwise is not None:
        rowwise = subject.run(row, *plain, **options[1]).rowwise
    if desc.columnwise is not None:
        columnwise = subject.run(column, *longer, **options[2]).columnwise
    title = f"{kind} of {list(sizes)} rows to multiples of {step}"
    same_tensors(title, ours, Quantized(rowwise, columnwise))
    if "amax_out" in options[0]:
        amaxes = [option["amax_out"] for option in options]
        same_tensors("amax_out", amaxes[0], torch.maximum(*amaxes[1:]))


@law(3, "quantize", applies=lambda desc: not desc.grouped and is_nearest(desc))
def quantize_and_sum_equals_the_call_and_sums(
    subject: Subject, desc: QuantizeDesc
) -> Iterator[float]:
    """Operands are the plain call's; column sums are within the bound.

    The bound is that of sums in float32.
    """
    for chunked in (False, True) if has_both(desc) else (False,):
        method = subject.variant(desc, sums=True, chunked=chunked)
        if method is not None:
            sizes = subject.sizes("quantize", (5, 7), (0, 5), LARGE)
            for kind, shape in itertools.product(("decades", "nonfinite"), sizes):
                x = inputs.matrix(kind, *quantize_size(subject, desc, *shape), desc.dtype)
                yield _sums_within(subject, desc, method, f"{kind} {list(shape)}", x)


def _sums_within(
    subject: Subject, desc: QuantizeDesc, method: Callable[..., Any], title: str, x: torch.Tensor
) -> float:
    options = [quantize_keywords(subject, desc) for _ in range(2)]
    (row, column), sums = method(subject.here(x), **options[0])
    alone = subject.run(desc, subject.here(x), **options[1])
    quantized = Quantized(joined(desc.rowwise, row, len(x)), column)
    same_tensors(title, (quantized, options[0]), (alone, options[1]))
    same_form(f"sums of {title}", sums, torch.empty(x.shape[1], dtype=torch.float32))
    return column_sums_within(f"sums of {title}", sums, x)


@law(3, "quantize", applies=lambda desc: has_both(desc) and _is_elementwise(desc))
def quantize_columnwise_is_the_operand_of_the_transpose(
    subject: Subject, desc: QuantizeDesc
) -> None:
    """The columnwise operand of x is the rowwise operand of x.T, also for a square matrix."""
    size = max(quantize_size(subject, desc, SQUARE, SQUARE))
    x = inputs.matrix("decades", size, size, desc.dtype)
    ours = both(subject, desc, x).ours
    swapped = QuantizeDesc(desc.dtype, desc.columnwise, None)
    keywords = quantize_keywords(subject, swapped)
    transposed = subject.quantizer(swapped)(swapped, subject.here(x.t().contiguous()), **keywords)
    plain = QuantizeDesc(desc.dtype, desc.rowwise, None)
    straight = subject.quantizer(plain)(plain, subject.here(x), **quantize_keywords(subject, plain))
    expected = Quantized(straight.rowwise, transposed.rowwise)
    same_tensors("square", ours, expected)
