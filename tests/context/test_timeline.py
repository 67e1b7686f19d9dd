"""torch's own checkpoint repeats the recipe of its forward, whatever ran before, or is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import fp8core
from fp8core import UnsupportedError, autocast, ops, recipe

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


def within(outer: bool) -> Callable[[Function, torch.Tensor, bool], torch.Tensor]:
    """A checkpoint in another one, which is reentrant if ``outer``."""
    return lambda run, x, use_reentrant: kept(lambda x: kept(run, x, use_reentrant), x, outer)


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


def mlp_after(earlier: str) -> nn.Module:
    layer = fp8core.LayerNormMLP(32, 64)
    EARLIER[earlier](layer)
    return layer


def linear_after(chosen: recipe.Recipe) -> nn.Module:
    layer = fp8core.Linear(32, 32)
    evaluate(layer, chosen)
    return layer


def dropping() -> nn.Module:
    layer = ops.Sequential(ops.Linear(32, 32), ops.Dropout(0.5), ops.GELU())
    train(layer, DELAYED)
    return layer


def converted() -> nn.Module:
    own = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    fp8core.convert(own, CURRENT)
    evaluate(own, BLOCK)
    evaluate(own, None)
    return own


# A module after what ran before, the recipe of an autocast in the function, and the checkpoint.
REPEATED: dict[str, tuple[Callable[[], nn.Module], recipe.Recipe | None, Any]] = {
    **{f"{name}, then a recipe": (partial(mlp_after, name), BLOCK, kept) for name in EARLIER},
    **{f"{name}, then none": (partial(mlp_after, name), None, kept) for name in EARLIER},
    "half, low first": (lambda: Half(True), None, kept),
    "half, high first": (lambda: Half(False), None, kept),
    "a stateless recipe after a delayed one": (dropping, CURRENT, kept),
    "a converted model": (converted, None, kept),
    **{
        f"{name}, in a checkpoint, reentrant {outer}": (make, chosen, within(outer))
        for name, make, chosen in (
            ("innermost autocast", lambda: linear_after(BLOCK), CURRENT),
            ("high precision", lambda: linear_after(CURRENT), None),
        )
        for outer in (True, False)
    },
}


@BOTH
@pytest.mark.parametrize("case", REPEATED)
def test_a_recompute_repeats_the_recipe_of_its_forward(case: str, use_reentrant: bool) -> None:
    make, chosen, keep = REPEATED[case]
    layer = make()
    run = layer if chosen is None else inside(layer, chosen)
    assert_same(grads(layer, lambda x: keep(run, x, use_reentrant)), grads(layer, run))


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


def in_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


@BOTH
def test_backward_in_another_thread_repeats_a_recipe_entered_inside(use_reentrant: bool) -> None:
    layer, x = fp8core.Linear(32, 32), rows()
    y = kept(inside(layer, CURRENT), x, use_reentrant).sum()
    in_thread(y.backward)
    assert x.grad is not None


def lost(layer: nn.Module, keep: Any, use_reentrant: bool) -> torch.Tensor:
    """Forward in an autocast that backward is outside of."""
    with autocast(recipe=CURRENT):
        made: torch.Tensor = keep(layer, rows(), use_reentrant)
    return made


def lost_between(layer: nn.Module, outer: bool, use_reentrant: bool) -> torch.Tensor:
    def between(x: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=CURRENT):
            return kept(layer, x, use_reentrant)

    return kept(between, rows(), outer)


def lost_before(later: str, layer: nn.Module, use_reentrant: bool) -> torch.Tensor:
    y = lost(layer, kept, use_reentrant)
    EARLIER[later](layer)
    evaluate(layer, None)
    return y


def lost_in_a_thread(layer: nn.Module, use_reentrant: bool) -> torch.Tensor:
    made: list[torch.Tensor] = []
    in_thread(lambda: made.append(lost(layer, kept, use_reentrant)))
    return made[0]


LOST: dict[str, Callable[[nn.Module, bool], torch.Tensor]] = {
    "after an evaluation": partial(lost_before, "evaluated"),
    "after a pass outside": partial(lost_before, "outside"),
    "in a thread that has ended": lost_in_a_thread,
    **{
        f"{place} nested checkpoints, reentrant {outer}": run
        for outer in (True, False)
        for place, run in (
            ("between", lambda layer, inner, outer=outer: lost_between(layer, outer, inner)),
            ("around", lambda layer, inner, outer=outer: lost(layer, within(outer), inner)),
        )
    },
}


# torch 2.11's generator of a nested checkpoint asserts when it is collected after an error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@BOTH
@pytest.mark.parametrize("case", LOST)
def test_a_lost_recipe_is_refused(case: str, use_reentrant: bool) -> None:
    y = LOST[case](fp8core.Linear(32, 32), use_reentrant)
    with pytest.raises(UnsupportedError, match=r"outside the autocast.*fp8core\.checkpoint"):
        y.sum().backward()


@BOTH
@pytest.mark.parametrize("outer", [True, False])
def test_a_recipe_lost_around_torchs_checkpoint_in_fp8cores_is_refused(
    outer: bool, use_reentrant: bool
) -> None:
    layer = fp8core.Linear(32, 32)
    with autocast(recipe=CURRENT):
        y = fp8core.checkpoint(lambda x: kept(layer, x, use_reentrant), rows(), use_reentrant=outer)
    with pytest.raises((UnsupportedError, fp8core.OperandError), match="recompute"):
        y.sum().backward()


@BOTH
@pytest.mark.parametrize("is_low_first", [True, False, None])
def test_another_recipe_around_backward_is_refused(
    is_low_first: bool | None, use_reentrant: bool
) -> None:
    """Of a layer, or of the half in high precision of a function."""
    if is_low_first is None:
        y = lost(linear_after(BLOCK), kept, use_reentrant)
    else:
        y = kept(Half(is_low_first), rows(), use_reentrant)
    around = BLOCK if is_low_first is None else CURRENT
    with autocast(recipe=around), pytest.raises(UnsupportedError, match="another recipe"):
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
def test_delayed_scales_that_have_moved_on_are_still_refused(use_reentrant: bool) -> None:
    layer = fp8core.Linear(32, 32)
    train(layer, CURRENT)
    y = kept(inside(layer, DELAYED), rows(), use_reentrant)
    with pytest.raises(UnsupportedError, match="delayed scaling, whose scales have moved on"):
        y.sum().backward()


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
    layer = fp8core.Linear(32, 32)
    forward = [
        run(layer, use_reentrant)
        for run in (lost_in_a_thread, lambda *given: lost(given[0], kept, given[1]))
    ]
    for _ in range(600):
        in_thread(lambda: evaluate(layer, CURRENT))
    for y in forward:
        with pytest.raises(UnsupportedError, match="outside the autocast"):
            y.sum().backward()
