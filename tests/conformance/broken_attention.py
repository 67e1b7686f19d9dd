"""Backends whose attention computes as the reference does, but for one fault each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core_backends.reference.attention import attention, attention_backward
from tests.conformance.broken import Sound, caught_by, fault


class _Misreads(Sound):
    """Computes another descriptor than it is given, forward and backward."""

    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        raise NotImplementedError

    def attention(self, desc: AttentionDesc, *given: Any, **named: Any) -> Any:
        return attention(self.misread(desc), *given, **named)

    def attention_backward(self, desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
        forward = self.misread(desc.attention)
        return attention_backward(replace(desc, attention=forward), *given, **named)


@caught_by("law4_attention_is_within_the_bound")
class SeesTheNextKey(_Misreads):
    """A causal mask that is one key too wide."""

    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        left, right = desc.window
        return replace(desc, window=(left, right + 1 if right >= 0 else right))


@caught_by("law4_attention_is_within_the_bound")
class SeesOneKeyLess(_Misreads):
    """A window that is one key too narrow on the left."""

    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        left, right = desc.window
        return replace(desc, window=(max(left - 1, 0) if left >= 0 else left, right))


@caught_by("law4_attention_is_within_the_bound")
class TakesTheOtherCorner(_Misreads):
    """The diagonal at the top left corner, whatever is asked for."""

    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        return replace(desc, bottom_right=False)


@caught_by("law4_attention_is_within_the_bound")
class ForgetsTheSink(_Misreads):
    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        return replace(desc, softmax="vanilla") if desc.softmax == "off-by-one" else desc


@caught_by("law4_attention_is_within_the_bound")
class ForgetsTheCap(_Misreads):
    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        return replace(desc, softcap=0.0)


@caught_by("law4_attention_is_within_the_bound")
class ScalesTheBias(_Misreads):
    """Adds a bias before the scale that is to be added behind it."""

    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        return replace(desc, bias="pre_scale") if desc.bias == "post_scale" else desc


@fault("attention", "law4_attention_is_within_the_bound")
def mixes_groups(desc: AttentionDesc, q: Any, k: Any, v: Any, **named: Any) -> Any:
    """Neighbouring heads read different groups."""
    return attention(desc, q, k.flip(-2), v.flip(-2), **named)


@fault("attention", "law4_attention_is_within_the_bound")
def gives_nan_where_nothing_is_seen(desc: AttentionDesc, *given: Any, **named: Any) -> Any:
    out, stats, max_logit = attention(desc, *given, **named)
    if desc.layout == "sbhd":
        is_blind = (stats == -torch.inf).permute(2, 0, 1)[..., None]
        out = out.masked_fill(is_blind, torch.nan)
    return out, stats, max_logit


@fault("attention", "law4_attention_is_within_the_bound")
def leaves_the_sink_out_of_statistics(desc: AttentionDesc, *given: Any, **named: Any) -> Any:
    out, stats, max_logit = attention(desc, *given, **named)
    if desc.softmax == "learnable":
        offset = named["softmax_offset"][:, None]
        stats = stats + torch.log1p(-torch.exp(offset - stats).clamp(max=0.99))
    return out, stats, max_logit


@fault("attention", "law4_attention_is_within_the_bound")
def counts_masked_logits(desc: AttentionDesc, *given: Any, **named: Any) -> Any:
    """The largest logit of all keys, also of those that a mask excludes."""
    out, stats, max_logit = attention(desc, *given, **named)
    if desc.max_logit:
        max_logit = attention(replace(desc, window=(-1, -1)), *given, **named)[2]
    return out, stats, max_logit


@fault("attention", "law4_attention_drops_as_often_as_asked")
def forgets_to_scale_what_it_keeps(desc: AttentionDesc, *given: Any, **named: Any) -> Any:
    out, *rest = attention(desc, *given, **named)
    return (out * (1 - desc.dropout), *rest)


@fault("attention_backward", "law4_attention_backward_drops_what_forward_dropped")
def drops_others_in_backward(desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
    if "rng" in named:
        named["rng"] = named["rng"] + 1
    return attention_backward(desc, *given, **named)


@fault("attention_backward", "law4_attention_backward_is_within_the_bound")
def averages_over_groups(desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
    """The gradient of a key is the mean over the heads that read it, not the sum."""
    grad_q, grad_k, *rest = attention_backward(desc, *given, **named)
    repeats = desc.attention.heads // desc.attention.groups
    return (grad_q, grad_k / repeats, *rest)


@fault("attention_backward", "law4_attention_backward_of_a_part_uses_the_given_result")
def takes_the_part_for_the_whole(desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
    """The gradients of a part of the keys with the row sums of that part alone."""
    fields = (desc.attention, desc.bias_grad, desc.grad_output, desc.dp)
    return attention_backward(AttentionBackwardDesc(*fields), *given, **named)


@fault("attention_backward", "law4_attention_backward_is_within_the_bound")
def forgets_the_row_sums(desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
    """The gradient of the bias without what the softmax takes off."""
    *grads, bias, offset = attention_backward(desc, *given, **named)
    if bias is not None:
        bias = bias + 0.5
    return (*grads, bias, offset)


@fault("attention", "law4_attention_is_within_the_bound")
def forgets_the_scale_of_the_weights(desc: AttentionDesc, *given: Any, **named: Any) -> Any:
    """Multiplies codes of weights with the values, without dividing by their scale."""
    out, *rest = attention(desc, *given, **named)
    return (out * named["s_scale"].to(out.dtype) if desc.s is not None else out, *rest)


@fault("attention", "law4_attention_is_within_the_bound")
def forgets_the_scale_of_the_result(desc: AttentionDesc, *given: Any, **named: Any) -> Any:
    """Casts the result without the scale of the values."""
    out, *rest = attention(replace(desc, out=None), *given, **named)
    if desc.out is not None:
        out = out.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    return (out, *rest)


@fault("attention", "law4_attention_is_within_the_bound")
def leaves_the_result_unrounded(desc: AttentionDesc, *given: Any, **named: Any) -> Any:
    return attention(replace(desc, out=None), *given, **named)


@fault("attention", "law4_attention_is_within_the_bound")
def records_scaled_weights(desc: AttentionDesc, *given: Any, **named: Any) -> Any:
    """Records the amax of what it casts, behind the scale."""
    results = attention(desc, *given, **named)
    if named.get("s_amax_out") is not None:
        named["s_amax_out"].mul_(named["s_scale"])
    return results


@fault("attention_backward", "law4_attention_backward_is_within_the_bound")
def records_no_gradient(desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
    """Rounds the gradients of logits and records nothing."""
    named.pop("dp_amax_out", None)
    return attention_backward(desc, *given, **named)
