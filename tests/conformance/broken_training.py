"""Backends whose routes, routers, cross entropy or steps are the reference's, but for one fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8core_backends.reference import cross_entropy, optimizers, permutation, router
from tests.conformance.broken import Sound


class OrdersByToken(Sound):
    """Numbers the rows token by token, not expert by expert."""

    def route(self, desc: Any, routing: torch.Tensor, rows: int) -> Any:
        if desc.kind != "mask":
            return permutation.route(desc, routing, rows)
        goes = routing != 0
        places = goes.flatten().cumsum(0).reshape(goes.shape) - 1
        index = torch.where(goes & (places < rows), places, -1).to(torch.int32)
        return index, permutation._inverse(index, rows)


class KeepsDroppedTokens(Sound):
    """Numbers rows beyond those that there are."""

    def route(self, desc: Any, routing: torch.Tensor, rows: int) -> Any:
        index, _ = permutation.route(desc, routing, 2**20)
        return index, permutation.route(desc, routing, rows)[1]


class LosesTheLastRow(Sound):
    """Takes the last of the rows for none."""

    def route(self, desc: Any, routing: torch.Tensor, rows: int) -> Any:
        index, sources = permutation.route(desc, routing, rows)
        if desc.kind == "rows" and rows:
            sources[-1:] = -1
        return index, sources


class CopiesZeroProbabilities(Sound):
    """Copies a row whose probability is 0."""

    def dispatch_rows(self, desc: Any, *given: Any, probs: Any = None) -> Any:
        y, _ = permutation.dispatch_rows(desc, *given)
        return y, permutation.dispatch_rows(desc, *given, probs=probs)[1]


class CombinesInTheDtype(Sound):
    """Adds the rows of a token in the dtype of the tokens."""

    def combine_rows(
        self, desc: Any, x: torch.Tensor, index: torch.Tensor, *, weights: Any = None, **named: Any
    ) -> Any:
        y = x.new_zeros(len(index), x.shape[1])
        for slot in range(index.shape[1]):
            one = None if weights is None else weights[:, slot : slot + 1]
            y = y + permutation.combine_rows(desc, x, index[:, slot : slot + 1], weights=one)[0]
        return y, permutation.combine_rows(desc, x, index, **named)[1]


class SkipsZeroWeights(Sound):
    """Does not read a row whose weight is 0, so that its NaN is lost."""

    def combine_rows(
        self, desc: Any, x: torch.Tensor, index: torch.Tensor, *, weights: Any = None, **named: Any
    ) -> Any:
        read = index if weights is None else torch.where(weights == 0, -1, index)
        y, _ = permutation.combine_rows(desc, x, read, weights=weights)
        return y, permutation.combine_rows(desc, x, index, **named)[1]


class SwapsGradients(Sound):
    """Weights the gradient of a token's row by the weight of another slot."""

    def combine_rows_backward(self, desc: Any, *given: Any) -> Any:
        *rest, weights = given
        grad_x, _ = permutation.combine_rows_backward(desc, *rest, weights.flip(1))
        return grad_x, permutation.combine_rows_backward(desc, *given)[1]


class BiasesProbabilities(Sound):
    """Returns the scores that experts rank by."""

    def router(self, desc: Any, logits: torch.Tensor, *, expert_bias: Any = None) -> Any:
        probs, chosen, scores = router.router(desc, logits, expert_bias=expert_bias)
        if expert_bias is None or desc.of_all:
            return probs, chosen, scores
        return torch.where(chosen, probs + expert_bias.to(probs.dtype), 0), chosen, scores


class TakesTheLastOfTwoAlike(Sound):
    """Of equal scores the expert with the higher number comes first."""

    def router(self, desc: Any, logits: torch.Tensor, *, expert_bias: Any = None) -> Any:
        bias = None if expert_bias is None else expert_bias.flip(0)
        results = router.router(desc, logits.flip(1), expert_bias=bias)
        return tuple(one.flip(1).contiguous() for one in results)


class ChoosesWithoutNaN(Sound):
    """Has a token whose logits are NaN go nowhere."""

    def router(self, desc: Any, logits: torch.Tensor, **named: Any) -> Any:
        probs, chosen, scores = router.router(desc, logits, **named)
        return probs, chosen & ~logits.isnan().any(1, keepdim=True), scores


class ForgetsTheSum(Sound):
    """Takes the sum that scores are divided by for a constant."""

    def router_backward(self, desc: Any, grad: torch.Tensor, *given: Any) -> Any:
        return router.router_backward(replace(desc, topk=1), grad, *given)


class TakesNaNForZero(Sound):
    """Gives a score of NaN the gradient 0."""

    def router_backward(self, desc: Any, *given: Any) -> Any:
        return router.router_backward(desc, *given).nan_to_num(0)


