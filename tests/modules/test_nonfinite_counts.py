"""What the casts of a layer count: each NaN and inf once, in every recipe, eager and captured."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import fp8core as te
from fp8core import recipe
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.torch_ops import counted
from tests.device import DEVICE

RECIPES = ("delayed", "current", "block", "mxfp8", "nvfp4", "rowwise")


def counts(layer: LowPrecisionModule) -> list[int]:
    """Non-finite elements that calls with gradients and without have met."""
    return layer._bindings.nonfinite[DEVICE].tolist()


def step(layer: torch.nn.Module, name: str, *, x: object = None, grad: object = None) -> None:
    value = torch.randn(32, 64, dtype=torch.bfloat16)
    if x is not None:
        value[1, 2] = x
    value.requires_grad_()
    with te.autocast(recipe=recipe.by_name(name)):
        y = layer(value)
    gradient = torch.ones_like(y)
    if grad is not None:
        gradient[3, 4] = grad
    y.backward(gradient)


@pytest.mark.parametrize("name", RECIPES)
def test_each_tensor_is_counted_once(name: str) -> None:
    layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    step(layer, name)
    assert counts(layer) == [0, 0]
    step(layer, name, x=math.inf)
    assert counts(layer) == [1, 0]
    step(layer, name, grad=math.nan)
    assert counts(layer) == [2, 0]
    with torch.no_grad():
        layer.weight[0, :3] = -math.inf
    step(layer, name)
    assert counts(layer) == [5, 0]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_are_counted_apart(guard: type) -> None:
    layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    x = torch.full((32, 64), math.nan, dtype=torch.bfloat16)
    with guard(), te.autocast(recipe=recipe.by_name("current")):
        layer(x)
    assert counts(layer) == [0, 32 * 64]
    step(layer, "current", grad=math.inf)
    assert counts(layer) == [1, 32 * 64]


def test_high_precision_counts_nothing() -> None:
    layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    layer(torch.full((32, 64), math.nan, dtype=torch.bfloat16))
    assert layer._bindings.nonfinite == {}


def test_counts_outlive_what_is_bound_and_are_no_state() -> None:
    layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    step(layer, "current", grad=math.inf)
    keys = set(layer.state_dict())
    layer.load_state_dict(layer.state_dict())
    layer.unbind()
    step(layer, "current", grad=math.inf)
    assert counts(layer) == [2, 0]
    assert keys == {"weight"}
    assert copy.deepcopy(layer)._bindings.nonfinite == {}


def test_rows_outside_groups_and_padding_are_not_counted() -> None:
    layer = te.GroupedLinear(2, 64, 32, bias=False, params_dtype=torch.bfloat16)
    x = torch.randn(40, 64, dtype=torch.bfloat16)
    x[7] = math.inf
    with te.autocast(recipe=recipe.by_name("mxfp8")):
        layer(x, [11, 29])
    assert counts(layer) == [64, 0]


def test_links_of_a_chain_are_counted() -> None:
    layer = te.LayerNormMLP(64, 128, params_dtype=torch.bfloat16, bias=False)
    step(layer, "current", x=math.nan)
    rows = 64 + 128  # the norm and the activation spread it over its row
    assert counts(layer)[0] >= rows


def test_captured_graph_counts_for_its_device() -> None:
    layer = te.Linear(64, 32, bias=False, params_dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager")
    step(compiled, "current")
    before = int(counted.counter_of(DEVICE))
    step(compiled, "current", x=math.inf, grad=math.nan)
    assert int(counted.counter_of(DEVICE)) == before + 2
    assert layer._bindings.nonfinite == {}
