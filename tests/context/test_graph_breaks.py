"""What torch.compile cannot take into a graph leaves the layers around it what they were asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

import fp8core
from fp8core import autocast, recipe, use_backend
from fp8core.context import timeline

CURRENT = recipe.by_name("current")
Run = Callable[[fp8core.Linear, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def inside(layer: fp8core.Linear, x: torch.Tensor) -> torch.Tensor:
    with autocast(recipe=CURRENT):
        torch._dynamo.graph_break()
        made: torch.Tensor = layer(x)
    return made


def before(layer: fp8core.Linear, x: torch.Tensor) -> torch.Tensor:
    context = autocast(recipe=CURRENT)
    torch._dynamo.graph_break()
    with context:
        made: torch.Tensor = layer(x)
    return made


def between(layer: fp8core.Linear, x: torch.Tensor) -> torch.Tensor:
    with autocast(recipe=CURRENT):
        layer(x)
        torch._dynamo.graph_break()
        made: torch.Tensor = layer(x)
    return made


def nested(layer: fp8core.Linear, x: torch.Tensor) -> torch.Tensor:
    with autocast(enabled=False), use_backend("reference"):
        torch._dynamo.graph_break()
        with autocast(recipe=CURRENT):
            torch._dynamo.graph_break()
            made: torch.Tensor = layer(x)
    return made


@autocast(recipe=CURRENT)
def decorated(layer: fp8core.Linear, x: torch.Tensor) -> torch.Tensor:
    torch._dynamo.graph_break()
    made: torch.Tensor = layer(x)
    return made


@pytest.mark.parametrize("run", [inside, before, between, nested, decorated])
def test_an_autocast_around_a_graph_break_holds(run: Run) -> None:
    layer, x = fp8core.Linear(32, 16), torch.randn(32, 32)
    outside = layer(x)
    with autocast(recipe=CURRENT):
        want = layer(x)
    compiled = torch.compile(run, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(layer, x), want)
    assert torch.equal(layer(x), outside)
    assert timeline._thread.history is None or timeline._thread.history.entered is None
