"""A weight stored in parts (``parameters_split``): what it costs in memory beside a whole one."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from tests.chain.test_requantized import bytes_held, saved_tensors
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


def forward(layer: Any, name: str | None) -> torch.Tensor:
    chosen = None if name is None else recipe.by_name(name)
    x = torch.randn(64, HIDDEN, dtype=BF16, requires_grad=True)
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        y: torch.Tensor = layer(x)
    return y


@pytest.mark.parametrize(("kind", "name"), turns(KINDS, [None, *NAMES]))
def test_gradients_of_the_parts_are_views_of_one_result(kind: Any, name: str | None) -> None:
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
    sizes = []
    for split in (None, PARTS):
        layer = make(kind, split)
        with saved_tensors() as saved:
            forward(layer, name)
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
