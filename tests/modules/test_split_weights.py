"""A weight stored in parts (``parameters_split``): its bits and its memory are a whole one's."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch

import fp8core
from fp8core import Linear, recipe
from tests.chain.test_requantized import bytes_held, saved_tensors
from tests.device import DEVICE
from tests.modules.layers import RECIPES, active, assert_same, step
from tests.pairs import turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


BF16 = torch.bfloat16
HIDDEN, PARTS = 256, {"query": 256, "key": 128, "value": 128}
ROWS = sum(PARTS.values())
KINDS = (fp8core.Linear, fp8core.LayerNormLinear)
NAMES = recipe.names()


def make(kind: Any, split: dict[str, int] | None = None) -> Any:
    torch.manual_seed(0)
    return kind(HIDDEN, ROWS, params_dtype=BF16, parameters_split=split)


def forward(layer: Any, name: Any) -> torch.Tensor:
    x = torch.randn(64, HIDDEN, dtype=BF16, requires_grad=True)
    with active(name):
        y: torch.Tensor = layer(x)
    return y


@pytest.mark.parametrize(("kind", "name"), turns(KINDS, RECIPES))
def test_gradients_of_the_parts_are_views_of_one_result(kind: Any, name: str) -> None:
    layer = make(kind, PARTS)
    forward(layer, name).sum().backward()
    for which, size in (("weight", ROWS * HIDDEN), ("bias", ROWS)):
        grads = [layer.get_parameter(f"{part}_{which}").grad for part in PARTS]
        storages = {grad.untyped_storage().data_ptr() for grad in grads}
        assert len(storages) == 1
        assert grads[0].untyped_storage().nbytes() == 2 * size
        assert all(grad.is_contiguous() for grad in grads)


@pytest.mark.parametrize(("kind", "name"), turns(KINDS, NAMES))
def test_under_a_recipe_it_holds_what_a_whole_weight_holds(kind: Any, name: str) -> None:
    sizes, chosen = [], dataclasses.replace(recipe.by_name(name), holding="fastest")
    for split in (None, PARTS):
        layer = make(kind, split)
        with saved_tensors() as saved:
            forward(layer, chosen)
        sizes.append(bytes_held(saved, layer))
    assert sizes[0] == sizes[1] > ROWS * HIDDEN // 2  # codes of the weight, of half a byte or more


@pytest.mark.parametrize(("kind", "name"), turns(KINDS, NAMES))
def test_under_a_recipe_the_concatenation_ends_with_forward(
    kind: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined: list[weakref.ref[torch.Tensor]] = []
    cat = torch.cat

    def watched(*arguments: Any, **options: Any) -> torch.Tensor:
        result = cat(*arguments, **options)
        if result.shape == (ROWS, HIDDEN) and result.dtype == BF16:
            joined.append(weakref.ref(result))
        return result

    monkeypatch.setattr(torch, "cat", watched)
    layer = make(kind, PARTS)
    outputs = [forward(layer, name) for _ in range(3)]  # the third repeats the second
    assert len(joined) == len(outputs)
    assert [one() for one in joined] == [None] * len(joined)


def test_parameters_split_names_parts_of_equal_size() -> None:
    layer = Linear(6, 9, parameters_split=("query", "key_", "value"))
    assert {name: tuple(p.shape) for name, p in layer.named_parameters()} == {
        **{f"{part}_weight": (3, 6) for part in ("query", "key", "value")},
        **{f"{part}_bias": (3,) for part in ("query", "key", "value")},
    }


def test_parameters_split_takes_sizes() -> None:
    layer = Linear(6, 8, bias=False, parameters_split={"query": 6, "kv": 2})
    assert [tuple(p.shape) for p in layer.parameters()] == [(6, 6), (2, 6)]


def test_parts_have_storages_of_their_own() -> None:
    """Accelerate's savers drop all but one of the tensors that share one."""
    state = Linear(6, 9, parameters_split=("query", "key", "value"), device=DEVICE).state_dict()
    assert len({one.untyped_storage().data_ptr() for one in state.values()}) == len(state) == 6


@pytest.mark.parametrize("name", RECIPES)
def test_a_split_layer_has_the_bits_of_a_whole_one(name: str) -> None:
    whole, split = Linear(32, 24), Linear(32, 24, parameters_split={"q": 8, "kv": 16})
    torch.nn.init.normal_(whole.bias)
    with torch.no_grad():
        for kind in ("weight", "bias"):
            q, kv = getattr(whole, kind).split([8, 16])
            getattr(split, f"q_{kind}").copy_(q)
            getattr(split, f"kv_{kind}").copy_(kv)
    x = torch.randn(4, 32)
    assert_same(*(step(layer, x, name)[:2] for layer in (whole, split)))
    for kind in ("weight", "bias"):
        parts = [getattr(split, f"{part}_{kind}").grad for part in ("q", "kv")]
        assert torch.equal(torch.cat(parts), getattr(whole, kind).grad)


def test_a_frozen_part_of_a_split_gets_no_gradient() -> None:
    layer = Linear(32, 16, parameters_split=("q", "k"))
    layer.q_weight.requires_grad_(False)
    step(layer, torch.randn(4, 32), "current")
    assert layer.q_weight.grad is None
    assert layer.k_weight.grad is not None
