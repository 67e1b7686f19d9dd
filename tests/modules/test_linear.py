"""Linear: Transformer Engine's constructor, its parameters, and what it is as a torch module."""

from __future__ import annotations

import copy
import inspect
import io
from typing import Any

import pytest
import torch

from fp8core import (
    Linear,
    OperandError,
    RecipeError,
    UnsupportedError,
    autocast,
    recipe,
)
from fp8core.modules.layers.linear import NOT_OFFERED
from tests.device import BACKEND, DEVICE
from tests.pairs import turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

RECIPES = {"none": None, **{name: recipe.by_name(name) for name in recipe.names()}}

# What asks for something that is not offered, and what is not the default but asks for nothing.
REFUSED = [
    {"ub_overlap_ag": True},
    {"ub_overlap_rs": True},
    {"ub_overlap_rs_dgrad": True},
    {"ub_bulk_dgrad": True},
    {"ub_bulk_wgrad": True},
    {"symmetric_ar_type": "multimem_all_reduce"},
]
IDLE = [
    {"ub_name": "qkv"},
    {"symmetric_ar_type": False},
]


def forward(layer: Linear, x: torch.Tensor, name: str) -> torch.Tensor:
    chosen = RECIPES[name]
    torch.manual_seed(11)
    with autocast(enabled=chosen is not None, recipe=chosen):
        return layer(x)


def test_an_argument_that_is_not_offered_is_refused_by_name() -> None:
    for argument in REFUSED:
        with pytest.raises(
            UnsupportedError, match=rf"Linear\({next(iter(argument))}=.*not offered"
        ):
            Linear(8, 8, **argument)


def test_every_argument_that_is_not_offered_has_a_value_here() -> None:
    assert {name for own in (*REFUSED, *IDLE) for name in own} == set(NOT_OFFERED)


def test_the_default_of_an_argument_that_is_not_offered_is_taken() -> None:
    for name in NOT_OFFERED:
        Linear(8, 8, **{name: inspect.signature(Linear).parameters[name].default})


def test_a_value_that_asks_for_nothing_is_taken() -> None:
    for argument in IDLE:
        torch.manual_seed(3)
        layer = Linear(8, 8, **argument)
        torch.manual_seed(3)
        assert torch.equal(layer.weight, Linear(8, 8).weight), argument


@pytest.mark.usefixtures("group_of_one")
def test_a_tensor_parallel_group_of_one_rank_is_taken() -> None:
    Linear(8, 8, tp_group=torch.distributed.group.WORLD)


def test_a_size_that_is_no_positive_integer_is_refused() -> None:
    for sizes in [(0, 8), (8, 0), (-1, 8), (8.0, 8), ("8", 8)]:
        with pytest.raises(OperandError, match="expected an integer >= 1"):
            Linear(*sizes)


def test_parameters_are_weight_and_bias() -> None:
    shapes = {name: tuple(p.shape) for name, p in Linear(6, 4).named_parameters()}
    assert shapes == {"weight": (4, 6), "bias": (4,)}


def test_without_bias_there_is_none() -> None:
    layer = Linear(6, 4, bias=False)
    assert layer.bias is None
    assert list(layer.state_dict()) == ["weight"]


def test_the_default_initialization_is_transformer_engine_s() -> None:
    layer = Linear(256, 256)
    assert abs(layer.weight.std().item() - 0.023) < 0.001
    assert not layer.bias.any()


def test_init_method_fills_each_weight_and_no_bias() -> None:
    seen = []

    def ones(weight: torch.Tensor) -> None:
        seen.append(tuple(weight.shape))
        torch.nn.init.ones_(weight)

    layer = Linear(6, 4, init_method=ones, parameters_split=("q", "k"))
    assert seen == [(2, 6), (2, 6)]
    assert layer.q_weight.eq(1).all()
    assert not layer.q_bias.any()


