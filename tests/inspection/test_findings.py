"""Where NaN and inf came up first is found, and a monitor can stop there."""

from __future__ import annotations

import logging
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


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and "step() was not called" in record.getMessage()
    ]


def batch(model: torch.nn.Module, recipe: str = "current") -> None:
    x = torch.randn(21, 32, dtype=models.BF16)
    with te.autocast(recipe=te.recipe.by_name(recipe)):
        y = model(x)
    y.float().square().mean().backward()


@pytest.mark.parametrize("name", ["linear", "mlp"])
@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_it_is_said_once_with_the_layer(
    name: str, recipe: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.make(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with te.monitor(model) as watch:
        for _ in range(4):
            batch(model, recipe)
            optimizer.step()
    (line,) = said(caplog)
    kind = type(model).__name__
    assert line.startswith(f"monitor: the weight of '{kind}")
    assert "within step 0" in line
    assert {row.step for row in watch.rows} == {0}


def test_it_is_said_of_a_quantized_parameter(caplog: pytest.LogCaptureFixture) -> None:
    with te.quantized_model_init(recipe=te.recipe.Float8CurrentScaling()):
        model = te.Linear(32, 48, params_dtype=models.BF16)
    with te.monitor(model):
        for _ in range(2):
            batch(model)
            with torch.no_grad():
                model.weight.copy_(torch.randn(48, 32, dtype=models.BF16))
        assert len(said(caplog)) == 1


def test_each_monitor_says_it(caplog: pytest.LogCaptureFixture) -> None:
    model = models.make("linear")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with te.monitor(model):
            for _ in range(2):
                batch(model)
                optimizer.step()
    assert len(said(caplog)) == 2


@pytest.mark.parametrize("is_before", [True, False])
def test_microbatches_and_a_step_that_is_ended_are_right(
    is_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = models.make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with te.monitor(model, every=2) as watch:
        for _ in range(4):
            batch(model)
            batch(model)
            if is_before:
                watch.step()
            optimizer.step()
            if not is_before:
                watch.step()
    assert said(caplog) == []


def test_evaluation_is_one_step_until_it_is_ended(caplog: pytest.LogCaptureFixture) -> None:
    model = models.make("linear")
    with te.monitor(model), torch.inference_mode():
        for _ in range(3):
            model(torch.randn(4, 32, dtype=models.BF16))
    assert said(caplog) == []


def test_the_repr_says_what_is_watched_and_how_far_it_is() -> None:
    model = te.prepare(torch.nn.Sequential(*(te.Linear(32, 32) for _ in range(5))))
    watch = te.monitor(model, every=3)
    assert repr(watch) == "<Monitor of 0, 1, 2 and 2 more: open, step 0, every=3, 0 rows>"
    model(torch.full((32, 32), torch.inf)).sum().backward()
    watch.step()
    watch.close()
    assert repr(watch) == (
        f"<Monitor of 0, 1, 2 and 2 more: closed, step 1, every=3, {len(watch.rows)} rows; "
        f"first NaN or inf: {watch.first_nonfinite}>"
    )
