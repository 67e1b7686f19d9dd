"""A training loop that forgets ``step()``: batches would be one step's; it is said, by name."""

from __future__ import annotations

import logging

import pytest
import torch

import fp8core as te
from tests.inspection import models


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
