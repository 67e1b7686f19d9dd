"""What tests of layers share: recipes by name, and a step of training to compare with another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fp8core import Linear, autocast, recipe

RECIPES: dict[str, recipe.Recipe | None] = {
    "none": None,
    **{name: recipe.by_name(name) for name in recipe.names()},
}
"""Every recipe by its name; ``none`` is high precision."""
DELAYED = recipe.DelayedScaling(amax_history_len=4)


def active(chosen: str | recipe.Recipe | None) -> autocast:
    """Return the autocast of a recipe, or of its name; of high precision for None."""
    found = RECIPES[chosen] if isinstance(chosen, str) else chosen
    return autocast(enabled=found is not None, recipe=found)


def step(
    layer: torch.nn.Module,
    x: torch.Tensor,
    chosen: str | recipe.Recipe | None,
    *arguments: Any,
    **keywords: Any,
) -> list[torch.Tensor | None]:
    """Return the first result and the gradients of ``x`` and of the parameters of one step.

    The numbers that layers draw, and the gradient of the result, are the same in each call.
    """
    layer.zero_grad()
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(11)
    with active(chosen):
        y = layer(x, *arguments, **keywords)
    y = y[0] if isinstance(y, tuple) else y
    torch.manual_seed(12)
    y.backward(torch.randn(y.shape).to(y))
    return [y.detach(), x.grad, *(own.grad for own in layer.parameters())]


def assert_same(got: Iterable[torch.Tensor | None], want: Iterable[torch.Tensor | None]) -> None:
    """Assert that tensors are equal bit for bit, and None where the others are."""
    for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
        assert (mine is None) == (theirs is None), number
        if mine is not None and theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)


# --- layers with delayed state ---


def train(layer: torch.nn.Module, x: torch.Tensor, chosen: recipe.Recipe = DELAYED) -> torch.Tensor:
    """Take a step down the gradients, and return the layer's result of before."""
    layer.zero_grad()
    with autocast(recipe=chosen):
        y: torch.Tensor = layer(x)
    y.square().sum().backward()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.sub_(parameter.grad, alpha=1e-3)
    return y.detach()


def trained(steps: int = 2, chosen: recipe.Recipe = DELAYED, **arguments: Any) -> Linear:
    """Return a linear of 32 and 16 features after some steps."""
    layer = Linear(32, 16, **arguments)
    for _ in range(steps):
        train(layer, torch.randn(4, 32, dtype=layer.weight.dtype), chosen)
    return layer


def snapshot(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the state."""
    return {key: value.clone() for key, value in layer.state_dict().items()}
