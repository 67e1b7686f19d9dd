"""NaN and inf in what layers cast: what is counted, what found_inf says, what spreads."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch

import fp8core as te
from fp8core import recipe
from fp8core.backend_api import OperandSpec
from fp8core.errors import OperandError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.torch_ops import nonfinite
from tests.device import DEVICE
from tests.modules.layers import active

KINDS: dict[str, type[recipe.Recipe]] = {
    "delayed": recipe.DelayedScaling,
    "current": recipe.Float8CurrentScaling,
    "rowwise": recipe.Float8RowwiseScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}
VALUES = (math.inf, -math.inf, math.nan)
BF16 = torch.bfloat16
Layer = TypeVar("Layer", bound=torch.nn.Module)


@pytest.fixture(autouse=True)
def fresh_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp8core.torch_ops.nonfinite._counters", {})


def linear() -> te.Linear:
    torch.manual_seed(0)
    return counted(te.Linear(64, 32, bias=False, params_dtype=BF16))


def counted(layer: Layer) -> Layer:
    """Return ``layer``, whose casts count from now on."""
    te.clear_found_inf(layer)
    return layer


def results(
    layer: torch.nn.Module,
    chosen: str | recipe.Recipe,
    *,
    x_value: float | None = None,
    grad_value: float | None = None,
    splits: tuple[object, ...] = (),
) -> dict[str, torch.Tensor]:
    """Return the result and the gradients of a step that meets these values."""
    torch.manual_seed(3)
    x = torch.randn(64, 64, dtype=BF16)
    if x_value is not None:
        x[40, 7] = x_value
    x.requires_grad_()
    layer.zero_grad()
    with active(chosen):
        y = layer(x, *splits)
    grad = torch.randn(y.shape).to(y.dtype)
    if grad_value is not None:
        grad[40, 7] = grad_value
    y.backward(grad)
    made = {"y": y, "dx": x.grad}
    made |= {f"d{name}": own.grad for name, own in layer.named_parameters()}
    return {name: value.detach().clone() for name, value in made.items()}


def is_all_nan(x: torch.Tensor) -> bool:
    return bool(x.isnan().all())


def of_nan(columns: int = 64) -> torch.Tensor:
    return torch.full((32, columns), math.nan, dtype=BF16)


# --- counts: where somebody asks, each NaN and inf once, in every recipe, eager and captured ---


@pytest.mark.parametrize("name", KINDS)
def test_nothing_is_counted_where_nobody_asks(name: str) -> None:
    model = torch.nn.Sequential(te.Linear(64, 32, bias=False, params_dtype=BF16))
    before = results(model, name, x_value=math.inf)
    assert model[0]._bindings.nonfinite == {}
    with pytest.raises(OperandError, match=r"casts of Linear\(64, 32\) ran before anybody asked"):
        te.found_inf(model)
    assert te.found_inf(model) == 0
    after = results(model, name, x_value=math.inf)
    assert counts(model[0]) == [1, 0]
    assert te.found_inf(model) == 1
    if name != "delayed":  # whose scale has followed
        assert all(torch.equal(after[key], before[key]) for key in before)


def test_a_part_of_a_transformer_layer_is_counted_from_when_it_is_asked_for() -> None:
    layer = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0)
    x = torch.randn(8, 2, 64)
    x[3, 1, 5] = math.nan
    for _ in range(3):
        with active("current"):
            layer(x)
    te.clear_found_inf(layer.layernorm_mlp)
    with active("current"):
        layer(x)
    assert te.found_inf(layer.layernorm_mlp) == 1
    assert layer.self_attention.proj._bindings.nonfinite == {}


def counts(layer: LowPrecisionModule) -> list[int]:
    """Non-finite elements that calls with gradients and without have met."""
    return layer._bindings.nonfinite[DEVICE].tolist()


@pytest.mark.parametrize("name", KINDS)
def test_each_tensor_is_counted_once(name: str) -> None:
    layer = linear()
    results(layer, name)
    assert counts(layer) == [0, 0]
    results(layer, name, x_value=math.inf)
    assert counts(layer) == [1, 0]
    results(layer, name, grad_value=math.nan)
    assert counts(layer) == [2, 0]
    with torch.no_grad():
        layer.weight[0, :3] = -math.inf
    results(layer, name)
    assert counts(layer) == [5, 0]


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_are_counted_apart(guard: type) -> None:
    layer = linear()
    with guard(), active("current"):
        layer(of_nan())
    assert counts(layer) == [0, 32 * 64]
    results(layer, "current", grad_value=math.inf)
    assert counts(layer) == [1, 32 * 64]


def test_high_precision_counts_nothing() -> None:
    layer = linear()
    layer(of_nan())
    assert layer._bindings.nonfinite == {}


def test_counts_outlive_what_is_bound_and_are_no_state() -> None:
    layer = linear()
    results(layer, "current", grad_value=math.inf)
    keys = set(layer.state_dict())
    layer.load_state_dict(layer.state_dict())
    layer.unbind()
    results(layer, "current", grad_value=math.inf)
    assert counts(layer) == [2, 0]
    assert keys == {"weight"}
    assert copy.deepcopy(layer)._bindings.nonfinite == {}


def test_rows_outside_groups_and_padding_are_not_counted() -> None:
    layer = counted(te.GroupedLinear(2, 64, 32, bias=False, params_dtype=BF16))
    x = torch.randn(40, 64, dtype=BF16)
    x[7] = math.inf
    with active("mxfp8"):
        layer(x, [11, 29])
    assert counts(layer) == [64, 0]


def test_links_of_a_chain_are_counted() -> None:
    layer = counted(te.LayerNormMLP(64, 128, params_dtype=BF16, bias=False))
    results(layer, "current", x_value=math.nan)
    rows = 64 + 128  # the norm and the activation spread it over its row
    assert counts(layer)[0] >= rows


def test_captured_graph_counts_for_its_device() -> None:
    layer = linear()
    compiled = torch.compile(layer, backend="aot_eager")
    results(compiled, "current")
    before = int(nonfinite.counter_of(DEVICE))
    results(compiled, "current", x_value=math.inf, grad_value=math.nan)
    assert int(nonfinite.counter_of(DEVICE)) == before + 2
    assert layer._bindings.nonfinite == {}


# --- found_inf: whether a model's casts met some, and until when ---


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [te.Linear(64, 64, bias=False, params_dtype=BF16) for _ in range(3)]
    return torch.nn.Sequential(*layers)


def test_it_is_a_float32_scalar_that_says_so_until_it_is_cleared() -> None:
    model = make()
    assert te.found_inf(model) == 0
    results(model, "current")
    found = te.found_inf(model)
    assert (found.dtype, found.shape, float(found)) == (torch.float32, (), 0.0)
    results(model, "current", grad_value=math.inf)
    results(model, "current")
    assert te.found_inf(model) == 1
    te.clear_found_inf(model)
    assert te.found_inf(model) == 0
    results(model, "current", grad_value=math.nan)
    assert te.found_inf(model) == 1


OF_DYNAMO = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not",
    "ignore:.*is deprecated:DeprecationWarning",
)


@OF_DYNAMO
def test_a_compiled_function_leaves_its_graph_for_it_and_says_so_where_it_may_not() -> None:
    model = counted(make())
    scaler = torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        te.watch_grad_scaler(scaler, model).remove()
        te.clear_found_inf(model)
        with te.autocast(recipe="current"):
            y = model(x)
        return te.found_inf(model), y

    torch._dynamo.reset()
    call = torch.compile(step, backend="aot_eager")
    x = torch.ones(32, 64, dtype=BF16)
    assert [float(call(value)[0]) for value in (x, x * math.inf, x)] == [0.0, 1.0, 0.0]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="fp8core runs watch_grad_scaler out"):
        torch.compile(step, backend="aot_eager", fullgraph=True)(x)


@OF_DYNAMO
def test_a_watched_scaler_steps_in_a_compiled_function() -> None:
    layer = te.Linear(32, 32)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(layer.parameters(), 0.1)
    te.watch_grad_scaler(scaler, layer)

    def step(x: torch.Tensor) -> None:
        with te.autocast(recipe="current"):
            loss = layer(x).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    torch._dynamo.reset()
    call, x = torch.compile(step, backend="aot_eager"), torch.ones(16, 32)
    call(x)
    before, scale = layer.weight.detach().clone(), scaler.get_scale()
    call(x * math.inf)
    assert torch.equal(before, layer.weight)
    assert scaler.get_scale() == scale / 2
    call(x)
    assert not torch.equal(before, layer.weight)


def test_what_one_module_clears_another_still_says() -> None:
    model = counted(make())
    results(model, "current", grad_value=math.inf)
    te.clear_found_inf(model[2])
    assert (te.found_inf(model[2]), te.found_inf(model)) == (0, 1)


def test_a_call_without_gradients_counts_too() -> None:
    model = counted(make())
    with torch.no_grad(), active("current"):
        model(of_nan())
    assert te.found_inf(model) == 1


def test_high_precision_finds_nothing() -> None:
    model = make()
    model(of_nan())
    assert te.found_inf(model) == 0


def test_a_layer_that_is_gone_hides_nothing() -> None:
    model = make()
    results(model, "current", grad_value=math.inf)
    te.clear_found_inf(model)
    del model[2]
    results(model, "current", grad_value=math.inf)
    assert te.found_inf(model) == 1


def test_a_copy_has_met_nothing() -> None:
    model = make()
    results(model, "current", grad_value=math.inf)
    assert te.found_inf(copy.deepcopy(model)) == 0


def test_a_converted_model_and_a_wrapper_have_their_layers() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).to(BF16)
    te.convert(model, recipe="current")
    wrapper = counted(torch.nn.ModuleDict({"inner": model}))
    results(model, "current", grad_value=math.inf)
    assert te.found_inf(wrapper) == 1


def test_a_compiled_model_is_counted() -> None:
    model = make()
    compiled = torch.compile(model, backend="aot_eager")
    results(compiled, "current")
    assert te.found_inf(model) == 0
    results(compiled, "current", grad_value=math.inf)
    assert te.found_inf(model) == te.found_inf(compiled) == 1
    te.clear_found_inf(model)
    assert te.found_inf(model) == 0


@pytest.mark.parametrize("name", ["current", "nvfp4"])
def test_a_write_to_a_quantized_parameter_is_counted(name: str) -> None:
    with te.quantized_model_init(recipe=recipe.by_name(name)):
        layer = te.Linear(64, 64, bias=False, params_dtype=BF16)
    assert te.found_inf(layer) == 0
    with torch.no_grad():
        layer.weight.copy_(torch.full((64, 64), math.inf))
    assert te.found_inf(layer) == 1


def test_a_model_without_layers_is_refused() -> None:
    for function in [te.found_inf, te.clear_found_inf]:
        with pytest.raises(te.OperandError, match="Sequential has no layer of fp8core"):
            function(torch.nn.Sequential(torch.nn.Linear(4, 4)))  # type: ignore[operator]


# --- who asks, and when: layers that join, copies, steps that are under way ---

COPIES: list[Callable[[Any], Any]] = [
    copy.deepcopy,
    lambda model: pickle.loads(pickle.dumps(model)),
]


def unasked() -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(64, 32, bias=False, params_dtype=BF16, name="up")


def refuses(model: torch.nn.Module) -> bool:
    with pytest.raises(
        OperandError, match=r"casts of 'up' \(Linear\(64, 32\)\) ran before anybody"
    ):
        te.found_inf(model)
    return True


@pytest.mark.parametrize("name", KINDS)
def test_counting_changes_no_bit_and_no_delayed_scale(name: str) -> None:
    layer, never = unasked(), unasked()
    for turn in range(4):
        if turn == 2:
            te.clear_found_inf(layer)
        values, expected = results(layer, name), results(never, name)
        for key, value in values.items():
            assert torch.equal(value, expected[key]), (turn, key)
    assert all(map(torch.equal, layer.buffers(), never.buffers()))
    assert counts(layer) == [0, 0]


def test_layers_without_casts_are_no_error() -> None:
    layer, norm = unasked(), te.LayerNorm(64, params_dtype=BF16)
    layer(of_nan())
    with active("current"):
        norm(of_nan())
    with te.autocast(enabled=False, calibrating=True, recipe="delayed"):
        layer(of_nan())
    layer.to("meta")
    with active("current"):
        layer(of_nan().to("meta"))
    assert te.found_inf(layer) == te.found_inf(norm) == 0


def test_a_layer_that_joins_counts_from_the_next_clear_on() -> None:
    model = counted(make())
    results(model, "current")
    model.append(unasked())
    results(model, "current", grad_value=math.inf)
    assert refuses(model)
    model.append(te.Linear(32, 64, bias=False, params_dtype=BF16))
    te.clear_found_inf(model)
    results(model, "current", grad_value=math.inf)
    assert counts(model[4]) == [1, 0]
    assert te.found_inf(model) == 1


@pytest.mark.parametrize("copied", COPIES)
def test_a_copy_counts_where_it_is_asked_itself(copied: Callable[[Any], Any]) -> None:
    layer = counted(unasked())
    results(layer, "current", grad_value=math.inf)
    new = copied(layer)
    results(new, "current", grad_value=math.inf)
    assert refuses(new)
    results(new, "current", grad_value=math.inf)
    assert (te.found_inf(new), te.found_inf(layer)) == (1, 1)


def test_what_propagates_is_counted_where_somebody_asks() -> None:
    layer, chosen = unasked(), recipe.Float8CurrentScaling(nonfinite="propagate")
    assert is_all_nan(results(layer, chosen, grad_value=math.inf)["dx"])
    layer.unbind()
    assert refuses(layer)
    assert is_all_nan(results(layer, chosen, grad_value=math.inf)["dx"])
    assert counts(layer) == [1, 0]


def test_kept_weights_and_a_recompute_outlive_the_question() -> None:
    layer = unasked()
    x = torch.randn(32, 64, dtype=BF16, requires_grad=True)
    with active("current"):
        expected = layer(x, is_first_microbatch=True)
        y = te.checkpoint(layer, x)
        te.clear_found_inf(layer)
        assert torch.equal(layer(x, is_first_microbatch=False), expected)
    assert counts(layer) == [0, 0]
    grad = torch.ones_like(y)
    grad[3, 5] = math.inf
    y.backward(grad)  # what runs again is bound to count
    assert counts(layer) == [1, 0]


def test_a_monitored_layer_counts_while_it_is_watched_and_afterwards() -> None:
    layer = unasked()
    results(layer, "current")
    with te.monitor(layer):
        results(layer, "current")
        te.clear_found_inf(layer)
        results(layer, "current", grad_value=math.inf)
        assert counts(layer) == [1, 0]
    results(layer, "current", grad_value=math.inf)
    assert counts(layer) == [2, 0]


# --- nonfinite="propagate": a tensor with some makes all results that it has part in NaN ---


@pytest.mark.parametrize("name", KINDS)
def test_a_gradient_makes_both_gradients_nan(name: str) -> None:
    for value in VALUES:
        layer = linear()
        made = results(layer, KINDS[name](nonfinite="propagate"), grad_value=value)
        assert made["y"].isfinite().all()
        assert is_all_nan(made["dx"])
        assert is_all_nan(made["dweight"])
        assert te.found_inf(layer) == 1


def test_an_input_makes_output_and_weight_gradient_nan() -> None:
    for name in KINDS:
        for value in VALUES:
            made = results(linear(), KINDS[name](nonfinite="propagate"), x_value=value)
            assert is_all_nan(made["y"]), name
            assert is_all_nan(made["dweight"]), name
            assert made["dx"].isfinite().all(), name


@pytest.mark.parametrize("name", KINDS)
def test_a_weight_makes_output_and_input_gradient_nan(name: str) -> None:
    layer = linear()
    with torch.no_grad():
        layer.weight[5, 6] = math.inf
    made = results(layer, KINDS[name](nonfinite="propagate"))
    assert is_all_nan(made["y"])
    assert is_all_nan(made["dx"])
    assert made["dweight"].isfinite().all()


@pytest.mark.parametrize("name", KINDS)
def test_finite_tensors_give_the_same_bits(name: str) -> None:
    one, other = linear(), linear()
    te.clear_found_inf(other)  # graphs of other tests count for all models
    for _ in range(3):
        first = results(one, KINDS[name]())
        second = results(other, KINDS[name](nonfinite="propagate"))
        for key, value in first.items():
            assert torch.equal(value, second[key]), key
    assert te.found_inf(other) == 0


def test_delayed_state_is_not_touched() -> None:
    layer = linear()
    chosen = recipe.DelayedScaling(nonfinite="propagate")
    results(layer, chosen)
    before = {name: own.clone() for name, own in layer.named_buffers()}
    results(layer, chosen, x_value=math.nan, grad_value=math.inf)
    assert all(own.isfinite().all() for own in layer.buffers())
    assert torch.equal(layer.scale_bwd, before["scale_bwd"])
    again = results(layer, chosen)
    assert all(value.isfinite().all() for value in again.values())


def test_the_result_of_a_fused_chain_shows_it() -> None:
    torch.manual_seed(0)
    layer = te.LayerNormMLP(64, 128, bias=False, params_dtype=BF16)
    made = results(layer, recipe.Float8CurrentScaling(nonfinite="propagate"), grad_value=math.inf)
    assert is_all_nan(made["dfc2_weight"])
    assert is_all_nan(made["dfc1_weight"])


def test_groups_show_it() -> None:
    torch.manual_seed(0)
    layer = te.GroupedLinear(2, 64, 32, bias=False, params_dtype=BF16)
    chosen = recipe.Float8CurrentScaling(nonfinite="propagate")
    made = results(layer, chosen, grad_value=math.inf, splits=([32, 32],))
    assert is_all_nan(made["dweight1"])
    made = results(layer, chosen, splits=([32, 32],))
    assert all(value.isfinite().all() for value in made.values())


@pytest.mark.parametrize("name", ["current", "mxfp8", "nvfp4"])
def test_a_compiled_layer_shows_it(name: str) -> None:
    layer = linear()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    chosen = KINDS[name](nonfinite="propagate")
    made = results(compiled, chosen, grad_value=math.inf)
    assert is_all_nan(made["dx"])
    eager, captured = results(linear(), chosen), results(compiled, chosen)
    if name != "nvfp4":  # whose graph draws another seed
        assert torch.equal(eager["dx"], captured["dx"])
    assert captured["y"].isfinite().all()


def test_an_exported_layer_shows_it() -> None:
    layer = linear().eval()
    x = torch.randn(64, 64, dtype=BF16)
    with te.autocast(recipe=recipe.Float8CurrentScaling(nonfinite="propagate")), torch.no_grad():
        program = torch.export.export(layer, (x,)).module()
        assert torch.equal(program(x), layer(x))
        x[3, 4] = math.inf
        assert is_all_nan(program(x))


def test_a_kept_weight_of_the_other_kind_is_not_used() -> None:
    layer = linear()
    with torch.no_grad():
        layer.weight[0, 0] = math.inf
    x = torch.randn(32, 64, dtype=BF16)
    with te.autocast(recipe=recipe.Float8CurrentScaling()):
        assert layer(x, is_first_microbatch=True).isfinite().all()
    with te.autocast(recipe=recipe.Float8CurrentScaling(nonfinite="propagate")):
        assert is_all_nan(layer(x, is_first_microbatch=False)[:, 0])


def test_a_custom_recipe_takes_it() -> None:
    def factory(role: object) -> OperandSpec:
        return OperandSpec("e4m3", (0, 0), 448.0)

    made = results(
        linear(), recipe.CustomRecipe(factory, nonfinite="propagate"), grad_value=math.inf
    )
    assert is_all_nan(made["dx"])


def test_a_quantize_of_a_chain_shows_it() -> None:
    chain = te.ops.Sequential(te.ops.Quantize(forward=True), te.ops.GELU())
    x = torch.randn(32, 64, dtype=BF16)
    x[0, 0] = math.inf
    with te.autocast(recipe=recipe.Float8CurrentScaling(nonfinite="propagate")):
        assert is_all_nan(chain(x))


def test_another_word_is_refused() -> None:
    for kind in [*KINDS.values(), recipe.CustomRecipe]:
        given = {"margin": 1} if kind is recipe.CustomRecipe else {}
        with pytest.raises(te.RecipeError, match=r"nonfinite='nan'.*'saturate', 'propagate'"):
            kind(**given, nonfinite="nan")


def test_recipes_that_differ_in_it_are_different_values() -> None:
    for kind in KINDS.values():
        assert kind() == kind(nonfinite="saturate") != kind(nonfinite="propagate"), kind
        assert "nonfinite='propagate'" in str(kind(nonfinite="propagate")), kind
