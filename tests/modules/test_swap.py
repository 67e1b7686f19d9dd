"""``swap_tensors``, and conversions that use it: parameters stay the same objects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import fp8core
from fp8core import autocast, ops, quantized_model_init, recipe
from tests.pairs import pairs


def converted() -> nn.Module:
    own = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32))
    fp8core.convert(own)
    return own


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: fp8core.Linear(32, 32),
    "parts": lambda: fp8core.Linear(32, 32, parameters_split=("query", "key")),
    "norm": lambda: fp8core.RMSNorm(32),
    "layernorm_linear": lambda: fp8core.LayerNormLinear(32, 32),
    "mlp": lambda: fp8core.LayerNormMLP(32, 64),
    "sequential": lambda: ops.Sequential(ops.Linear(32, 32), ops.Bias(32), ops.GELU()),
    "converted": converted,
}
NOT_STORED = {"parts", "norm", "converted"}
STORED = [None, "delayed", "current", "mxfp8"]
MOMENTS = ["fresh", "after forward", "after backward", "after an evaluation"]


@pytest.fixture(autouse=True)
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def run(layer: nn.Module, name: str | None) -> torch.Tensor:
    dtype = next(layer.parameters()).dtype
    with autocast(enabled=name is not None, recipe=name or "current"):
        y: torch.Tensor = layer(torch.randn(32, 32, dtype=dtype, requires_grad=True))
    return y


def layer_at(moment: str, kind: str, stored: str | None, used: str | None) -> nn.Module:
    with quantized_model_init(stored is not None, recipe=stored and recipe.by_name(stored)):
        layer = LAYERS[kind]()
    if moment == "after an evaluation":
        with torch.no_grad():
            run(layer, used)
    elif moment != "fresh":
        y = run(layer, used)
        if moment == "after backward":
            y.sum().backward()
    return layer


SWAPS: dict[str, Callable[[nn.Module], object]] = {
    "half": lambda layer: layer.half(),
    "to": lambda layer: layer.to(torch.bfloat16),
    "load": lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict())),
    "assign": lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict()), assign=True),
    "swap_tensors": lambda layer: [
        torch.utils.swap_tensors(own, nn.Parameter(own.detach().clone()))
        for own in layer.parameters()
    ],
}


@pytest.mark.parametrize(
    ("kind", "stored", "moment", "swap"),
    pairs(
        *map(list, (LAYERS, STORED, MOMENTS, SWAPS)),
        keep=lambda kind, stored, *_: not (stored and kind in NOT_STORED),
    ),
)
def test_parameters_are_swapped_and_train_on(
    kind: str, stored: str | None, moment: str, swap: str
) -> None:
    for used in (None, stored or "current"):
        layer = layer_at(moment, kind, stored, used)
        before = list(layer.parameters())
        SWAPS[swap](layer)
        assert all(map(lambda a, b: a is b, before, layer.parameters()))
        run(layer, used).sum().backward()
        assert all(own.grad is not None for own in layer.parameters())


@pytest.mark.parametrize("swap", SWAPS)
def test_delayed_state_survives(swap: str) -> None:
    layer = layer_at("after backward", "mlp", None, "delayed")
    before = {name: own.clone() for name, own in layer.named_buffers()}
    SWAPS[swap](layer)
    assert all(torch.equal(own, before[name]) for name, own in layer.named_buffers())
    assert set(before) == dict(layer.named_buffers()).keys()


def test_a_swapped_weight_is_what_the_next_forward_computes_with() -> None:
    layer, other, x = (*(fp8core.Linear(32, 32) for _ in "ab"), torch.randn(32, 32))
    with torch.no_grad(), autocast(recipe="current"):
        layer(x)
        want = other(x)
        torch.utils.swap_tensors(layer.weight, other.weight)
        assert torch.equal(layer(x), want)
