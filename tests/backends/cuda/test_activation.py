"""The native activations against the reference backend in float64, within the kit's bound."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from fp8core.backend_api import (
    ACTIVATIONS,
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
)
from fp8core.conformance.compare import ulp, within
from tests.backends.cuda.cuda_cases import DEVICE, DTYPES, EMPTY, SHAPES, backend, same_bits

pytestmark = pytest.mark.needs_accelerator("cuda")

CPU, F64 = torch.device("cpu"), torch.float64
FUNCTION = 2.0**-20  # of an activation's error, as a share of the size of its arguments
PARAMS = {"clamped_swiglu": (7.0, 1.702, 1.0)}
# Fewer columns than a vector, one vector, rows that begin at odd addresses, many rows and columns.
SIZES = (*SHAPES, (1, 7), (1, 8), (5, 9), (3, 20008), (4100, 24), (2, 66000), (70000, 8))
# One for each function; the others differ in beta alone.
FUNCTIONS = ("gelu", "qgelu", "relu", "srelu", "geglu", "glu", "swiglu", "clamped_swiglu")


def forward(name: str, dtype: torch.dtype, out_dtype: torch.dtype) -> ActivationDesc:
    return ActivationDesc(name, dtype, out_dtype, PARAMS.get(name, ()))


def backward(name: str, dtype: torch.dtype, out_dtype: torch.dtype) -> ActivationBackwardDesc:
    return ActivationBackwardDesc(name, dtype, out_dtype, PARAMS.get(name, ()))


def columns(name: str, n: int) -> int:
    return 2 * n if name in GATED else n


def drawn(rows: int, cols: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return values of a few decades within +-16, with zeros of both signs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=generator) * 3
    x *= 10.0 ** (2 * torch.rand(rows, 1, generator=generator) - 1)
    x[::5, ::3] = -0.0
    return x.clamp(-16, 16).to(dtype).to(DEVICE)


def sizes(desc: ActivationDesc | ActivationBackwardDesc, x: torch.Tensor) -> torch.Tensor:
    """Return the size that the rounding errors of ``y`` grow with, as the kit counts it."""
    if desc.name not in GATED:
        return 1 + x.abs()
    a, b = x.abs().chunk(2, -1)
    return (1 + a) * (2 + b)


def judge(desc: ActivationDesc | ActivationBackwardDesc, *given: torch.Tensor) -> torch.Tensor:
    """Return the results of the reference backend in float64, on the CPU."""
    wide = replace(desc, dtype=F64, out_dtype=F64)
    run = backend("reference").bind(wide, CPU)
    return run(*(one.cpu().double() for one in given))


def check_forward(desc: ActivationDesc, x: torch.Tensor) -> None:
    before = x.clone()
    y = backend("cuda").bind(desc, DEVICE)(x)
    expected = judge(desc, x)
    assert y.dtype == desc.out_dtype
    assert y.is_contiguous()
    bound = FUNCTION * sizes(desc, x.cpu().double()) + ulp(expected, desc.out_dtype)
    within(f"{desc} of {list(x.shape)} {x.stride()}", y, expected, bound)
    assert same_bits(x, before), "the input was written"


def check_backward(desc: ActivationBackwardDesc, grad: torch.Tensor, x: torch.Tensor) -> None:
    before = grad.clone(), x.clone()
    grad_x = backend("cuda").bind(desc, DEVICE)(grad, x)
    expected = judge(desc, grad, x)
    assert grad_x.dtype == desc.out_dtype
    assert grad_x.is_contiguous()
    size = grad.cpu().double().abs() * sizes(desc, x.cpu().double()) ** 2
    size = torch.cat((size, size), -1) if desc.name in GATED else size
    bound = FUNCTION * size + ulp(expected, desc.out_dtype)
    within(f"{desc} of {list(x.shape)} {x.stride()}", grad_x, expected, bound)
    for one, other in zip((grad, x), before, strict=True):
        assert same_bits(one, other), "an input was written"


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_within_the_bound_in_every_pair_of_dtypes(name: str) -> None:
    for dtype, out_dtype in itertools.product(DTYPES, DTYPES):
        for rows, n in ((9, 70), (64, 64), (33, 2056)):
            check_forward(forward(name, dtype, out_dtype), drawn(rows, columns(name, n), dtype, 1))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_derivatives_are_within_the_bound_in_every_pair_of_dtypes(name: str) -> None:
    for dtype, out_dtype in itertools.product(DTYPES, DTYPES):
        for rows, n in ((9, 70), (64, 64), (33, 2056)):
            x = drawn(rows, columns(name, n), dtype, 1)
            check_backward(backward(name, dtype, out_dtype), drawn(rows, n, dtype, 2), x)


@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_any_number_of_rows_and_columns_is_computed(name: str) -> None:
    for rows, n in (*SIZES, *EMPTY):
        x = drawn(rows, columns(name, n), torch.bfloat16, 3)
        check_forward(forward(name, torch.bfloat16, torch.bfloat16), x)
        grad = drawn(rows, n, torch.bfloat16, 4)
        check_backward(backward(name, torch.bfloat16, torch.bfloat16), grad, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "geglu"])
def test_strides_and_odd_addresses_change_nothing(name: str, dtype: torch.dtype) -> None:
    cols = columns(name, 256)
    whole = drawn(300, 2 * cols + 48, dtype, 5)
    views = {
        "rows apart": whole[:130, 16 : 16 + cols],
        "rows apart, odd addresses": whole[1:131, 1 : 1 + cols],
        "every other row": whole[:260:2, :cols],
        "every other column": whole[:130, : 2 * cols : 2],
        "turned": whole[:cols, :130].t() if cols <= 300 else whole[:, :130].t()[:, :cols],
        "one row": whole[7:8, :cols],
    }
    for x in views.values():
        if x.shape[1] != cols:
            continue
        check_forward(forward(name, dtype, torch.float32), x)
        n = cols // (2 if name in GATED else 1)
        for grad in (drawn(len(x), n, dtype, 6), whole[: len(x), 3 : 3 + n]):
            check_backward(backward(name, dtype, dtype), grad, x)
        row = drawn(1, n, dtype, 8)
        check_backward(backward(name, dtype, dtype), row.expand(len(x), n), x)


def every_bfloat16(name: str, limit: float) -> torch.Tensor:
    """Return inf, NaN and all values within ``limit``, beside ordinary ones for a gated one."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = torch.where(values.isfinite(), values.clamp(-limit, limit), values).reshape(256, 256)
    halves = (x.to(DEVICE), drawn(256, 256, torch.bfloat16, 9))
    return torch.cat(halves, 1) if name in GATED else halves[0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_bfloat16_is_activated_and_differentiated(name: str) -> None:
    x = every_bfloat16(name, 1e15)  # whose square is still finite
    grad = torch.ones(256, 256, dtype=torch.bfloat16, device=DEVICE)
    for out_dtype in (torch.float32, torch.bfloat16):
        check_forward(forward(name, torch.bfloat16, out_dtype), x)
        check_backward(backward(name, torch.bfloat16, out_dtype), grad, x)


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {"srelu"}))
def test_slopes_far_out_are_exactly_0_and_1(name: str) -> None:
    """Where the bound of the kit is as large as the values, and x^3 overflows."""
    x = every_bfloat16(name, torch.inf)
    grad = torch.ones(256, 256, dtype=torch.bfloat16, device=DEVICE)
    desc = backward(name, torch.bfloat16, torch.float32)
    ours = backend("cuda").bind(desc, DEVICE)(grad, x).cpu().double()[:, :256]
    theirs = judge(desc, grad, x)[:, :256]
    far = x.cpu()[:, :256].abs() > 1000
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[far].nan_to_num(), theirs[far].nan_to_num())