class ScalesBeforeItSubtracts(Sound):
    """Turns logits into exponents of 2 before it subtracts the largest."""

    def cross_entropy(self, desc: Any, x: torch.Tensor, target: torch.Tensor) -> Any:
        loss, *sums = cross_entropy.cross_entropy(desc, x, target)
        scaled = x.to(loss.dtype) * 1.4426950408889634
        overflows = scaled.isinf().any(1) & x.isfinite().all(1)
        return torch.where(overflows, torch.nan, loss), *sums


class ReadsUnknownTargets(Sound):
    """Takes a target that is no class for the class 0."""

    def cross_entropy(self, desc: Any, x: torch.Tensor, target: torch.Tensor) -> Any:
        is_known = (target >= 0) & (target < x.shape[1]) | (target == desc.ignore_index)
        return cross_entropy.cross_entropy(desc, x, torch.where(is_known, target, 0))


class Overflows(Sound):
    """Adds up the exponentials of the logits themselves."""

    def cross_entropy(self, desc: Any, x: torch.Tensor, target: torch.Tensor) -> Any:
        loss, largest, log_sum = cross_entropy.cross_entropy(desc, x, target)
        naive = x.to(log_sum.dtype).exp().sum(1).log() - largest
        return torch.where(target == desc.ignore_index, 0, loss + (naive - log_sum)), largest, naive


class AddsTheLargestLogit(Sound):
    """Rounds the largest logit plus the logarithm of the sum."""

    def cross_entropy_backward(
        self, desc: Any, grad: Any, x: Any, target: Any, largest: Any, log_sum: Any
    ) -> Any:
        given = (grad, x, target, largest + log_sum, torch.zeros_like(log_sum))
        return cross_entropy.cross_entropy_backward(desc, *given)


class TrainsIgnoredTargets(Sound):
    """Gives ignored targets a gradient."""

    def cross_entropy_backward(self, desc: Any, *given: Any) -> Any:
        return cross_entropy.cross_entropy_backward(replace(desc, ignore_index=-7), *given)


class CountsFromZero(Sound):
    """Corrects the averages as of the step before."""

    def adam(self, desc: Any, *lists: Any, step: Any, **named: Any) -> Any:
        optimizers.adam(desc, *lists, step=step + 1, **named)


class MovesTheParameterOn(Sound):
    """Writes another value to the parameter than its master's."""

    def adam(
        self, desc: Any, grads: Any, params: Any, one: Any, two: Any, *rest: Any, **named: Any
    ) -> Any:
        optimizers.adam(desc, grads, params, one, two, *rest, **named)
        if desc.master == "float32":
            for param in params:
                param.add_(param, alpha=2**-6)


class StepsAnyway(Sound):
    """Does not look at found_inf."""

    def adam(self, desc: Any, *lists: Any, found_inf: Any = None, **named: Any) -> Any:
        optimizers.adam(desc, *lists, **named)


CAUGHT_BY: dict[type[Sound], str] = {
    OrdersByToken: "law4_route_equals_the_reference",
    KeepsDroppedTokens: "law4_route_equals_the_reference",
    LosesTheLastRow: "law4_route_of_rows_is_inverted",
    CopiesZeroProbabilities: "law4_dispatch_copies_the_rows",
    CombinesInTheDtype: "law4_combine_is_within_the_bound",
    SkipsZeroWeights: "law4_combine_passes_on_nan_and_inf",
    SwapsGradients: "law4_combine_backward_is_within_the_bound",
    BiasesProbabilities: "law4_router_chooses_as_the_reference",
    TakesTheLastOfTwoAlike: "law4_router_takes_the_lower_expert_of_two_alike",
    ChoosesWithoutNaN: "law4_router_passes_on_nan",
    ForgetsTheSum: "law4_router_backward_is_within_the_bound",
    TakesNaNForZero: "law4_router_backward_passes_on_nan",
    ScalesBeforeItSubtracts: "law4_cross_entropy_takes_the_largest_floats",
    ReadsUnknownTargets: "law4_cross_entropy_is_within_the_bound",
    Overflows: "law4_cross_entropy_is_within_the_bound",
    AddsTheLargestLogit: "law4_cross_entropy_backward_is_within_the_bound",
    TrainsIgnoredTargets: "law4_cross_entropy_backward_is_within_the_bound",
    CountsFromZero: "law4_adam_steps_as_the_reference",
    MovesTheParameterOn: "law4_adam_rounds_the_parameter_from_its_master",
    StepsAnyway: "law4_steps_stop_where_something_is_not_finite",
}
"""Each fault, and the test of the kit whose name says what it is."""
