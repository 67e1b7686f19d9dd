"""Law 4 for products, dense and of each group, against float64 products of dequantized operands;
also of many rows, terms and groups, in any strides, and computed some rows at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import GemmDesc, GroupedGemmDesc, Numerics, Operand, split_groups
from fp8core.conformance import inputs
from fp8core.conformance.calls import Case, OpCall, example
from fp8core.conformance.checks import law
from fp8core.conformance.compare import require, same_bits, same_form, ulp, within
from fp8core.conformance.operands import (
    Groups,
    aligned,
    gemm_operands,
    grouped_operands,
    operand,
    source_dtype,
    step_of,
)
from fp8core.conformance.subject import Subject, on_cpu
from fp8core.torch_ops.private import pytree


@example(GemmDesc)
def _gemm(subject: Subject, desc: GemmDesc, case: Case) -> OpCall:
    a, b = gemm_operands(subject, desc, *(case.size or (5, 7, 160)), seed=case.seed)
    m, n = len(a.data), len(b.data)
    bias = inputs.moderate(1, n, desc.out_dtype, case.seed_of(2))[0]
    keywords: dict[str, Any] = {"bias": subject.here(bias)}
    if desc.accumulate:
        keywords["out"] = subject.here(inputs.moderate(m, n, desc.out_dtype, case.seed_of(3)))
    return OpCall(desc, (a, b), keywords, frozenset({"out"}))


@example(GroupedGemmDesc)
def _grouped_gemm(subject: Subject, desc: GroupedGemmDesc, case: Case) -> OpCall:
    groups = grouped_operands(subject, desc, seed=case.seed)
    keywords: dict[str, Any] = {}
    if not desc.contract_groups:
        biases = inputs.moderate(len(groups.sizes), groups.n, desc.out_dtype, case.seed_of(2))
        keywords["bias"] = list(subject.here(biases))
    if desc.accumulate:
        out = inputs.moderate(groups.m, groups.n, desc.out_dtype, case.seed_of(3))
        count = len(groups.sizes)
        keywords["out"] = (
            [subject.here(out) for _ in range(count)] if desc.contract_groups else subject.here(out)
        )
    return OpCall(desc, groups.arguments, keywords, frozenset({"out"}))


def each_within(
    subject: Subject,
    desc: GroupedGemmDesc,
    groups: Groups,
    results: Any,
    terms: list[torch.Tensor] | None = None,
) -> Iterator[float]:
    """Require every group's product, plus its entry of ``terms``, to be within the bound."""
    parts = parts_of(desc, groups, results)
    require(len(parts) == len(groups.sizes), f"{len(parts)} results for {len(groups.sizes)} groups")
    for group, operands in enumerate(operands_by_group(desc, groups.arguments)):
        term = None if terms is None else terms[group]
        name = f"group {group} of sizes {groups.sizes}"
        yield product_within(subject, desc, name, parts[group], operands, term)


def parts_of(desc: GroupedGemmDesc, groups: Groups, results: Any) -> list[torch.Tensor]:
    """Return the result of each group, where the groups may be rows of one tensor."""
    return list(results if desc.contract_groups else torch.split(results, groups.sizes))


def operands_by_group(
    desc: GroupedGemmDesc, arguments: Sequence[Any]
) -> Iterator[tuple[Operand, Operand]]:
    """Yield the operands of each group's product, on the CPU."""
    a, b, offsets = on_cpu(arguments)
    bounds, dim = offsets.tolist(), int(desc.contract_groups)
    firsts = split_groups(desc.a, a, bounds, dim, step_of(desc))
    seconds = split_groups(desc.b, b, bounds, 1, step_of(desc)) if dim else b
    yield from zip(firsts, seconds, strict=True)


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate, is_core=True)
def grouped_gemm_product_of_each_group_is_within_the_bound(
    subject: Subject, desc: GroupedGemmDesc
) -> Iterator[float]:
    """Groups that are empty, one step long, or end in the middle of a block give their products."""
    groups = grouped_operands(subject, desc)
    yield from each_within(subject, desc, groups, subject.run(desc, *groups.arguments))


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate and not desc.contract_groups)
def grouped_gemm_adds_the_bias_of_each_group(
    subject: Subject, desc: GroupedGemmDesc
) -> Iterator[float]:
    """Each group's bias is added to the product of that group."""
    groups = grouped_operands(subject, desc)
    biases = subject.here(
        list(inputs.moderate(len(groups.sizes), groups.n, desc.out_dtype, 2) * 10)
    )
    results = subject.run(desc, *groups.arguments, bias=biases)
    yield from each_within(subject, desc, groups, results, biases)


