"""Norms on CUDA: within the kit's bounds of float64, and the same bits whatever way a row is read.

A row's bits follow from the row alone. So one row, many rows, a sum that was computed before, and
rows that are too long or not aligned for the kernel that holds them in registers, all agree.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from fp8core.backend_api import AddNormDesc, NormBackwardDesc, NormDesc
from fp8core.errors import OperandError
from tests.backends.cuda.cuda_cases import DEVICE, DTYPES, backend, same_bits

pytestmark = pytest.mark.needs_accelerator("cuda")
KINDS = ("rmsnorm", "layernorm")
# One column; cut vectors; whole vectors; chunks of 256, whole and cut; more warps than one; rows
# held in two and in four vectors a lane; rows that are read again.
COLUMNS = (
    *(1, 3, 8, 70, 256, 264, 768, 1000, 1024, 2048, 2304, 2305, 4096, 5120, 6144),
    *(8192, 8200, 12288, 13824, 16384, 16392, 20000, 32768, 32776, 40000),
)
ROWS = (1, 2, 33, 700)
FLOAT64 = torch.float64

Results = tuple[torch.Tensor | None, ...]


def norm_desc(kind: str, dtype: torch.dtype = torch.bfloat16, **changed: object) -> NormDesc:
    return dataclasses.replace(NormDesc(kind, dtype, dtype, 1e-5), **changed)


def parameters(desc: NormDesc, n: int, dtype: torch.dtype) -> list[torch.Tensor]:
    count = 2 if desc.kind == "layernorm" else 1
    return [torch.randn(n, device=DEVICE).to(dtype) for _ in range(count)]


def rows_of(rows: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rows of different sizes and means."""
    size = torch.linspace(-6, 6, rows, device=DEVICE).exp2()[:, None]
    return ((torch.randn(rows, n, device=DEVICE) + 0.5) * size).to(dtype)


def run(desc: object, *given: torch.Tensor | None, **named: torch.Tensor) -> Results:
    return backend("cuda").bind(desc, DEVICE)(*given, **named)


def exact(desc: NormDesc) -> NormDesc:
    return dataclasses.replace(desc, dtype=FLOAT64, out_dtype=FLOAT64)


def near(
    ours: torch.Tensor | None, theirs: torch.Tensor | None, size: torch.Tensor, terms: int
) -> bool:
    """Say whether two results differ by roundings of the result and of sums of ``terms`` alone."""
    if ours is None or theirs is None:
        return ours is theirs
    allowed = (terms + 16) * 2.0**-24 * size + torch.finfo(ours.dtype).eps * theirs.abs()
    error = (ours.double() - theirs).abs()
    return bool((error <= allowed + torch.finfo(ours.dtype).tiny).all())