@pytest.mark.parametrize("name", ["gelu", "swiglu", "clamped_swiglu"])
def test_nan_and_inf_of_the_gradient_reach_the_result(name: str) -> None:
    # Far out a slope is 0 in float64 and tiny in float32, and inf times the two differs.
    x = drawn(20, columns(name, 24), torch.float16, 10).clamp(-3, 3)
    grad = drawn(20, 24, torch.float16, 11)
    for at, value in enumerate((math.nan, math.inf, -math.inf)):
        grad[at] = value
    check_backward(backward(name, torch.float16, torch.float16), grad, x)


def test_results_beyond_float16_are_infinite() -> None:
    x = torch.full((8, 16), 300.0, dtype=torch.float16, device=DEVICE)
    run = backend("cuda").bind(forward("srelu", torch.float16, torch.float16), DEVICE)
    assert run(x).isposinf().all()


@pytest.mark.parametrize("name", ["silu", "swiglu"])
def test_every_element_of_the_result_is_written(name: str) -> None:
    x = drawn(257, columns(name, 1032), torch.bfloat16, 12)
    results = []
    for poison in (0x00, 0xFF):
        torch.cuda.empty_cache()
        torch.full((16 << 20,), poison, dtype=torch.uint8, device=DEVICE)  # freed, then reused
        y = backend("cuda").bind(forward(name, x.dtype, x.dtype), DEVICE)(x)
        results.append(backend("cuda").bind(backward(name, x.dtype, x.dtype), DEVICE)(y, x))
    assert same_bits(*results)


def test_a_side_stream_gives_the_same() -> None:
    x = drawn(2048, 4096, torch.bfloat16, 13)
    desc = forward("swiglu", x.dtype, x.dtype)
    expected = backend("cuda").bind(desc, DEVICE)(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        y = backend("cuda").bind(desc, DEVICE)(x)
    torch.cuda.current_stream().wait_stream(stream)
    assert same_bits(y, expected)


def test_more_elements_than_one_launch_counts_are_computed() -> None:
    rows, cols = (1 << 20) + 5, 1025
    x = torch.randn(1, cols, device=DEVICE).bfloat16().expand(rows, cols).contiguous()
    x[-1] = 3.0
    y = backend("cuda").bind(forward("relu", x.dtype, x.dtype), DEVICE)(x)
    assert torch.equal(y, torch.relu(x))


def test_an_odd_number_of_columns_has_no_two_halves() -> None:
    run = backend("cuda").bind(forward("swiglu", torch.bfloat16, torch.bfloat16), DEVICE)
    with pytest.raises(ValueError, match="two halves"):
        run(torch.zeros(4, 7, dtype=torch.bfloat16, device=DEVICE))
