"""Activations fused with casts: bit for bit the activation alone, then the reference's cast.

test_sizes.py has the kit's law of it at the sizes of vectors and tiles.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fp8core.backend_api import (
    ACTIVATIONS,
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    ColumnSumsDesc,
    FusedDesc,
    QuantizeDesc,
)
from tests.backends.cuda.cuda_cases import DEVICE, backend, differs, same_bits, spec
from tests.pairs import turns

pytestmark = pytest.mark.needs_accelerator("cuda")

PARAMS = {"clamped_swiglu": (7.0, 1.702, 1.0)}
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
    return FusedDesc(producer, QuantizeDesc(out_dtype, own, own), sums)


def drawn(name: str, rows: int, n: int, dtype: torch.dtype, backward: bool) -> list[torch.Tensor]:
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


def check(desc: FusedDesc, tensors: list[torch.Tensor]) -> None:
    own = desc.quantize.rowwise or desc.quantize.columnwise
    ours, theirs = (given(own, nonfinite_out=torch.full((1,), 7, device=DEVICE)) for _ in range(2))
    before = [one.clone() for one in tensors]
    quantized, *sums = backend("cuda").bind(desc, DEVICE)(*tensors, **ours)
    value = backend("cuda").bind(desc.producer, DEVICE)(*tensors)
    # Casts to byte scales equal the reference's on the CPU alone, which other tests compare.
    judge = "reference" if own.scale_format == "float32" else "cuda"
    expected = backend(judge).bind(desc.quantize, DEVICE)(value, **theirs)
    text = f"{desc} of {[list(one.shape) for one in tensors]}"
    assert differs(quantized.rowwise, expected.rowwise) is None, f"rowwise {text}"
    assert differs(quantized.columnwise, expected.columnwise) is None, f"columnwise {text}"
    for name, one in ours.items():
        assert same_bits(one, theirs[name]), f"{name} {one} for {theirs[name]}: {text}"
    assert len(sums) == desc.sums
    if desc.sums:
        apart = backend("cuda").bind(ColumnSumsDesc(value.dtype), DEVICE)(value)
        assert same_bits(sums[0], apart), f"column sums {text}"
    for one, other in zip(tensors, before, strict=True):
        assert same_bits(one, other), "an input was written"


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_equals_the_pair(name: str) -> None:
    for recipe, dtype, backward in itertools.product(
        RECIPES, (torch.bfloat16, torch.float16), (False, True)
    ):
        for element in ("e4m3", "e5m2") if backward else ("e4m3",):
            desc = fused(name, spec(recipe, element), dtype, backward, sums=backward)
            for shape in ((130, 264), (256, 256)):
                check(desc, drawn(name, *shape, dtype, backward))


def test_float16_overflows_as_the_pair_does() -> None:
    x = torch.randn(130, 264, device=DEVICE)
    x[5, 7], x[100, 200] = 300.0, 1000.0
    for recipe in RECIPES:
        check(fused("srelu", spec(recipe), torch.float16, backward=False), [x.half()])


@pytest.mark.parametrize(("name", "recipe"), turns(NAMES, RECIPES))
def test_large_tensors_equal_the_pair(name: str, recipe: str) -> None:
    for backward in (False, True):
        desc = fused(name, spec(recipe), torch.bfloat16, backward, sums=backward)
        for rows, n in ((4096, 4096), (8200, 1408), (129, 28672)):
            check(desc, drawn(name, rows, n, torch.bfloat16, backward))


@pytest.mark.parametrize("recipe", RECIPES)
def test_whole_vectors_take_one_kernel(recipe: str) -> None:
    """The two steps are not taken where one is possible."""
    for name, backward in itertools.product(("gelu", "swiglu"), (False, True)):
        run = backend("cuda").bind(fused(name, spec(recipe), torch.bfloat16, backward), DEVICE)
        step = "_backward" if backward else "_activation"
        setattr(run, step, None)
        tensors = drawn(name, 256, 256, torch.bfloat16, backward)
        run(*tensors, **given(spec(recipe)))
        with pytest.raises(TypeError):
            run(*drawn(name, 256, 130, torch.bfloat16, backward), **given(spec(recipe)))
