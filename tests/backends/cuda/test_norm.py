"""Norms on CUDA: the same bits whatever way a row is read; test_sizes.py has the kit's bounds.

A row's bits follow from the row alone. So one row, many rows, a sum that was computed before, and
rows that are too long or not aligned for the kernel that holds them in registers, all agree.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

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


def same(ours: Results, theirs: Results) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(one is other if one is None else same_bits(one, other) for one, other in pairs)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    """Return the same values one element behind an aligned address."""
    moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)[1:].view(x.shape)
    return moved.copy_(x)


def cases(n: int) -> Iterator[tuple[NormDesc, torch.Tensor, list[torch.Tensor]]]:
    """Yield norms of rows of ``n`` in each dtype, 700 rows, and their parameters."""
    for kind, dtype in itertools.product(KINDS, DTYPES):
        desc = norm_desc(kind, dtype)
        yield desc, rows_of(700, n, dtype), parameters(desc, n, dtype)


def layouts(x: torch.Tensor) -> list[torch.Tensor]:
    """Return ``x`` with a gap behind its rows, at odd addresses, and by columns."""
    rows, n = x.shape
    spaced = torch.zeros(rows, n + 24, dtype=x.dtype, device=DEVICE)
    shifted = torch.zeros(rows, n + 3, dtype=x.dtype, device=DEVICE)
    spaced[:, 8 : n + 8] = shifted[:, 1 : n + 1] = x
    views = (spaced[:, 8 : n + 8], shifted[:, 1 : n + 1], x.t().contiguous().t(), unaligned(x))
    return [*views]


@pytest.mark.parametrize("n", COLUMNS)
def test_a_row_has_the_same_bits_among_any_others_and_however_it_is_read(n: int) -> None:
    for desc, x, given in cases(n):
        whole = run(desc, x, *given)
        for at in (0, 1, 33, 699):
            alone = run(desc, x[at : at + 1], *given)
            part = tuple(None if one is None else one[at : at + 1] for one in whole)
            assert same(alone, part), (desc, at)
        x = x[:40]
        expected = tuple(None if one is None else one[:40] for one in whole)
        for at, view in enumerate(layouts(x)):
            assert same(run(desc, view, *given), expected), (desc, at)
        assert same(run(desc, x, *map(unaligned, given)), expected), desc
        spread = [one.repeat_interleave(2)[::2] for one in given]
        assert same(run(desc, x, *spread), expected), desc
        wide = [one.double() for one in given]
        assert same(run(desc, x, *wide), expected), desc


@pytest.mark.parametrize("n", COLUMNS)
def test_the_norm_of_a_sum_equals_the_pair_in_any_layout(n: int) -> None:
    for desc, x, given in cases(n):
        x, residual = x[:40], x[40:80].flip(0)
        total = x + residual
        expected = (total, *run(desc, total, *given))
        assert same(run(AddNormDesc(desc), unaligned(x), residual, *given), expected), desc
        for at, view in enumerate(layouts(residual)):
            assert same(run(AddNormDesc(desc), x, view, *given), expected), (desc, at)


@pytest.mark.parametrize("n", COLUMNS)
def test_grad_x_has_the_same_bits_however_rows_are_read(n: int) -> None:
    for desc, x, (weight, *bias) in cases(n):
        x, grad = x[:300], torch.randn(300, n, device=DEVICE).to(x.dtype)
        _, mean, rstd = run(desc, x, weight, *bias)
        given = (weight, mean, rstd)
        expected = run(NormBackwardDesc(desc), grad, x, *given)
        assert same(run(NormBackwardDesc(desc), grad, x, *given), expected), desc
        one = slice(17, 18)
        of_one = (weight, None if mean is None else mean[one], rstd[one])
        alone = run(NormBackwardDesc(desc), grad[one], x[one], *of_one)
        assert same_bits(alone[0], expected[0][one]), desc
        views = [(view, x) for view in (*layouts(grad), grad.float())]
        for view in (*views, (grad, unaligned(x))):
            assert same_bits(run(NormBackwardDesc(desc), *view, *given)[0], expected[0]), desc


@pytest.mark.parametrize("n", [70, 264, 4096, 12288, 20000])
def test_a_residual_s_gradient_of_any_layout_is_added_as_by_the_pair(n: int) -> None:
    for desc, x, (weight, *bias) in cases(n):
        x = x[:40]
        grad, residual = (torch.randn(40, n, device=DEVICE).to(x.dtype) for _ in range(2))
        _, mean, rstd = run(desc, x, weight, *bias)
        given = (grad, x, weight, mean, rstd)
        grad_x, *_ = run(NormBackwardDesc(desc), *given)
        for view in (residual, *layouts(residual)):
            added, *_ = run(NormBackwardDesc(desc), *given, residual_grad=view)
            assert same_bits(added, grad_x + residual), desc


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
