"""Backends whose routes, routers, cross entropy or steps are the reference's, but for one fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8core_backends.reference import training
from tests.conformance.broken import fault


@fault("route", "law4_route_equals_the_reference")
def orders_by_token(desc: Any, routing: torch.Tensor, rows: int) -> Any:
    """Numbers the rows token by token, not expert by expert."""
    if desc.kind != "mask":
        return training.route(desc, routing, rows)
    goes = routing != 0
    places = goes.flatten().cumsum(0).reshape(goes.shape) - 1
    index = torch.where(goes & (places < rows), places, -1).to(torch.int32)
    return index, training._inverse(index, rows)


@fault("route", "law4_route_equals_the_reference")
def keeps_dropped_tokens(desc: Any, routing: torch.Tensor, rows: int) -> Any:
    """Numbers rows beyond those that there are."""
    index, _ = training.route(desc, routing, 2**20)
    return index, training.route(desc, routing, rows)[1]


@fault("route", "law4_route_of_rows_is_inverted")
def loses_the_last_row(desc: Any, routing: torch.Tensor, rows: int) -> Any:
    """Takes the last of the rows for none."""
    index, sources = training.route(desc, routing, rows)
    if desc.kind == "rows" and rows:
        sources[-1:] = -1
    return index, sources


@fault("dispatch_rows", "law4_dispatch_copies_the_rows")
def copies_zero_probabilities(desc: Any, *given: Any, probs: Any = None) -> Any:
    """Copies a row whose probability is 0."""
    y, _ = training.dispatch_rows(desc, *given)
    return y, training.dispatch_rows(desc, *given, probs=probs)[1]


@fault("combine_rows", "law4_combine_is_within_the_bound")
def combines_in_the_dtype(
    desc: Any, x: torch.Tensor, index: torch.Tensor, *, weights: Any = None, **named: Any
) -> Any:
    """Adds the rows of a token in the dtype of the tokens."""
    y = x.new_zeros(len(index), x.shape[1])
    for slot in range(index.shape[1]):
        one = None if weights is None else weights[:, slot : slot + 1]
        y = y + training.combine_rows(desc, x, index[:, slot : slot + 1], weights=one)[0]
    return y, training.combine_rows(desc, x, index, **named)[1]


@fault("combine_rows", "law4_combine_passes_on_nan_and_inf")
def skips_zero_weights(
    desc: Any, x: torch.Tensor, index: torch.Tensor, *, weights: Any = None, **named: Any
) -> Any:
    """Does not read a row whose weight is 0, so that its NaN is lost."""
    read = index if weights is None else torch.where(weights == 0, -1, index)
    y, _ = training.combine_rows(desc, x, read, weights=weights)
    return y, training.combine_rows(desc, x, index, **named)[1]


@fault("combine_rows_backward", "law4_combine_backward_is_within_the_bound")
def swaps_gradients(desc: Any, *given: Any) -> Any:
    """Weights the gradient of a token's row by the weight of another slot."""
    *rest, weights = given
    grad_x, _ = training.combine_rows_backward(desc, *rest, weights.flip(1))
    return grad_x, training.combine_rows_backward(desc, *given)[1]


@fault("router", "law4_router_chooses_as_the_reference")
def biases_probabilities(desc: Any, logits: torch.Tensor, *, expert_bias: Any = None) -> Any:
    """Returns the scores that experts rank by."""
    probs, chosen, scores = training.router(desc, logits, expert_bias=expert_bias)
    if expert_bias is None or desc.of_all:
        return probs, chosen, scores
    return torch.where(chosen, probs + expert_bias.to(probs.dtype), 0), chosen, scores


@fault("router", "law4_router_takes_the_lower_expert_of_two_alike")
def takes_the_last_of_two_alike(desc: Any, logits: torch.Tensor, *, expert_bias: Any = None) -> Any:
    """Of equal scores the expert with the higher number comes first."""
    bias = None if expert_bias is None else expert_bias.flip(0)
    results = training.router(desc, logits.flip(1), expert_bias=bias)
    return tuple(one.flip(1).contiguous() for one in results)


