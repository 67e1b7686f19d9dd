"""Norms fused with casts: bit for bit the norm alone, then the reference's cast.

test_sizes.py has the kit's law of it at the sizes of panels, tiles and clusters.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from fp8core.backend_api import FusedDesc, NormDesc, OperandSpec, QuantizeDesc
from fp8core.errors import OperandError
from fp8core_backends.cuda import native
from fp8core_backends.cuda.fused_norm import FusedNorm
from tests.backends.cuda.cuda_cases import DEVICE, backend, differs, same_bits, spec

pytestmark = pytest.mark.needs_accelerator("cuda")
RECIPES = ("delayed", "current", "rowwise", "vector")
KINDS = ("rmsnorm", "layernorm")
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


def test_what_does_not_fit_is_refused() -> None:
    desc = fused("rmsnorm", spec("delayed"), torch.bfloat16)
    x, weight = drawn(desc, 4, 64)
    run, given = backend("cuda").bind(desc, DEVICE), keywords(spec("delayed"))
    with pytest.raises(OperandError, match="this one was bound for"):
        run(x.float(), weight, **given)
    with pytest.raises(OperandError, match=r"rows of 64: the weight is \[32\]"):
        run(x, weight[:32], **given)
    with pytest.raises(OperandError, match="rmsnorm: a bias was given"):
        run(x, weight, weight, **given)
