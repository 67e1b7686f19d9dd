"""LayerNorm and RMSNorm as layers: against torch's own, their names, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from fp8core import (
    LayerNorm,
    RMSNorm,
    autocast,
    recipe,
)
from tests.chain import fused_toy
from tests.pairs import pairs

BOTH = [LayerNorm, RMSNorm]
BF16 = torch.bfloat16


def twin(layer: torch.nn.Module, size: int, dtype: torch.dtype) -> torch.nn.Module:
    """Return torch's norm with the same eps and the same factors."""
    kind = torch.nn.LayerNorm if isinstance(layer, LayerNorm) else torch.nn.RMSNorm
    made = kind(size, eps=layer.eps, dtype=dtype)
    for name, parameter in made.named_parameters():
        parameter.data.copy_(getattr(layer, name).data)
    if layer.zero_centered_gamma:
        made.weight.data.add_(1)
    return made


def randomize(layer: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter))


@pytest.mark.parametrize("centered", [False, True])
@pytest.mark.parametrize("kind", BOTH)
def test_output_and_gradients_are_torchs(kind: type, centered: bool) -> None:
    # float64: fewer than 64 roundings of values below 2^9, times the 6 rows of a sum
    bound = 6 * 64 * 2.0**9 * 2.0**-53
    layer = kind(7, zero_centered_gamma=centered, params_dtype=torch.float64)
    randomize(layer)
    other = twin(layer, 7, torch.float64)
    x = torch.randn(2, 3, 7, dtype=torch.float64)
    results = []
    for one in (layer, other):
        own = x.clone().requires_grad_()
        y = one(own)
        y.sin().sum().backward()
        results.append([y, own.grad, *(parameter.grad for parameter in one.parameters())])
    for got, want in zip(*results, strict=True):
        assert (got - want).abs().max() <= bound


def test_bfloat16_is_the_float32_result_rounded_once() -> None:
    for kind in BOTH:
        layer = kind(9, params_dtype=BF16)
        randomize(layer)
        wide = kind(9, params_dtype=torch.float32)
        wide.load_state_dict(layer.state_dict())
        x = torch.randn(4, 9, dtype=BF16)
        assert torch.equal(layer(x), wide(x.float()).to(BF16)), kind


def test_a_recipe_changes_nothing() -> None:
    for kind in BOTH:
        layer = kind(8)
        x = torch.randn(4, 8)
        with autocast(recipe=recipe.DelayedScaling()):
            inside = layer(x)
        assert torch.equal(inside, layer(x)), kind


def test_no_rows_give_no_rows_and_zero_gradients() -> None:
    for kind in BOTH:
        layer = kind(8)
        y = layer(torch.zeros(0, 8, requires_grad=True))
        y.sum().backward()
        assert y.shape == (0, 8), kind
        assert layer.weight.grad is not None, kind
        assert not layer.weight.grad.any(), kind


def test_an_input_of_another_dtype_is_cast_to_that_of_the_weight() -> None:
    for kind in BOTH:
        layer, x = kind(8), torch.randn(2, 8).to(BF16)
        assert torch.equal(layer(x), layer(x.float())), kind


def test_sequence_parallel_marks_the_parameters() -> None:
    for kind in BOTH:
        layer = kind(8, sequence_parallel=True)
        assert all(one.sequence_parallel is True for one in layer.parameters()), kind
        assert not hasattr(kind(8).weight, "sequence_parallel"), kind


def run(layer: torch.nn.Module, dtype: torch.dtype, *, is_added_before: bool) -> list[torch.Tensor]:
    """Return the norm of a sum, and the gradients of both terms and the parameters."""
    generator = torch.Generator().manual_seed(4)
    terms = [torch.randn(2, 3, 16, generator=generator).to(dtype).requires_grad_() for _ in "ab"]
    layer.zero_grad()
    y = layer(terms[0] + terms[1]) if is_added_before else layer(terms[0], residual=terms[1])
    y.sin().sum().backward()
    grads = [own.grad for own in (*terms, *layer.parameters())]
    return [y.detach(), *(grad.clone() for grad in grads if grad is not None)]


def test_the_norm_of_a_sum_equals_the_sum_and_its_norm() -> None:
    for kind, dtype, name in pairs(BOTH, [BF16, torch.float32], [None, *recipe.names()]):
        layer = kind(16, params_dtype=dtype)
        randomize(layer)
        with autocast(enabled=name is not None, recipe=recipe.by_name(name or "current")):
            want, got = (run(layer, dtype, is_added_before=flag) for flag in (True, False))
        assert len(want) == len(got), (kind, dtype)
        assert all(map(torch.equal, got, want)), (kind, dtype)


def test_the_norm_of_a_sum_is_one_operation_where_a_backend_has_it() -> None:
    for kind in BOTH:
        layer = kind(16)
        with fused_toy.installed("add_norm") as calls:
            run(layer, torch.float32, is_added_before=False)
        assert (calls["add_norm"], calls["norm"]) == (1, 0), kind


def test_calls_with_and_without_a_residual_take_turns() -> None:
    for kind in BOTH:
        layer, x = kind(16), torch.randn(4, 16)
        results = [layer(x), layer(x, residual=x), layer(x), layer(x, residual=x)]
        assert torch.equal(results[0], results[2]), kind
        assert torch.equal(results[1], results[3]), kind
        assert torch.equal(results[1], layer(x + x)), kind
