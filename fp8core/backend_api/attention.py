"""Attention, the softmax of scaled products of queries and keys, times values; its gradients."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar

import torch

from fp8core.backend_api.operand_spec import Operand, OperandSpec, dtype_text, plain_text, text
from fp8core.backend_api.record import ResultShape, computing_dtype, operation, shape_of

ATTENTION_LAYOUTS = ("sbhd", "bshd", "thd")
"""Dimensions: s sequence, b batch, h heads, d head size; t the tokens of all sequences."""


@dataclass(frozen=True, slots=True)
class RotaryDesc:
    """``rotary(x, freqs, *, start_positions=None, cu_seqlens=None) -> y``.

    ``x [s, b, h, d]`` in ``dtype`` and a ``layout`` of attention (``"sbhd"``; batch first in
    ``"bshd"``; ``[t, h, d]`` in ``"thd"``); ``y`` likewise, contiguous. ``freqs`` is float32
    ``[positions, 1, 1, r]``, angles in radians, r even and at most d. Computed in float32 (float64
    from float64), rounded once. The elements ``i`` and ``j`` of a pair, at position ``p``, become::

        y[i] = x[i] * cos(freqs[p, i]) - x[j] * sin(freqs[p, i])
        y[j] = x[j] * cos(freqs[p, j]) + x[i] * sin(freqs[p, j])

    The elements behind the first r are copied.

    ``start_positions``, int32 ``[b]`` on the device, is the position of the first token of each
    sequence, 0 if None. ``cu_seqlens``, int32 ``[b + 1]`` on the device, is given in thd alone:
    where sequences begin and end among the tokens. A token of no sequence has zeros in ``y``. At a
    position that ``freqs`` lacks, the elements that would be rotated are NaN.

    Attributes:
        interleaved: the pairs are ``(0, 1), (2, 3)``, else ``(i, i + r / 2)``.
        inverse: the transposed map, which is the gradient; it rotates back where both elements of
            a pair have one angle, as they have in ``fp8core.RotaryPositionEmbedding``.
    """

    op: ClassVar[str] = "rotary"
    low_precision: ClassVar[bool] = False
    dtype: torch.dtype
    layout: str
    interleaved: bool = False
    inverse: bool = False
    __str__ = plain_text


@dataclass(frozen=True, slots=True)
class PackedRotaryDesc(RotaryDesc):
    """As RotaryDesc, of queries beside keys and values: ``rotary(x, freqs, *, k, v, ...) -> y``.

    ``k`` and ``v`` have the tokens, dtype and head size of x, and any strides. ``y [.., heads of
    all three, d]`` has the heads one after the other, those of x and k as RotaryDesc has them,
    those of v as they are. A variant: whoever denies it is asked for RotaryDesc.
    """

    packed: ClassVar[bool] = True

    @classmethod
    def of(cls, desc: RotaryDesc) -> PackedRotaryDesc:
        """Return the descriptor that rotates queries and keys as ``desc`` does."""
        return cls(desc.dtype, desc.layout, desc.interleaved, desc.inverse)

    def plain(self) -> RotaryDesc:
        """Return the descriptor of queries, or of keys, alone."""
        return RotaryDesc(self.dtype, self.layout, self.interleaved, self.inverse)


def _rotations(dtype: torch.dtype) -> dict[str, RotaryDesc]:
    """Return the rotation in each layout, of either kind of pairs, and its gradient."""
    options = itertools.product((False, True), ATTENTION_LAYOUTS, (False, True))
    return {
        "interleaved." * interleaved + layout + ".backward" * inverse: RotaryDesc(
            dtype, layout, interleaved, inverse
        )
        for interleaved, layout, inverse in options
    }


@operation(
    samples=_rotations,
    # A saved program has no keys and values.
    schema="(str operation, Tensor x, Tensor freqs, Tensor? start_positions, Tensor? cu_seqlens, "
    "Tensor? k=None, Tensor? v=None) -> Tensor",
)
def rotary(
    desc: RotaryDesc,
    x: torch.Tensor,
    freqs: torch.Tensor,
    *,
    start_positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
) -> ResultShape:
    """Return the shape of ``y``."""
    *tokens, heads, size = x.shape
    heads += sum([part.shape[-2] for part in (k, v) if part is not None])
    return ResultShape((*tokens, heads, size), x.dtype)


ATTENTION_BIASES = (None, "pre_scale", "post_scale", "alibi")
ATTENTION_SOFTMAXES = ("vanilla", "off-by-one", "learnable")


@dataclass(frozen=True, slots=True)
class AttentionDesc:
    """``attention(q, k, v, *, bias=None, alibi_slopes=None, mask=None, softmax_offset=None,
    cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None,
    max_seqlen_q=None, max_seqlen_kv=None, rng=None, s_scale=None, s_amax_out=None) -> (out, stats,
    max_logit)``.

    Computed in float32 from ``dtype`` (float64 from float64), for query i and key j of a sequence::

        logits[i, j] = scale * (q[i] . k[j])
        out[i] = sum over j of dropped(softmax(logits[i]))[j] * v[j]

    ``q [s, b, heads, head_dim]``, ``k [.., groups, head_dim]``, ``v [.., groups, head_dim_v]`` in
    ``layout`` (``"sbhd"``; batch first in ``"bshd"``; ``[t, h, d]`` in ``"thd"``); ``heads`` is a
    multiple of ``groups``, and ``heads / groups`` neighbouring heads read one group. ``out`` has
    the layout of ``q``, contiguous, with ``head_dim_v`` columns. ``stats [b, heads, s]``
    (``[t, heads]`` in thd) is float32 (float64 from float64): the logarithm of the sum that divides
    the exponentials. ``max_logit [heads]`` likewise: the largest logit that no mask excludes, -inf
    if there is none; None unless the descriptor asks for it.

    A query that may look at no key, and one behind the end of its sequence, has zeros in ``out``
    and -inf in ``stats``; its gradient is zero, and it adds nothing to other gradients. With a sink
    (``softmax`` other than vanilla) the statistics of such a query hold the sink alone where the
    query is within its sequence. Values behind the end of a sequence have no effect, NaN included.

    In low precision, with a spec ``qkv``, q, k and v are an :class:`~fp8core.backend_api.Operand`
    each: ``data`` in the layout, and a scale for the whole tensor. The weights, after dropout, are
    quantized by the spec ``s`` before they are multiplied with the values: by ``s_scale``, float32
    ``[1]``, a multiplier. ``s_amax_out``, float32 ``[1]``, becomes the maximum of itself and of the
    weights' amax; None records nothing. The sum that divides the exponentials is of unrounded ones.
    With a spec ``out`` the result is codes of it, uint8, whose ``scale_inv`` is that of the values
    divided by ``1 - dropout``: no element of the result is larger than the largest value times
    ``1 / (1 - dropout)``, so that the scale of the values fits it, and a code that rounding lifts
    above the format's maximum is that maximum.

    Every keyword is given for the descriptors that need it alone.

    Attributes:
        window: query i sees the keys from ``i + shift - left`` to ``i + shift + right``, of
            ``(left, right)``; -1 is no limit. A causal mask is ``right = 0``.
        bottom_right: ``shift`` is the number of keys less the number of queries of the sequence;
            0 if False.
        padding: sequences have lengths: ``cu_seqlens_q`` and ``cu_seqlens_kv``, int32 ``[b + 1]``
            on the device, whose differences are the lengths. True in thd, where they are also
            where sequences begin, unless ``cu_seqlens_q_padded`` and ``cu_seqlens_kv_padded`` say
            that; there no sequence is longer than ``max_seqlen_q`` and ``max_seqlen_kv``, integers.
        arbitrary: ``mask``, bool, of a shape that broadcasts to ``[b, heads, s_q, s_kv]``: True
            excludes a key.
        bias: ``"post_scale"``: ``bias``, of four dimensions that broadcast to
            ``[b, heads, s_q, s_kv]``, is added to the logits; ``"pre_scale"``: before the scale
            multiplies them; ``"alibi"``: ``-slope * |i + shift - j|`` is added, ``alibi_slopes``
            float32 ``[heads]`` or ``[b, heads]``.
        softcap: c: the scaled logits become ``c * tanh(logits / c)``, before a post-scale bias and
            ALiBi are added; 0.0 leaves them.
        softmax: ``"off-by-one"`` adds 1 to the sum of exponentials, ``"learnable"``
            ``exp(softmax_offset[head])``, of any float dtype.
        dropout: the probability with which a weight becomes zero, the others being multiplied by
            ``1 / (1 - dropout)``; ``rng`` is int64 ``[2]``, seed and offset, on the CPU, or, in a
            graph of the device, there: the same values drop the same weights, in backward too.
        max_logit: whether ``max_logit`` is returned.
        qkv, s: how queries, keys and values are quantized, and how the weights are; tensorwise, and
            ``s`` delayed. None in high precision.
        out: how the result is quantized, tensorwise and delayed; None returns it in ``dtype``.
    """

    op: ClassVar[str] = "attention"
    dtype: torch.dtype
    layout: str
    heads: int
    groups: int
    head_dim: int
    head_dim_v: int
    scale: float
    window: tuple[int, int] = (-1, -1)
    bottom_right: bool = False
    padding: bool = False
    arbitrary: bool = False
    bias: str | None = None
    softcap: float = 0.0
    softmax: str = "vanilla"
    dropout: float = 0.0
    max_logit: bool = False
    qkv: OperandSpec | None = None
    s: OperandSpec | None = None
    out: OperandSpec | None = None

    @property
    def low_precision(self) -> bool:
        """Whether queries, keys and values are quantized."""
        return self.qkv is not None

    def __str__(self) -> str:
        heads, sizes = f"{self.heads} heads", f"d={self.head_dim}"
        if self.groups != self.heads:
            heads += f" in {self.groups} groups"
        if self.head_dim_v != self.head_dim:
            sizes += f", dv={self.head_dim_v}"
        scale = f"scale={self.scale:.9g}"
        return text(self, dtype_text(self.dtype), self.layout, heads, sizes, scale)


@dataclass(frozen=True, slots=True)
class CachedAttentionDesc(AttentionDesc):
    """As AttentionDesc, with padding and in high precision, where k and v are those of a cache at
    its capacity: ``[b, capacity, ..]``, whatever the lengths of the sequences are; in thd
    ``[b * capacity, ..]``, with a sequence at each multiple of the capacity, which is
    ``max_seqlen_kv``.

    The calls of a generation differ in the values of ``cu_seqlens`` alone, so that a kernel that
    reads lengths on the device is prepared once. Rows behind the end of a sequence are finite: a
    weight of 0 is enough to exclude them. Without a backend for it, AttentionDesc is asked for,
    with keys and values up to the longest sequence.
    """


@dataclass(frozen=True, slots=True)
class PagedAttentionDesc(CachedAttentionDesc):
    """As CachedAttentionDesc, of one query a sequence or none, whose keys and values are read where
    they lie: ``attention(q, k, v, *, page_table, cu_seqlens_q, cu_seqlens_kv, ...)``.

    ``k [pages, page size, groups, head_dim]``, ``v`` likewise, in every layout. ``page_table``,
    int32 ``[b, n]`` on the device, has the pages of each sequence in their order: the key at
    position p of sequence i is row ``p % page size`` of page ``page_table[i, p // page size]``. No
    sequence is longer than ``n * page size``. Entries behind the end of a sequence say nothing; a
    page that is none of the ``pages`` is read nowhere, and its keys and values are zeros.

    With a spec ``kv``, of blocks ``(1, 0)`` and float32 scales, k and v are an
    :class:`~fp8core.backend_api.Operand` each: codes, uint8, in that form, and ``scale_inv [pages,
    page size, groups, 1]``, a scale for each head of a token. q and the result are in ``dtype``.

    Optional: a backend that denies it is asked for CachedAttentionDesc or AttentionDesc, with
    copies of the pages in high precision.
    """

    kv: OperandSpec | None = None


@dataclass(frozen=True, slots=True)
class SingleQueryDesc(AttentionDesc):
    """As AttentionDesc, of one query a sequence, in sbhd and bshd, in high precision and without
    padding: ``attention(q, k, v, *, mask=None)``.

    k and v are those of another library's cache, of any strides, as where heads lie outside of
    tokens: they are read where they lie. ``mask``, which ``arbitrary`` asks for, is ``[b, 1, 1,
    s_kv]`` or ``[1, 1, 1, s_kv]``. Rows that it excludes are finite: a weight of 0 is enough to
    exclude them.

    Optional: whoever asks for it has an attention of its own beside it.
    """


@operation(schema="(str operation, Tensor?[] tensors, SymInt[]? sizes) -> Tensor[]")
def attention(
    desc: AttentionDesc,
    q: torch.Tensor | Operand,
    k: torch.Tensor | Operand,
    v: torch.Tensor | Operand,
    *,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    softmax_offset: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    rng: torch.Tensor | None = None,
    s_scale: torch.Tensor | None = None,
    s_amax_out: torch.Tensor | None = None,
) -> tuple[ResultShape, ResultShape, ResultShape | None]:
    """Return the shapes of ``out``, ``stats`` and ``max_logit``."""
    size = _size(q)
    out = ResultShape((*size[:-1], desc.head_dim_v), torch.uint8 if desc.out else desc.dtype)
    wide = computing_dtype(desc.dtype)
    max_logit = ResultShape((desc.heads,), wide) if desc.max_logit else None
    if desc.layout == "thd":
        return out, ResultShape((size[0], desc.heads), wide), max_logit
    sequence, batch = size[:2] if desc.layout == "sbhd" else (size[1], size[0])
    return out, ResultShape((batch, desc.heads, sequence), wide), max_logit


def _size(x: torch.Tensor | Operand) -> tuple[int, ...]:
    return tuple((x.data if isinstance(x, Operand) else x).shape)


@dataclass(frozen=True, slots=True)
class AttentionBackwardDesc:
    """``attention_backward(grad_out, q, k, v, out, stats, *, bias=None, alibi_slopes=None,
    mask=None, softmax_offset=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
    cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, rng=None, s_scale=None,
    dp_scale=None, dp_amax_out=None) -> (grad_q, grad_k, grad_v, grad_bias, grad_softmax_offset)``.

    ``out`` and ``stats`` are forward's, ``out`` dequantized to ``attention.dtype`` if forward
    quantized it, the keywords those of forward. The first three gradients
    are in ``attention.dtype``, contiguous in the layout; ``grad_bias`` has shape and dtype of
    ``bias``, summed in float32, None unless ``bias_grad`` asks for it; ``grad_softmax_offset``
    float32 ``[heads]`` (float64 from float64), None unless the offset is learned.

    In low precision q, k and v are operands, as in forward. With ``grad_output`` the gradient of
    the result is one, too, and the weights are rounded by ``s_scale``, that of forward. The
    gradients of the logits are quantized by the spec ``dp`` before they are multiplied with queries
    and keys: by ``dp_scale``, recording ``dp_amax_out``, if it is delayed; else by a scale that
    follows from their amax. Without ``grad_output`` nothing is rounded but the results, to
    ``attention.dtype``: the logits are those of the exact values of the operands, whose statistics
    forward returned, where values rounded to ``attention.dtype`` have others.
    """

    op: ClassVar[str] = "attention_backward"
    attention: AttentionDesc
    bias_grad: bool = False
    grad_output: OperandSpec | None = None
    dp: OperandSpec | None = None
    __str__ = plain_text

    @property
    def low_precision(self) -> bool:
        """Whether the tensors that it multiplies are quantized."""
        return self.attention.low_precision


@dataclass(frozen=True, slots=True)
class AttentionPartBackwardDesc(AttentionBackwardDesc):
    """As AttentionBackwardDesc, where ``out`` and ``stats`` are those of more keys: k and v are a
    part of the keys and values that the queries see, as on one rank of several.

    With ``P = exp(logits - stats)`` the gradients of the logits are
    ``P * (grad_out @ v^T - sum over d of grad_out * out)``, dropout as in forward. The gradient of
    the queries is the part's term: the terms of all parts add up to the whole, and the gradients
    of keys and values are complete. ``stats`` is -inf where a query sees no key of any part.
    """


@operation(schema="(str operation, Tensor?[] tensors, SymInt[]? sizes) -> Tensor[]")
def attention_backward(
    desc: AttentionBackwardDesc,
    grad_out: torch.Tensor | Operand,
    q: torch.Tensor | Operand,
    k: torch.Tensor | Operand,
    v: torch.Tensor | Operand,
    out: torch.Tensor,
    stats: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    softmax_offset: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_kv: torch.Tensor | None = None,
    cu_seqlens_q_padded: torch.Tensor | None = None,
    cu_seqlens_kv_padded: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    rng: torch.Tensor | None = None,
    s_scale: torch.Tensor | None = None,
    dp_scale: torch.Tensor | None = None,
    dp_amax_out: torch.Tensor | None = None,
) -> tuple[ResultShape, ResultShape, ResultShape, ResultShape | None, ResultShape | None]:
    """Return the shapes of the gradients of queries, keys, values, bias and offset."""
    grad_q, grad_k, grad_v = (ResultShape(_size(x), desc.attention.dtype) for x in (q, k, v))
    grad_bias = shape_of(bias) if desc.bias_grad and bias is not None else None
    offset = ResultShape((desc.attention.heads,), computing_dtype(desc.attention.dtype))
    is_learned = desc.attention.softmax == "learnable"
    return grad_q, grad_k, grad_v, grad_bias, offset if is_learned else None
