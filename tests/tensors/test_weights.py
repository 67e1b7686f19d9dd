"""When a weight is quantized, and when one is taken that the caller asked to keep.

``quantize`` calls of the toy backend are counted: the input costs one a forward, the weight one
more where it is quantized.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fp8core
from fp8core import LayerNormMLP, Linear, OperandError, UnsupportedError, autocast, recipe
from tests.chain import fused_toy
from tests.device import DEVICE
from tests.pairs import pairs, turns

RECIPES = recipe.names()
STATELESS = [name for name in RECIPES if name != "delayed"]
WITH_WEIGHT, INPUT_ALONE = 2, 1


@pytest.fixture
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


ALL_RECIPES = recipe.names()


def microbatches(name: str, count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    own = LayerNormMLP(32, 64)
    x, grad = torch.randn(128, 32), torch.randn(128, 32)
    with autocast(recipe=recipe.by_name(name)):
        y = torch.cat([own(part) for part in x.chunk(count)])
    y.backward(grad)
    assert all(parameter.grad is not None for parameter in own.parameters())
    return [y.detach(), *(parameter.grad for parameter in own.parameters())]


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_four_microbatches_give_the_gradients_of_one_batch(name: str) -> None:
    """Scales do not depend on how the rows are parted: only the order of float32 sums does.

    128 terms a sum, and a code that flips in fc1's gradient; bound: numerics.md's for MLPs.
    """
    for got, want in zip(microbatches(name, 4), microbatches(name, 1), strict=True):
        assert (got - want).norm() <= 2e-2 * want.norm()


@pytest.mark.parametrize("name", ["current", "block", "rowwise"])
def test_microbatches_with_their_own_scales_give_them_within_the_noise(name: str) -> None:
    """Each side is 23 dB of noise away from the exact gradient (conventions: one e5m2 operand)."""
    for got, want in zip(microbatches(name, 4), microbatches(name, 1), strict=True):
        assert (got - want).norm() <= 2 * 10 ** (-23 / 20) * want.norm()


def test_the_amax_of_one_autocast_is_the_largest_of_its_microbatches() -> None:
    own, chosen = Linear(32, 32), recipe.DelayedScaling(amax_history_len=3)
    with autocast(recipe=chosen):
        for size in (1.0, 5.0, 2.0):
            own(torch.full((8, 32), size))
    assert own.amax_history_fwd[-1, 0] == 5.0
    assert not own.amax_history_fwd[:-1, 0].any()


FLAGGED: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: Linear(32, 32),
    "LayerNormLinear": lambda: fp8core.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: LayerNormMLP(32, 64),
    "GroupedLinear": lambda: fp8core.GroupedLinear(2, 32, 32),
}


@pytest.mark.parametrize(
    ("order", "kind", "name", "use_reentrant"), pairs([1, -1], FLAGGED, ALL_RECIPES, [True, False])
)
def test_each_microbatch_may_have_its_own_autocast_and_recompute(
    order: int, kind: str, name: str, use_reentrant: bool
) -> None:
    """Delayed scales move on between them; the kept weight is that of the first, both ways.

    As Megatron, which keeps the flag on the module, backward recomputes when it has been lowered.
    """

    def grads(checkpoints: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        own, found = FLAGGED[kind](), []
        splits = ([20, 12],) if kind == "GroupedLinear" else ()
        x = torch.randn(32, 32, requires_grad=True)
        is_first = True

        def flagged_run(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = own(x, *splits, is_first_microbatch=is_first)
            return y

        for _ in range(3):
            outputs = []
            for flag in (True, False, False):
                is_first = flag
                with autocast(recipe=recipe.by_name(name)):
                    if checkpoints:
                        y = fp8core.checkpoint(flagged_run, x * 3, use_reentrant=use_reentrant)
                    else:
                        y = flagged_run(x * 3)
                outputs.append(y)
            for y in outputs[::order]:
                y.square().sum().backward()
            found += [x.grad, *(parameter.grad for parameter in own.parameters())]
            x.grad = None
            own.zero_grad()
        return found

    torch.manual_seed(3)
    want = grads(False)
    torch.manual_seed(3)
    assert all(map(torch.equal, grads(True), want))


CURRENT = recipe.by_name("current")


def tokens(seed: int = 5) -> torch.Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))


def split() -> nn.Module:
    return Linear(32, 32, parameters_split=("query", "key"))


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(Linear(32, 32))


def flagged_run(own: nn.Module, first: bool | None) -> torch.Tensor:
    with autocast(recipe=CURRENT):
        y: torch.Tensor = own(tokens(), is_first_microbatch=first)
    return y


@pytest.mark.parametrize("make", [split, normed, lambda: Linear(32, 32)])
def test_a_step_before_a_later_microbatch_is_refused(make: Any) -> None:
    own = make()
    optimizer = torch.optim.SGD(own.parameters(), lr=1.0)
    flagged_run(own, True).sum().backward()
    flagged_run(own, False)
    optimizer.step()
    with pytest.raises(OperandError, match="was written"):
        flagged_run(own, False)
    flagged_run(own, True)
    flagged_run(own, False)


def test_another_parameter_in_its_place_is_refused() -> None:
    own = Linear(32, 32)
    flagged_run(own, True)
    other = nn.Parameter(tokens())
    for _ in range(own.weight._version):  # the counter tells nothing
        other.detach().mul_(1)
    own.weight = other
    with pytest.raises(OperandError, match="was written"):
        flagged_run(own, False)


def test_a_later_microbatch_with_other_weights_is_refused() -> None:
    own = Linear(32, 32)
    with autocast(recipe=CURRENT):
        functional_call(own, {"weight": tokens(1)}, (tokens(), True))
        with pytest.raises(OperandError, match="was written"):
            functional_call(own, {"weight": tokens(2)}, (tokens(), False))


def test_a_recompute_takes_the_weight_of_its_forward() -> None:
    """Two steps in flight: the second keeps the weight at a scale that has moved meanwhile."""
    chosen = recipe.DelayedScaling(amax_history_len=2)

    def grads(depth: int, flips: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        own, flag, outputs = Linear(32, 32), True, []
        xs = [tokens(at).requires_grad_() for at in range(4)]

        def inside(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = own(x, is_first_microbatch=flag)
            return y

        forward: Any = inside
        for _ in range(depth):
            forward = partial(fp8core.checkpoint, forward)
        for at, x in enumerate(xs):
            flag = at % 2 == 0
            with autocast(recipe=chosen):
                outputs.append(forward(x))
        for at in reversed(range(4)):  # what the first step kept is gone by then
            flag = at % 2 == 0 and not flips
            outputs[at].square().sum().backward()
        with autocast(recipe=chosen):
            last = own(tokens(), is_first_microbatch=False)
        return [last.detach(), *[x.grad for x in xs], own.weight.grad]  # type: ignore[list-item]  # all have one

    want = grads(0, False)
    for depth, flips in ((1, False), (1, True), (2, False), (2, True)):
        assert all(map(torch.equal, grads(depth, flips), want)), (depth, flips)