def _out(subject: Subject, desc: GroupedGemmDesc, groups: Groups, fill: float | None) -> Any:
    """Return ``out`` in the descriptor's form, full of ``fill``, or of moderate values if None."""
    shape = (groups.m, groups.n)
    count = len(groups.sizes) if desc.contract_groups else 1
    outs = [
        torch.full(shape, fill, dtype=desc.out_dtype, device=subject.device)
        if fill is not None
        else subject.here(inputs.moderate(*shape, desc.out_dtype, 3 + at) * 10)
        for at in range(count)
    ]
    return outs if desc.contract_groups else outs[0]


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate)
def grouped_gemm_writes_into_out(subject: Subject, desc: GroupedGemmDesc) -> Iterator[float]:
    """The products replace the values of out; a sum over an empty group gives zeros."""
    groups = grouped_operands(subject, desc)
    out = _out(subject, desc, groups, math.nan)
    subject.run(desc, *groups.arguments, out=out)
    yield from each_within(subject, desc, groups, out)


@law(4, "grouped_gemm", applies=lambda desc: desc.accumulate)
def grouped_gemm_accumulates_into_out(subject: Subject, desc: GroupedGemmDesc) -> Iterator[float]:
    """With accumulate each product is added to out; an empty group leaves out unchanged."""
    groups = grouped_operands(subject, desc)
    out = _out(subject, desc, groups, None)
    before = [part.clone() for part in parts_of(desc, groups, out)]
    subject.run(desc, *groups.arguments, out=out)
    for group, size in enumerate(groups.sizes):
        if size == 0:
            part = parts_of(desc, groups, out)[group]
            same_bits(f"out of the empty group {group}", part, before[group])
    yield from each_within(subject, desc, groups, out, before)


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate)
def grouped_gemm_takes_groups_that_are_all_empty(subject: Subject, desc: GroupedGemmDesc) -> None:
    """Without a row the result is empty, or zeros for every group."""
    groups = grouped_operands(subject, desc, (0, 0, 0))
    results = subject.run(desc, *groups.arguments)
    if desc.contract_groups:
        require(len(results) == 3, f"{len(results)} results for 3 groups")
        require(not any(bool(part.any()) for part in results), "an empty sum is not zero")
    else:
        require(results.shape == (0, groups.n), f"no rows give {list(results.shape)}")


@law(4, "grouped_gemm", applies=lambda desc: desc.offsets_on_device and not desc.contract_groups)
def grouped_gemm_of_rows_of_no_group_is_zero(
    subject: Subject, desc: GroupedGemmDesc
) -> Iterator[float]:
    """Rows behind the last group are zeros, also in out, or stay where the product is added."""
    groups = grouped_operands(subject, desc, behind=32)
    used = sum(groups.sizes)
    out = _out(subject, desc, groups, None if desc.accumulate else math.nan)
    before = out.clone()
    subject.run(desc, *groups.arguments, out=out)
    rest = before[used:] if desc.accumulate else torch.zeros_like(before[used:])
    same_bits("out behind the last group", out[used:] + 0.0, rest + 0.0)  # +0 for -0
    terms = parts_of(desc, groups, before[:used]) if desc.accumulate else None
    yield from each_within(subject, desc, groups, out[:used], terms)
    if not desc.accumulate:
        result = subject.run(desc, *groups.arguments)
        require(not bool(result[used:].any()), "a row behind the last group is not zero")


def _keeps_nan(desc: GroupedGemmDesc) -> bool:
    specs = [spec for spec in (desc.a, desc.b) if spec is not None]
    return not desc.accumulate and all(
        has_nan(spec.format) and not spec.transform for spec in specs
    )


