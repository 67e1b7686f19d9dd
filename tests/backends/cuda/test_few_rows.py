"""Products of few rows by the kernel of fp8core, in every way that it proposes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
)
from fp8core_backends.cuda import autotune
from tests.backends.cuda.cuda_cases import (
    DEVICE,
    DTYPES,
    backend,
    nothing_waits,
    products_of_few_rows,
    spec,
)
from tests.pairs import pairs

pytestmark = pytest.mark.needs_accelerator("cuda")

ROWS = (1, 3, 8, 9, 16, 17, 32, 33, 64)
# The least; what is no multiple of a tile, or of a block of k; blocks of threads that share a sum;
# more tiles than there are multiprocessors.
SIZES = ((16, 16), (48, 272), (304, 1040), (1024, 4096), (8208, 640))
PAIRS = {
    "delayed": ("delayed", "delayed"),
    "rowwise": ("rowwise", "rowwise"),
    "vector by square": ("vector", "square"),
    "vector by vector": ("vector", "vector"),
    "square by vector": ("square", "vector"),
}
WEIGHTS = ("current", "rowwise", "square", "vector")
# Terms are exact, sums of a warp's tensor core are cut off like those of other 16-bit products.
PER_TERM = 2.0**-23


def cast(own: OperandSpec, x: torch.Tensor) -> Operand:
    given = {"scale": torch.full((1,), 2.5, device=DEVICE)} if own.delayed else {}
    operand = backend("cuda").bind(QuantizeDesc(x.dtype, own, None), DEVICE)(x, **given).rowwise
    assert operand is not None
    return operand


def values(rows: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of different magnitudes."""
    exponents = torch.arange(rows, device=DEVICE)[:, None] % 7 - 3
    return (torch.randn(rows, k, device=DEVICE) * exponents.exp2()).to(dtype)


def exact(own: OperandSpec, operand: Operand) -> torch.Tensor:
    return backend("reference").bind(DequantizeDesc(own), DEVICE)(operand).double()


def check(desc: GemmDesc, a: Operand, b: Operand, values_of_a: torch.Tensor) -> None:
    """Compare the product of each way, with and without a bias, with the one in float64."""
    assert desc.b is not None
    left, right = values_of_a.double(), exact(desc.b, b)
    ideal, size = left @ right.t(), left.abs() @ right.abs().t()
    term = torch.randn(len(right), device=DEVICE).to(desc.out_dtype)
    for bias in (None, term):
        whole = ideal if bias is None else ideal + bias.double()
        ulp = torch.finfo(desc.out_dtype).eps * whole.abs() + torch.finfo(desc.out_dtype).tiny
        bound = PER_TERM * left.shape[1] * (size + (0 if bias is None else bias.abs())) + ulp
        results = list(products_of_few_rows(desc, a, b, bias=bias))
        assert results
        for result in results:
            error = (result.double() - whole).abs()
            assert result.dtype == desc.out_dtype
            assert (error <= bound).all(), f"{(error / size).max():.2e} of {desc}"


@pytest.mark.parametrize(("pair", "rows"), pairs(PAIRS, ROWS))
def test_products_of_codes(pair: str, rows: int) -> None:
    a_spec, b_spec = map(spec, PAIRS[pair])
    for (n, k), out_dtype in zip(SIZES, itertools.cycle(DTYPES), strict=False):
        a = cast(a_spec, values(rows, k, torch.bfloat16))
        b = cast(b_spec, values(n, k, torch.bfloat16))
        check(GemmDesc(a_spec, b_spec, out_dtype), a, b, exact(a_spec, a))


