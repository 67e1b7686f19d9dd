"""More than 2^31 elements: offsets that 32 bits do not hold; slices against the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fp8core.backend_api import (
    AmaxDesc,
    DequantizeDesc,
    GemmDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
)
from tests.backends.cuda.cuda_cases import DEVICE, backend, differs, spec

pytestmark = pytest.mark.needs_accelerator("cuda")
NEEDED = 40 << 30  # bytes: the input, both orientations of its codes, float32 products
BOUNDARY = 2**31
# Read and written in vectors, and one element at a time.
SHAPES = ((33_000, 66_000), (46_341, 46_343))
RECIPES = ("delayed", "current", "rowwise", "vector", "square")
LARGEST = 100.0
# CudaBackend.numerics: 32 products, each cut off 13 bits below the largest. Millions of sums are
# looked at here, so the bound that test_gemm.py measured over thousands does not hold.
BOUND = 2.0**-9


@pytest.fixture(autouse=True)
def room() -> Iterator[None]:
    free, _ = torch.cuda.mem_get_info(DEVICE)
    if free < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of free device memory, found {free >> 30}")
    yield
    torch.cuda.empty_cache()


@pytest.fixture(scope="module", params=SHAPES, ids=str)
def x(request: pytest.FixtureRequest) -> Iterator[torch.Tensor]:
    """A matrix whose largest element is its last one."""
    if torch.cuda.mem_get_info(DEVICE)[0] < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of free device memory")
    made = torch.randn(request.param, dtype=torch.bfloat16, device=DEVICE)
    made[-1, -1] = LARGEST
    yield made
    del made
    torch.cuda.empty_cache()


def slices(rows: int, cols: int) -> list[slice]:
    """Return the first, the last and that block of 128 rows that holds element 2^31."""
    middle = BOUNDARY // cols // 128 * 128
    last = (rows - 1) // 128 * 128
    return [slice(0, 128), slice(middle, min(rows, middle + 128)), slice(last, rows)]


def part(own: OperandSpec, made: Operand, rows: slice) -> Operand:
    """Return ``rows`` of an operand, which begin where a block does."""
    assert made.scale_inv is not None
    height = own.block[0]
    of_scales = slice(rows.start // height, -(-rows.stop // height)) if height else slice(None)
    return Operand(made.data[rows], made.scale_inv[of_scales])


@pytest.mark.parametrize("name", RECIPES)
def test_codes_beyond_element_2_31_equal_the_reference(name: str, x: torch.Tensor) -> None:
    own = spec(name)
    desc = QuantizeDesc(torch.bfloat16, own, own)
    amax = torch.zeros(1, device=DEVICE) if own.delayed else None
    given = {"scale": torch.full((1,), 3.7, device=DEVICE)} if own.delayed else {}
    made = backend("cuda").bind(desc, DEVICE)(x, amax_out=amax, **given)
    assert amax is None or amax.item() == LARGEST
    for turned, (half, whole) in enumerate(
        zip(desc.halves(), (made.rowwise, made.columnwise), strict=True)
    ):
        source = x.t() if turned else x
        for rows in slices(*source.shape):
            piece = source[rows]
            count = len(piece)
            if own.block == (0, 0):  # with a row that has the whole tensor's amax
                piece = torch.cat([piece, torch.full_like(piece[:1], LARGEST)])
            piece = piece.t().contiguous() if turned else piece
            wanted = backend("reference").bind(half, DEVICE)(piece, **given)
            theirs = wanted.columnwise if turned else wanted.rowwise
            theirs = part(own, theirs, slice(0, count))
            said = differs(part(own, whole, rows), theirs)
            assert said is None, (("rowwise", "columnwise")[turned], rows, said)


@pytest.mark.parametrize("name", RECIPES)
def test_a_part_of_long_rows_equals_its_copy(name: str, x: torch.Tensor) -> None:
    own = spec(name)
    run = backend("cuda").bind(QuantizeDesc(torch.bfloat16, own, own), DEVICE)
    given = {"scale": torch.full((1,), 3.7, device=DEVICE)} if own.delayed else {}
    view = x[:, -200:]
    ours, theirs = run(view, **given), run(view.contiguous(), **given)
    assert differs(ours.rowwise, theirs.rowwise) is None
    assert differs(ours.columnwise, theirs.columnwise) is None


def test_an_amax_takes_all_elements(x: torch.Tensor) -> None:
    desc = AmaxDesc(QuantizeDesc(torch.bfloat16, spec("current"), None))
    run = backend("cuda").bind(desc, DEVICE)
    assert run(x).item() == LARGEST


PAIRS = {
    "current": ("current", "current", torch.bfloat16),
    "rowwise": ("rowwise", "rowwise", torch.bfloat16),
    "vector by square": ("vector", "square", torch.bfloat16),
    "vector by vector, added": ("vector", "vector", torch.float32),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_products_beyond_element_2_31(pair: str) -> None:
    left, right, out_dtype = PAIRS[pair]
    size, k = 47_008, 128
    a_spec, b_spec = spec(left), spec(right)
    operands = []
    for own in (a_spec, b_spec):
        source = torch.randn(size, k, dtype=torch.bfloat16, device=DEVICE)
        made = backend("cuda").bind(QuantizeDesc(torch.bfloat16, own, None), DEVICE)(source)
        operands.append(made.rowwise)
    a, b = operands
    accumulate = out_dtype == torch.float32
    before = 1000.0 if accumulate else float("nan")
    out = torch.full((size, size), before, dtype=out_dtype, device=DEVICE)
    desc = GemmDesc(a_spec, b_spec, out_dtype, accumulate=accumulate)
    backend("cuda").bind(desc, DEVICE)(a, b, out=out)
    assert all(chunk.isfinite().all() for chunk in out.split(4096))
    wide = [
        backend("reference").bind(DequantizeDesc(own), DEVICE)(made).double()
        for own, made in ((a_spec, a), (b_spec, b))
    ]
    eps = torch.finfo(out_dtype).eps
    for rows in slices(size, size):
        ideal = wide[0][rows] @ wide[1].t() + (1000.0 if accumulate else 0.0)
        error = (out[rows].double() - ideal).abs() - eps * ideal.abs()
        size_of_sum = wide[0][rows].abs() @ wide[1].abs().t() + (before if accumulate else 0.0)
        worst = (error / size_of_sum).max().item()
        assert worst <= BOUND, (rows, worst)
