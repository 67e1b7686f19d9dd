"""``requantize_weights=True``: what a graph holds of weights, and for how long."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import fp8core
from fp8core import Linear, autocast
from fp8core.chain.linear.link import LinearLink
from fp8core.modules.bind import bind
from tests.chain.requantizing import (
    BF16,
    CURRENT,
    NAMES,
    assert_same,
    bytes_held,
    forward,
    layer,
    recipes,
    saved_tensors,
    values,
)
from tests.device import DEVICE
from tests.inspection import models
from tests.inspection.models import make
from tests.pairs import turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


@pytest.mark.parametrize(("kind", "name"), turns(models.LAYERS, NAMES))
def test_no_codes_of_a_weight_are_held(kind: str, name: str) -> None:
    held, again = recipes(name)
    sizes = []
    for chosen in (held, again):
        own = make(kind)
        torch.manual_seed(2)
        x = torch.randn(models.ROWS, 32, dtype=BF16, requires_grad=True)
        with saved_tensors() as saved, autocast(recipe=chosen):
            models.call(own, x)
        sizes.append(bytes_held(saved, own))
    weights = [one for one in make(kind).parameters() if one.dim() == 2]
    codes = sum(one.numel() for one in weights) // (2 if name == "nvfp4" else 1)
    assert sizes[0] - sizes[1] >= codes - 4 * len(weights)  # each has a copy of its delayed scale


def test_a_weight_that_dgrad_does_not_need_is_not_saved() -> None:
    own = layer()
    with saved_tensors() as saved:
        forward(own, values().detach(), CURRENT)
    assert [tuple(one.shape) for one in saved] == [(32, 32), (1, 1)]


def test_inference_saves_nothing() -> None:
    for guard in [torch.no_grad, torch.inference_mode]:
        own = layer()
        with saved_tensors() as saved, guard():
            y = forward(own, values(), CURRENT)
        assert saved == [], guard
        assert not y.requires_grad, guard


def test_under_torch_autocast_the_parameter_itself_is_saved() -> None:
    """It is quantized from its own dtype: nothing is converted."""
    found = []
    for chosen in recipes("current"):
        own, x = layer(), values()
        with saved_tensors() as saved, torch.autocast(DEVICE.type, BF16):
            y = forward(own, x, chosen)
        assert any(one is own.weight for one in saved) == chosen.requantize_weights
        y.sum().backward()
        found.append([y.detach(), x.grad, own.weight.grad])
    assert_same(*found)


def split() -> nn.Module:
    return Linear(32, 48, parameters_split=("query", "key"))


def normed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(Linear(32, 48))


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("of", [split, normed])
def test_a_weight_that_forward_computes_is_held_as_codes(
    of: Callable[[], nn.Module], is_trained: bool
) -> None:
    """It is larger than its codes, and nobody else would hold it."""
    found, sizes = [], []
    for chosen in recipes("current"):
        torch.manual_seed(1)
        own, x = of().requires_grad_(is_trained), values()
        with saved_tensors() as saved:
            y = forward(own, x, chosen)
        sizes.append(bytes_held(saved, own))
        y.sum().backward()
        found.append([y.detach(), x.grad])
    assert_same(*found)
    assert sizes[0] == sizes[1]


def test_backward_frees_the_codes_after_dgrad() -> None:
    own, x = layer(), values()
    with autocast(recipe=CURRENT):
        bound = bind(own, x.device, x.dtype)
    link = bound.linears[0]
    codes: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    def dgrad(dy: Any, weight: Any) -> Any:
        codes.append(weakref.ref(weight.data))
        return link.dgrad(dy, weight)

    def wgrad(*arguments: Any) -> Any:
        alive.append(codes[0]() is not None)
        return link.wgrad(*arguments)

    assert isinstance(link, LinearLink)
    watched = dataclasses.replace(link, dgrad=dgrad, wgrad=wgrad, _programs={})
    fp8core.chain.run.run((watched,), x, own.link_params()).sum().backward()
    assert alive == [False]


def test_a_retained_graph_gives_the_same_twice() -> None:
    own, x = layer(), values()
    y = forward(own, x, CURRENT).sum()
    first = torch.autograd.grad(y, (x, own.weight), retain_graph=True)
    assert_same(list(torch.autograd.grad(y, (x, own.weight))), list(first))


def test_saved_tensors_may_be_offloaded() -> None:
    found = []
    for hooks in (nullcontext(), torch.autograd.graph.save_on_cpu()):
        own, x = layer(), values()
        with hooks:
            y = forward(own, x, CURRENT)
        y.sum().backward()
        found.append([y.detach(), x.grad, own.weight.grad])
    assert_same(*found)