@pytest.mark.parametrize(("name", "rows"), pairs(WEIGHTS, ROWS))
def test_products_by_codes_alone(name: str, rows: int) -> None:
    b_spec = spec(name)
    for (n, k), dtype in itertools.product(SIZES[:3], DTYPES[:2]):
        x = values(rows, k, dtype)
        b = cast(b_spec, values(n, k, dtype))
        check(GemmDesc(None, b_spec, dtype), Operand(x), b, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_are_multiplied_by_what_is_decoded(dtype: torch.dtype) -> None:
    b_spec = spec("square")
    x, b = values(65, 272, dtype), cast(b_spec, values(48, 272, dtype))
    desc = GemmDesc(None, b_spec, dtype)
    decoded = backend("cuda").bind(DequantizeDesc(b_spec, dtype), DEVICE)(b)
    want = backend("cuda").bind(replace(desc, b=None), DEVICE)(Operand(x), Operand(decoded))
    assert torch.equal(backend("cuda").bind(desc, DEVICE)(Operand(x), b), want)


def test_rows_apart_are_read_and_written_where_they_lie() -> None:
    own = spec("rowwise")
    desc = GemmDesc(own, own, torch.bfloat16)
    a, b = cast(own, values(5, 544, torch.bfloat16)), cast(own, values(48, 544, torch.bfloat16))
    parts = [Operand(x.data[:, 272:], x.scale_inv) for x in (a, b)]
    whole = [Operand(x.data.contiguous(), x.scale_inv) for x in parts]
    results = list(products_of_few_rows(desc, *parts))
    assert results
    assert all(map(torch.equal, results, products_of_few_rows(desc, *whole)))
    wide = torch.full((5, 96), 7.0, dtype=torch.bfloat16, device=DEVICE)
    run = backend("cuda").bind(desc, DEVICE)
    torch.testing.assert_close(run(*whole, out=wide[:, 48:]), results[0])
    assert (wide[:, :48] == 7).all()


def test_a_nan_stays_in_its_row_and_column() -> None:
    own = spec("current")
    a, b = cast(own, values(5, 272, torch.bfloat16)), cast(own, values(48, 272, torch.bfloat16))
    a.data[2, 3], b.data[7, 5] = 0x7F, 0xFF
    for result in products_of_few_rows(GemmDesc(own, own, torch.bfloat16), a, b):
        spoilt = result.isnan()
        assert spoilt[2].all()
        assert spoilt[:, 7].all()
        assert spoilt.sum() == 48 + 5 - 1


def test_the_same_way_has_the_same_bits_and_a_choice_is_recalled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "_tables", {})
    own = spec("rowwise")
    desc = GemmDesc(own, own, torch.bfloat16)
    a, b = cast(own, values(1, 4096, torch.bfloat16)), cast(own, values(4096, 4096, torch.bfloat16))
    first = backend("cuda").bind(desc, DEVICE)(a, b)
    monkeypatch.setattr(autotune, "_tables", {})
    monkeypatch.setattr(autotune, "_time", lambda *arguments: pytest.fail("timed again"))
    assert torch.equal(backend("cuda").bind(desc, DEVICE)(a, b), first)
    ways = [list(products_of_few_rows(desc, a, b)) for _ in range(2)]
    assert all(map(torch.equal, *ways))


def test_a_captured_step_reads_the_operands_of_its_replay() -> None:
    own = spec("current")
    a, b = cast(own, values(4, 512, torch.bfloat16)), cast(own, values(256, 512, torch.bfloat16))
    run = backend("cuda").bind(GemmDesc(own, own, torch.bfloat16), DEVICE)
    run(a, b)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run(a, b)
    a.data.copy_(cast(own, values(4, 512, torch.bfloat16)).data)
    graph.replay()
    assert torch.equal(result, run(a, b))


# --- groups whose sizes only the device knows, by codes alone ---

BOUNDS = {
    "of a row each": range(9),
    "of none, of more than a tile, and a tail": (0, 0, 3, 3, 3, 80, 81, 90, 90, 97),
    "in one": (0, 0, 0, 70, 70),
    "of two launches": (*([0] * 3), *range(200), 199, 199),
    "without a row": (0, 0, 0),
}


def of_groups(name: str, dtype: torch.dtype, n: int, k: int, sizes: str, behind: int) -> Any:
    own, bounds = spec(name), list(BOUNDS[sizes])
    x = values(bounds[-1] + behind, k, dtype)
    weights = [cast(own, values(n, k, dtype)) for _ in range(min(len(bounds) - 1, 5))]
    b = [weights[group % len(weights)] for group in range(len(bounds) - 1)]
    return own, x, b, bounds


