"""What a layer creates in its first call outlives it, also if that call is under a transform."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.dispatch import table
from tests.device import let_go_of_backward_passes
from tests.pairs import pairs

HIDDEN, FFN = 32, 48
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: fp8core.Linear(HIDDEN, FFN),
    "mlp": lambda: fp8core.LayerNormMLP(HIDDEN, FFN),
    "norm": lambda: fp8core.RMSNorm(HIDDEN),
}
TRANSFORMS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "grad": lambda layer, x: torch.func.grad(lambda x: layer(x).square().sum())(x),
    "vmap": lambda layer, x: torch.vmap(layer)(torch.stack((x, x))),
    "jvp": lambda layer, x: torch.func.jvp(layer, (x,), (x,)),
}


@pytest.fixture(autouse=True, scope="module")
def earlier_objects() -> Iterator[None]:
    """Spare the collector what tests before these have left: it is visited many times."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def wrapped() -> list[torch.Tensor]:
    """Return the tensors of transforms that are still alive."""
    let_go_of_backward_passes()
    gc.collect()
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    return [one for one in tensors if torch._C._functorch.is_functorch_wrapped_tensor(one)]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    ("kind", "transform", "name"), pairs(LAYERS, TRANSFORMS, ["delayed", "current", "mxfp8", None])
)
def test_a_first_call_under_a_transform_leaves_tensors_with_memory(
    kind: str, transform: str, name: str | None
) -> None:
    table.forget()  # operations too are bound by the first call
    before = wrapped()
    layer = LAYERS[kind]()
    chosen = None if name is None else recipe.by_name(name)
    x = torch.linspace(-1, 1, 16 * HIDDEN).reshape(16, HIDDEN)
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        if chosen is None or kind == "norm":
            TRANSFORMS[transform](layer, x)
        else:
            with pytest.raises(fp8core.UnsupportedError, match=r"torch\.func"):
                TRANSFORMS[transform](layer, x)
        assert len(wrapped()) == len(before)
        assert all(one.data_ptr() for one in layer.buffers() if one.numel())
        layer(torch.randn(16, HIDDEN, requires_grad=True)).sum().backward()
