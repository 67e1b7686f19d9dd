"""What a layer returns may be written in place, as torch's layers allow it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

import fp8core
from fp8core import recipe
from tests.pairs import turns

HIDDEN, FFN = 32, 48
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: fp8core.Linear(HIDDEN, FFN),
    "norm": lambda: fp8core.RMSNorm(HIDDEN),
    "norm_linear": lambda: fp8core.LayerNormLinear(HIDDEN, FFN),
    "mlp": lambda: fp8core.LayerNormMLP(HIDDEN, FFN),
    "attention": lambda: fp8core.MultiheadAttention(HIDDEN, 2, attention_dropout=0.0),
    "transformer": lambda: fp8core.TransformerLayer(
        HIDDEN, FFN, 2, hidden_dropout=0.0, attention_dropout=0.0
    ),
    "sequential": lambda: fp8core.ops.Sequential(
        fp8core.ops.Linear(HIDDEN, FFN), fp8core.ops.GELU()
    ),
}
RECIPES = {"current": recipe.Float8CurrentScaling(), "none": None}


def low_precision(name: str) -> AbstractContextManager[object]:
    chosen = RECIPES[name]
    return nullcontext() if chosen is None else fp8core.autocast(recipe=chosen)


@pytest.mark.parametrize(("kind", "name"), turns(LAYERS, RECIPES))
def test_a_result_that_is_written_has_the_gradients_of_a_copy(kind: str, name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]()
    gradients = []
    for is_written in (False, True):
        x = torch.linspace(-1, 1, 16 * HIDDEN).reshape(8, 2, HIDDEN).requires_grad_()
        with low_precision(name):
            y = layer(x)
        result = torch.relu_(y) if is_written else torch.relu(y)
        gradients.append(torch.autograd.grad(result.square().sum(), [x, *layer.parameters()]))
    assert all(map(torch.equal, *gradients))


def test_compiled_code_writes_a_result() -> None:
    layer = fp8core.Linear(HIDDEN, FFN)
    x = torch.randn(8, 2, HIDDEN)
    with low_precision("current"):
        written = torch.compile(lambda x: torch.relu_(layer(x)), backend="eager", fullgraph=True)(x)
        assert torch.equal(written, torch.relu(layer(x)))


def test_a_write_to_what_backward_reads_is_noticed() -> None:
    layer = fp8core.LayerNormLinear(HIDDEN, FFN, return_layernorm_output=True)
    y, normalized = layer(torch.randn(8, 2, HIDDEN, requires_grad=True))
    normalized.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
