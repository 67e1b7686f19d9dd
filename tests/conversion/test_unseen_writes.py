"""A converted layer computes with its weight as it is, however that was written.

Code that trains torch's layers may write through ``.data``, a detached tensor or numpy, none of
which changes a parameter's version: the twin is written in a way that does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import nn

import fp8core
from fp8core import recipe
from tests.pairs import turns

Write = Callable[[nn.Parameter, torch.Tensor], object]
WRITES: dict[str, Write] = {
    "data -=": lambda own, step: own.data.sub_(step),
    "data.copy_": lambda own, step: own.data.copy_(own.data - step),
    "detach().numpy()": lambda own, step: own.detach().numpy().__isub__(step.numpy()),
}


def seen(own: nn.Parameter, step: torch.Tensor) -> None:
    with torch.no_grad():
        own.sub_(step)


def made(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    own = nn.Sequential(nn.Linear(48, 70), nn.GELU(), nn.Linear(70, 32))
    fp8core.convert(own, name)
    return own


def run(own: nn.Module, write: Write, *, steps: int = 3) -> list[torch.Tensor]:
    """Return the outputs before and after each write, in training and in evaluation."""
    torch.manual_seed(1)
    x, found = torch.randn(32, 48), []
    for _ in range(steps):
        own.zero_grad()
        y = own(x)
        y.square().mean().backward()
        for parameter in own.parameters():
            write(cast(nn.Parameter, parameter), cast(torch.Tensor, parameter.grad))
        with torch.no_grad():
            before = own(x)
            for parameter in own.parameters():
                write(cast(nn.Parameter, parameter), torch.ones_like(parameter))
            found += [y.detach(), before, own(x)]
    return found


@pytest.mark.parametrize(("name", "write"), turns(recipe.names(), WRITES))
def test_a_write_that_torch_does_not_see_counts(name: str, write: str) -> None:
    got, want = run(made(name), WRITES[write]), run(made(name), seen)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_microbatches_in_one_autocast_see_a_write_between_them() -> None:
    own, x = made("delayed"), torch.randn(32, 48)
    with fp8core.autocast(recipe=recipe.DelayedScaling()):
        before = own(x)
        own[0].weight.data.zero_()
        own[0].bias.data.zero_()
        after = own(x)
    assert not torch.equal(before, after)
    assert torch.equal(after, own[2].bias.expand_as(after))


def test_fp8core_own_layers_in_a_converted_model_see_it_too() -> None:
    own, x = nn.Sequential(fp8core.Linear(32, 32)), torch.randn(32, 32)
    fp8core.convert(own, "mxfp8")
    with torch.no_grad():
        own(x)
        own[0].weight.data.zero_()
        assert torch.equal(own(x), own[0].bias.expand(32, 32))
