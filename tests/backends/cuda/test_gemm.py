"""The CUDA backend's GEMMs against the float64 product of the dequantized operands."""

from __future__ import annotations

import pytest
import torch

from fp8core.backend_api import DequantizeDesc, GemmDesc, Operand, OperandSpec, QuantizeDesc
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
