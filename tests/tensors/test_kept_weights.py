"""``is_first_microbatch=False`` takes the kept weight, or says that it is another by now."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

import fp8core
from fp8core import Linear, OperandError, autocast, recipe

CURRENT = recipe.by_name("current")


def values(seed: int = 5) -> torch.Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))


def split() -> nn.Module:
    return Linear(32, 32, parameters_split=("query", "key"))


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(Linear(32, 32))


def run(own: nn.Module, first: bool | None) -> torch.Tensor:
    with autocast(recipe=CURRENT):
        y: torch.Tensor = own(values(), is_first_microbatch=first)
    return y


@pytest.mark.parametrize("make", [split, normed, lambda: Linear(32, 32)])
def test_a_step_before_a_later_microbatch_is_refused(make: Any) -> None:
    own = make()
    optimizer = torch.optim.SGD(own.parameters(), lr=1.0)
    run(own, True).sum().backward()
    run(own, False)
    optimizer.step()
    with pytest.raises(OperandError, match="was written"):
        run(own, False)
    run(own, True)
    run(own, False)


def test_another_parameter_in_its_place_is_refused() -> None:
    own = Linear(32, 32)
    run(own, True)
    other = nn.Parameter(values())
    for _ in range(own.weight._version):  # the counter tells nothing
        other.detach().mul_(1)
    own.weight = other
    with pytest.raises(OperandError, match="was written"):
        run(own, False)


def test_a_later_microbatch_with_other_weights_is_refused() -> None:
    own = Linear(32, 32)
    with autocast(recipe=CURRENT):
        functional_call(own, {"weight": values(1)}, (values(), True))
        with pytest.raises(OperandError, match="was written"):
            functional_call(own, {"weight": values(2)}, (values(), False))


def test_a_recompute_takes_the_weight_of_its_forward() -> None:
    """Two steps in flight: the second keeps the weight at a scale that has moved meanwhile."""
    chosen = recipe.DelayedScaling(amax_history_len=2)

    def grads(checkpoints: bool, flips: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        own, flag, outputs = Linear(32, 32), True, []
        xs = [values(at).requires_grad_() for at in range(4)]

        def inside(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = own(x, is_first_microbatch=flag)
            return y

        for at, x in enumerate(xs):
            flag = at % 2 == 0
            with autocast(recipe=chosen):
                outputs.append(fp8core.checkpoint(inside, x) if checkpoints else inside(x))
        for at, y in enumerate(outputs):
            flag = at % 2 == 0 and not flips
            y.square().sum().backward()
        with autocast(recipe=chosen):
            last = own(values(), is_first_microbatch=False)
        return [last.detach(), *[x.grad for x in xs], own.weight.grad]  # type: ignore[list-item]  # all have one

    want = grads(False, False)
    for flips in (False, True):
        assert all(map(torch.equal, grads(True, flips), want))
