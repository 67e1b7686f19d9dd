"""The native activations where the kit's bounds say little: layouts, far out, NaN, large sizes.

test_sizes.py holds them to the kit's bounds at the sizes of vectors, and in every dtype.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fp8core.backend_api import (
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
)
from tests.backends.cuda.cuda_cases import DEVICE, backend, same_bits

pytestmark = pytest.mark.needs_accelerator("cuda")

CPU, F64 = torch.device("cpu"), torch.float64
PARAMS = {"clamped_swiglu": (7.0, 1.702, 1.0)}
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


def judge(desc: ActivationDesc | ActivationBackwardDesc, *given: torch.Tensor) -> torch.Tensor:
    """Return the results of the reference backend in float64, on the CPU."""
    wide = replace(desc, dtype=F64, out_dtype=F64)
    run = backend("reference").bind(wide, CPU)
    return run(*(one.cpu().double() for one in given))


def run(desc: ActivationDesc | ActivationBackwardDesc, *given: torch.Tensor) -> torch.Tensor:
    before = [one.clone() for one in given]
    y: torch.Tensor = backend("cuda").bind(desc, DEVICE)(*given)
    assert (y.dtype, y.is_contiguous()) == (desc.out_dtype, True)
    assert all(map(same_bits, given, before)), "an input was written"
    return y


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {"srelu"}))
def test_slopes_far_out_are_exactly_0_and_1(name: str) -> None:
    """Where the bound of the kit is as large as the values, and x^3 overflows."""
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = values.reshape(256, 256).to(DEVICE)
    x = torch.cat((x, drawn(256, 256, torch.bfloat16, 9)), 1) if name in GATED else x
    grad = torch.ones(256, 256, dtype=torch.bfloat16, device=DEVICE)
    desc = backward(name, torch.bfloat16, torch.float32)
    ours = run(desc, grad, x).cpu().double()[:, :256]
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
    desc = backward(name, torch.float16, torch.float16)
    ours, theirs = run(desc, grad, x).cpu(), judge(desc, grad, x)
    odd = ~theirs.isfinite()
    assert odd.any()
    assert torch.equal(ours[odd].double().nan_to_num(7.0), theirs[odd].nan_to_num(7.0))
    assert ours[~odd].isfinite().all()


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
