"""``delay_wgrad_compute``: backward leaves weight gradients, ``backward_dw()`` computes them.

tests/test_ways.py compares the bits of the gradients with those of backward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, UnsupportedError
from fp8core.torch_ops.private import PASSES_DATACLASSES
from tests.pairs import turns

LAYERS: dict[str, Callable[..., Any]] = {
    "linear": lambda **more: fp8core.Linear(48, 32, **more),
    "parts": lambda **more: fp8core.Linear(48, 32, parameters_split=("a", "b"), **more),
    "mlp": lambda **more: fp8core.LayerNormMLP(48, 64, activation="swiglu", **more),
}


def pair(name: str, **more: Any) -> tuple[Any, Any, torch.Tensor]:
    torch.manual_seed(0)
    plain, late = LAYERS[name](), LAYERS[name](delay_wgrad_compute=True, **more)
    late.load_state_dict(plain.state_dict())
    return plain, late, torch.randn(32, 48)


def backward(layer: Any, x: torch.Tensor, chosen: Any) -> torch.Tensor:
    x = x.clone().requires_grad_()
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    assert x.grad is not None
    return x.grad


def weights(layer: Any) -> dict[str, torch.Tensor]:
    return {name: p for name, p in layer.named_parameters() if p.dim() > 1}


@pytest.mark.parametrize(
    ("name", "chosen"), turns(["parts", "linear"], [None, "current", "mxfp8", "delayed"])
)
def test_gradients_are_those_of_backward_and_come_later(name: str, chosen: str | None) -> None:
    plain, late, x = pair(name)
    assert torch.equal(*(backward(one, x, chosen) for one in (plain, late)))
    others = {n: p.grad for n, p in late.named_parameters() if p.dim() == 1}
    for n, parameter in plain.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(others[n], parameter.grad)
    assert all(parameter.grad is None for parameter in weights(late).values())
    late.backward_dw()
    for n, parameter in weights(plain).items():
        assert torch.equal(weights(late)[n].grad, parameter.grad), n


def test_passes_are_computed_in_the_order_of_their_backward() -> None:
    plain, late, x = pair("linear")
    batches = [x, 2 * x, 3 * x]
    expected = []
    for batch in batches:
        plain.zero_grad()
        backward(plain, batch, "current")
        expected.append(plain.weight.grad.clone())
        backward(late, batch, "current")
    for grad in expected:
        late.weight.grad = None
        late.backward_dw()
        assert torch.equal(late.weight.grad, grad)


def test_a_graph_that_is_kept_leaves_gradients_each_time() -> None:
    _, late, x = pair("linear")
    y = late(x).sum()
    y.backward(retain_graph=True)
    y.backward()
    late.backward_dw()
    once = late.weight.grad.clone()
    late.backward_dw()
    assert torch.equal(late.weight.grad, 2 * once)


def test_hooks_of_the_parameters_run_in_backward_dw() -> None:
    _, late, x = pair("linear")
    seen: list[str] = []
    late.weight.register_post_accumulate_grad_hook(lambda p: seen.append("weight"))
    late.register_wgrad_accumulation_and_reduce_hooks(
        wgrad_accumulation_and_reduce_hook=lambda: seen.append("layer")
    )
    backward(late, x, "current")
    assert seen == []
    late.backward_dw()
    assert seen == ["weight", "layer"]


def test_a_parametrized_weight_hands_its_gradient_on() -> None:
    plain, late, x = pair("linear")
    for one in (plain, late):
        torch.nn.utils.parametrizations.weight_norm(one, "weight")
        backward(one, x, None)
    late.backward_dw()
    for name in ("original0", "original1"):
        mine, theirs = (getattr(one.parametrizations.weight, name).grad for one in (late, plain))
        torch.testing.assert_close(mine, theirs)


def test_a_recompute_leaves_them_once() -> None:
    plain, late, x = pair("mlp")
    backward(plain, x, "delayed")
    backward(lambda t: fp8core.checkpoint(late, t, use_reentrant=False), x, "delayed")
    late.backward_dw()
    assert torch.equal(late.fc1_weight.grad, plain.fc1_weight.grad)
    with pytest.raises(OperandError, match="without a backward pass"):
        late.backward_dw()


def test_without_a_backward_it_is_refused() -> None:
    _, late, _ = pair("linear")
    assert late.need_backward_dw()
    with pytest.raises(OperandError, match=r"backward_dw\(\) without a backward pass"):
        late.backward_dw()


def test_layers_without_it_and_frozen_ones_do_nothing() -> None:
    plain, late, x = pair("linear")
    assert not plain.need_backward_dw()
    plain.backward_dw()
    late.weight.requires_grad_(False)
    backward(late, x, "current")
    late.backward_dw()
    assert late.weight.grad is None


def test_a_missing_main_grad_can_be_given_and_the_call_repeated() -> None:
    _, late, x = pair("mlp", fuse_wgrad_accumulation=True)
    late.fc2_weight.main_grad = torch.zeros_like(late.fc2_weight)
    backward(late, x, "current")
    with pytest.raises(OperandError, match="main_grad=None"):
        late.backward_dw()
    after = late.fc2_weight.main_grad.clone()
    late.fc1_weight.main_grad = torch.zeros_like(late.fc1_weight)
    late.backward_dw()
    assert torch.equal(late.fc2_weight.main_grad, after)
    assert late.fc1_weight.main_grad.any()


def test_parameters_replaced_since_forward_are_refused() -> None:
    _, late, x = pair("linear")
    backward(late, x, "current")
    late.weight = torch.nn.Parameter(late.weight.detach().clone())
    with pytest.raises(UnsupportedError, match="parameters of forward were replaced"):
        late.backward_dw()


def test_a_copy_has_none_of_them() -> None:
    _, late, x = pair("linear")
    backward(late, x, "current")
    copied = copy.deepcopy(late)
    assert copied.need_backward_dw()
    with pytest.raises(OperandError, match="without a backward pass"):
        copied.backward_dw()
    late.backward_dw()


def test_a_second_derivative_is_refused() -> None:
    _, late, x = pair("linear")
    x.requires_grad_()
    (grad,) = torch.autograd.grad(late(x).sum(), x, create_graph=True)
    with pytest.raises(UnsupportedError, match="with delay_wgrad_compute=True"):
        grad.sum().backward()


@pytest.mark.skipif(not PASSES_DATACLASSES, reason="an older torch raises before it is asked")
def test_a_graph_refuses_it() -> None:
    _, late, x = pair("linear")
    with pytest.raises(UnsupportedError, match="delay_wgrad_compute is not offered under torch"):
        torch.compile(late, backend="eager", fullgraph=True)(x)


def test_it_is_the_weights_that_frameworks_skip() -> None:
    _, late, _ = pair("mlp")
    skipped = {n for n, p in late.named_parameters() if getattr(p, "skip_backward_post_hook", 0)}
    assert skipped == {"fc1_weight", "fc2_weight"}


def test_it_goes_with_kept_weights() -> None:
    _, late, x = pair("linear")
    outputs = []
    for first in (True, False):
        with fp8core.autocast(recipe="current"):
            y = late(x, is_first_microbatch=first)
        y.sum().backward()
        outputs.append(y)
    assert torch.equal(*outputs)
    late.backward_dw()
    late.backward_dw()
    with torch.no_grad():
        late.weight.zero_()
    with fp8core.autocast(recipe="current"), pytest.raises(OperandError, match="was written since"):
        late(x, is_first_microbatch=False)
