"""torch's own checkpoint repeats the recipe of its forward, whatever ran before, or is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import fp8core
from fp8core import UnsupportedError, autocast, ops, recipe
from tests.pairs import turns

CURRENT, BLOCK, DELAYED = (recipe.by_name(name) for name in ("current", "block", "delayed"))
BOTH = pytest.mark.parametrize("use_reentrant", [True, False])
Function = Callable[[torch.Tensor], torch.Tensor]


def rows() -> torch.Tensor:
    return torch.randn(32, 32, requires_grad=True)


def kept(function: Function, x: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    made: torch.Tensor = torch.utils.checkpoint.checkpoint(function, x, use_reentrant=use_reentrant)
    return made


def inside(layer: nn.Module, chosen: recipe.Recipe) -> Function:
    """The layer with its autocast in the function that is checkpointed."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=chosen):
            made: torch.Tensor = layer(x)
        return made

    return run


def evaluate(layer: nn.Module, chosen: recipe.Recipe | None) -> None:
    with torch.no_grad(), autocast(enabled=chosen is not None, recipe=chosen):
        layer(rows())


def train(layer: nn.Module, chosen: recipe.Recipe | None) -> None:
    with autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(rows())
    y.sum().backward()
    layer.zero_grad()


EARLIER: dict[str, Callable[[nn.Module], None]] = {
    "evaluated": lambda layer: evaluate(layer, CURRENT),
    "trained": lambda layer: train(layer, CURRENT),
    "trained, delayed": lambda layer: train(layer, DELAYED),
    "in high precision": lambda layer: train(layer, None),
    "outside": lambda layer: layer(rows()).sum().backward(),
}


