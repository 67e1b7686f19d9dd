"""Microbatches: their gradients and amaxes, and the flag that tells the first of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import fp8core
from fp8core import LayerNormMLP, Linear, autocast, recipe
from tests.pairs import pairs, turns

RECIPES = recipe.names()


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


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: Linear(32, 32),
    "LayerNormLinear": lambda: fp8core.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: LayerNormMLP(32, 64),
    "GroupedLinear": lambda: fp8core.GroupedLinear(2, 32, 32),
}


@pytest.mark.parametrize(
    ("order", "kind", "name", "use_reentrant"), pairs([1, -1], LAYERS, RECIPES, [True, False])
)
def test_each_microbatch_may_have_its_own_autocast_and_recompute(
    order: int, kind: str, name: str, use_reentrant: bool
) -> None:
    """Delayed scales move on between them; the kept weight is that of the first, both ways."""

    def grads(checkpoints: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        own, found = LAYERS[kind](), []
        splits = ([20, 12],) if kind == "GroupedLinear" else ()
        x = torch.randn(32, 32, requires_grad=True)
        is_first = True

        def run(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = own(x, *splits, is_first_microbatch=is_first)
            return y

        for _ in range(3):
            outputs = []
            for flag in (True, False, False):
                is_first = flag
                with autocast(recipe=recipe.by_name(name)):
                    if checkpoints:
                        y = fp8core.checkpoint(run, x * 3, use_reentrant=use_reentrant)
                    else:
                        y = run(x * 3)
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


@pytest.mark.parametrize(
    ("name", "use_reentrant"), [*turns(RECIPES, [True, False]), ("delayed", False)]
)
def test_the_flag_may_flip_between_forward_and_recompute(name: str, use_reentrant: bool) -> None:
    """Megatron keeps the flag on the module, and has lowered it when backward recomputes."""

    def grads(checkpoints: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        own = LayerNormMLP(32, 64)
        x = torch.randn(32, 32, requires_grad=True)
        is_first = True

        def run(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = own(x, is_first_microbatch=is_first)
            return y

        for _ in range(2):
            with autocast(recipe=recipe.by_name(name)):
                is_first = True
                if checkpoints:
                    first = fp8core.checkpoint(run, x, use_reentrant=use_reentrant)
                else:
                    first = run(x)
                is_first = False
                if checkpoints:
                    second = fp8core.checkpoint(run, x, use_reentrant=use_reentrant)
                else:
                    second = run(x)
            first.square().sum().backward()
            second.sum().backward()
        return [x.grad, *(own.grad for own in own.parameters())]  # type: ignore[list-item]  # all have one

    torch.manual_seed(3)
    want = grads(False)
    torch.manual_seed(3)
    for got, one in zip(grads(True), want, strict=True):
        assert torch.equal(got, one)
