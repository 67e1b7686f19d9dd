"""Training around the layers: tokens of experts, the loss, and steps of optimizers.

Permutation sends each token's rows to experts and back.

A *route* is two tensors that say the same. ``index [t, k]``, int32, has the k rows to which token i
may go: ``index[i, j]`` is a row, -1 where there is none. ``sources [m]``, int32, is its inverse:
``sources[d] = i * k + j`` if ``index[i, j] = d``, -1 for a row to which no token goes. So a row
takes at most one token. A number that is no row, or no entry of the route, counts as -1: the host
does not read routes, and they must be no addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from fp8core.backend_api.operand_spec import dtype_text, plain_text, text
from fp8core.backend_api.record import ResultShape, computing_dtype, operation, shape_of


@dataclass(frozen=True, slots=True)
class CrossEntropyDesc:
    """``cross_entropy(x, target) -> (loss, largest, log_sum)`` of logits ``x [t, v]`` in ``dtype``.

    ``target [t]`` is int64. The results are float32 ``[t]`` (float64 from float64), computed in
    that precision, and with ``s = label_smoothing``::

        largest = max(x)
        log_sum = log(sum(exp(x - largest)))
        loss = (1 - s) * (largest - x[target]) + s * mean(largest - x) + log_sum

    One number would not do for ``largest`` and ``log_sum``: their sum is rounded to the precision
    of the larger one, by which every probability would be off.

    ``loss`` is 0 where the target is ``ignore_index``, and inf where it is another number outside
    of 0 to v - 1: the host does not read targets, and they must be no addresses.
    """

    op: ClassVar[str] = "cross_entropy"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    label_smoothing: float = 0.0
    ignore_index: int = -100
    __str__ = plain_text


def _losses(dtype: torch.dtype) -> dict[str, CrossEntropyDesc]:
    return {"": CrossEntropyDesc(dtype), "smoothed": CrossEntropyDesc(dtype, 0.1)}


@operation(samples=_losses)
def cross_entropy(
    desc: CrossEntropyDesc, x: torch.Tensor, target: torch.Tensor
) -> tuple[ResultShape, ResultShape, ResultShape]:
    """Return the shapes of ``loss``, ``largest`` and ``log_sum``."""
    of_token = ResultShape((x.shape[0],), computing_dtype(x.dtype))
    return of_token, of_token, of_token


@dataclass(frozen=True, slots=True)
class CrossEntropyBackwardDesc:
    """``cross_entropy_backward(grad, x, target, largest, log_sum) -> grad_x [t, v]`` in ``dtype``.

    From ``grad [t]``, the gradient of ``loss`` in its dtype and of any stride, with
    ``s = label_smoothing``::

        grad_x = grad * (exp(x - largest - log_sum) - (1 - s) * one_hot(target) - s / v)

    Zeros where the target is ``ignore_index``; the one_hot of another number outside of 0 to v - 1
    is zeros. Computed in float32 (float64 from float64), rounded once.
    """

    op: ClassVar[str] = "cross_entropy_backward"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    label_smoothing: float = 0.0
    ignore_index: int = -100
    __str__ = plain_text


def _backward(cls: type[Any], samples: Mapping[str, Any]) -> dict[str, Any]:
    """Return the descriptors of ``cls`` with the fields of those of forward."""
    return {
        name: cls(**{field.name: getattr(desc, field.name) for field in fields(desc)})
        for name, desc in samples.items()
    }


@operation(samples=lambda dtype: _backward(CrossEntropyBackwardDesc, _losses(dtype)))
def cross_entropy_backward(
    desc: CrossEntropyBackwardDesc,
    grad: torch.Tensor,
    x: torch.Tensor,
    target: torch.Tensor,
    largest: torch.Tensor,
    log_sum: torch.Tensor,
) -> ResultShape:
    """Return the shape of ``grad_x``."""
    return shape_of(x)


SCORE_FUNCTIONS: tuple[str, ...] = ("softmax", "sigmoid", "sqrtsoftplus")
"""Scores of logits x: ``softmax(x)``, ``sigmoid(x)``, ``sqrt(log(1 + exp(x)))``."""


@dataclass(frozen=True, slots=True)
class RouterDesc:
    """``router(logits, *, expert_bias=None) -> (probs, routing_map, scores)``.

    ``logits [t, e]`` in ``dtype``, computed in float32. A token goes to the ``topk`` experts that
    rank highest; of experts of equal rank the lower number comes first, and NaN comes before every
    number. ``routing_map [t, e]`` is bool.

    Without ``of_all``, ``probs [t, e]`` in ``dtype`` are 0 for the other experts:

    * ``"softmax"``: experts rank by their logits, and ``probs`` is the softmax over the chosen
      ones; with ``pre_softmax`` it is the softmax over all experts;
    * ``"sigmoid"``, ``"sqrtsoftplus"``: experts rank by their scores, plus ``expert_bias [e]``
      (any floating-point dtype) if it is given. ``probs`` are the scores without it, divided by
      their sum over the chosen experts plus 1e-20 where ``topk`` is above 1.

    Then they are multiplied by ``scaling_factor``. With ``num_groups``, the experts are that many
    groups of neighbours; only experts of the ``group_topk`` groups rank whose ``topk / group_topk``
    highest ranks have the largest sums.

    With ``of_all``, for an auxiliary loss, ``probs [t, e]`` are float32 and those of every expert:
    softmax over all, or the scores divided by their sum over all, plus 1e-20, for any ``topk``.

    ``scores [t, e]``, float32, is what :class:`RouterBackwardDesc` needs besides: the scores before
    the division, of a softmax over the chosen experts 0 for the others.
    """

    op: ClassVar[str] = "router"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    topk: int
    score_function: str
    pre_softmax: bool = False
    num_groups: int = 0
    group_topk: int = 0
    scaling_factor: float = 1.0
    of_all: bool = False

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype), f"top {self.topk}", self.score_function)


def _routers(dtype: torch.dtype) -> dict[str, RouterDesc]:
    return {
        "softmax": RouterDesc(dtype, 3, "softmax", scaling_factor=2.5),
        "softmax.pre": RouterDesc(dtype, 3, "softmax", pre_softmax=True),
        "softmax.groups": RouterDesc(dtype, 4, "softmax", num_groups=3, group_topk=2),
        "softmax.all": RouterDesc(dtype, 3, "softmax", of_all=True),
        "sigmoid": RouterDesc(dtype, 3, "sigmoid", scaling_factor=2.5),
        "sigmoid.one": RouterDesc(dtype, 1, "sigmoid"),
        "sigmoid.groups": RouterDesc(dtype, 4, "sigmoid", num_groups=3, group_topk=2),
        "sigmoid.all": RouterDesc(dtype, 3, "sigmoid", of_all=True),
        "sqrtsoftplus": RouterDesc(dtype, 3, "sqrtsoftplus"),
        "sqrtsoftplus.all": RouterDesc(dtype, 1, "sqrtsoftplus", of_all=True),
    }


@operation(samples=_routers)
def router(
    desc: RouterDesc, logits: torch.Tensor, *, expert_bias: torch.Tensor | None = None
) -> tuple[ResultShape, ResultShape, ResultShape]:
    """Return the shapes of ``probs``, ``routing_map`` and ``scores``."""
    probs = shape_of(logits, torch.float32 if desc.of_all else desc.dtype)
    return probs, shape_of(logits, torch.bool), shape_of(logits, torch.float32)


@dataclass(frozen=True, slots=True)
class RouterBackwardDesc:
    """``router_backward(grad_probs, routing_map, scores) -> grad_logits``.

    The gradient of :class:`RouterDesc` with the same fields, ``grad_logits [t, e]`` in ``dtype``,
    from a gradient in the dtype of ``probs`` and what forward returned. Computed in float32,
    rounded once. The choice of experts has no gradient.
    """

    op: ClassVar[str] = "router_backward"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    topk: int
    score_function: str
    pre_softmax: bool = False
    num_groups: int = 0
    group_topk: int = 0
    scaling_factor: float = 1.0
    of_all: bool = False

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype), f"top {self.topk}", self.score_function)


@operation(samples=lambda dtype: _backward(RouterBackwardDesc, _routers(dtype)))
def router_backward(
    desc: RouterBackwardDesc,
    grad_probs: torch.Tensor,
    routing_map: torch.Tensor,
    scores: torch.Tensor,
) -> ResultShape:
    """Return the shape of the gradient of the logits."""
    return shape_of(scores, desc.dtype)


ROUTE_KINDS: tuple[str, ...] = ("mask", "experts", "rows")
"""What ``routing`` of a :class:`RouteDesc` holds."""


@dataclass(frozen=True, slots=True)
class RouteDesc:
    """``route(routing, rows) -> (index, sources)``: a route to ``rows`` rows.

    ``routing`` is bool or an integer tensor, ``dtype``:

    * ``"mask"``: ``[t, e]``, not 0 where token i goes to expert j; ``k`` is e;
    * ``"experts"``: ``[t, k]``, the numbers of a token's experts; a negative one stands for none;
    * ``"rows"``: ``[t, k]``, the rows themselves, each of them once; a negative one stands for
      none.

    With experts, the rows are those of expert 0, then those of expert 1; among the rows of an
    expert, in the order of the tokens, and of ``routing``'s columns. Tokens for which there is no
    row among the first ``rows`` are dropped: they get -1.
    """

    op: ClassVar[str] = "route"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    kind: str
    __str__ = plain_text


def _routes(dtype: torch.dtype) -> dict[str, RouteDesc]:
    return {
        "mask": RouteDesc(torch.bool, "mask"),
        "mask.int32": RouteDesc(torch.int32, "mask"),
        "experts": RouteDesc(torch.int32, "experts"),
        "experts.int64": RouteDesc(torch.int64, "experts"),
        "rows": RouteDesc(torch.int32, "rows"),
    }


@operation(samples=_routes)
def route(desc: RouteDesc, routing: torch.Tensor, rows: int) -> tuple[ResultShape, ResultShape]:
    """Return the shapes of ``index`` and ``sources``."""
    return shape_of(routing, torch.int32), ResultShape((rows,), torch.int32)


@dataclass(frozen=True, slots=True)
class DispatchDesc:
    """``dispatch_rows(x, index, sources, *, probs=None) -> (y, permuted_probs)``.

    ``y [m, n] = x[sources // k]`` in ``dtype``, bit for bit, from ``x [t, n]``; zeros where
    ``sources`` is -1. ``probs [t, k]`` has any floating-point dtype: then ``permuted_probs [m]`` is
    ``probs.flatten()[sources]``, 0 where there is none; else it is None. Results are contiguous.

    Attributes:
        skips_improbable: with ``probs``, a row whose probability is 0 is zeros too.
    """

    op: ClassVar[str] = "dispatch_rows"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    skips_improbable: bool = False
    __str__ = plain_text


def _dispatches(dtype: torch.dtype) -> dict[str, DispatchDesc]:
    return {"": DispatchDesc(dtype), "probable": DispatchDesc(dtype, skips_improbable=True)}


@operation(samples=_dispatches)
def dispatch_rows(
    desc: DispatchDesc,
    x: torch.Tensor,
    index: torch.Tensor,
    sources: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
) -> tuple[ResultShape, ResultShape | None]:
    """Return the shapes of ``y`` and ``permuted_probs``."""
    rows = sources.shape[0]
    permuted_probs = None if probs is None else ResultShape((rows,), probs.dtype)
    return ResultShape((rows, x.shape[1]), x.dtype), permuted_probs


@dataclass(frozen=True, slots=True)
class CombineDesc:
    """``combine_rows(x, index, *, weights=None, row_values=None) -> (y, values)``.

    ``y [t, n]`` in ``dtype``: the sum over j of ``weights[i, j] * x[index[i, j]]``, from
    ``x [m, n]``; without ``weights [t, k]``, which have any floating-point dtype, of the rows
    alone. Added in float32 (float64 from float64), in the order of j, and rounded once; zeros for a
    token without rows. ``row_values [m]``: then ``values [t, k]`` is ``row_values[index]``, 0 where
    there is none; else it is None. Results are contiguous.
    """

    op: ClassVar[str] = "combine_rows"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    __str__ = plain_text


@operation(samples=lambda dtype: {"": CombineDesc(dtype)})
def combine_rows(
    desc: CombineDesc,
    x: torch.Tensor,
    index: torch.Tensor,
    *,
    weights: torch.Tensor | None = None,
    row_values: torch.Tensor | None = None,
) -> tuple[ResultShape, ResultShape | None]:
    """Return the shapes of ``y`` and ``values``."""
    values = None if row_values is None else shape_of(index, row_values.dtype)
    return ResultShape((index.shape[0], x.shape[1]), x.dtype), values


@dataclass(frozen=True, slots=True)
class CombineBackwardDesc:
    """``combine_rows_backward(grad, x, index, sources, weights) -> (grad_x, grad_weights)``.

    The gradients of :class:`CombineDesc` with weights, from ``grad [t, n]``:
    ``grad_x [m, n] = weights.flatten()[sources] * grad[sources // k]`` in ``dtype``, zeros where
    ``sources`` is -1, and ``grad_weights [t, k]``, in the dtype of the weights, the products
    ``grad[i] . x[index[i, j]]``, 0 where there is no row. Computed in float32 (float64 from
    float64), rounded once. Results are contiguous.
    """

    op: ClassVar[str] = "combine_rows_backward"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    __str__ = plain_text


@operation(samples=lambda dtype: {"": CombineBackwardDesc(dtype)})
def combine_rows_backward(
    desc: CombineBackwardDesc,
    grad: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
    sources: torch.Tensor,
    weights: torch.Tensor,
) -> tuple[ResultShape, ResultShape]:
    """Return the shapes of ``grad_x`` and ``grad_weights``."""
    return shape_of(x), shape_of(weights)


MASTER_KINDS: tuple[str, ...] = ("none", "float32", "remainder")
"""Where the values that are stepped lie: in the parameter; in a float32 tensor beside it; in the
parameter, bfloat16, and the 16 bits that it lacks."""


@dataclass(frozen=True, slots=True)
class AdamDesc:
    """``adam(grads, params, exp_avgs, exp_avg_sqs, masters, *, lr, beta1, beta2, eps, weight_decay,
    step, bias_correction=True, inv_scale=1.0, found_inf=None) -> None``: a step of Adam.

    Lists of as many tensors, those of one parameter of one shape, of any strides; all are updated
    in place but ``grads``. ``masters`` is empty where there are none. ``step`` is the number of
    this step, from 1 on; gradients are multiplied by ``inv_scale`` first. ``lr``, ``step`` and
    ``inv_scale`` are numbers, or tensors of one element on the device, float32, and int32 for
    ``step``. ``found_inf``, float32 or int32 ``[1]`` on the device or None: if it is not 0, nothing
    is updated. In float32, p the value stepped::

        g = grad * inv_scale   (+ weight_decay * p without ``decoupled``)
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        update = (m / (1 - beta1**step)) / (sqrt(v / (1 - beta2**step)) + eps)
        p = p - lr * (update   (+ weight_decay * p with ``decoupled``))

    without the two divisions by ``1 - beta**step`` if ``bias_correction`` is False. ``m``, ``v``
    and ``p`` are rounded once to their dtypes, the parameter from the new ``p``.

    Attributes:
        dtype: of the parameters.
        grad_dtype: of the gradients.
        state_dtype: of both averages, float32 or bfloat16.
        master: ``"float32"``: ``masters`` are float32, hold p, and the parameter is p rounded.
            ``"remainder"``: parameters are bfloat16, ``masters`` int16; the bits of p are
            ``(bits(param) << 16) + remainder``: the parameter is p rounded to nearest, halves away
            from zero, the remainder the lower 16 bits, as a signed number. ``"none"``: the
            parameter is p, and there are no masters.
        decoupled: weight decay as AdamW has it.
    """

    op: ClassVar[str] = "adam"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    grad_dtype: torch.dtype
    state_dtype: torch.dtype = torch.float32
    master: str = "none"
    decoupled: bool = True
    __str__ = plain_text


def _steps(dtype: torch.dtype) -> dict[str, AdamDesc]:
    """Return steps of parameters of ``dtype`` with gradients likewise and in float32."""
    steps: dict[str, AdamDesc] = {}
    for grad_dtype in dict.fromkeys((dtype, torch.float32)):
        of_grads = "" if grad_dtype == dtype else "float32_grads."
        steps[f"{of_grads}adamw"] = AdamDesc(dtype, grad_dtype)
        steps[f"{of_grads}adam"] = AdamDesc(dtype, grad_dtype, decoupled=False)
        if dtype != torch.float32:
            steps[f"{of_grads}masters"] = AdamDesc(dtype, grad_dtype, master="float32")
        if dtype == torch.bfloat16:
            steps[f"{of_grads}remainders"] = AdamDesc(dtype, grad_dtype, master="remainder")
            averages = AdamDesc(dtype, grad_dtype, torch.bfloat16, "float32")
            steps[f"{of_grads}bfloat16_averages"] = averages
    return steps


@operation(writes=("params", "exp_avgs", "exp_avg_sqs", "masters"), samples=_steps)
def adam(
    desc: AdamDesc,
    grads: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    exp_avgs: Sequence[torch.Tensor],
    exp_avg_sqs: Sequence[torch.Tensor],
    masters: Sequence[torch.Tensor],
    *,
    lr: float | torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: float | torch.Tensor,
    bias_correction: bool = True,
    inv_scale: float | torch.Tensor = 1.0,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Return None: a step has no result."""