def same(ours: Results, theirs: Results) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(one is other if one is None else same_bits(one, other) for one, other in pairs)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """Return the same values one element behind an aligned address."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return moved.copy_(x)


def check_norm(desc: NormDesc, x: torch.Tensor, weight_dtype: torch.dtype) -> None:
    given = parameters(desc, x.shape[1], weight_dtype)
    y, mean, rstd = run(desc, x, *given)
    wide, *wide_given = (one.double() for one in (x, *given))
    expected = backend("reference").bind(exact(desc), DEVICE)(wide, *wide_given)
    n = x.shape[1]
    center = torch.zeros_like(expected[2]) if expected[1] is None else expected[1]
    gamma = wide_given[0] + 1 if desc.zero_centered else wide_given[0]
    size = (wide.abs() + center.abs()[:, None]) * expected[2][:, None] * gamma.abs()
    size = size + sum(one.abs() for one in wide_given[1:])
    largest = wide.abs().amax(1)
    assert y.dtype == desc.out_dtype
    assert near(y, expected[0], size, n)
    assert near(mean, expected[1], largest, n)
    assert near(rstd, expected[2], expected[2] * (1 + largest * expected[2]), n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", COLUMNS)
def test_any_number_of_columns_is_within_the_bound(kind: str, n: int) -> None:
    for dtype, rows in itertools.product(DTYPES, ROWS):
        check_norm(norm_desc(kind, dtype), rows_of(rows, n, dtype), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_any_dtypes_go_together(kind: str, zero_centered: bool) -> None:
    for dtype, out_dtype, weight_dtype in itertools.product(DTYPES, repeat=3):
        desc = norm_desc(kind, dtype, out_dtype=out_dtype, zero_centered=zero_centered)
        check_norm(desc, rows_of(9, 264, dtype), weight_dtype)
    check_norm(norm_desc(kind), rows_of(9, 264, torch.bfloat16), FLOAT64)


@pytest.mark.parametrize("kind", KINDS)
def test_very_many_rows_are_normalized(kind: str) -> None:
    for n in (1, 6, 64):
        check_norm(norm_desc(kind), rows_of(66000, n, torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("n", [16, 70, 4096])
def test_a_row_far_from_zero_keeps_its_digits(n: int) -> None:
    for dtype in DTYPES:
        x = 100 + (torch.rand(33, n, device=DEVICE) < 0.05).float() * 100 * torch.finfo(dtype).eps
        check_norm(norm_desc("layernorm", dtype), x.to(dtype), dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", COLUMNS)
def test_a_row_has_the_same_bits_among_any_others(kind: str, n: int) -> None:
    for dtype in DTYPES:
        desc, x = norm_desc(kind, dtype), rows_of(700, n, dtype)
        given = parameters(desc, n, dtype)
        whole = run(desc, x, *given)
        for at in (0, 1, 33, 699):
            alone = run(desc, x[at : at + 1], *given)
            part = tuple(None if one is None else one[at : at + 1] for one in whole)
            assert same(alone, part), at


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", COLUMNS)
def test_strides_and_addresses_change_no_bit(kind: str, n: int) -> None:
    for dtype in DTYPES:
        desc, x = norm_desc(kind, dtype), rows_of(40, n, dtype)
        given = parameters(desc, n, dtype)
        expected = run(desc, x, *given)
        spaced = torch.zeros(40, n + 24, dtype=dtype, device=DEVICE)
        spaced[:, 8 : n + 8] = x
        shifted = torch.zeros(40, n + 3, dtype=dtype, device=DEVICE)
        shifted[:, 1 : n + 1] = x
        by_columns = x.t().contiguous().t()
        views = (spaced[:, 8 : n + 8], shifted[:, 1 : n + 1], by_columns, unaligned(x))
        for at, view in enumerate(views):
            assert same(run(desc, view, *given), expected), at
        assert same(run(desc, x, *map(unaligned, given)), expected)
        assert same(run(desc, x, *(one.repeat_interleave(2)[::2] for one in given)), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", COLUMNS)
def test_the_norm_of_a_sum_equals_the_pair(kind: str, n: int) -> None:
    for dtype in DTYPES:
        desc, x, residual = norm_desc(kind, dtype), rows_of(40, n, dtype), rows_of(40, n, dtype)
        residual = residual.flip(0)
        given = parameters(desc, n, dtype)
        total = x + residual
        expected = (total, *run(desc, total, *given))
        assert same(run(AddNormDesc(desc), x, residual, *given), expected)
        assert same(run(AddNormDesc(desc), unaligned(x), residual, *given), expected)
        spaced = torch.zeros(40, n + 8, dtype=dtype, device=DEVICE)
        spaced[:, :n] = residual
        assert same(run(AddNormDesc(desc), x, spaced[:, :n], *given), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_inf_stay_in_their_rows(kind: str) -> None:
    for dtype, n in itertools.product(DTYPES, (70, 264, 4096, 12288)):
        desc, x = norm_desc(kind, dtype), rows_of(40, n, dtype)
        given = parameters(desc, n, dtype)
        expected = run(desc, x, *given)
        for at, value in ((3, torch.nan), (17, torch.inf), (18, -torch.inf)):
            x[at, n // 2] = value
        y, mean, rstd = run(desc, x, *given)
        reference = backend("reference").bind(desc, DEVICE)(x, *given)
        odd = torch.tensor([3, 17, 18], device=DEVICE)
        for ours, theirs in zip((y, mean, rstd), reference, strict=True):
            if ours is not None and theirs is not None:
                assert torch.equal(ours[odd].isnan(), theirs[odd].isnan())
        kept = [at for at in range(40) if at not in (3, 17, 18)]
        ours = tuple(None if one is None else one[kept] for one in (y, mean, rstd))
        assert same(ours, tuple(None if one is None else one[kept] for one in expected))


def alike(ours: Results, theirs: Results) -> bool:
    """Say whether results are equal, any NaN to any other."""
    whole = [
        [None if one is None else one.nan_to_num(7.0) for one in results]
        for results in (ours, theirs)
    ]
    return same(*map(tuple, whole))


@pytest.mark.parametrize("kind", KINDS)
def test_empty_rows_and_columns(kind: str) -> None:
    desc = norm_desc(kind)
    for rows, n in ((0, 16), (16, 0), (0, 0)):
        x = torch.zeros(rows, n, dtype=torch.bfloat16, device=DEVICE)
        given = parameters(desc, n, torch.bfloat16)
        ours = run(desc, x, *given)
        theirs = backend("reference").bind(desc, DEVICE)(x, *given)
        assert alike(ours, theirs)
        assert run(AddNormDesc(desc), x, x, *given)[0].shape == (rows, n)
        gradients = run(NormBackwardDesc(desc), x, x, given[0], *ours[1:])
        reference = backend("reference").bind(NormBackwardDesc(desc), DEVICE)
        assert alike(gradients, reference(x, x, given[0], *ours[1:]))


def check_backward(
    desc: NormDesc,
    x: torch.Tensor,
    grad: torch.Tensor,
    weight_dtype: torch.dtype,
) -> Results:
    weight, *_ = parameters(desc, x.shape[1], weight_dtype)
    _, mean, rstd = run(desc, x, weight, *[weight][: desc.kind == "layernorm"])
    results = run(NormBackwardDesc(desc), grad, x, weight, mean, rstd)
    wide = [None if one is None else one.double() for one in (grad, x, weight, mean, rstd)]
    expected = backend("reference").bind(NormBackwardDesc(exact(desc)), DEVICE)(*wide)
    center = 0 if mean is None else mean.double()[:, None]
    z = ((x.double() - center) * rstd.double()[:, None]).abs()
    gamma = weight.double() + 1 if desc.zero_centered else weight.double()
    g = (grad.double() * gamma).abs()
    size = g + z * (g * z).mean(-1, keepdim=True) + g.mean(-1, keepdim=True)
    terms = sum(x.shape) + 16
    assert results[0].dtype == desc.dtype
    assert near(results[0], expected[0], rstd.double()[:, None] * size, terms)
    assert near(results[1], expected[1], (grad.double().abs() * z).sum(0), terms)
    assert near(results[2], expected[2], grad.double().abs().sum(0), terms)
    return results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", COLUMNS)
def test_gradients_are_within_the_bound(kind: str, n: int) -> None:
    for dtype, rows in itertools.product(DTYPES, ROWS):
        grad = torch.randn(rows, n, device=DEVICE).to(dtype)
        check_backward(norm_desc(kind, dtype), rows_of(rows, n, dtype), grad, dtype)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_very_many_rows(kind: str) -> None:
    for n in (1, 6, 64):
        grad = torch.randn(66000, n, device=DEVICE).bfloat16()
        check_backward(norm_desc(kind), rows_of(66000, n, grad.dtype), grad, grad.dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradients_of_any_dtypes(kind: str, zero_centered: bool) -> None:
    for dtype, grad_dtype, weight_dtype in itertools.product(DTYPES, repeat=3):
        grad = torch.randn(33, 264, device=DEVICE).to(grad_dtype)
        desc = norm_desc(kind, dtype, zero_centered=zero_centered)
        check_backward(desc, rows_of(33, 264, dtype), grad, weight_dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", COLUMNS)
def test_grad_x_has_the_same_bits_however_rows_are_read(kind: str, n: int) -> None:
    for dtype in DTYPES:
        desc, x = norm_desc(kind, dtype), rows_of(300, n, dtype)
        grad = torch.randn(300, n, device=DEVICE).to(dtype)
        weight, *bias = parameters(desc, n, dtype)
        _, mean, rstd = run(desc, x, weight, *bias)
        given = (weight, mean, rstd)
        expected = run(NormBackwardDesc(desc), grad, x, *given)
        assert same(run(NormBackwardDesc(desc), grad, x, *given), expected)
        one = slice(17, 18)
        of_one = (weight, None if mean is None else mean[one], rstd[one])
        alone = run(NormBackwardDesc(desc), grad[one], x[one], *of_one)
        assert same_bits(alone[0], expected[0][one])
        for views in ((unaligned(grad), x), (grad, unaligned(x)), (grad.t().contiguous().t(), x)):
            assert same_bits(run(NormBackwardDesc(desc), *views, *given)[0], expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_residual_s_gradient_is_added_as_by_the_pair(kind: str) -> None:
    for dtype, n in itertools.product(DTYPES, (70, 264, 4096, 12288, 20000)):
        desc, x = norm_desc(kind, dtype), rows_of(40, n, dtype)
        grad, residual = (torch.randn(40, n, device=DEVICE).to(dtype) for _ in range(2))
        weight, *bias = parameters(desc, n, dtype)
        _, mean, rstd = run(desc, x, weight, *bias)
        given = (grad, x, weight, mean, rstd)
        grad_x, *rest = run(NormBackwardDesc(desc), *given)
        for view in (residual, unaligned(residual), residual.t().contiguous().t()):
            added, *others = run(NormBackwardDesc(desc), *given, residual_grad=view)
            assert same_bits(added, grad_x + residual)
            if view is residual:
                assert same(tuple(others), tuple(rest))


@pytest.mark.parametrize("kind", KINDS)
def test_results_are_written_whole(kind: str) -> None:
    desc = norm_desc(kind)
    for rows, n in ((257, 1040), (257, 70), (40, 12288)):
        x, grad = rows_of(rows, n, desc.dtype), torch.randn(rows, n, device=DEVICE).bfloat16()
        given = parameters(desc, n, desc.dtype)
        outcomes = []
        for poison in (0x00, 0xFF):
            torch.cuda.empty_cache()
            torch.full((64 << 20,), poison, dtype=torch.uint8, device=DEVICE)  # freed, then reused
            statistics = run(desc, x, *given)
            backward = run(NormBackwardDesc(desc), grad, x, given[0], *statistics[1:])
            outcomes.append((*statistics, *backward, *run(AddNormDesc(desc), x, grad, *given)))
        assert same(*outcomes)


@pytest.mark.parametrize("kind", KINDS)
def test_a_side_stream_gives_the_same(kind: str) -> None:
    desc = norm_desc(kind)
    x = rows_of(2048, 2048, desc.dtype)
    given = parameters(desc, 2048, desc.dtype)
    expected = run(desc, x, *given)
    gradients = run(NormBackwardDesc(desc), x, x, given[0], *expected[1:])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        ours = run(desc, x, *given)
        our_gradients = run(NormBackwardDesc(desc), x, x, given[0], *ours[1:])
    torch.cuda.current_stream().wait_stream(stream)
    assert same(ours, expected)
    assert same(our_gradients, gradients)


def test_what_does_not_fit_is_refused() -> None:
    desc = norm_desc("rmsnorm")
    x, weight = rows_of(4, 64, desc.dtype), torch.ones(64, device=DEVICE)
    with pytest.raises(OperandError, match=r"rows of 64: the weight is \[32\]"):
        run(desc, x, weight[:32])
    with pytest.raises(OperandError, match="rmsnorm: a bias was given"):
        run(desc, x, weight, weight)
    with pytest.raises(OperandError, match="they have one shape and dtype"):
        run(AddNormDesc(desc), x, x[:2], weight)
    rstd = torch.ones(4, device=DEVICE)
    with pytest.raises(OperandError, match=r"of 4 rows: the rstd is \[2\]"):
        run(NormBackwardDesc(desc), x, x, weight, None, rstd[:2])
    with pytest.raises(OperandError, match="of 4 rows: the mean is None"):
        run(NormBackwardDesc(norm_desc("layernorm")), x, x, weight, None, rstd)