def test_params_dtype_is_the_dtype_of_the_parameters() -> None:
    dtypes = {p.dtype for p in Linear(6, 4, params_dtype=torch.bfloat16).parameters()}
    assert dtypes == {torch.bfloat16}


def test_the_dtype_is_torch_s_default() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        assert Linear(6, 4).weight.dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", RECIPES)
def test_return_bias_returns_the_bias_that_was_not_added(name: str) -> None:
    layer = Linear(32, 16, return_bias=True)
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(4, 32)
    y, bias = forward(layer, x, name)
    assert bias is layer.bias
    without = Linear(32, 16, bias=False)
    without.load_state_dict({"weight": layer.weight})
    assert torch.equal(y, forward(without, x, name))


@pytest.mark.parametrize("name", RECIPES)
def test_a_bias_that_was_not_added_gets_its_gradient_where_it_is_used(name: str) -> None:
    layer = Linear(32, 16, return_bias=True)
    y, bias = forward(layer, torch.randn(4, 32), name)
    y.sum().backward()
    assert layer.bias.grad is None
    assert layer.weight.grad is not None
    bias.sum().backward()
    assert layer.bias.grad.eq(1).all()


def test_return_bias_without_a_bias_returns_none() -> None:
    assert Linear(32, 16, bias=False, return_bias=True)(torch.randn(4, 32))[1] is None


def test_parameters_split_names_parts_of_equal_size() -> None:
    layer = Linear(6, 9, parameters_split=("query", "key_", "value"))
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        **{f"{part}_weight": (3, 6) for part in ("query", "key", "value")},
        **{f"{part}_bias": (3,) for part in ("query", "key", "value")},
    }


def test_parameters_split_takes_sizes() -> None:
    layer = Linear(6, 8, bias=False, parameters_split={"query": 6, "kv": 2})
    assert [tuple(p.shape) for p in layer.parameters()] == [(6, 6), (2, 6)]


def test_parts_have_storages_of_their_own() -> None:
    """Accelerate's savers drop all but one of the tensors that share one."""
    state = Linear(6, 9, parameters_split=("query", "key", "value"), device=DEVICE).state_dict()
    assert len({one.untyped_storage().data_ptr() for one in state.values()}) == len(state) == 6


SPLITS: list[Any] = [("a", "b", "c"), {"a": 3}, {"a": 9, "b": -1}, ("a", "a_"), ("",), (), 2]
SPLITS += [("a.b", "c"), {"a": 4.0, "b": 4.0}, (1, 2)]


def test_a_split_that_does_not_fit_is_refused() -> None:
    for split in SPLITS:
        with pytest.raises(RecipeError, match="parameters_split"):
            Linear(6, 8, parameters_split=split)


@pytest.mark.parametrize("name", RECIPES)
def test_a_split_layer_has_the_bits_of_a_whole_one(name: str) -> None:
    whole, split = Linear(32, 24), Linear(32, 24, parameters_split={"q": 8, "kv": 16})
    torch.nn.init.normal_(whole.bias)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            q, kv = getattr(whole, kind).split([8, 16])
            getattr(split, f"q_{kind}").copy_(q)
            getattr(split, f"kv_{kind}").copy_(kv)
    x, dy = torch.randn(2, 4, 32), torch.randn(4, 24)
    found = []
    for layer in (whole, split):
        leaf = x[0].clone().requires_grad_()
        y = forward(layer, leaf, name)
        y.backward(dy)
        found.append((y, leaf.grad))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)
    for kind in ("weight", "bias"):
        parts = [getattr(split, f"{part}_{kind}").grad for part in ("q", "kv")]
        assert torch.equal(torch.cat(parts), getattr(whole, kind).grad)


def test_a_frozen_part_of_a_split_gets_no_gradient() -> None:
    layer = Linear(32, 16, parameters_split=("q", "k"))
    layer.q_weight.requires_grad_(False)
    forward(layer, torch.randn(4, 32), "current").sum().backward()
    assert layer.q_weight.grad is None
    assert layer.k_weight.grad is not None


