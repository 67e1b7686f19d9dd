"""Where NaN and inf came up first is found, and a monitor can stop there."""

from __future__ import annotations

import math

import pytest
import torch

import fp8core as te
from fp8core import recipe
from fp8core.monitoring import NonFinite
from tests.inspection import models
from tests.inspection.models import CURRENT, step


def test_first_nonfinite_is_the_tensor_that_had_it_first() -> None:
    model = torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))
    with te.monitor(model) as watch:
        step(model, torch.randn(4, 32))
        watch.step()
        assert watch.first_nonfinite is None
        x = torch.randn(4, 32)
        x[1, 2], x[3, 3] = math.nan, math.inf
        step(model, x)
        watch.step()
    assert watch.first_nonfinite == NonFinite(1, "0", "input", nan=1, inf=1)
    assert (watch.row("0", "input").nan, watch.row("0", "input").inf) == (1, 1)


def test_gemm_of_finite_operands_that_overflows_is_located() -> None:
    model = torch.nn.Sequential(te.Linear(32, 32, bias=False), te.Linear(32, 32, bias=False))
    model.to(torch.float16)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.fill_(60000.0)
    with te.monitor(model) as watch, te.autocast(recipe=CURRENT):
        model(torch.ones(2, 32, dtype=torch.float16))
    assert watch.first_nonfinite == NonFinite(0, "1", "output", nan=0, inf=64)


def test_gradient_that_overflows_is_located() -> None:
    layer = te.Linear(32, 32, bias=False).to(torch.float16)
    with torch.no_grad():
        layer.weight.fill_(1.0)
    x = torch.ones(2, 32, dtype=torch.float16, requires_grad=True)
    with te.monitor(layer) as watch:
        step(layer, x, CURRENT, grad=60000.0)
    found = watch.first_nonfinite
    assert found is not None
    assert (found.tensor, found.inf) == ("grad_input", 64)


def test_nonfinite_weight_is_located() -> None:
    layer = te.Linear(32, 32)
    with torch.no_grad():
        layer.weight[3, 4] = math.inf
    with te.monitor(layer) as watch, te.autocast(recipe=CURRENT):
        layer(torch.ones(2, 32))
    assert watch.first_nonfinite == NonFinite(0, "Linear", "weight", nan=0, inf=1)


def test_raise_stops_before_the_cast_and_leaves_the_delayed_state() -> None:
    model = models.make("linear")
    delayed = recipe.DelayedScaling()
    good = torch.randn(4, 32).to(models.BF16)
    step(model, good, delayed)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (
        te.monitor(model, on_nonfinite="raise") as watch,
        pytest.raises(te.NonFiniteError, match="step 0: input of 'Linear' has 128 NaN, 0 inf"),
    ):
        step(model, good * math.nan, delayed)
    assert watch.first_nonfinite is not None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_raise_on_a_weight_comes_before_its_cast() -> None:
    layer = te.Linear(32, 32)
    delayed = recipe.DelayedScaling()
    step(layer, torch.randn(4, 32), delayed)
    recorded = layer.amax_history_fwd.clone()
    with torch.no_grad():
        layer.weight[0, 0] = math.nan
    with (
        te.monitor(layer, on_nonfinite="raise"),
        pytest.raises(te.NonFiniteError, match="weight of 'Linear' has 1 NaN"),
    ):
        step(layer, torch.randn(4, 32), delayed)
    assert torch.equal(layer.amax_history_fwd, recorded)


def test_raise_in_backward() -> None:
    model = models.make("linear")
    with (
        te.monitor(model, on_nonfinite="raise"),
        pytest.raises(te.NonFiniteError, match="grad_output of 'Linear'"),
    ):
        step(model, torch.randn(4, 32).to(models.BF16), CURRENT, grad=math.inf)
