"""The router of a mixture of experts, beside the same formulas in torch."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8core.errors import OperandError
from fp8core.router import (
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)
from tests.pairs import turns
from tests.refusals import unrefused

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


def logits(tokens: int = 9, experts: int = 8, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    order = torch.rand(tokens, experts, generator=generator).argsort(1)
    return (order * 0.5 + order**2 / 64 - 1.5).to(dtype)


def route(x: torch.Tensor, topk: int, function: str = "softmax", **named: Any) -> Any:
    options: dict[str, Any] = {
        "use_pre_softmax": False,
        "num_groups": None,
        "group_topk": None,
        "scaling_factor": None,
        "expert_bias": None,
    }
    return fused_topk_with_score_function(x, topk, score_function=function, **(options | named))


def scores_of(x: torch.Tensor, function: str) -> torch.Tensor:
    if function == "softmax":
        return x.softmax(-1)
    return x.sigmoid() if function == "sigmoid" else torch.nn.functional.softplus(x).sqrt()


@pytest.mark.parametrize(
    ("dtype", "function"), [*turns(FLOATS, FUNCTIONS), *turns([torch.float32], FUNCTIONS[1:])]
)
def test_probs_of_the_best_experts(dtype: torch.dtype, function: str) -> None:
    x = logits(dtype=dtype)
    probs, chosen = route(x, 3, function, scaling_factor=2.5)
    best = x.topk(3).indices
    values = x.float().gather(1, best)
    if function == "softmax":
        values = values.softmax(-1)
    else:
        values = scores_of(values, function)
        values = values / values.sum(1, keepdim=True)
    expected = torch.zeros(9, 8).scatter(1, best, values * 2.5)
    torch.testing.assert_close(probs, expected.to(dtype))
    assert torch.equal(chosen, torch.zeros(9, 8).scatter(1, best, 1).bool())


def test_softmax_before_the_choice_is_over_all_experts() -> None:
    x = logits()
    probs, chosen = route(x, 3, use_pre_softmax=True)
    torch.testing.assert_close(probs, x.softmax(-1) * chosen)


def test_one_expert_keeps_its_score() -> None:
    x = logits()
    probs, chosen = route(x, 1, "sigmoid")
    torch.testing.assert_close(probs, x.sigmoid() * chosen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bias_decides_the_choice_and_no_probability(dtype: torch.dtype) -> None:
    x = logits()
    bias = torch.tensor([0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0, 0.0], dtype=dtype)
    probs, chosen = route(x, 2, "sigmoid", expert_bias=bias)
    assert chosen[:, 2].all()
    scores = x.sigmoid() * chosen
    torch.testing.assert_close(probs, scores / scores.sum(1, keepdim=True))


@pytest.mark.parametrize("function", FUNCTIONS)
def test_experts_of_the_best_groups_alone(function: str) -> None:
    x = logits(40, 12)
    _, chosen = route(x, 4, function, num_groups=4, group_topk=2)
    ranked = x if function == "softmax" else scores_of(x, function)
    sums = ranked.unflatten(1, (4, 3)).topk(2).values.sum(-1)
    allowed = torch.zeros(40, 4).scatter(1, sums.topk(2).indices, 1).repeat_interleave(3, 1)
    best = ranked.masked_fill(allowed == 0, -torch.inf).topk(4).indices
    assert torch.equal(chosen, torch.zeros(40, 12).scatter(1, best, 1).bool())


def test_experts_that_rank_alike_are_taken_in_order() -> None:
    _, chosen = route(torch.zeros(2, 8), 3)
    assert chosen.tolist() == [[True] * 3 + [False] * 5] * 2


def test_bitmap_has_a_bit_for_each_expert() -> None:
    x = logits(5, 11)
    _, chosen = route(x, 3)
    for layout in ("bitmap_u8", RoutingMapFormat.BITMAP_U8, 1):
        _, bits = route(x, 3, routing_map_format=layout)
        assert bits.shape == (5, 2)
        unpacked = (bits[..., None] >> torch.arange(8)) & 1
        assert torch.equal(unpacked.flatten(1)[:, :11].bool(), chosen)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices_of_the_experts_are_written(dtype: torch.dtype) -> None:
    x = logits()
    indices = torch.empty(9, 3, dtype=dtype)
    _, result = route(x, 3, topk_indices=indices)
    assert result is indices
    assert torch.equal(indices, x.topk(3).indices.sort(1).values.to(dtype))


def test_leading_dimensions_are_kept() -> None:
    x = logits(12).reshape(3, 4, 8)
    probs, chosen = route(x, 2)
    flat, flags = route(x.reshape(12, 8), 2)
    assert torch.equal(probs, flat.reshape(3, 4, 8))
    assert torch.equal(chosen, flags.reshape(3, 4, 8))


@pytest.mark.parametrize("topk", [1, 3])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_scores_of_all_for_the_loss(function: str, topk: int) -> None:
    x = logits(dtype=torch.bfloat16)
    chosen, scores = fused_compute_score_for_moe_aux_loss(x, topk, function)
    expected = scores_of(x.float(), function)
    if function != "softmax":
        expected = expected / expected.sum(1, keepdim=True)
    torch.testing.assert_close(scores, expected)
    assert torch.equal(chosen, torch.zeros(9, 8).scatter(1, x.topk(topk).indices, 1).bool())


@pytest.mark.parametrize("total", [9, torch.tensor(9)])
def test_loss_of_unequal_loads(total: Any) -> None:
    probs = logits().softmax(-1).requires_grad_()
    counts = torch.arange(8)
    loss = fused_moe_aux_loss(probs, counts, total, 8, 2, 0.01)
    expected = (probs.sum(0) * counts).sum() * (8 * 0.01 / (2 * 81))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    torch.testing.assert_close(probs.grad, (counts * 8 * 0.01 / (2 * 81)).expand(9, 8).float())


# Gradients

OPTIONS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax, pre": {"use_pre_softmax": True, "scaling_factor": 2.0},
    "softmax, groups": {"num_groups": 4, "group_topk": 1},
    "sigmoid": {"scaling_factor": 2.5},
    "sigmoid, bias": {"expert_bias": torch.arange(8.0) / 8},
    "sqrtsoftplus": {},
}


def in_torch(x: torch.Tensor, chosen: torch.Tensor, name: str, named: dict[str, Any]) -> Any:
    """The probabilities of a choice that is known."""
    function = name.partition(",")[0]
    if function == "softmax" and not named.get("use_pre_softmax"):
        probs = torch.where(chosen, x, -torch.inf).softmax(-1)
    else:
        probs = scores_of(x, function) * chosen
        if function != "softmax":
            probs = probs / probs.sum(1, keepdim=True)
    return probs * (named.get("scaling_factor") or 1.0)


@pytest.mark.parametrize("name", OPTIONS)
def test_gradient_of_the_logits(name: str) -> None:
    named = OPTIONS[name]
    x, other = logits().requires_grad_(), logits().requires_grad_()
    probs, chosen = route(x, 2, name.partition(",")[0], **named)
    weights = torch.randn(9, 8, generator=torch.Generator().manual_seed(2))
    (probs * weights).sum().backward()
    (in_torch(other, chosen, name, named) * weights).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_second_derivative(name: str) -> None:
    named = OPTIONS[name]
    x, other = logits().requires_grad_(), logits().requires_grad_()
    probs, chosen = route(x, 2, name.partition(",")[0], **named)
    for leaf, value in ((x, probs), (other, in_torch(other, chosen, name, named))):
        (grad,) = torch.autograd.grad(value.square().sum(), leaf, create_graph=True)
        grad.square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_gradient_of_the_scores_of_all(function: str, topk: int) -> None:
    x, other = logits().requires_grad_(), logits().requires_grad_()
    weights = torch.randn(9, 8, generator=torch.Generator().manual_seed(2))
    (fused_compute_score_for_moe_aux_loss(x, topk, function)[1] * weights).sum().backward()
    scores = scores_of(other, function)
    if function != "softmax":
        scores = scores / scores.sum(1, keepdim=True)
    (scores * weights).sum().backward()
    torch.testing.assert_close(x.grad, other.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled_in_one_graph() -> None:
    def run(x: torch.Tensor) -> Any:
        probs, chosen = route(x, 2, "sigmoid", scaling_factor=2.5)
        chosen_too, scores = fused_compute_score_for_moe_aux_loss(x, 2, "softmax")
        return probs, chosen, chosen_too, scores

    x, other = logits().requires_grad_(), logits().requires_grad_()
    results = torch.compile(run, fullgraph=True, backend="aot_eager")(x)
    expected = run(other)
    torch.testing.assert_close(results, expected)
    (results[0].square().sum() + results[3].square().sum()).backward()
    (expected[0].square().sum() + expected[3].square().sum()).backward()
    torch.testing.assert_close(x.grad, other.grad)


# Hostile input


def test_no_tokens() -> None:
    probs, chosen = route(torch.empty(0, 8, requires_grad=True), 2)
    assert probs.shape == chosen.shape == (0, 8)
    probs.sum().backward()


ERRORS: dict[str, Any] = {
    "topk=9): logits [9, 8] has 8 experts; expected an integer from 1": lambda: route(logits(), 9),
    "topk=2.0)": lambda: route(logits(), 2.0),
    "topk_indices is on meta": lambda: route(
        logits(), 2, topk_indices=torch.zeros(9, 2, dtype=torch.int64, device="meta")
    ),
    "topk=0)": lambda: route(logits(), 0),
    "Did you mean 'sigmoid'?": lambda: route(logits(), 2, "sigmoids"),
    "num_groups=3 does not divide 8 experts": lambda: route(
        logits(), 2, num_groups=3, group_topk=1
    ),
    "group_topk=5 is above num_groups=4": lambda: route(logits(), 5, num_groups=4, group_topk=5),
    "group_topk=2 does not divide topk=3": lambda: route(logits(), 3, num_groups=4, group_topk=2),
    "takes 3 experts of a group, which has 2": lambda: route(
        logits(), 3, num_groups=4, group_topk=1
    ),
    "group_topk=-1): expected integers above 0": lambda: route(
        logits(), 2, num_groups=2, group_topk=-1
    ),
    "num_groups=2.0, group_topk=1): expected integers": lambda: route(
        logits(), 2, num_groups=2.0, group_topk=1
    ),
    "Give num_groups too": lambda: route(logits(), 2, group_topk=2),
    "leave it at None for softmax": lambda: route(logits(), 2, expert_bias=torch.ones(8)),
    "expert_bias is torch.float32 [7]": lambda: route(
        logits(), 2, "sigmoid", expert_bias=torch.ones(7)
    ),
    "logits is torch.float64": lambda: route(logits().double(), 2),
    "topk_indices is torch.float32": lambda: route(logits(), 2, topk_indices=torch.ones(9, 2)),
    "Did you mean 'bitmap_u8'?": lambda: route(logits(), 2, routing_map_format="bitmap_u"),
    "tokens_per_expert is [7]": lambda: fused_moe_aux_loss(logits(), torch.ones(7), 9, 8, 2, 0.1),
    "expected a positive number": lambda: fused_moe_aux_loss(logits(), torch.ones(8), 0, 8, 2, 0.1),
}


def test_what_does_not_fit_is_named() -> None:
    table = {words: (call, OperandError, re.escape(words)) for words, call in ERRORS.items()}
    assert unrefused(table) == {}


BOUNDS = (-0.5, 0.75)


def histogram_of(x: torch.Tensor, bias: torch.Tensor, topk: int, bins: int) -> torch.Tensor:
    """Count, one token and expert at a time, what bias an expert needs to reach the cutoff."""
    counts = torch.zeros(x.shape[1], bins, dtype=torch.int32)
    lower, upper = BOUNDS
    for row in x.float().sigmoid():
        cutoff = sorted((row + bias).tolist())[-topk - 1]
        for expert, score in enumerate(row.tolist()):
            place = math.floor((cutoff - score - lower) / (upper - lower) * bins)
            counts[expert, min(max(place, 0), bins - 1)] += 1
    return counts


def balance(x: torch.Tensor, topk: int = 2, bins: int = 7, **named: Any) -> torch.Tensor:
    """Route with a new histogram, and return it."""
    counts = torch.zeros(x.shape[-1], bins, dtype=torch.int32)
    options = {
        "qb_histogram": counts,
        "qb_bin_bounds": torch.tensor(BOUNDS, device=x.device),
        "qb_histogram_mode": "fused_atomic",
    }
    route(x, topk, "sigmoid", **(options | named))
    return counts


# Biases beyond the bounds count in the first and last bins.
BIAS = torch.tensor([0.0, 3.0, -3.0, 0.11, 0.05, -0.2, 0.3, 0.0])


@pytest.mark.parametrize("mode", ["two_kernel", "fused_atomic"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_histogram_counts_the_biases_that_experts_need(dtype: torch.dtype, mode: str) -> None:
    x = logits(tokens=33, dtype=dtype)
    found = balance(x, expert_bias=BIAS, qb_histogram_mode=mode)
    assert torch.equal(found, histogram_of(x, BIAS, 2, 7))
    assert (found.sum(1) == 33).all()
    assert found[:, [0, -1]].any()


def test_histogram_adds_microbatches_and_leaves_routes_and_gradients_alone() -> None:
    x = logits(tokens=12).requires_grad_()
    counts = torch.zeros(8, 7, dtype=torch.int32)
    options = {"expert_bias": BIAS, "scaling_factor": 2.5}
    plain = route(x, 2, "sigmoid", **options)
    balancing = {
        "qb_histogram": counts,
        "qb_bin_bounds": torch.tensor(BOUNDS),
        "qb_histogram_mode": "two_kernel",
    }
    parts = [route(part, 2, "sigmoid", **options, **balancing) for part in (x[:5], x[5:])]
    probs, chosen = zip(*parts, strict=True)
    assert torch.equal(counts, histogram_of(x.detach(), BIAS, 2, 7))
    assert torch.equal(torch.cat(probs), plain[0])
    assert torch.equal(torch.cat(chosen), plain[1])
    weights = torch.arange(96.0).reshape(12, 8)
    (found,) = torch.autograd.grad((torch.cat(probs) * weights).sum(), x)
    (expected,) = torch.autograd.grad((plain[0] * weights).sum(), x)
    assert torch.equal(found, expected)


def test_histogram_of_no_bias_no_tokens_and_leading_sizes() -> None:
    x = logits(tokens=12)
    zero = torch.zeros(8)
    assert torch.equal(balance(x), histogram_of(x, zero, 2, 7))
    assert torch.equal(balance(x.reshape(3, 4, 8)), balance(x))
    assert not balance(x[:0]).any()


def test_histogram_does_not_count_nan() -> None:
    x = logits(tokens=12)
    x[3, 5] = torch.nan
    whole = balance(x)
    assert torch.equal(whole[5], balance(x[[i for i in range(12) if i != 3]])[5])
    assert whole.sum(1).tolist() == [12, 12, 12, 12, 12, 11, 12, 12]


def test_histogram_of_tensors_without_values() -> None:
    x = logits(tokens=12)
    with FakeTensorMode() as mode:
        counts = mode.from_tensor(torch.zeros(8, 7, dtype=torch.int32))
        bounds = mode.from_tensor(torch.tensor(BOUNDS))
        balance(mode.from_tensor(x), qb_histogram=counts, qb_bin_bounds=bounds)
    assert counts._version == 1


def test_bins_of_the_least_width_count_every_token() -> None:
    counts = balance(logits(tokens=12), qb_bin_bounds=torch.tensor([0.0, 1e-45]))
    assert counts.sum(1).tolist() == [12] * 8


def test_histogram_in_a_compiled_graph() -> None:
    x = logits(tokens=12)
    compiled = torch.compile(balance, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), balance(x))


@pytest.mark.parametrize(
    ("named", "text"),
    [
        ({"qb_histogram": None}, "qb_histogram is None"),
        ({"qb_bin_bounds": None, "qb_histogram_mode": None}, "qb_bin_bounds and qb_histogram_mode"),
        ({"qb_histogram_mode": "fused"}, "expected one of 'two_kernel', 'fused_atomic'"),
        ({"score_function": "softmax"}, "expected score_function='sigmoid'"),
        ({"num_groups": 2, "group_topk": 1}, "without groups"),
        ({"topk": 8}, "topk below the number of experts"),
        (
            {"qb_histogram": torch.zeros(8, 4)},
            "torch.float32 \\[8, 4\\] on \\S+; expected torch.int32",
        ),
        (
            {"qb_histogram": torch.zeros(7, 4, dtype=torch.int32)},
            "expected torch.int32 \\[8, bins\\]",
        ),
        ({"qb_histogram": torch.zeros(8, 0, dtype=torch.int32)}, "\\[8, 0\\]"),
        ({"qb_histogram": torch.zeros(8, dtype=torch.int32)}, "torch.int32 \\[8\\] on "),
        ({"qb_histogram": [[0] * 4] * 8}, "qb_histogram is list"),
        ({"qb_bin_bounds": (0.0, 1.0)}, "qb_bin_bounds is tuple"),
        ({"qb_bin_bounds": torch.zeros(2, dtype=torch.float64)}, "torch.float64"),
        ({"qb_bin_bounds": torch.zeros(2, device="meta")}, "on meta"),
        ({"qb_bin_bounds": torch.tensor([1.0, 1.0])}, "the lower below the upper"),
        ({"qb_bin_bounds": torch.tensor([0.0, torch.inf])}, "finite"),
        ({"qb_bin_bounds": torch.tensor([torch.nan, 1.0])}, "finite"),
        ({"qb_bin_bounds": torch.tensor([-3e38, 3e38])}, "by a finite float32"),
    ],
)
def test_histogram_that_does_not_fit_is_refused(named: dict[str, Any], text: str) -> None:
    counts = torch.zeros(8, 4, dtype=torch.int32)
    options: dict[str, Any] = {
        "topk": 2,
        "score_function": "sigmoid",
        "qb_histogram": counts,
        "qb_bin_bounds": torch.tensor([-1.0, 1.0]),
        "qb_histogram_mode": "two_kernel",
    }
    options |= named
    with pytest.raises(OperandError, match=text):
        route(logits(), options.pop("topk"), options.pop("score_function"), **options)
    assert not counts.any()


def test_bounds_of_a_histogram_are_checked_again_once_they_changed() -> None:
    bounds = torch.tensor(BOUNDS)
    balance(logits(), qb_bin_bounds=bounds)
    bounds[1] = -1.0
    with pytest.raises(OperandError, match="the lower below the upper"):
        balance(logits(), qb_bin_bounds=bounds)
    with torch.inference_mode():
        balance(logits(), qb_bin_bounds=torch.tensor(BOUNDS))