def test_results_have_the_dtype_of_the_input() -> None:
    for name, dtype in turns(RECIPES, [torch.bfloat16, torch.float16, torch.float32]):
        layer = Linear(32, 16, params_dtype=dtype)
        x = torch.randn(4, 32).to(dtype).requires_grad_()
        y = forward(layer, x, name)
        y.sum().backward()
        assert {y.dtype, x.grad.dtype, layer.weight.grad.dtype, layer.bias.grad.dtype} == {dtype}, (
            name,
            dtype,
        )


def test_print_says_sizes_dtype_and_how_it_last_ran() -> None:
    layer = Linear(8, 4, params_dtype=torch.bfloat16, return_bias=True)
    assert repr(layer) == "Linear(in_features=8, out_features=4, bias=True, dtype=bfloat16)"
    with autocast(recipe=recipe.MXFP8BlockScaling()):
        layer(torch.randn(2, 8).bfloat16())
    assert repr(layer).endswith("dtype=bfloat16, last run: MXFP8BlockScaling on reference)")
    layer(torch.randn(2, 8).bfloat16())
    assert repr(layer).endswith("last run: high precision on reference)")
    with autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()):
        layer(torch.randn(2, 8).bfloat16())
    assert repr(layer).endswith("last run: high precision on reference)")


def test_print_names_the_recipe_that_was_chosen_for_the_layer() -> None:
    for name, want in [
        ("a", f"MXFP8BlockScaling on {BACKEND}"),
        ("b", f"high precision on {BACKEND}"),
        ("c", f"NVFP4BlockScaling on {BACKEND}"),
    ]:
        inner = recipe.PerLayer(
            {"c": recipe.NVFP4BlockScaling()}, default=recipe.MXFP8BlockScaling()
        )
        layer = Linear(32, 32, name=name)
        with autocast(recipe=recipe.PerLayer({"b": None}, default=inner)):
            layer(torch.randn(32, 32))
        assert repr(layer).endswith(f"last run: {want})"), (name, want)


def test_a_deep_copy_computes_the_same_with_its_own_parameters() -> None:
    for name in RECIPES:
        layer, x = Linear(32, 16), torch.randn(4, 32)
        forward(layer, x, name)
        twin = copy.deepcopy(layer)
        assert torch.equal(forward(layer, x, name), forward(twin, x, name)), name
        assert twin.weight is not layer.weight, name


def test_a_pickled_layer_computes_the_same() -> None:
    layer, x, file = Linear(32, 16), torch.randn(4, 32), io.BytesIO()
    forward(layer, x, "delayed")
    torch.save(layer, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(forward(loaded, x, "delayed"), forward(layer, x, "delayed"))


def test_moving_to_another_dtype_computes_in_it() -> None:
    for name in RECIPES:
        layer = Linear(32, 16)
        forward(layer, torch.randn(4, 32), name)
        layer.bfloat16()
        assert forward(layer, torch.randn(4, 32).bfloat16(), name).dtype == torch.bfloat16, name


def test_a_parametrized_weight_is_used() -> None:
    layer, x = Linear(32, 16), torch.randn(4, 32)
    torch.nn.utils.parametrizations.weight_norm(layer, "weight")
    y = forward(layer, x, "current")
    y.sum().backward()
    assert layer.parametrizations.weight.original0.grad is not None
    assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))


def test_two_layers_may_share_a_weight() -> None:
    first, second = Linear(16, 16, bias=False), Linear(16, 16, bias=False)
    second.weight = first.weight
    x = torch.randn(4, 16)
    forward(second, forward(first, x, "current"), "current").sum().backward()
    alone = Linear(16, 16, bias=False)
    alone.load_state_dict({"weight": first.weight})
    forward(alone, forward(alone, x, "current"), "current").sum().backward()
    assert torch.equal(alone.weight.grad, first.weight.grad)