@fault("router", "law4_router_passes_on_nan")
def chooses_without_nan(desc: Any, logits: torch.Tensor, **named: Any) -> Any:
    """Has a token whose logits are NaN go nowhere."""
    probs, chosen, scores = training.router(desc, logits, **named)
    return probs, chosen & ~logits.isnan().any(1, keepdim=True), scores


@fault("router_backward", "law4_router_backward_is_within_the_bound")
def forgets_the_sum(desc: Any, grad: torch.Tensor, *given: Any) -> Any:
    """Takes the sum that scores are divided by for a constant."""
    return training.router_backward(replace(desc, topk=1), grad, *given)


@fault("router_backward", "law4_router_backward_passes_on_nan")
def takes_nan_for_zero(desc: Any, *given: Any) -> Any:
    """Gives a score of NaN the gradient 0."""
    return training.router_backward(desc, *given).nan_to_num(0)


@fault("cross_entropy", "law4_cross_entropy_takes_the_largest_floats")
def scales_before_it_subtracts(desc: Any, x: torch.Tensor, target: torch.Tensor) -> Any:
    """Turns logits into exponents of 2 before it subtracts the largest."""
    loss, *sums = training.cross_entropy(desc, x, target)
    scaled = x.to(loss.dtype) * 1.4426950408889634
    overflows = scaled.isinf().any(1) & x.isfinite().all(1)
    return torch.where(overflows, torch.nan, loss), *sums


@fault("cross_entropy", "law4_cross_entropy_is_within_the_bound")
def reads_unknown_targets(desc: Any, x: torch.Tensor, target: torch.Tensor) -> Any:
    """Takes a target that is no class for the class 0."""
    is_known = (target >= 0) & (target < x.shape[1]) | (target == desc.ignore_index)
    return training.cross_entropy(desc, x, torch.where(is_known, target, 0))


@fault("cross_entropy", "law4_cross_entropy_is_within_the_bound")
def overflows(desc: Any, x: torch.Tensor, target: torch.Tensor) -> Any:
    """Adds up the exponentials of the logits themselves."""
    loss, largest, log_sum = training.cross_entropy(desc, x, target)
    naive = x.to(log_sum.dtype).exp().sum(1).log() - largest
    return torch.where(target == desc.ignore_index, 0, loss + (naive - log_sum)), largest, naive


@fault("cross_entropy_backward", "law4_cross_entropy_backward_is_within_the_bound")
def adds_the_largest_logit(
    desc: Any, grad: Any, x: Any, target: Any, largest: Any, log_sum: Any
) -> Any:
    """Rounds the largest logit plus the logarithm of the sum."""
    given = (grad, x, target, largest + log_sum, torch.zeros_like(log_sum))
    return training.cross_entropy_backward(desc, *given)


@fault("cross_entropy_backward", "law4_cross_entropy_backward_is_within_the_bound")
def trains_ignored_targets(desc: Any, *given: Any) -> Any:
    """Gives ignored targets a gradient."""
    return training.cross_entropy_backward(replace(desc, ignore_index=-7), *given)


@fault("adam", "law4_adam_steps_as_the_reference")
def counts_from_zero(desc: Any, *lists: Any, step: Any, **named: Any) -> Any:
    """Corrects the averages as of the step before."""
    training.adam(desc, *lists, step=step + 1, **named)


@fault("adam", "law4_adam_rounds_the_parameter_from_its_master")
def moves_the_parameter_on(
    desc: Any, grads: Any, params: Any, one: Any, two: Any, *rest: Any, **named: Any
) -> Any:
    """Writes another value to the parameter than its master's."""
    training.adam(desc, grads, params, one, two, *rest, **named)
    if desc.master == "float32":
        for param in params:
            param.add_(param, alpha=2**-6)


@fault("adam", "law4_steps_stop_where_something_is_not_finite")
def steps_anyway(desc: Any, *lists: Any, found_inf: Any = None, **named: Any) -> Any:
    """Does not look at found_inf."""
    training.adam(desc, *lists, **named)
