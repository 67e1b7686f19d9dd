"""The quantized weight that is kept: when it is taken again, and when it is made anew.

``quantize`` calls of the toy backend are counted: the input costs one a forward, the weight one
more where it is quantized.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch

import fp8core
from fp8core import LayerNormMLP, Linear, OperandError, UnsupportedError, autocast, recipe
from tests.links import fused_toy

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


@pytest.mark.parametrize("name", STATELESS)
def test_an_unchanged_weight_is_quantized_once(name: str, forward: Forward) -> None:
    own = layer()
    assert [forward(own, name=name) for _ in range(3)] == [WITH_WEIGHT, INPUT_ALONE, INPUT_ALONE]


def test_an_optimizer_step_makes_it_anew(forward: Forward) -> None:
    own = layer()
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    forward(own)
    own.weight.grad = torch.ones_like(own.weight)
    optimizer.step()
    assert forward(own) == WITH_WEIGHT


def test_a_write_in_place_makes_it_anew(forward: Forward) -> None:
    own = layer()
    forward(own)
    with torch.no_grad():
        own.weight[0, 0] = 3
    assert forward(own) == WITH_WEIGHT


def test_another_tensor_in_data_makes_it_anew(forward: Forward) -> None:
    own = layer()
    forward(own)
    own.weight.data = own.weight.data.clone()
    assert forward(own) == WITH_WEIGHT


def test_another_parameter_makes_it_anew(forward: Forward) -> None:
    own = layer()
    forward(own)
    own.weight = torch.nn.Parameter(own.weight.detach())
    assert forward(own) == WITH_WEIGHT


def test_a_write_through_data_is_seen_after_invalidation(forward: Forward) -> None:
    own = layer()
    forward(own)
    own.weight.data.mul_(2)
    assert forward(own) == INPUT_ALONE
    own.invalidate_weight_cache()
    assert forward(own) == WITH_WEIGHT


def test_loading_a_state_dict_makes_it_anew(forward: Forward) -> None:
    own = layer()
    forward(own)
    own.load_state_dict(own.state_dict())
    assert forward(own) == WITH_WEIGHT


def test_another_recipe_makes_it_anew(forward: Forward) -> None:
    own = layer()
    forward(own, name="current")
    assert forward(own, name="block") == WITH_WEIGHT


def test_a_copy_keeps_its_own(forward: Forward) -> None:
    own = layer()
    forward(own)
    other = copy.deepcopy(own)
    assert forward(other) == WITH_WEIGHT
    with torch.no_grad():
        other.weight.zero_()
    with autocast(recipe=recipe.by_name("current")), torch.no_grad():
        assert own(torch.ones(32, 32)).any()
        assert not other(torch.ones(32, 32)).any()


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


def test_a_weight_made_in_inference_mode_is_never_kept(forward: Forward) -> None:
    with torch.inference_mode():
        own = layer()
        assert [forward(own) for _ in range(2)] == [WITH_WEIGHT, WITH_WEIGHT]


@pytest.mark.parametrize("name", STATELESS)
def test_an_evaluation_without_gradients_reuses_the_weight(name: str, forward: Forward) -> None:
    own = layer()
    forward(own, name=name)
    with torch.no_grad():
        assert forward(own, name=name) == INPUT_ALONE


def test_training_keeps_a_weight_only_where_it_is_used_again(calls: Counter[str]) -> None:
    """Kept operands take memory until the optimizer's step; the last step tells if they pay."""
    own, x = layer(), torch.ones(32, 32, requires_grad=True)

    def step(microbatches: int) -> int:
        before = calls["quantize"]
        for _ in range(microbatches):
            with autocast(recipe=recipe.by_name("current")):
                own(x).sum().backward()
        with torch.no_grad():
            own.weight.mul_(0.9)
        input_and_grad = 2 * microbatches
        return calls["quantize"] - before - input_and_grad

    # Once at the second microbatch, as the first has kept nothing; then once a step.
    assert [step(3), step(3), step(3)] == [2, 1, 1]
    # One microbatch a step: the first time it is kept in vain, afterwards not.
    assert [step(1), step(1), step(2)] == [1, 1, 2]


def test_training_after_an_evaluation_gets_its_columnwise_weight(forward: Forward) -> None:
    own = layer()
    with torch.no_grad():
        forward(own)
    x = torch.ones(32, 32, requires_grad=True)
    with autocast(recipe=recipe.by_name("current")):
        own(x).sum().backward()
    assert x.grad is not None


def test_an_evaluation_takes_no_amax_away_from_training() -> None:
    """The weight that an evaluation kept was not recorded; training must record it."""
    own, chosen = layer(), recipe.DelayedScaling(amax_history_len=2)
    x = torch.ones(32, 32)
    with torch.no_grad(), autocast(recipe=chosen):
        own(x)
    with autocast(recipe=chosen):
        own(x)
    assert own.amax_history_fwd[-1, 1] == own.weight.abs().max()


