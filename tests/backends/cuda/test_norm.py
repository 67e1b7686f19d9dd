"""Norms on CUDA, alone and fused with casts; test_sizes.py has the kit's bounds and law of fusions.

A row's bits follow from the row alone. So one row, many rows, a sum that was computed before, and
rows that are too long or not aligned for the kernel that holds them in registers, all agree. A
fusion has the bits of the norm alone, then of the reference's cast.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    AddNormDesc,
    FusedDesc,
    NormBackwardDesc,
    NormDesc,
    OperandSpec,
    QuantizeDesc,
)
from fp8core.errors import OperandError
from fp8core_backends.cuda import native
from fp8core_backends.cuda.fused_norm import FusedNorm
from tests.backends.cuda.cuda_cases import (
    DEVICE,
    DTYPES,
    NORM_COLUMNS,
    backend,
    differs,
    same_bits,
    spec,
)

pytestmark = pytest.mark.needs_accelerator("cuda")
KINDS = ("rmsnorm", "layernorm")
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


@pytest.mark.parametrize("n", NORM_COLUMNS)
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


@pytest.mark.parametrize("n", NORM_COLUMNS)
def test_the_norm_of_a_sum_equals_the_pair_in_any_layout(n: int) -> None:
    for desc, x, given in cases(n):
        x, residual = x[:40], x[40:80].flip(0)
        total = x + residual
        expected = (total, *run(desc, total, *given))
        assert same(run(AddNormDesc(desc), unaligned(x), residual, *given), expected), desc
        for at, view in enumerate(layouts(residual)):
            assert same(run(AddNormDesc(desc), x, view, *given), expected), (desc, at)


@pytest.mark.parametrize("n", NORM_COLUMNS)
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
            added, *_ = run(NormBackwardDesc(desc, added=True), *given, view)
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


RECIPES = ("delayed", "current", "rowwise", "vector")
HALVES = (torch.bfloat16, torch.float16)


def fused(kind: str, own: OperandSpec, dtype: torch.dtype, **changed: object) -> FusedDesc:
    """Return the descriptor that the chain asks for under a recipe's spec ``own``."""
    out_dtype = torch.float32 if own.delayed else dtype
    norm = dataclasses.replace(NormDesc(kind, dtype, out_dtype, 1e-5), **changed)
    return FusedDesc(norm, QuantizeDesc(out_dtype, own, own))


def drawn(desc: FusedDesc, rows: int, n: int) -> list[torch.Tensor]:
    """Return x, whose rows are of different sizes and means, a weight and a bias."""
    norm = desc.producer
    size = torch.linspace(-6, 6, rows, device=DEVICE).exp2()[:, None]
    x = (torch.randn(rows, n, device=DEVICE) + 0.5) * size
    x[::7] = 0.0
    weight, bias = torch.randn(2, n, device=DEVICE)
    weight[3::5] = 0.0
    given = [x, weight, bias][: 3 if norm.kind == "layernorm" else 2]
    return [one.to(norm.dtype).contiguous() for one in given]


def keywords(own: OperandSpec) -> dict[str, torch.Tensor]:
    """Return those of a cast; ``amax_out`` holds an amax that some results exceed."""
    count = {"nonfinite_out": torch.full((1,), 7, device=DEVICE)}
    if not own.delayed:
        return count
    scale = torch.full((1,), 3.7, device=DEVICE)
    return {"scale": scale, "amax_out": torch.full((1,), 0.25, device=DEVICE), **count}


def same_statistics(ours: Any, theirs: Any) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(one is other if one is None else same_bits(one, other) for one, other in pairs)


