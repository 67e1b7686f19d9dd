"""Backends whose attention computes as the reference does, but for one fault each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc
from fp8core_backends.reference.attention import attention, attention_backward
from tests.conformance.broken import Sound


class _Misreads(Sound):
    """Computes another descriptor than it is given, forward and backward."""

    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        raise NotImplementedError

    def attention(self, desc: AttentionDesc, *given: Any, **named: Any) -> Any:
        return attention(self.misread(desc), *given, **named)

    def attention_backward(self, desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
        forward = self.misread(desc.attention)
        return attention_backward(replace(desc, attention=forward), *given, **named)


class SeesTheNextKey(_Misreads):
    """A causal mask that is one key too wide."""

    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        left, right = desc.window
        return replace(desc, window=(left, right + 1 if right >= 0 else right))


class SeesOneKeyLess(_Misreads):
    """A window that is one key too narrow on the left."""

    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        left, right = desc.window
        return replace(desc, window=(max(left - 1, 0) if left >= 0 else left, right))


class TakesTheOtherCorner(_Misreads):
    """The diagonal at the top left corner, whatever is asked for."""

    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        return replace(desc, bottom_right=False)


class ForgetsTheSink(_Misreads):
    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        return replace(desc, softmax="vanilla") if desc.softmax == "off-by-one" else desc


class ForgetsTheCap(_Misreads):
    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        return replace(desc, softcap=0.0)


class ScalesTheBias(_Misreads):
    """Adds a bias before the scale that is to be added behind it."""

    def misread(self, desc: AttentionDesc) -> AttentionDesc:
        return replace(desc, bias="pre_scale") if desc.bias == "post_scale" else desc


class MixesGroups(Sound):
    """Neighbouring heads read different groups."""

    def attention(self, desc: AttentionDesc, q: Any, k: Any, v: Any, **named: Any) -> Any:
        return attention(desc, q, k.flip(-2), v.flip(-2), **named)


class GivesNanWhereNothingIsSeen(Sound):
    def attention(self, desc: AttentionDesc, *given: Any, **named: Any) -> Any:
        out, stats, max_logit = attention(desc, *given, **named)
        if desc.layout == "sbhd":
            is_blind = (stats == -torch.inf).permute(2, 0, 1)[..., None]
            out = out.masked_fill(is_blind, torch.nan)
        return out, stats, max_logit


class LeavesTheSinkOutOfStatistics(Sound):
    def attention(self, desc: AttentionDesc, *given: Any, **named: Any) -> Any:
        out, stats, max_logit = attention(desc, *given, **named)
        if desc.softmax == "learnable":
            offset = named["softmax_offset"][:, None]
            stats = stats + torch.log1p(-torch.exp(offset - stats).clamp(max=0.99))
        return out, stats, max_logit


class CountsMaskedLogits(Sound):
    """The largest logit of all keys, also of those that a mask excludes."""

    def attention(self, desc: AttentionDesc, *given: Any, **named: Any) -> Any:
        out, stats, max_logit = attention(desc, *given, **named)
        if desc.max_logit:
            max_logit = attention(replace(desc, window=(-1, -1)), *given, **named)[2]
        return out, stats, max_logit


class ForgetsToScaleWhatItKeeps(Sound):
    def attention(self, desc: AttentionDesc, *given: Any, **named: Any) -> Any:
        out, *rest = attention(desc, *given, **named)
        return (out * (1 - desc.dropout), *rest)


class DropsOthersInBackward(Sound):
    def attention_backward(self, desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
        if "rng" in named:
            named["rng"] = named["rng"] + 1
        return attention_backward(desc, *given, **named)


class AveragesOverGroups(Sound):
    """The gradient of a key is the mean over the heads that read it, not the sum."""

    def attention_backward(self, desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
        grad_q, grad_k, *rest = attention_backward(desc, *given, **named)
        repeats = desc.attention.heads // desc.attention.groups
        return (grad_q, grad_k / repeats, *rest)


class TakesThePartForTheWhole(Sound):
    """The gradients of a part of the keys with the row sums of that part alone."""

    def attention_backward(self, desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
        fields = (desc.attention, desc.bias_grad, desc.grad_output, desc.dp)
        return attention_backward(AttentionBackwardDesc(*fields), *given, **named)


class ForgetsTheRowSums(Sound):
    """The gradient of the bias without what the softmax takes off."""

    def attention_backward(self, desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
        *grads, bias, offset = attention_backward(desc, *given, **named)
        if bias is not None:
            bias = bias + 0.5
        return (*grads, bias, offset)


class ForgetsTheScaleOfTheWeights(Sound):
    """Multiplies codes of weights with the values, without dividing by their scale."""

    def attention(self, desc: AttentionDesc, *given: Any, **named: Any) -> Any:
        out, *rest = attention(desc, *given, **named)
        return (out * named["s_scale"].to(out.dtype) if desc.s is not None else out, *rest)


class ForgetsTheScaleOfTheResult(Sound):
    """Casts the result without the scale of the values."""

    def attention(self, desc: AttentionDesc, *given: Any, **named: Any) -> Any:
        out, *rest = attention(replace(desc, out=None), *given, **named)
        if desc.out is not None:
            out = out.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
        return (out, *rest)


class LeavesTheResultUnrounded(Sound):
    def attention(self, desc: AttentionDesc, *given: Any, **named: Any) -> Any:
        return attention(replace(desc, out=None), *given, **named)


class RecordsScaledWeights(Sound):
    """Records the amax of what it casts, behind the scale."""

    def attention(self, desc: AttentionDesc, *given: Any, **named: Any) -> Any:
        results = attention(desc, *given, **named)
        if named.get("s_amax_out") is not None:
            named["s_amax_out"].mul_(named["s_scale"])
        return results


class RecordsNoGradient(Sound):
    """Rounds the gradients of logits and records nothing."""

    def attention_backward(self, desc: AttentionBackwardDesc, *given: Any, **named: Any) -> Any:
        named.pop("dp_amax_out", None)
        return attention_backward(desc, *given, **named)


_FORWARD = "law4_attention_is_within_the_bound"
_BACKWARD = "law4_attention_backward_is_within_the_bound"
CAUGHT_BY: dict[type[Sound], str] = {
    SeesTheNextKey: _FORWARD,
    SeesOneKeyLess: _FORWARD,
    TakesTheOtherCorner: _FORWARD,
    ForgetsTheSink: _FORWARD,
    ForgetsTheCap: _FORWARD,
    ScalesTheBias: _FORWARD,
    MixesGroups: _FORWARD,
    GivesNanWhereNothingIsSeen: _FORWARD,
    LeavesTheSinkOutOfStatistics: _FORWARD,
    CountsMaskedLogits: _FORWARD,
    ForgetsToScaleWhatItKeeps: "law4_attention_drops_as_often_as_asked",
    DropsOthersInBackward: "law4_attention_backward_drops_what_forward_dropped",
    AveragesOverGroups: _BACKWARD,
    ForgetsTheRowSums: _BACKWARD,
    TakesThePartForTheWhole: "law4_attention_backward_of_a_part_uses_the_given_result",
    ForgetsTheScaleOfTheWeights: _FORWARD,
    ForgetsTheScaleOfTheResult: _FORWARD,
    LeavesTheResultUnrounded: _FORWARD,
    RecordsScaledWeights: _FORWARD,
    RecordsNoGradient: _BACKWARD,
}
