"""The router of a mixture of experts: which experts each token goes to, with which probability.

The names and arguments are those of ``transformer_engine.pytorch.router``. Everything is computed
in float32.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.weak import WeakIdKeyDictionary

from fp8core.backend_api import SCORE_FUNCTIONS, RouterBackwardDesc, RouterDesc
from fp8core.chain.alone import bound, derivatives, in_torch, is_transformed, needs_node, plain
from fp8core.errors import OperandError, checked_choice, did_you_mean, elsewhere
from fp8core.torch_ops import private
from fp8core.torch_ops.capture import has_no_values

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_MODES = ("two_kernel", "fused_atomic")
# The version of bounds of bins that was checked.
_CHECKED: MutableMapping[torch.Tensor, int | None] = WeakIdKeyDictionary()

Optional = torch.Tensor | None
Balancing: TypeAlias = "tuple[Optional, Optional, str | None]"
Values: TypeAlias = "tuple[torch.dtype, int, str, bool, int, int, float, bool]"


class RoutingMapFormat(enum.IntEnum):
    """How a routing map is stored: bool ``[tokens, experts]``, or a bit for each expert, uint8
    ``[tokens, ceil(experts / 8)]``, the lowest bit first."""

    BYTEMAP = 0
    BITMAP_U8 = 1


# The compiler iterates no Enum.
_FORMATS = {format.name.lower(): format for format in RoutingMapFormat}


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: str | RoutingMapFormat | int = RoutingMapFormat.BYTEMAP,
    topk_indices: torch.Tensor | None = None,
    qb_histogram: torch.Tensor | None = None,
    qb_bin_bounds: torch.Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities of the ``topk`` experts of each token, and which ones they are.

    Args:
        logits: ``[..., experts]``, float32, bfloat16 or float16.
        topk: how many experts each token goes to. Of experts of equal rank, the one with the lower
            number comes first.
        use_pre_softmax: the softmax is over all experts, not over the chosen ones.
        num_groups, group_topk: experts are this many groups of neighbours, and only those of
            ``group_topk`` groups are chosen: those whose ``topk / group_topk`` best scores have the
            largest sums. None: all.
        scaling_factor: probabilities are multiplied by it; None stands for 1.
        score_function: ``"softmax"``, ``"sigmoid"`` or ``"sqrtsoftplus"``. Probabilities of the
            last two are divided by their sum over the chosen experts where ``topk`` is above 1.
        expert_bias: ``[experts]``, added to the scores for the choice alone; not for softmax.
        routing_map_format: a :class:`RoutingMapFormat`, its number, ``"bytemap"`` or
            ``"bitmap_u8"``.
        topk_indices: an integer tensor ``[..., topk]``, which gets the numbers of the experts, in
            ascending order, and is returned instead of the map.
        qb_histogram: int32 ``[experts, bins]``, to which each call adds, for quantile balancing of
            sigmoid scores without groups; a forward that is repeated may add again. The cutoff of a
            token is the ``topk + 1``-th largest of its scores plus bias; cutoff minus score counts
            once for each expert, in the first or last bin if outside of the bounds. NaN does not
            count.
        qb_bin_bounds: float32 ``[2]``, finite, the lower below the upper: the ends of the bins,
            which are of equal width. Trusted where a graph is captured or compiled.
        qb_histogram_mode: ``"two_kernel"`` or ``"fused_atomic"``: the counts are the same. All
            three are given, or none.

    Returns ``probs``, in shape and dtype of ``logits``, 0 for other experts, and the routing map.
    ``probs`` are differentiable with respect to ``logits``; the choice is not.

    Raises:
        OperandError: ``topk`` above the number of experts, groups that do not divide them, or
            tensors that do not fit.
    """
    owner = "fused_topk_with_score_function"
    layout = _format_of(owner, routing_map_format)
    experts = _check_logits(owner, logits, topk, score_function)
    groups, best = _check_groups(owner, experts, topk, num_groups, group_topk)
    _check_bias(owner, logits, expert_bias, score_function)
    if use_pre_softmax and score_function != "softmax":
        use_pre_softmax = False  # as Transformer Engine, which reads it for softmax alone
    if topk_indices is not None:
        _check_indices(owner, logits, topk, topk_indices)
    balancing = qb_histogram, qb_bin_bounds, qb_histogram_mode
    if any(value is not None for value in balancing):
        is_plain = score_function == "sigmoid" and not groups
        _check_histogram(owner, logits, topk, is_plain, balancing)
    factor = 1.0 if scaling_factor is None else float(scaling_factor)
    values = (logits.dtype, topk, score_function, bool(use_pre_softmax), groups, best, factor)
    rows = plain(logits, f"logits of {owner}").reshape(-1, experts)
    if expert_bias is not None:
        expert_bias = plain(expert_bias.detach(), f"expert_bias of {owner}")
    probs, chosen, scores = _routed((*values, False), rows, expert_bias)
    if qb_histogram is not None and qb_bin_bounds is not None and scores is not None:
        _count(qb_histogram, qb_bin_bounds, scores.detach(), expert_bias, topk)
    probs = probs.reshape(logits.shape)
    if topk_indices is not None:
        # The chosen experts first, each kind in ascending order.
        order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        topk_indices.copy_(order[:, :topk].reshape(topk_indices.shape))
        return probs, topk_indices
    return probs, _stored(chosen, layout, logits.shape[:-1])


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: str | RoutingMapFormat | int = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the routing map of the best ``topk`` experts, and the scores of all, for an auxiliary
    loss.

    Args:
        logits, topk, score_function, routing_map_format: as of
            :func:`fused_topk_with_score_function`.

    The scores are float32 in the shape of ``logits``, and differentiable: softmax over all experts,
    or, of the other functions, divided by their sum over all.

    Raises:
        OperandError: as :func:`fused_topk_with_score_function`.
    """
    owner = "fused_compute_score_for_moe_aux_loss"
    layout = _format_of(owner, routing_map_format)
    experts = _check_logits(owner, logits, topk, score_function)
    rows = plain(logits, f"logits of {owner}").reshape(-1, experts)
    values = (logits.dtype, topk, score_function, False, 0, 0, 1.0, True)
    scores, chosen, _ = _routed(values, rows, None)
    return _stored(chosen, layout, logits.shape[:-1]), scores.reshape(logits.shape)


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """Return the loss that balances the load of experts, a scalar in the dtype of ``probs``.

    The loss is ``coeff * num_experts / (topk * total_num_tokens ** 2)`` times the sum over the
    experts of ``tokens_per_expert * probs.sum(0)``, in float32.

    Args:
        probs: ``[tokens, experts]``, floating-point.
        tokens_per_expert: ``[experts]``, of any dtype: how many tokens go to each expert.
        total_num_tokens: a number, or a tensor of one element on the device.
        num_experts, topk: of the layer.
        coeff: the weight of the loss.

    Raises:
        OperandError: tensors that do not fit.
    """
    owner = "fused_moe_aux_loss"
    if probs.dim() != 2 or not probs.is_floating_point():
        raise OperandError(
            f"{owner}: probs is {probs.dtype} {list(probs.shape)}; expected floating-point "
            f"[tokens, experts]."
        )
    if tuple(tokens_per_expert.shape) != (probs.shape[1],):
        raise OperandError(
            f"{owner}: tokens_per_expert is {list(tokens_per_expert.shape)}; expected "
            f"[{probs.shape[1]}], as probs is {list(probs.shape)}."
        )
    if not isinstance(total_num_tokens, torch.Tensor) and total_num_tokens <= 0:
        raise OperandError(
            f"{owner}(total_num_tokens={total_num_tokens}): expected a positive number."
        )
    wide = torch.float64 if probs.dtype == torch.float64 else torch.float32
    if isinstance(total_num_tokens, torch.Tensor):
        total_num_tokens = total_num_tokens.reshape(()).to(wide)
    weights = tokens_per_expert.detach().to(wide)
    total = (probs.sum(0, dtype=wide) * weights).sum()
    loss = total * (num_experts * coeff / topk) / total_num_tokens / total_num_tokens
    return loss.to(probs.dtype)


# Checks


def _format_of(owner: str, value: str | RoutingMapFormat | int) -> RoutingMapFormat:
    if isinstance(value, str) and value in _FORMATS:
        return _FORMATS[value]
    if isinstance(value, int) and value in _FORMATS.values():
        return RoutingMapFormat(value)
    raise OperandError(
        f"{owner}(routing_map_format={value!r}): expected a RoutingMapFormat, its number, or one "
        f"of {', '.join(_FORMATS)}.{did_you_mean(str(value), _FORMATS)}"
    )


def _check_logits(owner: str, logits: torch.Tensor, topk: int, score_function: str) -> int:
    """Return the number of experts, or refuse the arguments."""
    checked_choice(owner, "score_function", score_function, SCORE_FUNCTIONS)
    if not isinstance(logits, torch.Tensor) or logits.dtype not in _FLOATS or not logits.dim():
        is_tensor = isinstance(logits, torch.Tensor)
        shown = f"{logits.dtype} {list(logits.shape)}" if is_tensor else type(logits).__name__
        raise OperandError(
            f"{owner}: logits is {shown}; expected [..., experts] in float32, bfloat16 or float16."
        )
    experts = logits.shape[-1]
    if type(topk) is not int or not 1 <= topk <= experts:
        raise OperandError(
            f"{owner}(topk={topk!r}): logits {list(logits.shape)} has {experts} experts; expected "
            f"an integer from 1 to {experts}."
        )
    return experts


def _check_groups(
    owner: str, experts: int, topk: int, num_groups: int | None, group_topk: int | None
) -> tuple[int, int]:
    """Return the number of groups and how many of them are chosen; 0 for all experts."""
    if not group_topk:
        return 0, 0
    if not num_groups:
        raise OperandError(
            f"{owner}(group_topk={group_topk}, num_groups={num_groups}): groups are chosen of how "
            f"many? Give num_groups too, or neither."
        )
    if not all(type(number) is int and number > 0 for number in (num_groups, group_topk)):
        raise OperandError(
            f"{owner}(num_groups={num_groups!r}, group_topk={group_topk!r}): expected integers "
            f"above 0, or None for all experts."
        )
    problems = (
        (experts % num_groups != 0, f"num_groups={num_groups} does not divide {experts} experts"),
        (group_topk > num_groups, f"group_topk={group_topk} is above num_groups={num_groups}"),
        (topk % group_topk != 0, f"group_topk={group_topk} does not divide topk={topk}"),
        (
            topk // group_topk > experts // num_groups,
            f"topk={topk} takes {topk // group_topk} experts of a group, which has "
            f"{experts // num_groups}",
        ),
    )
    for is_wrong, text in problems:
        if is_wrong:
            raise OperandError(f"{owner}: {text}.")
    return num_groups, group_topk


def _check_bias(owner: str, logits: torch.Tensor, bias: Optional, score_function: str) -> None:
    if bias is None:
        return
    if score_function == "softmax":
        raise OperandError(
            f"{owner}: expert_bias is for the score functions sigmoid and sqrtsoftplus; leave it "
            f"at None for softmax."
        )
    is_right = tuple(bias.shape) == (logits.shape[-1],) and bias.is_floating_point()
    if not is_right or bias.device != logits.device:
        raise OperandError(
            f"{owner}: expert_bias is {bias.dtype} {list(bias.shape)} on {bias.device}; expected "
            f"floating-point [{logits.shape[-1]}] on {logits.device}."
        )


def _check_indices(owner: str, logits: torch.Tensor, topk: int, indices: torch.Tensor) -> None:
    expected = [*logits.shape[:-1], topk]
    is_integer = not (indices.is_floating_point() or indices.is_complex())
    if list(indices.shape) != expected or not is_integer or indices.dtype == torch.bool:
        raise OperandError(
            f"{owner}: topk_indices is {indices.dtype} {list(indices.shape)}; expected integers "
            f"{expected}."
        )
    if indices.device != logits.device:
        raise elsewhere(f"{owner}: topk_indices", indices.device, "logits", logits.device)


def _stored(chosen: torch.Tensor, layout: RoutingMapFormat, leading: Sequence[int]) -> torch.Tensor:
    """Return the map ``[tokens, experts]`` in ``layout``, its tokens in the ``leading`` sizes."""
    if layout is RoutingMapFormat.BYTEMAP:
        return chosen.reshape(*leading, chosen.shape[1])
    padded = torch.nn.functional.pad(chosen, (0, -chosen.shape[1] % 8))
    bits = 1 << torch.arange(8, device=chosen.device)
    packed = (padded.reshape(len(padded), padded.shape[1] // 8, 8) * bits).sum(-1).to(torch.uint8)
    return packed.reshape(*leading, packed.shape[1])


def _check_histogram(
    owner: str, logits: torch.Tensor, topk: int, is_plain: bool, balancing: Balancing
) -> None:
    """Refuse arguments of quantile balancing that do not fit; ``is_plain``: sigmoid, no groups."""
    names = ("qb_histogram", "qb_bin_bounds", "qb_histogram_mode")
    absent = [name for name, value in zip(names, balancing, strict=True) if value is None]
    if absent:
        raise OperandError(
            f"{owner}: {' and '.join(absent)} is None; expected {', '.join(names)} together, or "
            f"none of them."
        )
    counts, bounds, mode = balancing
    checked_choice(owner, "qb_histogram_mode", mode, _MODES)
    experts = logits.shape[-1]
    if not is_plain or topk == experts:
        raise OperandError(
            f"{owner}(qb_histogram=..., topk={topk}), {experts} experts: expected score_function="
            f"'sigmoid' without groups, and topk below the number of experts."
        )
    _check_counter(f"{owner}: qb_histogram", counts, torch.int32, (experts, None), logits.device)
    _check_counter(f"{owner}: qb_bin_bounds", bounds, torch.float32, (2,), logits.device)
    _check_bounds(owner, bounds)


def _check_counter(
    name: str, value: object, dtype: torch.dtype, shape: Sequence[int | None], device: torch.device
) -> None:
    """Refuse what is no tensor of ``shape``, None in which is any size above 0."""
    shown = type(value).__name__
    if isinstance(value, torch.Tensor):
        padded = itertools.zip_longest(value.shape, shape, fillvalue=0)
        sizes = [None if size is None and n else n for n, size in padded]
        if sizes == list(shape) and (value.dtype, value.device) == (dtype, device):
            return
        shown = f"{value.dtype} {list(value.shape)} on {value.device}"
    expected = ", ".join("bins" if size is None else str(size) for size in shape)
    raise OperandError(f"{name} is {shown}; expected {dtype} [{expected}] on {device}.")


def _check_bounds(owner: str, bounds: Any) -> None:
    """Refuse ends of bins that hold none, once for each content: the device is waited for."""
    is_recorded = torch.compiler.is_compiling() or private.is_traced() or private.is_capturing()
    if has_no_values(bounds) or is_recorded:
        return
    version = None if bounds.is_inference() else bounds._version
    if version is not None and _CHECKED.get(bounds) == version:
        return
    lower, upper = bounds.tolist()
    if not 0 < upper - lower <= torch.finfo(torch.float32).max:
        raise OperandError(
            f"{owner}: qb_bin_bounds is [{lower}, {upper}]; expected finite numbers, the lower "
            f"below the upper by a finite float32."
        )
    _CHECKED[bounds] = version


def _count(
    counts: torch.Tensor, bounds: torch.Tensor, scores: torch.Tensor, bias: Optional, topk: int
) -> None:
    """Add the tokens of ``scores [tokens, experts]`` to the histogram ``counts``."""
    lower, upper = bounds.unbind()
    bins = counts.shape[1]
    ranked = scores if bias is None else scores + bias.float()
    cutoff = ranked.topk(topk + 1, dim=-1).values[:, -1:]
    place = ((cutoff - scores - lower) / (upper - lower) * bins).clamp(0, bins - 1)
    # NaN has no index: it goes to the first bin, and adds 0.
    counts.scatter_add_(1, place.nan_to_num(0.0).long().T, (~place.isnan()).T.to(torch.int32))


# The operation and its gradient


def _routed(
    values: Values, logits: torch.Tensor, bias: Optional
) -> tuple[torch.Tensor, torch.Tensor, Optional]:
    """Return the probabilities, the map and the scores ``[tokens, experts]`` of a RouterDesc of
    ``values``; no scores, None, where the probabilities are those of all."""
    keywords = {} if bias is None else {"expert_bias": bias}
    if is_transformed():
        probs, chosen, scores = in_torch(RouterDesc, values, logits.device)(logits, **keywords)
    elif needs_node(logits):
        probs, chosen, scores = _Routed.apply(values, logits, bias)  # type: ignore[no-untyped-call]  # torch's
    else:
        probs, chosen, scores = bound(RouterDesc, values, logits)(logits, **keywords)
    return probs, chosen, None if values[-1] else scores


class _Routed(torch.autograd.Function):
    """The probabilities of experts, differentiable with respect to the logits."""

    @staticmethod
    def forward(
        ctx: Any, values: Values, logits: torch.Tensor, bias: Optional
    ) -> tuple[torch.Tensor, torch.Tensor, Optional]:
        keywords = {} if bias is None else {"expert_bias": bias}
        probs, chosen, scores = bound(RouterDesc, values, logits)(logits, **keywords)
        ctx.save_for_backward(logits, bias, chosen, scores)
        ctx.values = values
        if values[-1]:  # probs of all may be the scores themselves
            ctx.mark_non_differentiable(chosen)
            return probs, chosen, None
        ctx.mark_non_differentiable(chosen, scores)
        return probs, chosen, scores

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: object) -> tuple[Optional, ...]:
        logits, bias, chosen, scores = ctx.saved_tensors
        if torch.is_grad_enabled():
            run = in_torch(RouterDesc, ctx.values, logits.device)
            keywords = {} if bias is None else {"expert_bias": bias}
            (gradient,) = derivatives(lambda x: run(x, **keywords)[:1], (logits,), (grad,))
        else:
            run = bound(RouterBackwardDesc, ctx.values, logits)
            gradient = run(grad, chosen, scores)
        return None, gradient, None
