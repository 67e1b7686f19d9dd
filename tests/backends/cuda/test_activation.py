"""The native activations where the kit's bounds say little, and fused with casts.

Alone: layouts, far out, NaN, large sizes. Fused: bit for bit the activation alone, then the
reference's cast. test_sizes.py holds both to the kit's laws at the sizes of vectors and tiles.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    ColumnSumsDesc,
    FusedDesc,
    QuantizeDesc,
)
from tests.backends.cuda.cuda_cases import DEVICE, KERNELS, backend, differs, same_bits, spec
from tests.pairs import turns

pytestmark = pytest.mark.needs_accelerator("cuda")

CPU, F64 = torch.device("cpu"), torch.float64
PARAMS = {"clamped_swiglu": (7.0, 1.702, 1.0)}
# One for each function; the others differ in beta alone.
FUNCTIONS = (
    *("gelu", "erfgelu", "qgelu", "relu", "srelu", "geglu", "glu", "swiglu"),
    "clamped_swiglu",
)


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


@pytest.mark.parametrize("name", ["gelu", "erfgelu", "swiglu", "clamped_swiglu"])
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


RECIPES = ("delayed", "current", "rowwise", "vector", "mx", "mx square")
NAMES = ("gelu", "swiglu")


def fused(
    name: str,
    own: Any,
    dtype: torch.dtype,
    backward: bool,
    sums: bool = False,
) -> FusedDesc:
    """Return the descriptor that the chain asks for under a recipe's spec ``own``."""
    is_float = own.delayed and not (backward and name in GATED)
    out_dtype = torch.float32 if is_float else dtype
    producer = (ActivationBackwardDesc if backward else ActivationDesc)(
        name, dtype, out_dtype, PARAMS.get(name, ())
    )
    return FusedDesc(producer, QuantizeDesc(out_dtype, own, own, sums=sums))


def drawn_for(
    name: str, rows: int, n: int, dtype: torch.dtype, backward: bool
) -> list[torch.Tensor]:
    """Return the arguments of a fused operation, rows of different sizes and zeros among them."""
    x = torch.randn(rows, 2 * n if name in GATED else n, device=DEVICE)
    grad = torch.randn(rows, n, device=DEVICE)
    grad *= torch.linspace(-12, 2, rows, device=DEVICE).exp2()[:, None]
    for one in (x, grad):
        one[::7] = 0.0
        one[:, 3::5] = -0.0
    return [grad.to(dtype), x.to(dtype)] if backward else [x.to(dtype)]


def given(own: Any, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the keywords of a cast; ``amax_out`` holds an amax that some results exceed."""
    if own.scale_format == "e4m3":
        return {"rng": torch.tensor([7, 9]), **more}
    if not own.delayed:
        return more
    scale = torch.full((1,), 3.7, device=DEVICE)
    return {"scale": scale, "amax_out": torch.full((1,), 0.25, device=DEVICE), **more}


def check_fused(desc: FusedDesc, tensors: list[torch.Tensor]) -> None:
    own = desc.quantize.rowwise or desc.quantize.columnwise
    ours, theirs = (given(own, nonfinite_out=torch.full((1,), 7, device=DEVICE)) for _ in range(2))
    before = [one.clone() for one in tensors]
    quantized, *sums = backend("cuda").bind(desc, DEVICE)(*tensors, **ours)
    value = backend("cuda").bind(desc.producer, DEVICE)(*tensors)
    # Casts to byte scales equal the reference's on the CPU alone, which other tests compare.
    judge = "reference" if own.scale_format == "float32" else "cuda"
    expected = backend(judge).bind(replace(desc.quantize, sums=False), DEVICE)(value, **theirs)
    text = f"{desc} of {[list(one.shape) for one in tensors]}"
    assert differs(quantized.rowwise, expected.rowwise) is None, f"rowwise {text}"
    assert differs(quantized.columnwise, expected.columnwise) is None, f"columnwise {text}"
    for name, one in ours.items():
        assert same_bits(one, theirs[name]), f"{name} {one} for {theirs[name]}: {text}"
    assert len(sums) == desc.quantize.sums
    if desc.quantize.sums:
        apart = backend("cuda").bind(ColumnSumsDesc(value.dtype), DEVICE)(value)
        assert same_bits(sums[0], apart), f"column sums {text}"
    for one, other in zip(tensors, before, strict=True):
        assert same_bits(one, other), "an input was written"


@pytest.mark.parametrize("name", KERNELS)
def test_every_activation_equals_the_pair(name: str) -> None:
    for recipe, dtype, backward in itertools.product(
        RECIPES, (torch.bfloat16, torch.float16), (False, True)
    ):
        for element in ("e4m3", "e5m2") if backward else ("e4m3",):
            desc = fused(name, spec(recipe, element), dtype, backward, sums=backward)
            for shape in ((130, 264), (256, 256)):
                check_fused(desc, drawn_for(name, *shape, dtype, backward))


def test_float16_overflows_as_the_pair_does() -> None:
    x = torch.randn(130, 264, device=DEVICE)
    x[5, 7], x[100, 200] = 300.0, 1000.0
    for recipe in RECIPES:
        check_fused(fused("srelu", spec(recipe), torch.float16, backward=False), [x.half()])


@pytest.mark.parametrize(("name", "recipe"), turns(NAMES, RECIPES))
def test_large_tensors_equal_the_pair(name: str, recipe: str) -> None:
    for backward in (False, True):
        desc = fused(name, spec(recipe), torch.bfloat16, backward, sums=backward)
        for rows, n in ((4096, 4096), (8200, 1408), (129, 28672)):
            check_fused(desc, drawn_for(name, rows, n, torch.bfloat16, backward))


@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_vectors_take_one_kernel(recipe: str) -> None:
    """The two steps are not taken where one is possible."""
    for name, backward in itertools.product(("gelu", "swiglu"), (False, True)):
        run = backend("cuda").bind(fused(name, spec(recipe), torch.bfloat16, backward), DEVICE)
        step = "_backward" if backward else "_activation"
        setattr(run, step, None)
        tensors = drawn_for(name, 256, 256, torch.bfloat16, backward)
        run(*tensors, **given(spec(recipe)))
        with pytest.raises(TypeError):
            run(*drawn_for(name, 256, 130, torch.bfloat16, backward), **given(spec(recipe)))