@pytest.mark.parametrize(("name", "sizes"), pairs(WEIGHTS, BOUNDS))
def test_products_of_groups_by_codes_alone(name: str, sizes: str) -> None:
    for (n, k), dtype, behind in zip(SIZES, itertools.cycle(DTYPES[:2]), (0, 5) * 3, strict=False):
        own, x, b, bounds = of_groups(name, dtype, n, k, sizes, behind)
        desc = GroupedGemmDesc(None, own, dtype, offsets_on_device=True)
        run, offsets = backend("cuda").bind(desc, DEVICE), torch.tensor(bounds).to(DEVICE)
        terms = [torch.randn(n, device=DEVICE).to(dtype) for _ in b]
        eps, tiny = torch.finfo(dtype).eps, torch.finfo(dtype).tiny
        for bias in (None, terms):
            with nothing_waits():
                result = run(Operand(x), b, offsets, bias=bias)
            assert not result[bounds[-1] :].any()
            for group, (start, end) in enumerate(itertools.pairwise(bounds)):
                left, right = x[start:end].double(), exact(own, b[group])
                term = torch.zeros(n, device=DEVICE) if bias is None else bias[group].double()
                want = left @ right.t() + term
                size = left.abs() @ right.abs().t() + term.abs()
                bound = PER_TERM * k * size + eps * want.abs() + tiny
                assert ((result[start:end].double() - want).abs() <= bound).all(), group
            out = torch.full_like(result, math.nan)
            assert run(Operand(x), b, offsets, bias=bias, out=out) is out
            assert torch.equal(out, result)  # and the same bits again


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_a_row_has_the_same_bits_in_every_group(dtype: torch.dtype) -> None:
    own, x, b, _ = of_groups("rowwise", dtype, 304, 1040, "in one", 0)
    desc = GroupedGemmDesc(None, own, dtype, offsets_on_device=True)
    run, results = backend("cuda").bind(desc, DEVICE), []
    for bounds in ((0, 70, 70, 70, 70), (0, 1, 9, 41, 70), (0, 0, 17, 50, 70)):
        offsets = torch.tensor(bounds).to(DEVICE)
        results.append(run(Operand(x), b[:1] * 4, offsets))
    assert all(torch.equal(result, results[0]) for result in results)


def test_offsets_that_go_astray_stay_inside() -> None:
    own, x, b, _ = of_groups("square", torch.bfloat16, 48, 272, "in one", 0)
    desc = GroupedGemmDesc(None, own, torch.bfloat16, offsets_on_device=True)
    run = backend("cuda").bind(desc, DEVICE)
    for bounds in ((0, 300, 100, 2**40, 7), (5, 20, -7, 9, 70), (-(2**62), 3, 40, 40, 2**31)):
        cut = torch.tensor([0, *bounds[1:]]).clamp(0, 70).cummax(0).values
        want = run(Operand(x), b, cut.to(DEVICE))
        assert torch.equal(run(Operand(x), b, torch.tensor(bounds).to(DEVICE)), want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_a_group_wait_for_nothing(dtype: torch.dtype) -> None:
    own, k, bounds = spec("square"), 272, (0, 300, 300, 640)
    x, b = values(700, k, dtype), [cast(own, values(48, k, dtype)) for _ in range(3)]
    desc = GroupedGemmDesc(None, own, dtype, offsets_on_device=True)
    run, offsets = backend("cuda").bind(desc, DEVICE), torch.tensor(bounds).to(DEVICE)
    with nothing_waits():
        result = run(Operand(x), b, offsets)
    assert not result[640:].any()
    decode = backend("reference").bind(DequantizeDesc(own, dtype), DEVICE)
    for group, (start, end) in enumerate(itertools.pairwise(bounds)):
        want = x[start:end].double() @ decode(b[group]).double().t()
        size = x[start:end].double().abs() @ decode(b[group]).double().abs().t()
        error = (result[start:end].double() - want).abs()
        assert (error <= 2.0**-8 * size + 2.0**-8 * want.abs()).all()


def test_groups_are_captured_and_replayed_with_other_sizes() -> None:
    own, x, b, _ = of_groups("rowwise", torch.bfloat16, 304, 1040, "in one", 0)
    desc = GroupedGemmDesc(None, own, torch.bfloat16, offsets_on_device=True)
    run, offsets = backend("cuda").bind(desc, DEVICE), torch.tensor((0, 3, 3, 9, 70)).to(DEVICE)
    run(Operand(x), b, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(Operand(x), b, offsets)
    for bounds in ((0, 0, 1, 2, 70), (0, 65, 66, 66, 66)):
        offsets.copy_(torch.tensor(bounds))
        graph.replay()
        assert torch.equal(captured, run(Operand(x), b, offsets))