def check(desc: FusedDesc, tensors: list[torch.Tensor], run: Any = None) -> None:
    """Compare ``run``, by default the backend's callable, with the norm and the cast apart."""
    run = backend("cuda").bind(desc, DEVICE) if run is None else run
    own = desc.quantize.rowwise or desc.quantize.columnwise
    ours, theirs = keywords(own), keywords(own)
    before = [one.clone() for one in tensors]
    quantized, *statistics = run(*tensors, **ours)
    y, *expected_statistics = backend("cuda").bind(desc.producer, DEVICE)(*tensors)
    expected = backend("reference").bind(desc.quantize, DEVICE)(y, **theirs)
    text = f"{desc} of {list(tensors[0].shape)}"
    assert same_statistics(statistics, expected_statistics), f"statistics {text}"
    assert differs(quantized.rowwise, expected.rowwise) is None, f"rowwise {text}"
    assert differs(quantized.columnwise, expected.columnwise) is None, f"columnwise {text}"
    for name, one in ours.items():
        assert same_bits(one, theirs[name]), f"{name} {text}"
    assert all(map(same_bits, tensors, before)), f"an input was written {text}"


def orientations(desc: FusedDesc) -> list[FusedDesc]:
    casts = (desc.quantize, *desc.quantize.halves())
    return [dataclasses.replace(desc, quantize=cast) for cast in casts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_one_orientation_equals_its_half_of_both(kind: str, name: str) -> None:
    for desc in orientations(fused(kind, spec(name), torch.bfloat16))[1:]:
        for rows, n in ((1, 8), (70, 520), (257, 1024), (272, 4096), (130, 16384)):
            check(desc, drawn(desc, rows, n))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_a_zero_centered_weight_of_any_dtype(kind: str, name: str) -> None:
    desc = fused(kind, spec(name), torch.bfloat16, zero_centered=True)
    for dtype in (torch.float32, torch.float16, torch.float64):
        x, *parameters = drawn(desc, 130, 520)
        check(desc, [x, *(one.to(dtype) for one in parameters)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "rows", "threads"),
    [("delayed", 32, 256), ("delayed", 64, 256), ("vector", 128, 256), ("vector", 128, 512)],
)
def test_any_division_into_panels_and_slices_gives_the_same(
    kind: str, name: str, rows: int, threads: int
) -> None:
    desc, library = fused(kind, spec(name), torch.bfloat16), native.load()
    for shape in ((100, 1160), (257, 2048), (3000, 4096)):
        tensors, ran = drawn(desc, *shape), 0
        for cluster, ahead in itertools.product(range(1, 17), (0, 1)):
            run = FusedNorm(desc, DEVICE, library, (rows, threads, cluster, ahead))
            try:
                check(desc, tensors, run)
                ran += 1
            except ValueError as error:
                if "the device holds no cluster" not in str(error):
                    raise  # so few blocks have no memory for it
        assert ran > 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_nan_and_inf_are_counted_and_keep_their_places(kind: str, name: str) -> None:
    for dtype, (rows, n) in itertools.product(HALVES, ((70, 520), (257, 1024), (130, 4096))):
        desc = fused(kind, spec(name), dtype)
        x, *parameters = drawn(desc, rows, n)
        for at, value in ((3, torch.nan), (rows // 2, torch.inf), (rows - 1, -torch.inf)):
            x[at, n // 2] = value
        check(desc, [x, *parameters])
        parameters[0][n // 3] = torch.inf
        check(desc, [x, *parameters])
        parameters[0][-1] = torch.nan
        check(desc, [x, *parameters])


@pytest.mark.parametrize("name", RECIPES)
def test_large_tensors_equal_the_pair(name: str) -> None:
    desc = fused("rmsnorm", spec(name), torch.bfloat16)
    for rows, n in ((8192, 4096), (4096, 8192), (4100, 5120), (66000, 64)):
        check(desc, drawn(desc, rows, n))


def test_what_does_not_fit_a_fusion_is_refused() -> None:
    desc = fused("rmsnorm", spec("delayed"), torch.bfloat16)
    x, weight = drawn(desc, 4, 64)
    run, given = backend("cuda").bind(desc, DEVICE), keywords(spec("delayed"))
    with pytest.raises(OperandError, match="this one was bound for"):
        run(x.float(), weight, **given)
    with pytest.raises(OperandError, match=r"rows of 64: the weight is \[32\]"):
        run(x, weight[:32], **given)
    with pytest.raises(OperandError, match="rmsnorm: a bias was given"):
        run(x, weight, weight, **given)