@law(4, "grouped_gemm", applies=_keeps_nan)
def grouped_gemm_keeps_nan_in_its_group(subject: Subject, desc: GroupedGemmDesc) -> None:
    """NaN and inf of a group reach the products of that group alone."""

    def spoil(x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        spoilt = x.clone()
        spoilt[sizes[0] : sizes[0] + sizes[1]] = math.nan
        spoilt[sizes[0] + sizes[1] // 2] = math.inf
        return spoilt

    groups = grouped_operands(subject, desc, (37, 20, 71), change=spoil)
    results = subject.run(desc, *groups.arguments)
    finite = [bool(part.isfinite().all()) for part in parts_of(desc, groups, results)]
    require(finite == [True, False, True], f"groups without NaN: {finite}, expected all but 1")


SIZES = ((1, 1, 32), (5, 7, 160), (33, 17, 96), (140, 270, 520))


def product_within(
    subject: Subject,
    desc: GemmDesc,
    name: str,
    result: torch.Tensor,
    operands: tuple[Operand, Operand],
    term: torch.Tensor | None = None,
) -> float:
    """Require ``|result - expected| <= c (|a| @ |b|.T) + 1 ulp`` for ``expected = a @ b.T + term``.

    ``c`` is the backend's bound for ``k`` terms, one more with ``term``.
    """
    # [m, k] x [n, k] -> [m, n]
    x, y = subject.values(desc.a, operands[0]), subject.values(desc.b, operands[1])
    expected, magnitude = x @ y.t(), x.abs() @ y.abs().t()
    num_terms = x.shape[1]
    if term is not None:
        term = on_cpu(term).double()
        expected, magnitude = expected + term, magnitude + term.abs()
        num_terms += 1
    figures = subject.numerics(desc)
    c = figures.sum_error + num_terms * figures.sum_error_per_term
    same_form(name, result, torch.empty(expected.shape, dtype=desc.out_dtype))
    return within(name, result, expected, c * magnitude + ulp(expected, desc.out_dtype))


@law(4, "gemm", applies=lambda desc: not desc.accumulate, is_core=True)
def gemm_product_is_within_the_bound(subject: Subject, desc: GemmDesc) -> Iterator[float]:
    """``a @ b.T`` in small and odd sizes, for rows of many magnitudes, in both orientations."""
    for size, columnwise in itertools.product(subject.sizes("gemm", *SIZES), (False, True)):
        a, b = gemm_operands(subject, desc, *size, columnwise=columnwise)
        product = subject.run(desc, a, b)
        name = f"{'columnwise' if columnwise else 'rowwise'} operands, m n k {size}"
        yield product_within(subject, desc, name, product, (a, b))


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_adds_the_bias(subject: Subject, desc: GemmDesc) -> Iterator[float]:
    """``a @ b.T + bias``, for a bias of the output's dtype and one in float32."""
    a, b = gemm_operands(subject, desc, 5, 7, 160)
    for dtype in dict.fromkeys((desc.out_dtype, torch.float32)):
        bias = subject.here(inputs.moderate(1, len(b.data), dtype, 2)[0] * 10)
        result = subject.run(desc, a, b, bias=bias)
        yield product_within(subject, desc, f"bias {dtype}", result, (a, b), bias)


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_writes_into_out(subject: Subject, desc: GemmDesc) -> float:
    """The product replaces the values of out, NaN included, and out is returned."""
    a, b = gemm_operands(subject, desc, 5, 7, 160)
    out = torch.full(
        (len(a.data), len(b.data)), math.nan, dtype=desc.out_dtype, device=subject.device
    )
    require(subject.run(desc, a, b, out=out) is out, "returned another tensor than out")
    return product_within(subject, desc, "out", out, (a, b))


@law(4, "gemm", applies=lambda desc: desc.accumulate)
def gemm_accumulates_into_out(subject: Subject, desc: GemmDesc) -> float:
    """With accumulate the product is added to out."""
    a, b = gemm_operands(subject, desc, 5, 7, 160)
    out = subject.here(inputs.moderate(len(a.data), len(b.data), desc.out_dtype, 3) * 10)
    before = out.clone()
    require(subject.run(desc, a, b, out=out) is out, "returned another tensor than out")
    return product_within(subject, desc, "out", out, (a, b), before)


def _shows_roundings(desc: GemmDesc) -> bool:
    """Whether operands hold 2^-4 and 2^-10 side by side, and the output cannot hold their sum."""
    specs = [spec for spec in (desc.a, desc.b) if spec is not None]
    return desc.out_dtype == torch.bfloat16 and not any(
        formats.by_name(spec.format).bits == 4 or spec.transform or spec.delayed for spec in specs
    )


@law(4, "gemm", applies=_shows_roundings)
def gemm_rounds_once_after_the_bias_or_out(subject: Subject, desc: GemmDesc) -> None:
    """``2^-8 + 2^-20 + 1`` is 1 + 2^-7 in bfloat16; the product rounded first is a tie, and 1."""
    figures, default = subject.numerics(desc), Numerics()
    is_coarse = (
        figures.sum_error_per_term > default.sum_error_per_term
        or figures.sum_error > default.sum_error
        or figures.code_steps > 0
    )
    if is_coarse or not _is_exact(desc):
        return  # such bounds allow the 2^-20 to be lost
    m, n, k = aligned(subject, desc, 1, 1, 2)
    values = torch.zeros(max(m, n), k)
    values[:, 0], values[:, 1] = 2.0**-4, 2.0**-10
    dtype = source_dtype(desc)
    a = operand(subject, desc.a, subject.here(values[:m].to(dtype)))
    b = operand(subject, desc.b, subject.here(values[:n].to(dtype)))
    keywords: dict[str, Any] = {"bias": torch.ones(n, dtype=torch.bfloat16)}
    if desc.accumulate:
        keywords = {"out": torch.ones(m, n, dtype=torch.bfloat16)}
    results = on_cpu(subject.run(desc, a, b, **subject.here(keywords))).unique().tolist()
    expected = 1 + 2.0**-7
    require(results == [expected], f"2^-8 + 2^-20 + 1 gives {results}, expected {expected}")


def _is_exact(desc: GemmDesc) -> bool:
    """Whether both formats hold 2^-4 and 2^-10 exactly, in a block whose amax is 2^-4."""
    for spec in (desc.a, desc.b):
        if spec is not None:
            codes = formats.by_name(spec.format)
            needed = torch.tensor([codes.max, codes.max / 64, spec.target, spec.target / 64])
            if not torch.equal(codes.decode(codes.encode(needed)), needed):
                return False
    return True


@law(4, "gemm")
def gemm_of_nothing_is_zero_or_what_is_added(subject: Subject, desc: GemmDesc) -> None:
    """With m, n or k of zero the result is empty, or zeros, or the bias, or out unchanged."""
    full = aligned(subject, desc, 3, 5, 32)
    for empty in ((0,), (1,), (2,), (0, 1), (0, 2), (1, 2), (0, 1, 2)):
        m, n, k = (0 if at in empty else size for at, size in enumerate(full))
        a, b = gemm_operands(subject, desc, m, n, k)
        for keywords, expected in _added(subject, desc, m, n):
            result = subject.run(desc, a, b, **keywords)
            title = f"m n k {(m, n, k)} with {' and '.join(keywords) or 'neither bias nor out'}"
            same_bits(title, result + 0.0, expected + 0.0)  # +0 for -0


def _added(
    subject: Subject, desc: GemmDesc, m: int, n: int
) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """Return keywords of a call and the result that they alone have, of a product of zeros."""
    bias = inputs.moderate(1, n, desc.out_dtype, 2).reshape(n)
    if desc.accumulate:
        before = inputs.moderate(m, n, desc.out_dtype, 3)
        return [({"out": subject.here(before)}, before)]
    cases = []
    for has_bias, has_out in itertools.product((False, True), repeat=2):
        keywords = {"bias": bias} if has_bias else {}
        if has_out:
            keywords["out"] = torch.full((m, n), math.nan, dtype=desc.out_dtype)
        expected = bias if has_bias else torch.zeros(n, dtype=desc.out_dtype)
        cases.append((subject.here(keywords), expected.expand(m, n)))
    return cases


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_keeps_nan_in_its_row(subject: Subject, desc: GemmDesc) -> None:
    """A NaN in one row of a makes that whole row of the result NaN, and no other row."""
    m, n, k = aligned(subject, desc, 5, 7, 160)
    if desc.a is not None and not has_nan(desc.a.format):
        return
    if desc.a is not None and desc.a.transform is not None:
        return
    dtype = source_dtype(desc)
    x = inputs.moderate(m, k, dtype, 20).clone()
    x[2, 3] = math.nan
    _, b = gemm_operands(subject, desc, m, n, k)
    result = on_cpu(subject.run(desc, operand(subject, desc.a, subject.here(x)), b))
    spoilt = [row for row in range(m) if bool(result[row].isnan().any())]
    whole = [row for row in range(m) if bool(result[row].isnan().all())]
    require(spoilt == whole == [2], f"NaN in rows {spoilt}, all of it in {whole}, expected [2]")


def has_nan(format: str) -> bool:
    """Whether a format has a NaN."""
    return any(map(math.isnan, formats.by_name(format).values))


LONG = 4100
VERY_LONG = 66000  # above 65535, the largest extent of a grid of thread blocks in y and z
STEP = 1031  # the distance between the terms of a very long sum that are not zero
MANY_GROUPS = (0, 2, 1, 33, 0, 1, 1) * 10
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "transposed": inputs.transposed,
    "spaced": inputs.spaced,
    "shifted": inputs.shifted,
}


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_takes_any_m_n_and_k(subject: Subject, desc: GemmDesc) -> Iterator[float]:
    """Thousands of rows, of columns or of terms are within the same bound as few."""
    for size in ((LONG, 9, 64), (9, LONG, 64), (9, 9, LONG)):
        operands = gemm_operands(subject, desc, *size)
        product = subject.run(desc, *operands)
        yield product_within(subject, desc, f"m n k {size}", product, operands)
    if desc.out_dtype != torch.bfloat16:
        return  # one dtype stands for the others
    for size in ((VERY_LONG, 3, 32), (3, VERY_LONG, 32), (3, 3, VERY_LONG)):
        m, n, k = aligned(subject, desc, *size)
        operands = (_sparse(subject, desc, 0, m, k), _sparse(subject, desc, 1, n, k))
        product = subject.run(desc, *operands)
        name = f"m n k {(m, n, k)}, every {STEP}th term"
        yield product_within(subject, desc, name, product, operands)


def _sparse(subject: Subject, desc: GemmDesc, at: int, rows: int, k: int) -> Operand:
    """Return operand a (0) or b (1); of a very long k, most terms are zero.

    The bound grows with the magnitudes of all terms, so that among many terms of one size a
    missing one would stay within it.
    """
    dtype = source_dtype(desc)
    x = inputs.moderate(rows, min(k, 64), dtype, 20 + 20 * at)
    if k > x.shape[1]:
        wide = torch.zeros(rows, k, dtype=dtype)
        columns = [*range(0, k, STEP), k - 1]
        wide[:, columns] = x.repeat(1, 2)[:, : len(columns)]
        x = wide
    return operand(subject, (desc.a, desc.b)[at], subject.here(x))


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_of_as_many_rows_as_columns(subject: Subject, desc: GemmDesc) -> Iterator[float]:
    """With m = n, and with m = n = k, operands, scales and orientations are not confused."""
    for size, columnwise in itertools.product(((96, 96, 160), (128, 128, 128)), (False, True)):
        m, n, k = aligned(subject, desc, *size)
        size = (max(m, n), max(m, n), k)
        a, b = gemm_operands(subject, desc, *size, columnwise=columnwise)
        result = subject.run(desc, a, b)
        yield product_within(subject, desc, f"m n k {size}", result, (a, b))


@law(4, "gemm", applies=lambda desc: not desc.accumulate)
def gemm_takes_operands_of_any_strides(subject: Subject, desc: GemmDesc) -> Iterator[float]:
    """Operands that another backend laid out by rows, by columns or with gaps are read right."""
    for size in ((5, 7, 160), (64, 64, 64)):
        operands = gemm_operands(subject, desc, *size)
        for layout, lay in LAYOUTS.items():
            laid = pytree.tree_map_only(torch.Tensor, lay, operands)
            pairs = {"a and b": laid, "a": (laid[0], operands[1]), "b": (operands[0], laid[1])}
            for which, (a, b) in pairs.items():
                product = subject.run(desc, a, b)
                name = f"{layout} {which}, m n k {size}"
                yield product_within(subject, desc, name, product, (a, b))


def _is_no_float16(desc: GroupedGemmDesc) -> bool:
    return not desc.accumulate and desc.out_dtype != torch.float16


@law(4, "grouped_gemm", applies=_is_no_float16)
def grouped_gemm_takes_many_groups(subject: Subject, desc: GroupedGemmDesc) -> Iterator[float]:
    """Dozens of groups, some of them empty, some of equal length."""
    groups = grouped_operands(subject, desc, MANY_GROUPS, (6, 10, 64))
    yield from each_within(subject, desc, groups, subject.run(desc, *groups.arguments))


@law(4, "grouped_gemm", applies=_is_no_float16)
def grouped_gemm_takes_groups_of_any_size(
    subject: Subject, desc: GroupedGemmDesc
) -> Iterator[float]:
    """A group of thousands of rows, and groups with hundreds of columns and terms."""
    groups = grouped_operands(subject, desc, (3, LONG, 33), (6, 10, 64))
    yield from each_within(subject, desc, groups, subject.run(desc, *groups.arguments))
    wide = grouped_operands(subject, desc, (33, 1, 64), (530, 530, 530))
    yield from each_within(subject, desc, wide, subject.run(desc, *wide.arguments))


@law(4, "grouped_gemm", applies=lambda desc: not desc.accumulate)
def grouped_gemm_takes_operands_of_any_strides(
    subject: Subject, desc: GroupedGemmDesc
) -> Iterator[float]:
    """Operands laid out by rows, by columns or with gaps, in groups as long as they are wide."""
    groups = grouped_operands(subject, desc, (32, 0, 32), (64, 64, 64))
    a, b, offsets = groups.arguments
    for lay in LAYOUTS.values():
        laid = pytree.tree_map_only(torch.Tensor, lay, (a, b))
        laid_out = groups._replace(arguments=(*laid, offsets))
        yield from each_within(subject, desc, laid_out, subject.run(desc, *laid_out.arguments))


PARTS = 2, 4
# Rows of a part, columns and what is contracted; parts end with blocks of any recipe.
PART_SIZES = (128, 48, 160), (256, 256, 512)


@contextmanager
def repeatable() -> Iterator[None]:
    """Torch's setting for algorithms that are the same in every process."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def rows_of(a: Operand, at: int, rows: int, whole: int) -> Operand:
    """Return ``rows`` of the ``whole`` rows of a rowwise operand, from row ``at`` on."""
    data, *scales = (
        part if part is None or part.shape[0] == 1 else _of_rows(part, at, rows, whole)
        for part in a
    )
    assert data is not None
    return Operand(data, *scales)


def _of_rows(x: torch.Tensor, at: int, rows: int, whole: int) -> torch.Tensor:
    step = whole // x.shape[0]
    return x[at // step : (at + rows) // step]


@law(4, "gemm", applies=lambda desc: type(desc) is GemmDesc and not desc.accumulate)
def gemm_parts_have_the_bits_of_the_whole(subject: Subject, desc: GemmDesc) -> None:
    """With ``part``, if offered, rows are what the call gives them, and nothing is written beside.

    With and without a bias.
    """
    gemm_part = subject.variant(desc, part=True)
    if gemm_part is None:
        return
    with repeatable():
        for (rows, n, k), parts in ((size, parts) for size in PART_SIZES for parts in PARTS):
            a, b = gemm_operands(subject, desc, rows * parts, n, k)
            m = len(a.data)
            for bias in (None, subject.here(inputs.normal((len(b.data),), desc.out_dtype, 5))):
                whole = subject.run(desc, a, b, bias=bias)
                out = torch.full_like(whole, 77.0)
                for at in reversed(range(0, m, m // parts)):
                    untouched = out[:at].clone()
                    part = out[at : at + m // parts]
                    result = gemm_part(m, rows_of(a, at, m // parts, m), b, bias=bias, out=part)
                    require(result is part, "it returned another tensor than out")
                    require(torch.equal(out[:at], untouched), "wrote beside out")
                same_bits(f"{parts} parts of {m} rows, n {n}, k {k}", out, whole)
