"""``requantize_weights=True`` of weights that have operands already: those are used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import fp8core
from fp8core import Linear, autocast
from tests.chain.requantizing import (
    CURRENT,
    assert_same,
    counted_requantizations,
    forward,
    layer,
    recipes,
    step,
    values,
)

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_kept_operands_of_microbatches_are_not_made_again(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, again = recipes(name)

    def run(chosen: Any) -> list[torch.Tensor]:
        own, x, found = layer(), values(), []
        outputs = [forward(own, x, chosen, is_first_microbatch=at == 0) for at in range(3)]
        for y in outputs:
            y.square().sum().backward()
            found += [x.grad.clone(), own.weight.grad.clone()]  # type: ignore[union-attr]
        return [*found, *own.buffers()]

    with counted_requantizations(monkeypatch) as made:
        assert_same(run(again), run(held))
    assert made == [False] * 3


def test_kept_operands_of_frozen_weights_are_not_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own, x = layer(), values()
    want = step(layer(), recipes("current")[0])
    with counted_requantizations(monkeypatch) as made, fp8core.frozen_weights(own):
        assert_same(step(own, CURRENT, x), want)
    assert made == [False]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_frozen_weights_under_delayed_scaling_may_be_recomputed(use_reentrant: bool) -> None:
    """Forward records an amax, so it keeps nothing; nor does its recompute, which records none."""
    held, again = recipes("delayed")
    found = []
    for chosen in (held, again):
        own = layer()
        with fp8core.frozen_weights(own):
            for seed in range(3):
                x = values(seed)
                with autocast(recipe=chosen):
                    y = fp8core.checkpoint(own, x, use_reentrant=use_reentrant)
                y.square().sum().backward()
                found.append([y.detach(), x.grad, *own.buffers()])
    for mine, theirs in zip(found[3:], found[:3], strict=True):
        assert_same(mine, theirs)


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
def test_a_weight_stored_quantized_is_its_own_operand(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, again = recipes(name)
    found = []
    with counted_requantizations(monkeypatch) as made:
        for chosen in (held, again):
            torch.manual_seed(1)
            with fp8core.quantized_model_init(recipe=chosen):
                own = Linear(32, 64)
            found.append(step(own, chosen))
    assert_same(*found)
    assert made == [False]


def test_groups_may_mix_stored_and_plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    with counted_requantizations(monkeypatch) as made:
        for chosen in recipes("current"):
            torch.manual_seed(1)
            with fp8core.quantized_model_init(recipe=chosen):
                own = fp8core.GroupedLinear(2, 32, 64, bias=False)
            own.weight1 = nn.Parameter(own.weight1.dequantize())
            x = values()
            with autocast(recipe=chosen):
                y = own(x, [20, 12])
            y.square().sum().backward()
            found.append([y.detach(), x.grad, own.weight0.grad, own.weight1.grad])
    assert_same(*found)
    assert made == [False, True]


def test_a_weight_of_inference_mode_is_held_as_codes() -> None:
    """autograd does not save such a tensor."""
    own = layer(bias=False)
    with torch.inference_mode():
        own.weight = nn.Parameter(own.weight.detach().clone(), requires_grad=False)
    x = values()
    forward(own, x, CURRENT).sum().backward()
    want = values()
    forward(layer(bias=False), want, CURRENT).sum().backward()
    assert x.grad is not None
    assert want.grad is not None
    assert torch.equal(x.grad, want.grad)
