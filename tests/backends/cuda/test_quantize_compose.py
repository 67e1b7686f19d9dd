"""Casts composed of casts, judged by the casts of the reference: none of it needs a GPU."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fp8core import recipe
from fp8core.backend_api import Quantized, QuantizeDesc
from fp8core.recipe.plan import LayerRole
from fp8core_backends.cuda.quantize_compose import apart, in_groups
from tests.backends.cuda.cuda_cases import backend, differs

CPU = torch.device("cpu")
SIZES = (32, 0, 64, 16)
TENSORS = ("input", "grad_output")


def desc_of(name: str, tensor: str) -> QuantizeDesc:
    plan = recipe.by_name(name).plan(LayerRole("linear"), torch.float32)
    return QuantizeDesc(torch.float32, *getattr(plan, tensor))


@pytest.mark.parametrize("tensor", TENSORS)
@pytest.mark.parametrize("name", recipe.names())
def test_a_cast_a_group_is_a_cast_of_groups(name: str, tensor: str) -> None:
    desc, reference = desc_of(name, tensor), backend("reference")
    whole = dataclasses.replace(desc, grouped=True)
    torch.manual_seed(0)
    x = torch.randn(sum(SIZES), 48)
    offsets = torch.tensor((0, *SIZES)).cumsum(0)
    specs = [own for own in (desc.rowwise, desc.columnwise) if own is not None]

    def given() -> dict[str, torch.Tensor]:
        found = {}
        if any(own.delayed for own in specs):
            found = {"scale": torch.tensor((1.0, 2.0, 4.0, 8.0)), "amax_out": torch.zeros(4)}
        if any(own.stochastic for own in specs):
            found["rng"] = torch.tensor((7, 9))
        return found

    x[0, 3], x[-1, :2] = torch.inf, torch.nan
    ours, theirs = given(), given()
    for own_keywords in (ours, theirs):
        own_keywords["nonfinite_out"] = torch.full((1,), 7)
    made = in_groups(reference.bind(desc, CPU))(x, offsets, **ours)
    expected = reference.bind(whole, CPU)(x, offsets, **theirs)
    assert differs(made.rowwise, expected.rowwise) is None
    assert differs(made.columnwise, expected.columnwise) is None
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert int(ours["nonfinite_out"]) == 7 + 3


@pytest.mark.parametrize("name", recipe.names())
def test_halves_make_the_whole(name: str) -> None:
    desc, reference = desc_of(name, "input"), backend("reference")
    if desc.rowwise is None or desc.columnwise is None:
        pytest.skip("has one orientation")
    given = {"scale": torch.ones(1)} if desc.rowwise.delayed else {}
    x = torch.randn(64, 48)
    x[5, 6] = torch.inf
    count = torch.full((1,), 7)
    halves = apart(*(reference.bind(half, CPU) for half in desc.halves()))
    made = halves(x, **given, nonfinite_out=count)
    assert int(count) == 7 + 1
    expected = reference.bind(desc, CPU)(x, **given)
    assert differs(made.rowwise, expected.rowwise) is None
    assert differs(made.columnwise, expected.columnwise) is None


def test_seeds_stay_on_the_cpu_whatever_the_default_device_is() -> None:
    seeds: list[torch.Tensor] = []

    def dense(x: torch.Tensor, *, rng: torch.Tensor, nonfinite_out: None) -> Quantized:
        seeds.append(rng)
        return Quantized(None, None)

    x, offsets, rng = torch.zeros(5, 2), torch.tensor((0, 2, 5)), torch.tensor((7, 9))
    with torch.device("meta"):
        in_groups(dense)(x, offsets, rng=rng)
    assert [seed.tolist() for seed in seeds] == [[7, 9], [7, 10]]