def grads(layer: nn.Module, run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(7)
    x = rows()
    layer.zero_grad()
    run(x).square().sum().backward()
    return [x.grad, *(own.grad for own in layer.parameters())]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(("earlier", "use_reentrant"), turns(EARLIER, [True, False]))
def test_a_recipe_entered_inside_is_repeated_whatever_ran_before(
    earlier: str, use_reentrant: bool
) -> None:
    layer = fp8core.LayerNormMLP(32, 64)
    EARLIER[earlier](layer)
    run = inside(layer, BLOCK)
    assert_same(grads(layer, lambda x: kept(run, x, use_reentrant)), grads(layer, run))


@pytest.mark.parametrize(("earlier", "use_reentrant"), turns(EARLIER, [True, False]))
def test_high_precision_is_repeated_whatever_ran_before(earlier: str, use_reentrant: bool) -> None:
    layer = fp8core.LayerNormMLP(32, 64)
    EARLIER[earlier](layer)
    assert_same(grads(layer, lambda x: kept(layer, x, use_reentrant)), grads(layer, layer))


@BOTH
def test_a_recipe_around_forward_and_backward_is_repeated(use_reentrant: bool) -> None:
    layer = fp8core.Linear(32, 32)
    evaluate(layer, BLOCK)
    with autocast(recipe=CURRENT):
        got = grads(layer, lambda x: kept(layer, x, use_reentrant))
        assert_same(got, grads(layer, layer))


@BOTH
def test_switched_off_and_outside_are_the_same_high_precision(use_reentrant: bool) -> None:
    layer, x = fp8core.Linear(32, 32), rows()
    with autocast(enabled=False):
        y = kept(layer, x, use_reentrant)
    y.sum().backward()
    assert x.grad is not None


@BOTH
@pytest.mark.parametrize("later", ["evaluated", "outside"])
def test_a_lost_recipe_is_refused_whatever_ran_after(later: str, use_reentrant: bool) -> None:
    layer = fp8core.Linear(32, 32)
    with autocast(recipe=CURRENT):
        y = kept(layer, rows(), use_reentrant)
    EARLIER[later](layer)
    evaluate(layer, None)
    with pytest.raises(UnsupportedError, match=r"outside the autocast.*fp8core\.checkpoint"):
        y.sum().backward()


@BOTH
def test_another_recipe_around_backward_is_refused_whatever_ran_before(use_reentrant: bool) -> None:
    layer = fp8core.Linear(32, 32)
    evaluate(layer, BLOCK)
    with autocast(recipe=CURRENT):
        y = kept(layer, rows(), use_reentrant)
    with autocast(recipe=BLOCK), pytest.raises(UnsupportedError, match="another recipe"):
        y.sum().backward()


@BOTH
def test_two_functions_one_with_its_recipe_lost_is_refused(use_reentrant: bool) -> None:
    layer, x = fp8core.Linear(32, 32), rows()
    y = kept(layer, x, use_reentrant)
    with autocast(recipe=CURRENT):
        z = kept(layer, x, use_reentrant)
    y.sum().backward()
    with pytest.raises(UnsupportedError, match="outside the autocast"):
        z.sum().backward()


class Half(nn.Module):
    """High precision and, inside an autocast of its own, low precision, in either order."""

    def __init__(self, is_low_first: bool) -> None:
        super().__init__()
        self.high, self.low = fp8core.Linear(32, 32), fp8core.Linear(32, 32)
        self.is_low_first = is_low_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = inside(self.low, CURRENT)
        if self.is_low_first:
            made: torch.Tensor = self.high(low(x))
        else:
            made = low(self.high(x))
        return made


@BOTH
@pytest.mark.parametrize("is_low_first", [True, False])
def test_a_function_half_in_low_precision_is_repeated(
    is_low_first: bool, use_reentrant: bool
) -> None:
    own = Half(is_low_first)
    assert_same(grads(own, lambda x: kept(own, x, use_reentrant)), grads(own, own))


@BOTH
@pytest.mark.parametrize("is_low_first", [True, False])
def test_its_high_half_in_an_autocast_around_backward_is_refused(
    is_low_first: bool, use_reentrant: bool
) -> None:
    own = Half(is_low_first)
    y = kept(own, rows(), use_reentrant)
    with autocast(recipe=CURRENT), pytest.raises(UnsupportedError, match="another recipe"):
        y.sum().backward()


NESTED = pytest.mark.parametrize("outer", [True, False])


@BOTH
@NESTED
def test_nested_checkpoints_with_the_autocast_innermost_are_repeated(
    outer: bool, use_reentrant: bool
) -> None:
    layer = fp8core.Linear(32, 32)
    evaluate(layer, BLOCK)
    run = inside(layer, CURRENT)
    got = grads(layer, lambda x: kept(lambda x: kept(run, x, use_reentrant), x, outer))
    assert_same(got, grads(layer, run))


@BOTH
@NESTED
def test_nested_checkpoints_in_high_precision_are_repeated(
    outer: bool, use_reentrant: bool
) -> None:
    layer = fp8core.Linear(32, 32)
    evaluate(layer, CURRENT)
    got = grads(layer, lambda x: kept(lambda x: kept(layer, x, use_reentrant), x, outer))
    assert_same(got, grads(layer, layer))


@BOTH
@NESTED
def test_a_recipe_lost_between_nested_checkpoints_is_refused(
    outer: bool, use_reentrant: bool
) -> None:
    layer = fp8core.Linear(32, 32)

    def between(x: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=CURRENT):
            return kept(layer, x, use_reentrant)

    y = kept(between, rows(), outer)
    with pytest.raises(UnsupportedError, match="outside the autocast"):
        y.sum().backward()


# torch 2.11's generator of a nested checkpoint asserts when it is collected after an error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@BOTH
@NESTED
def test_a_recipe_lost_around_nested_checkpoints_is_refused(
    outer: bool, use_reentrant: bool
) -> None:
    layer = fp8core.Linear(32, 32)
    with autocast(recipe=CURRENT):
        y = kept(lambda x: kept(layer, x, use_reentrant), rows(), outer)
    with pytest.raises(UnsupportedError, match="outside the autocast"):
        y.sum().backward()


@BOTH
@NESTED
def test_a_recipe_lost_around_torchs_checkpoint_in_fp8cores_is_refused(
    outer: bool, use_reentrant: bool
) -> None:
    layer = fp8core.Linear(32, 32)
    with autocast(recipe=CURRENT):
        y = fp8core.checkpoint(lambda x: kept(layer, x, use_reentrant), rows(), use_reentrant=outer)
    with pytest.raises((UnsupportedError, fp8core.OperandError), match="recompute"):
        y.sum().backward()


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@BOTH
def test_a_recipe_of_a_thread_that_has_ended_is_not_lost(use_reentrant: bool) -> None:
    layer, made = fp8core.Linear(32, 32), []

    def forward() -> None:
        with autocast(recipe=CURRENT):
            made.append(kept(layer, rows(), use_reentrant))

    in_thread(forward)
    with pytest.raises(UnsupportedError, match="outside the autocast"):
        made[0].sum().backward()


@BOTH
def test_backward_in_another_thread_repeats_a_recipe_entered_inside(use_reentrant: bool) -> None:
    layer, x = fp8core.Linear(32, 32), rows()
    y = kept(inside(layer, CURRENT), x, use_reentrant).sum()
    in_thread(y.backward)
    assert x.grad is not None


@BOTH
def test_an_own_checkpoint_that_recomputes_in_a_hook_is_checked(use_reentrant: bool) -> None:
    """As Megatron's, which recomputes when the gradient of an output arrives."""
    layer, x = fp8core.Linear(32, 32), rows()
    with autocast(recipe=CURRENT):
        y = layer(x)

    def recompute(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            layer(x.detach().requires_grad_())

    y.register_hook(recompute)
    with pytest.raises(UnsupportedError, match="outside the autocast"):
        y.sum().backward()


def test_a_hook_may_evaluate_the_layer_in_another_recipe() -> None:
    layer = fp8core.Linear(32, 32)
    with autocast(recipe=CURRENT):
        y = layer(rows())
    y.register_hook(lambda grad: evaluate(layer, None))
    y.sum().backward()


@BOTH
def test_a_stateless_recipe_is_repeated_after_a_delayed_one(use_reentrant: bool) -> None:
    layer = ops.Sequential(ops.Linear(32, 32), ops.Dropout(0.5), ops.GELU())
    train(layer, DELAYED)
    run = inside(layer, CURRENT)
    assert_same(grads(layer, lambda x: kept(run, x, use_reentrant)), grads(layer, run))


@BOTH
def test_delayed_scales_that_have_moved_on_are_still_refused(use_reentrant: bool) -> None:
    layer = fp8core.Linear(32, 32)
    train(layer, CURRENT)
    y = kept(inside(layer, DELAYED), rows(), use_reentrant)
    with pytest.raises(UnsupportedError, match="delayed scaling, whose scales have moved on"):
        y.sum().backward()


@BOTH
def test_a_converted_model_repeats_after_an_evaluation_in_another_recipe(
    use_reentrant: bool,
) -> None:
    own = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    fp8core.convert(own, CURRENT)
    evaluate(own, BLOCK)
    evaluate(own, None)
    assert_same(grads(own, lambda x: kept(own, x, use_reentrant)), grads(own, own))


def test_what_is_forgotten_is_refused() -> None:
    layer, x = fp8core.Linear(32, 32), rows()
    with autocast(enabled=False):
        y = kept(layer, x, True)
    for _ in range(5000):
        with autocast(recipe=CURRENT):
            x * 1
    with pytest.raises(UnsupportedError, match="outside the autocast"):
        y.sum().backward()


@BOTH
def test_a_thread_that_only_recomputed_says_nothing_of_forwards(use_reentrant: bool) -> None:
    """As autograd's threads of accelerators, which enter what the function enters."""
    layer, x = fp8core.Linear(32, 32), rows()
    in_thread(kept(inside(layer, BLOCK), x, use_reentrant).sum().backward)
    with autocast(recipe=CURRENT):
        got = grads(layer, lambda x: kept(layer, x, use_reentrant))
        assert_same(got, grads(layer, layer))


@BOTH
def test_threads_that_ended_let_no_recompute_pass_for_another(use_reentrant: bool) -> None:
    layer, forward = fp8core.Linear(32, 32), []

    def train_elsewhere() -> None:
        with autocast(recipe=CURRENT):
            forward.append(kept(layer, rows(), use_reentrant))

    in_thread(train_elsewhere)
    with autocast(recipe=CURRENT):
        here = kept(layer, rows(), use_reentrant)
    for _ in range(600):
        in_thread(lambda: evaluate(layer, CURRENT))
    for y in (*forward, here):
        with pytest.raises(UnsupportedError, match="outside the autocast"):
            y.sum().backward()
