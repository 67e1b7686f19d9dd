"""Transforms within a compiled function: the first to need torch's operators may be a graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.func import grad, jacfwd, jvp, vmap

import fp8core
from fp8core import autocast, recipe
from fp8core.chain import differentiable
from tests.chain.test_differentiable import K, layer_of, loss
from tests.pairs import turns

# torch itself: forward-mode differentiation loads decompositions that it still compiles by script.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")

Transform = Callable[[nn.Module, torch.Tensor], torch.Tensor]
TRANSFORMS: dict[str, Transform] = {
    "vmap": lambda layer, x: vmap(layer)(x),
    "jvp": lambda layer, x: jvp(layer, (x,), (x,))[1],
    "grad": lambda layer, x: grad(loss(layer))(x),
    "jacfwd of grad": lambda layer, x: jacfwd(grad(loss(layer)))(x),
}


@pytest.fixture(autouse=True)
def nothing_bound() -> Iterator[None]:
    """Another test may have run the same layer, in eager."""
    differentiable._bound.cache_clear()
    torch.compiler.reset()
    yield
    differentiable._bound.cache_clear()
    torch.compiler.reset()


@pytest.mark.parametrize(
    ("transform", "kind"), turns(TRANSFORMS, ["linear", "norm and linear", "mlp", "sequential"])
)
def test_a_compiled_transform_equals_that_of_a_copy_in_eager(transform: str, kind: str) -> None:
    layer, x = layer_of(kind, torch.float32).eval(), torch.randn(3, K)

    def run(x: torch.Tensor) -> torch.Tensor:
        return TRANSFORMS[transform](layer, x)

    got = torch.compile(run, backend="aot_eager")(x)
    after = run(x)
    differentiable._bound.cache_clear()
    want = run(x)
    torch.testing.assert_close(got, want)
    assert torch.equal(after, want)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_with_a_recipe_a_compiled_transform_is_refused_by_name(transform: str) -> None:
    layer, x = fp8core.Linear(32, 16, name="fc"), torch.randn(32, 32)

    def run(x: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=recipe.by_name("current")):
            return TRANSFORMS[transform](layer, x)

    with pytest.raises(Exception, match="is not offered in low precision"):
        torch.compile(run, backend="aot_eager")(x)