def test_delayed_scales_that_changed_make_it_anew(forward: Forward) -> None:
    own = layer()
    assert [forward(own, name="delayed") for _ in range(2)] == [WITH_WEIGHT, WITH_WEIGHT]


def test_delayed_keeps_it_within_one_autocast(calls: Counter[str]) -> None:
    own = layer()
    with autocast(recipe=recipe.by_name("delayed")):
        for _ in range(3):
            own(torch.ones(32, 32))
    assert calls["quantize"] == 1 + 3


@pytest.mark.parametrize("name", RECIPES)
def test_the_first_microbatch_makes_it_anew_and_the_others_take_it(
    name: str, forward: Forward
) -> None:
    own = layer()
    found = [forward(own, first, name) for first in (True, False, False, True)]
    assert found == [WITH_WEIGHT, INPUT_ALONE, INPUT_ALONE, WITH_WEIGHT]


def test_a_later_microbatch_without_a_first_is_refused(forward: Forward) -> None:
    with pytest.raises(OperandError, match="is_first_microbatch=True"):
        forward(layer(), False)


def test_a_later_microbatch_without_a_first_is_refused_under_scales_that_changed() -> None:
    """Training that was not asked to keep a weight has nothing of the first microbatch's."""
    own, x = layer(), torch.ones(32, 32, requires_grad=True)
    chosen = recipe.by_name("delayed")
    with autocast(recipe=chosen):
        own(x)
    with pytest.raises(OperandError, match="which keeps the weight"), autocast(recipe=chosen):
        own(x, is_first_microbatch=False)


def test_a_later_microbatch_without_a_first_has_its_bits_where_scales_stay() -> None:
    own, x = layer(), torch.ones(32, 32, requires_grad=True)
    with autocast(recipe=recipe.by_name("delayed")):
        assert torch.equal(own(x), own(x, is_first_microbatch=False))


def test_a_later_microbatch_of_a_changed_weight_is_refused(forward: Forward) -> None:
    own = layer()
    forward(own, True)
    with torch.no_grad():
        own.weight.add_(1)
    with pytest.raises(OperandError, match="since the weight changed"):
        forward(own, False)


def test_a_later_microbatch_of_another_recipe_is_refused(forward: Forward) -> None:
    own = layer()
    forward(own, True, "current")
    with pytest.raises(OperandError, match="with this recipe"):
        forward(own, False, "block")


@pytest.mark.parametrize("name", STATELESS)
def test_a_later_microbatch_may_follow_an_evaluation(name: str, forward: Forward) -> None:
    own = layer()
    forward(own, True, name)
    with torch.no_grad():
        forward(own, None, name)
    assert forward(own, False, name) == INPUT_ALONE


@pytest.mark.parametrize("rows", [32, 17])
@pytest.mark.parametrize("name", RECIPES)
def test_later_microbatches_may_have_any_number_of_rows(name: str, rows: int) -> None:
    own = layer()
    with autocast(recipe=recipe.by_name(name)):
        first = own(torch.ones(rows, 32), is_first_microbatch=True)
        assert torch.equal(own(torch.ones(rows, 32), is_first_microbatch=False), first)


@pytest.mark.parametrize("name", RECIPES)
def test_later_microbatches_of_sizes_that_need_padding(name: str) -> None:
    own = Linear(33, 17)
    with autocast(recipe=recipe.by_name(name)):
        first = own(torch.ones(32, 33), is_first_microbatch=True)
        assert torch.equal(own(torch.ones(32, 33), is_first_microbatch=False), first)


def test_a_later_microbatch_of_a_split_weight_is_refused() -> None:
    own = Linear(32, 32, parameters_split=("query", "key"))
    with autocast(recipe=recipe.by_name("current")), pytest.raises(UnsupportedError, match="None"):
        own(torch.ones(32, 32), is_first_microbatch=False)


def test_a_changed_part_of_a_split_weight_is_seen() -> None:
    own = Linear(32, 32, parameters_split=("query", "key"), bias=False)
    x = torch.ones(32, 32)
    with torch.no_grad(), autocast(recipe=recipe.by_name("current")):
        own(x)
        own.key_weight.zero_()
        y = own(x)
    assert y[:, :16].any()
    assert not y[:, 16:].any()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("name", RECIPES)
def test_later_microbatches_may_be_checkpointed(name: str, use_reentrant: bool) -> None:
    own, x = layer(), torch.randn(32, 32, requires_grad=True)
    for first in (True, False, False):
        with autocast(recipe=recipe.by_name(name)):
            y = fp8core.checkpoint(own, x, first, use_reentrant=use_reentrant)
        y.sum().backward()


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
    own, chosen = layer(), recipe.DelayedScaling(amax_history_len=3)
    with autocast(recipe=chosen):
        for size in (1.0, 5.0, 2.0):
            own(torch.full((8, 32), size))
    assert own.amax_history_fwd[-1, 0] == 5.0
    assert not own.amax_history_fwd[:-1, 0].any()


@pytest.mark.parametrize("evaluates_in", [*RECIPES, None])
@pytest.mark.parametrize("name", RECIPES)
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
