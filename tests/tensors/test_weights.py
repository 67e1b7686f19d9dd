"""When a weight is quantized, and when one is taken that the caller asked to keep.

``quantize`` calls of the toy backend are counted: the input costs one a forward, the weight one
more where it is quantized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fp8core
from fp8core import Linear, OperandError, UnsupportedError, autocast, recipe
from tests.chain import fused_toy
from tests.device import DEVICE
from tests.pairs import turns

RECIPES = recipe.names()
STATELESS = [name for name in RECIPES if name != "delayed"]
WITH_WEIGHT, INPUT_ALONE = 2, 1


@pytest.fixture(autouse=True)
def calls() -> Iterator[Counter[str]]:
    with fused_toy.installed() as counts:
        yield counts


Forward = Callable[..., int]


@pytest.fixture
def forward(calls: Counter[str]) -> Forward:
    """``forward(layer, first)`` runs 32 rows and returns how often something was quantized."""

    def run(layer: Linear, first: bool | None = None, name: str = "current") -> int:
        before = calls["quantize"]
        with autocast(recipe=recipe.by_name(name)):
            layer(torch.ones(32, 32), is_first_microbatch=first)
        return calls["quantize"] - before

    return run


def layer() -> Linear:
    torch.manual_seed(1)
    return Linear(32, 32)


@pytest.mark.parametrize("name", RECIPES)
def test_every_forward_quantizes_the_weight_but_later_microbatches(
    name: str, forward: Forward
) -> None:
    own = layer()
    assert [forward(own, name=name) for _ in range(3)] == [WITH_WEIGHT] * 3
    with torch.no_grad():
        assert forward(own, name=name) == WITH_WEIGHT
    found = [forward(own, first, name) for first in (True, False, False, True)]
    assert found == [WITH_WEIGHT, INPUT_ALONE, INPUT_ALONE, WITH_WEIGHT]


def test_nothing_is_kept_unless_the_caller_says_so(forward: Forward) -> None:
    own = layer()
    forward(own)
    with torch.no_grad():
        forward(own)
    assert not own._bindings.weights.microbatches
    assert not own._bindings.weights.scope


@pytest.mark.parametrize("name", RECIPES)
def test_inference_mode_then_training_trains(name: str) -> None:
    own, fresh = layer(), layer()
    x = torch.randn(32, 32)
    with torch.inference_mode(), autocast(recipe=recipe.by_name(name)):
        own(x)
    grads = []
    for one in (own, fresh):
        torch.manual_seed(2)
        with autocast(recipe=recipe.by_name(name)):
            y = one(x)
        y.sum().backward()
        grads.append(one.weight.grad)
    assert torch.equal(*grads)


def test_an_evaluation_takes_no_amax_away_from_training() -> None:
    """An evaluation records no amax of the weight; training must record it."""
    own, chosen = layer(), recipe.DelayedScaling(amax_history_len=2)
    x = torch.ones(32, 32)
    with torch.no_grad(), autocast(recipe=chosen):
        own(x)
    with autocast(recipe=chosen):
        own(x)
    assert own.amax_history_fwd[-1, 1] == own.weight.abs().max()


@pytest.mark.parametrize("name", ["delayed", "current", "nvfp4"])
def test_a_later_microbatch_without_a_first_quantizes_and_keeps(
    name: str, forward: Forward
) -> None:
    own = layer()
    assert forward(own, False, name) == WITH_WEIGHT
    assert forward(own, False, name) == INPUT_ALONE


def test_a_later_microbatch_outside_any_recipe_computes_as_ever() -> None:
    own, x = layer(), torch.randn(4, 32)
    want = torch.nn.functional.linear(x, own.weight, own.bias)
    assert torch.equal(own(x, is_first_microbatch=False), want)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert own(x, is_first_microbatch=False).dtype == torch.bfloat16


def test_a_later_microbatch_of_another_recipe_quantizes_for_it(forward: Forward) -> None:
    own, x = layer(), torch.randn(4, 32)
    forward(own, True, "current")
    with autocast(recipe=recipe.by_name("block")):
        assert torch.equal(own(x, is_first_microbatch=False), own(x))


@pytest.mark.parametrize("name", STATELESS)
def test_a_later_microbatch_may_follow_an_evaluation(name: str, forward: Forward) -> None:
    own = layer()
    forward(own, True, name)
    with torch.no_grad():
        forward(own, None, name)
    assert forward(own, False, name) == INPUT_ALONE


@pytest.mark.parametrize("name", RECIPES)
def test_later_microbatches_of_any_size(name: str) -> None:
    for own, rows in ((layer(), 32), (layer(), 17), (Linear(33, 17), 32)):
        x = torch.ones(rows, own.in_features)
        with autocast(recipe=recipe.by_name(name)):
            first = own(x, is_first_microbatch=True)
            assert torch.equal(own(x, is_first_microbatch=False), first)


def test_a_split_weight_is_kept_too(forward: Forward) -> None:
    own = Linear(32, 32, parameters_split=("query", "key"))
    assert [forward(own, first) for first in (True, False)] == [WITH_WEIGHT, INPUT_ALONE]


def test_a_changed_part_of_a_split_weight_is_seen() -> None:
    own = Linear(32, 32, parameters_split=("query", "key"), bias=False)
    x = torch.ones(32, 32)
    with torch.no_grad(), autocast(recipe=recipe.by_name("current")):
        own(x)
        own.key_weight.zero_()
        y = own(x)
    assert y[:, :16].any()
    assert not y[:, 16:].any()


def test_frozen_weights_are_quantized_once(forward: Forward) -> None:
    own = layer()
    with fp8core.frozen_weights(own), torch.no_grad():
        assert [forward(own) for _ in range(3)] == [WITH_WEIGHT, INPUT_ALONE, INPUT_ALONE]
        assert forward(own, name="block") == WITH_WEIGHT
    with torch.no_grad():
        assert forward(own) == WITH_WEIGHT
    assert not own._bindings.weights.microbatches
    assert not own._bindings.weights.scope


def test_training_inside_frozen_weights_gets_its_columnwise_weight() -> None:
    """Gradients may be taken there, as for an adapter; only the weights stay."""
    own, x = layer(), torch.ones(32, 32, requires_grad=True)
    with fp8core.frozen_weights(own), autocast(recipe=recipe.by_name("current")):
        with torch.no_grad():
            own(x)
        own(x).sum().backward()
    assert x.grad is not None


def test_frozen_weights_under_inference_mode_serve_training_too() -> None:
    own, x = layer(), torch.ones(32, 32, requires_grad=True)
    with fp8core.frozen_weights(own), autocast(recipe=recipe.by_name("block")):
        with torch.inference_mode():
            own(x, is_first_microbatch=True)
        own(x).sum().backward()
    assert x.grad is not None


def test_frozen_weights_nest_and_end_with_an_exception(forward: Forward) -> None:
    own = layer()
    scope = fp8core.frozen_weights(own)
    with torch.no_grad(), scope:
        forward(own)
        with scope:
            assert forward(own) == INPUT_ALONE
        assert forward(own) == INPUT_ALONE
        with pytest.raises(KeyError), fp8core.frozen_weights(own):
            raise KeyError
        assert forward(own) == INPUT_ALONE
    assert forward(own) == WITH_WEIGHT


def test_a_write_inside_frozen_weights_that_torch_counts_is_refused_at_once(
    forward: Forward,
) -> None:
    own = layer()

    def run() -> None:
        with fp8core.frozen_weights(own), torch.no_grad():
            forward(own)
            own.weight.add_(1)
            forward(own)

    with pytest.raises(OperandError, match="no weight may change"):
        run()
    assert forward(own) == WITH_WEIGHT


def test_frozen_weights_of_a_whole_model_and_its_parametrized_weight(forward: Forward) -> None:
    model = torch.nn.Sequential(layer(), torch.nn.utils.parametrizations.weight_norm(layer()))
    with fp8core.frozen_weights(model), torch.no_grad():
        assert [forward(model[1]) for _ in range(2)] == [WITH_WEIGHT, INPUT_ALONE]  # type: ignore[arg-type]  # a Linear
    where = r"1\.parametrizations\.weight\.original1"
    with pytest.raises(OperandError, match=where), fp8core.frozen_weights(model):
        model[1].parametrizations.weight.original1.data.neg_()  # type: ignore[union-attr, index]


def test_a_layer_that_moves_inside_frozen_weights_is_quantized_as_outside(forward: Forward) -> None:
    own = layer()
    with fp8core.frozen_weights(own), torch.no_grad():
        forward(own)
        own.to(DEVICE)
        assert [forward(own) for _ in range(2)] == [WITH_WEIGHT] * 2


@pytest.mark.parametrize("model", [None, torch.nn.Linear(4, 4)])
def test_frozen_weights_of_nothing_are_refused(model: Any) -> None:
    with pytest.raises(OperandError, match="frozen_weights"):
        fp8core.frozen_weights(model)


@pytest.mark.parametrize("name", RECIPES)
def test_frozen_weights_change_no_bit_of_layers_groups_and_quantized_parameters(name: str) -> None:
    with fp8core.quantized_model_init(recipe=recipe.by_name(name)):
        try:
            stored: Any = Linear(32, 32)
        except UnsupportedError:
            stored = Linear(32, 32)
    own, grouped, x = layer(), fp8core.GroupedLinear(2, 32, 32), torch.randn(64, 32)
    with torch.no_grad(), autocast(recipe=recipe.by_name(name)):
        want = own(x), stored(x), grouped(x, [32, 32])
        with fp8core.frozen_weights(torch.nn.ModuleList([own, stored, grouped])):
            for _ in range(3):
                assert all(map(torch.equal, (own(x), stored(x), grouped(x, [32, 32])), want))


@pytest.mark.parametrize(
    ("name", "evaluates_in"),
    [*turns(RECIPES, RECIPES), *turns(RECIPES[1:] + RECIPES[:1], RECIPES), ("delayed", None)],
)
def test_an_evaluation_between_microbatches_changes_nothing(
    name: str, evaluates_in: str | None
) -> None:
    def outputs(evaluates: bool) -> list[torch.Tensor]:
        own = layer()
        x = 7 * torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        with autocast(recipe=recipe.by_name(name)):
            own(x, is_first_microbatch=True).sum().backward()
        chosen = None if evaluates_in is None else recipe.by_name(evaluates_in)
        if evaluates:
            with torch.no_grad(), autocast(enabled=chosen is not None, recipe=chosen):
                own(x)
        torch.manual_seed(3)  # a call draws a seed, as dropout does
        with autocast(recipe=recipe.by_name(name)):
            y = own(x, is_first_microbatch=False)
        y.square().sum().backward()
        return [y.detach(), own.weight.grad, x.grad]

    assert all(map(torch.equal, outputs(True), outputs(False)))


def test_a_recompute_takes_the_microbatches_weight_whatever_ran_in_between() -> None:
    def grad(checkpoints: bool) -> torch.Tensor:
        own, x = layer(), torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
        x.requires_grad_()
        chosen = recipe.by_name("delayed")
        with autocast(recipe=chosen):
            own(x, is_first_microbatch=True).sum().backward()
        x.grad = None
        with autocast(recipe=chosen):
            if checkpoints:
                again = {"use_reentrant": False, "is_first_microbatch": False}
                y = fp8core.checkpoint(own, x, **again)
            else:
                y = own(x, is_first_microbatch=False)
        with autocast(recipe=chosen), torch.no_grad():
            own(x)
        y.square().sum().backward()
        assert x.grad is not None
        return x.grad

    assert torch.equal(grad(True), grad(False))
