"""Products of the CUDA backend, dense and of groups whose sizes only the device knows.

They are held against the float64 product of the dequantized operands, casts of groups against the
reference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    GROUP_STEP,
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    Operand,
    OperandError,
    OperandSpec,
    QuantizeDesc,
    split_groups,
)
from tests.backends.cuda.cuda_cases import DEVICE, DTYPES, backend, spec, values
from tests.pairs import pairs

pytestmark = pytest.mark.needs_accelerator("cuda")

# k = 16, and what is no multiple of a tile.
SHAPES = ((16, 16, 16), (4, 32, 48), (128, 128, 128), (132, 144, 272), (1024, 512, 2048))
# cuBLASLt takes rows in larger steps where blocks of 128 x 128 scale them.
ANY_ROWS = tuple((rows, 144, 272) for rows in (1, 2, 3, 5, 17, 131))
PAIRS = {
    "delayed": ("delayed", "delayed"),
    "current": ("current", "current"),
    "rowwise": ("rowwise", "rowwise"),
    "vector by square": ("vector", "square"),
    "square by vector": ("square", "vector"),
    "vector by vector": ("vector", "vector"),
}
# Hopper's tensor cores keep about 14 bits below the largest term of 32 products, and with fast
# accumulation also of the running sum. Measured worst cases over these shapes: docs/measured.md.
BOUND = {False: 2.0**-12, True: 2.0**-9}


def operand(own: OperandSpec, x: torch.Tensor) -> Operand:
    desc = QuantizeDesc(x.dtype, own, None)
    given = {"scale": torch.full((1,), 2.5, device=DEVICE)} if own.delayed else {}
    made = backend("cuda").bind(desc, DEVICE)(x, **given).rowwise
    assert made is not None
    return made


def exact(own: OperandSpec, made: Operand) -> torch.Tensor:
    return backend("reference").bind(DequantizeDesc(own), DEVICE)(made).double()


def check(
    pair: str, shape: tuple[int, int, int], out_dtype: torch.dtype, fast: bool, formats: str
) -> None:
    m, n, k = shape
    a_spec, b_spec = (
        spec(name, element) for name, element in zip(PAIRS[pair], formats.split(), strict=True)
    )
    a = operand(a_spec, values("normal", (m, k), torch.bfloat16))
    b = operand(b_spec, values("normal", (n, k), torch.bfloat16))
    desc = GemmDesc(a_spec, b_spec, out_dtype, fast_accumulation=fast)
    made = backend("cuda").bind(desc, DEVICE)(a, b)
    left, right = exact(a_spec, a), exact(b_spec, b)
    ideal, size = left @ right.t(), left.abs() @ right.abs().t()
    ulp = torch.finfo(out_dtype).eps * ideal.abs()
    error = (made.double() - ideal).abs() - ulp
    assert made.dtype == out_dtype
    assert (error <= BOUND[fast] * size).all(), f"{(error / size).max().item():.2e} of {desc}"


@pytest.mark.parametrize(
    ("pair", "out_dtype", "formats"),
    pairs(PAIRS, DTYPES, ["e4m3 e4m3", "e5m2 e4m3", "e4m3 e5m2"]),
    ids=str,
)
def test_products_are_within_the_accumulators_bound(
    pair: str, out_dtype: torch.dtype, formats: str
) -> None:
    for shape in (*SHAPES, *(() if pair.startswith("square") else ANY_ROWS)):
        for fast in (False, True):
            check(pair, shape, out_dtype, fast, formats)


@pytest.mark.usefixtures("first_algorithms")
@pytest.mark.parametrize("pair", PAIRS)
def test_results_in_columns_of_a_wider_tensor_have_the_same_bits(pair: str) -> None:
    a_spec, b_spec = map(spec, PAIRS[pair])
    for m, n, k in ((256, 128, 512), (64, 96, 128), (8192, 1024, 4096)):
        a = operand(a_spec, values("normal", (m, k), torch.bfloat16))
        b = operand(b_spec, values("normal", (n, k), torch.bfloat16))
        run = backend("cuda").bind(GemmDesc(a_spec, b_spec, torch.bfloat16), DEVICE)
        around = torch.zeros(m, 3 * n, dtype=torch.bfloat16, device=DEVICE)
        run(a, b, out=around[:, n : 2 * n])
        assert torch.equal(around[:, n : 2 * n], run(a, b))
        assert not around[:, :n].any()
        assert not around[:, 2 * n :].any()


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_a_bias_of_any_dtype_is_added(out_dtype: torch.dtype) -> None:
    own = spec("current")
    a, b = (operand(own, values("normal", (64, 96), torch.bfloat16)) for _ in range(2))
    run = backend("cuda").bind(GemmDesc(own, own, out_dtype), DEVICE)
    plain = backend("cuda").bind(GemmDesc(own, own, torch.float32), DEVICE)
    for bias_dtype in DTYPES:
        bias = (100 * torch.randn(64, device=DEVICE)).to(bias_dtype)
        want = (plain(a, b) + bias.float()).to(out_dtype)
        eps = torch.finfo(out_dtype).eps
        torch.testing.assert_close(run(a, b, bias=bias), want, rtol=eps, atol=1e-4)


SIZES: dict[str, tuple[tuple[int, ...], int]] = {
    "ragged": ((0, 130, 1, 0, 33, 100), 264),
    "aligned": ((128, 256, 16), 400),
    "one": ((0, 0, 300, 0), 300),
    "tail": ((5, 0, 17), 200),
    "empty": ((0, 0, 0), 0),
    "nothing but tail": ((0, 0), 77),
    "many": (tuple(i % 7 for i in range(70)), 213),
}
FORMATS = ("e4m3 e4m3", "e5m2 e4m3", "e4m3 e5m2")
# Of a whole result, in the root mean square: held on an H200, not derived. Single elements, of
# which short sums with one large product are the worst, are held to what the backend declares.
MEAN_ERROR = {False: 2.0**-13, True: 2.0**-11}


def offsets_of(sizes: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor((0, *sizes), device=DEVICE).cumsum(0)


def keywords(desc: QuantizeDesc, groups: int) -> dict[str, Any]:
    own = desc.rowwise or desc.columnwise
    if own is None or not own.delayed:
        return {}
    room = torch.zeros(groups, 3, device=DEVICE)  # as in a layer's state: a column of a matrix
    room[:, 1] = torch.arange(1, groups + 1, device=DEVICE) * 0.37
    return {"scale": room[:, 1], "amax_out": room[:, 2]}


def cast(own: OperandSpec, x: torch.Tensor, counts: tuple[int, ...], dim: int) -> Operand:
    """Quantize the rows of ``x`` in groups: rowwise for ``dim`` 0, columnwise for 1."""
    desc = QuantizeDesc(x.dtype, None if dim else own, own if dim else None, True, True)
    made = backend("cuda").bind(desc, DEVICE)(x, offsets_of(counts), **keywords(desc, len(counts)))
    return made[dim]


def weight(own: OperandSpec, x: torch.Tensor) -> Operand:
    desc = QuantizeDesc(x.dtype, own, None)
    given = {"scale": torch.full((1,), 2.5, device=DEVICE)} if own.delayed else {}
    return backend("cuda").bind(desc, DEVICE)(x, **given).rowwise


def within(
    desc: GroupedGemmDesc, made: torch.Tensor, a: Operand, b: Operand, term: Any = 0.0
) -> None:
    """Require a group's product to be within the tensor core's bound of the float64 one."""
    left, right = exact(desc.a, a), exact(desc.b, b)
    ideal, size = left @ right.t(), left.abs() @ right.abs().t()
    whole = ideal + term
    ulp = torch.finfo(desc.out_dtype).eps * whole.abs() + 2.0**-22 * torch.as_tensor(term).abs()
    error = ((made.double() - whole).abs() - ulp).clamp(min=0)
    declared = backend("cuda").numerics(desc, DEVICE)
    bound = declared.sum_error + declared.sum_error_per_term * left.shape[1]
    assert (error <= bound * size).all(), f"{(error / size).max():.2e} of {desc}"
    mean = MEAN_ERROR[desc.fast_accumulation]
    assert error.norm() <= mean * size.norm(), f"{error.norm() / size.norm():.2e} of {desc}"


def stacked(pair: str, sizes: str, formats: str, n: int, k: int) -> Any:
    counts, rows = SIZES[sizes]
    a_spec, b_spec = (
        spec(name, element) for name, element in zip(PAIRS[pair], formats.split(), strict=True)
    )
    x = values("normal", (rows, k), torch.bfloat16)
    a = cast(a_spec, x, counts, 0)
    b = [weight(b_spec, values("normal", (n, k), torch.bfloat16)) for _ in counts]
    return a_spec, b_spec, a, b, counts


@pytest.mark.parametrize(("pair", "sizes", "formats"), pairs(PAIRS, SIZES, FORMATS))
def test_products_of_groups_of_rows(pair: str, sizes: str, formats: str) -> None:
    for n, k in ((48, 272), (400, 1040)):
        a_spec, b_spec, a, b, counts = stacked(pair, sizes, formats, n, k)
        bounds, used = offsets_of(counts).tolist(), sum(counts)
        bias = [100 * torch.randn(n, device=DEVICE).bfloat16() for _ in counts]
        for out_dtype, fast, biased in (
            (torch.bfloat16, False, True),
            (torch.float32, True, False),
            (torch.float16, False, False),
        ):
            desc = GroupedGemmDesc(
                a_spec, b_spec, out_dtype, fast_accumulation=fast, offsets_on_device=True
            )
            out = torch.full((len(a.data), n), float("nan"), dtype=out_dtype, device=DEVICE)
            given = bias if biased else None
            run = backend("cuda").bind(desc, DEVICE)
            assert run(a, b, offsets_of(counts), bias=given, out=out) is out
            parts = split_groups(a_spec, a, bounds, 0)
            for group, made in enumerate(torch.split(out[:used], list(counts))):
                term = bias[group].double() if biased else 0.0
                within(desc, made, parts[group], b[group], term)
            assert not out[used:].any()  # NaN would be any


@pytest.mark.parametrize(("pair", "sizes", "formats"), pairs(PAIRS, SIZES, FORMATS))
def test_sums_over_groups(pair: str, sizes: str, formats: str) -> None:
    counts, rows = SIZES[sizes]
    a_spec, b_spec = (
        spec(name, element) for name, element in zip(PAIRS[pair], formats.split(), strict=True)
    )
    for m, n in ((40, 48), (272, 400)):
        dy, x = (values("normal", (rows, cols), torch.bfloat16) for cols in (m, n))
        a, b = cast(a_spec, dy, counts, 1), cast(b_spec, x, counts, 1)
        bounds = offsets_of(counts).tolist()
        pairs = list(
            zip(
                split_groups(a_spec, a, bounds, 1, GROUP_STEP),
                split_groups(b_spec, b, bounds, 1, GROUP_STEP),
                strict=True,
            )
        )
        for out_dtype, fast, accumulate in (
            (torch.bfloat16, False, False),
            (torch.float32, False, True),
            (torch.float32, True, False),
        ):
            desc = GroupedGemmDesc(a_spec, b_spec, out_dtype, accumulate, fast, True, True)
            run = backend("cuda").bind(desc, DEVICE)
            start = 1000.0 if accumulate else float("nan")
            out = [torch.full((m, n), start, dtype=out_dtype, device=DEVICE) for _ in counts]
            run(a, b, offsets_of(counts), out=out)
            for made, own in zip(out, pairs, strict=True):
                within(desc, made, *own, 1000.0 if accumulate else 0.0)
            if not accumulate:
                again = run(a, b, offsets_of(counts))
                assert all(torch.equal(one, two) for one, two in zip(again, out, strict=True))


@pytest.mark.parametrize("pair", PAIRS)
def test_products_stay_inside_whatever_the_offsets_are(pair: str) -> None:
    """The operands are those of other offsets; compute-sanitizer sees where this leads."""
    a_spec, b_spec = (spec(name) for name in PAIRS[pair])
    x, counts = values("normal", (40, 144), torch.bfloat16), (20, 0, 20)
    b = [weight(b_spec, values("normal", (48, 144), torch.bfloat16)) for _ in counts]
    rows = GroupedGemmDesc(a_spec, b_spec, torch.bfloat16, offsets_on_device=True)
    sums = replace(rows, contract_groups=True)
    for offsets in ([0, 300, 100, 2**40], [5, 20, -7, 9], [-(2**62), 3, 40, 2**31]):
        given = torch.tensor(offsets, device=DEVICE)
        made = backend("cuda").bind(rows, DEVICE)(cast(a_spec, x, counts, 0), b, given)
        assert made.shape == (40, 48)
        backend("cuda").bind(sums, DEVICE)(
            cast(a_spec, x, counts, 1), cast(b_spec, x, counts, 1), given
        )
    torch.cuda.synchronize()


def test_sums_into_16_bits_are_added_up() -> None:
    own, counts = spec("current"), (20, 12)
    a = cast(own, values("normal", (32, 64), torch.bfloat16), counts, 0)
    b = [weight(own, values("normal", (48, 64), torch.bfloat16)) for _ in counts]
    desc = GroupedGemmDesc(own, own, torch.bfloat16, accumulate=True, offsets_on_device=True)
    plain = replace(desc, accumulate=False, out_dtype=torch.float32)
    out = torch.full((32, 48), 100.0, dtype=torch.bfloat16, device=DEVICE)
    backend("cuda").bind(desc, DEVICE)(a, b, offsets_of(counts), out=out)
    want = backend("cuda").bind(plain, DEVICE)(a, b, offsets_of(counts)) + 100.0
    assert torch.equal(out, want.bfloat16())


def test_shapes_that_do_not_fit_are_refused() -> None:
    own = spec("current")
    desc = GroupedGemmDesc(own, own, torch.bfloat16, offsets_on_device=True)
    a = cast(own, values("normal", (32, 64), torch.bfloat16), (20, 12), 0)
    b = weight(own, values("normal", (48, 64), torch.bfloat16))
    run = backend("cuda").bind(desc, DEVICE)
    with pytest.raises(OperandError, match="expected 2 b"):
        run(a, [b], offsets_of((20, 12)))
    with pytest.raises(OperandError, match="group_offsets"):
        run(a, [b, b], offsets_of((20, 12)).cpu())


def test_high_precision_is_left_to_the_cuda_backend() -> None:
    desc = GroupedGemmDesc(None, None, torch.bfloat16, offsets_on_device=True)
    assert backend("cuda").unsupported(desc, DEVICE) is None
    assert "would wait" in str(backend("reference").unsupported(desc, DEVICE))
