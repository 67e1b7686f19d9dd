"""``save_original_input``: the input is held as it came, and cast again in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8core
from fp8core import RecipeError, recipe
from tests.pairs import turns

CHOSEN: dict[str, Any] = {
    "current": "current",
    "mxfp8": "mxfp8",
    "block": "block",
    "rowwise": "rowwise",
    "nvfp4": recipe.NVFP4BlockScaling(disable_stochastic_rounding=True),
    "dequantized": recipe.MXFP8BlockScaling(backward_override="dequantized"),
    "high precision": None,
}


def grads(layer: Any, x: torch.Tensor, chosen: Any, *arguments: Any) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x, *arguments)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    return [y, x.grad, *[parameter.grad for parameter in layer.parameters()]]


@pytest.mark.parametrize(("name", "sizes"), turns(CHOSEN, [(64, 48, 32), (33, 50, 31)]), ids=str)
def test_results_are_the_same_bits(name: str, sizes: tuple[int, int, int]) -> None:
    rows, inputs, outputs = sizes
    torch.manual_seed(0)
    x = torch.randn(rows, inputs)
    layers = [fp8core.Linear(inputs, outputs, save_original_input=s) for s in (False, True)]
    layers[1].load_state_dict(layers[0].state_dict())
    for plain, again in zip(*(grads(one, x, CHOSEN[name]) for one in layers), strict=True):
        assert torch.equal(plain, again)


def test_groups_are_cast_again_as_groups() -> None:
    for name in CHOSEN:
        torch.manual_seed(0)
        x, splits = torch.randn(40, 48), [7, 0, 33]
        layers = [fp8core.GroupedLinear(3, 48, 32, save_original_input=s) for s in (False, True)]
        layers[1].load_state_dict(layers[0].state_dict())
        for plain, again in zip(
            *(grads(one, x, CHOSEN[name], splits) for one in layers), strict=True
        ):
            assert torch.equal(plain, again), name


def test_the_input_itself_is_held_and_no_copy_of_it() -> None:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    layer = fp8core.Linear(64, 32, bias=False, save_original_input=True)
    layer.weight.requires_grad_(True)
    x = torch.randn(4, 8, 64)
    with (
        fp8core.autocast(recipe="mxfp8"),
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
    ):
        layer(x)
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr()]


def test_a_write_to_the_input_is_noticed() -> None:
    layer, x = fp8core.Linear(64, 32, save_original_input=True), torch.randn(8, 64)
    with fp8core.autocast(recipe="mxfp8"):
        y = layer(x)
    x.zero_()
    with pytest.raises(fp8core.OperandError, match="was written in place since forward"):
        y.sum().backward()


def test_delayed_scaling_refuses_it() -> None:
    layer = fp8core.Linear(64, 32, save_original_input=True)
    with (
        fp8core.autocast(recipe="delayed"),
        pytest.raises(RecipeError, match="save_original_input=True with delayed scaling"),
    ):
        layer(torch.randn(8, 64))
    with fp8core.autocast(enabled=False, calibrating=True, recipe="delayed"):
        layer(torch.randn(8, 64))


def test_nan_is_counted_once() -> None:
    layer, x = fp8core.Linear(64, 32, save_original_input=True), torch.randn(32, 64)
    x[3, 5] = torch.nan
    with fp8core.autocast(recipe="mxfp8"):
        y = layer(x)
    counted = fp8core.found_inf(layer)
    y.sum().backward()
    other = fp8core.Linear(64, 32)
    with fp8core.autocast(recipe="mxfp8"):
        other(x)
    assert torch.equal(counted, fp8core.found_inf(other))
