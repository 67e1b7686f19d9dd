"""Layers on the CUDA backend against Transformer Engine's golden steps on an H200."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fp8core
from tests import golden_layers

pytestmark = pytest.mark.needs_accelerator("cuda")
BOUND = 2e-3
Arrays = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def linears(golden: Callable[[str], Arrays]) -> Arrays:
    return golden("linears_seed0")


@pytest.mark.parametrize("name", golden_layers.RECIPES)
def test_linear_is_within_the_bound(name: str, linears: Arrays) -> None:
    layer = fp8core.Linear(256, 128, params_dtype=torch.bfloat16, device="cuda")
    steps = 0
    for step in golden_layers.run(layer, "linear", name, linears):
        assert max(step.errors.values()) < BOUND, (step.index, step.errors)
        for way in ("fwd", "bwd") if name.startswith("delayed") else ():
            for buffer in ("scale", "amax_history"):
                want = golden_layers.tensor(linears[f"{step.prefix}/scaling_{way}/{buffer}"])
                got = getattr(layer, f"{buffer}_{way}")
                assert torch.equal(got.cpu(), want), (step.index, way, buffer)
        steps += 1
    assert steps == 5 if name.startswith("delayed") else steps


@pytest.mark.parametrize("name", golden_layers.RECIPES)
def test_grouped_linear_is_within_the_bound(name: str, linears: Arrays) -> None:
    chosen = golden_layers.RECIPES[name]
    layer = fp8core.GroupedLinear(
        4, 256, 128, bias=False, params_dtype=torch.bfloat16, device="cuda"
    )
    names = [f"weight{group}" for group in range(4)]
    at = "inputs/grouped_linear/step0"
    tensor = golden_layers.tensor
    layer.load_state_dict({key: tensor(linears[f"params/grouped_linear/{key}"]) for key in names})
    x = tensor(linears[f"{at}/x"]).cuda().requires_grad_()
    prefix = f"{name}/grouped_linear/step0"
    splits = linears[f"{name}/grouped_linear/m_splits"].tolist()
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x, splits)
    y.backward(tensor(linears[f"{at}/grad_output"]).cuda())
    found = {"y": y, "grad_input": x.grad}
    found |= {f"grad/{key}": getattr(layer, key).grad for key in names}
    errors = {
        key: golden_layers.error(got.cpu(), tensor(linears[f"{prefix}/{key}"]))
        for key, got in found.items()
    }
    assert max(errors.values()) < BOUND, errors


def test_what_ran_is_the_cuda_backend() -> None:
    layer = fp8core.Linear(64, 64, device="cuda", params_dtype=torch.bfloat16)
    with fp8core.autocast(recipe=golden_layers.RECIPES["current"]):
        layer(torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()
    assert "on cuda" in str(layer)
    said: Any = fp8core.explain(layer, golden_layers.RECIPES["current"])
    assert not said.refused
