"""Whether a model's casts met NaN or inf: what found_inf says, and until when."""

from __future__ import annotations

import copy
import math

import pytest
import torch

import fp8core as te
from fp8core import recipe

CURRENT = recipe.Float8CurrentScaling()


@pytest.fixture(autouse=True)
def fresh_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8core.torch_ops.counted._counters", {})


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16) for _ in range(3)]
    return torch.nn.Sequential(*layers)


def run(model: torch.nn.Module, *, value: float | None = None) -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    with te.autocast(recipe=CURRENT):
        y = model(x)
    grad = torch.ones_like(y)
    if value is not None:
        grad[0, 0] = value
    y.backward(grad)


def test_it_is_a_float32_scalar_that_says_so_until_it_is_cleared() -> None:
    model = make()
    assert te.found_inf(model) == 0
    run(model)
    found = te.found_inf(model)
    assert (found.dtype, found.shape, float(found)) == (torch.float32, (), 0.0)
    run(model, value=math.inf)
    run(model)
    assert te.found_inf(model) == 1
    te.clear_found_inf(model)
    assert te.found_inf(model) == 0
    run(model, value=math.nan)
    assert te.found_inf(model) == 1


def test_what_one_module_clears_another_still_says() -> None:
    model = make()
    run(model, value=math.inf)
    te.clear_found_inf(model[2])
    assert (te.found_inf(model[2]), te.found_inf(model)) == (0, 1)


def test_a_call_without_gradients_counts_too() -> None:
    model = make()
    with torch.no_grad(), te.autocast(recipe=CURRENT):
        model(torch.full((32, 64), math.nan, dtype=torch.bfloat16))
    assert te.found_inf(model) == 1


def test_high_precision_finds_nothing() -> None:
    model = make()
    model(torch.full((32, 64), math.nan, dtype=torch.bfloat16))
    assert te.found_inf(model) == 0


def test_a_layer_that_is_gone_hides_nothing() -> None:
    model = make()
    run(model, value=math.inf)
    te.clear_found_inf(model)
    del model[2]
    run(model, value=math.inf)
    assert te.found_inf(model) == 1


def test_a_copy_has_met_nothing() -> None:
    model = make()
    run(model, value=math.inf)
    assert te.found_inf(copy.deepcopy(model)) == 0


def test_a_converted_model_and_a_wrapper_have_their_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).to(torch.bfloat16)
    te.convert(model, recipe=CURRENT)
    wrapper = torch.nn.ModuleDict({"inner": model})
    run(model, value=math.inf)
    assert te.found_inf(wrapper) == 1


def test_a_compiled_model_is_counted() -> None:
    model = make()
    compiled = torch.compile(model, backend="aot_eager")
    run(compiled)
    assert te.found_inf(model) == 0
    run(compiled, value=math.inf)
    assert te.found_inf(model) == te.found_inf(compiled) == 1
    te.clear_found_inf(model)
    assert te.found_inf(model) == 0


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_a_write_to_a_quantized_parameter_is_counted(name: str) -> None:
    with te.quantized_model_init(recipe=recipe.by_name(name)):
        layer = te.Linear(64, 64, bias=False, params_dtype=torch.bfloat16)
    assert te.found_inf(layer) == 0
    with torch.no_grad():
        layer.weight.copy_(torch.full((64, 64), math.inf))
    assert te.found_inf(layer) == 1


def test_a_model_without_layers_is_refused() -> None:
    for function in [te.found_inf, te.clear_found_inf]:
        with pytest.raises(te.OperandError, match="Sequential has no layer of fp8core"):
            function(torch.nn.Sequential(torch.nn.Linear(4, 4)))  # type: ignore[operator]
