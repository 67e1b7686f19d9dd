"""Arguments of attention: the options of a call, numbers and names, masks, biases, and the keys and
values of a cache."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fp8core.chain.attention.pages import Pages
from fp8core.chain.attention.spec import in_layout
from fp8core.errors import OperandError, UnsupportedError, checked_choice
from fp8core.modules.calls.inputs import check_is_whole, check_kind
from fp8core.modules.calls.parameters import check_size, is_number
from fp8core.modules.layers.parallel import Parallel
from fp8core.modules.sequences.attention_inputs import Heads, Lengths, PaddingMask, Qkv
from fp8core.modules.sequences.inference import InferenceParams
from fp8core.torch_ops.capture import is_faked


class AttentionOptions(NamedTuple):
    """The options of a call of attention besides queries, keys and values: the arguments of
    :meth:`fp8core.DotProductAttention.forward`, in their order. Those that the constructor has too
    override it for the call.

    Attributes:
        attention_mask: for padding, bool ``[b, 1, 1, s]`` that is True behind the end of each
            sequence, or a tuple of two, of queries and of keys; for ``"arbitrary"``, bool that
            broadcasts to ``[b, heads, s_q, s_kv]``, True where a key is excluded. Other mask types
            ignore it, which is logged once.
        cu_seqlens_q, cu_seqlens_kv: int32 ``[b + 1]``: the lengths of the sequences, added up; a
            mask without padding leaves them unread.
        cu_seqlens_q_padded, cu_seqlens_kv_padded: in thd, where sequences begin if there is padding
            between them.
        max_seqlen_q, max_seqlen_kv: in thd, lengths that no sequence exceeds. Without them the host
            reads cu_seqlens, or, in a captured graph, takes the number of tokens.
        checkpoint_core_attention: attention is computed again in backward, instead of holding its
            result and statistics.
        core_attention_bias_type: ``"no_bias"``, ``"pre_scale_bias"``, ``"post_scale_bias"`` or
            ``"alibi"``; ``core_attention_bias`` broadcasts to ``[b, heads, s_q, s_kv]``.
        alibi_slopes: ``[heads]`` or ``[b, heads]``; those of the ALiBi paper if None.
        fast_zero_fill: changes nothing here.
        inference_params: the cache of keys and values: those of this call are stored, under the
            layer's number, and the queries see them behind the earlier ones. It says how long
            sequences are, so that cu_seqlens and a padding mask are not read, and causal mask types
            have their diagonal where the last query of a sequence sees all keys.
        pad_between_seqs: whether thd has padding between sequences; it follows from the padded
            cu_seqlens, which True needs.
        bf16_backward: gradients are computed in high precision, from dequantized tensors, also
            under a recipe with ``fp8_dpa_backward="fp8"``.
        qkv_layer: queries, keys and values in one tensor; ``kv_layer``: keys and values.
            ``qkv_interleave_dim`` is the dimension of 3 or 2: -3 or -2.
        fp8_output, num_splits, thd_attention_policies: not offered, as ``score_mod`` and its
            arguments.
    """

    attention_mask: PaddingMask = None
    qkv_format: str | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    attn_mask_type: str | None = None
    window_size: tuple[int, int] | None = None
    bottom_right_diagonal: bool | None = None
    softcap: float | None = None
    checkpoint_core_attention: bool = False
    core_attention_bias_type: str = "no_bias"
    core_attention_bias: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    fast_zero_fill: bool = True
    inference_params: InferenceParams | None = None
    pad_between_seqs: bool | None = None
    fp8_output: bool | None = False
    bf16_backward: bool | None = False
    num_splits: int | None = 1
    score_mod: Callable[..., Any] | None = None
    score_mod_bprop: Callable[..., Any] | None = None
    score_mod_tensors: Mapping[str, torch.Tensor] | None = None
    score_mod_bprop_tensors: Mapping[str, torch.Tensor] | None = None
    qkv_layer: torch.Tensor | None = None
    kv_layer: torch.Tensor | None = None
    qkv_interleave_dim: int = -3
    thd_attention_policies: list[dict[str, Any]] | None = None
    thd_attention_policy_dispatch: str = "auto"

    @property
    def lengths(self) -> Lengths:
        """Where the sequences are, as the call says it."""
        return Lengths(*self[2:8])

    def refuse_not_offered(self, owner: object) -> None:
        """Raise for the first option that asks for what is not offered."""
        for name, idle in _NOT_OFFERED.items():
            value = getattr(self, name)
            if value not in idle:
                shown = repr(value) if isinstance(value, bool | int) else type(value).__name__
                raise UnsupportedError(f"{owner}: {name}={shown} is not offered; leave it out.")

    def for_memo(self) -> AttentionOptions | None:
        """Return options that are equal to those of calls that ask for the same, and keep no cache
        alive; None if some are no plain values."""
        cache, plain = self.inference_params, self._replace(inference_params=None)
        if not PLAIN_OPTIONS.issuperset(map(type, plain)):
            return None
        same: Any = None if cache is None else _SameCache(cache)
        return self._replace(inference_params=same)


_NOT_OFFERED: dict[str, Sequence[object]] = {
    "fp8_output": (None, False),
    "num_splits": (None, 1),
    "score_mod": (None,),
    "score_mod_bprop": (None,),
    "score_mod_tensors": (None,),
    "score_mod_bprop_tensors": (None,),
    "thd_attention_policies": (None,),
}
"""The values of options that ask for nothing, of those whose other values are refused."""

PLAIN_OPTIONS = frozenset((type(None), bool, int, float, str, tuple))
"""Types of arguments that say the same in another call if they are equal."""


class _SameCache:
    """Equal to one cache, which it does not keep alive."""

    __slots__ = ("_cache",)

    def __init__(self, cache: InferenceParams) -> None:
        self._cache = weakref.ref(cache)

    def __eq__(self, cache: object) -> bool:
        return cache is not None and self._cache() is cache

    __hash__ = None  # type: ignore[assignment]  # compared, and no key


def mask_type_with_cache(owner: object, name: str) -> str:
    """Return the mask type that new tokens behind those of a cache have.

    Sequences have lengths, and the last query of each sees all of its keys, so that a model keeps
    the mask type that it was trained with.

    Raises:
        UnsupportedError: an arbitrary mask, which does not say which keys are in the cache.
    """
    kind = MASK_TYPES[name]
    if kind.arbitrary:
        raise UnsupportedError(
            f"{owner}: attn_mask_type='arbitrary' with inference_params is not offered; use a "
            f"causal mask type or 'padding'."
        )
    return "padding_causal_bottom_right" if kind.causal else "padding"


def with_cache(
    owner: object,
    layer: torch.nn.Module,
    cache: object,
    layout: str,
    new: Qkv,
    *,
    at_capacity: bool,
) -> tuple[Qkv, Lengths, bool, Pages | None]:
    """Store the keys and values of new tokens under the ``layer_number`` of ``layer``; return the
    queries with all keys and values, where the sequences are among them, whether these are those of
    :class:`~fp8core.backend_api.CachedAttentionDesc`, and the pages that they are, if they are.

    With ``at_capacity`` they are, where the cache keeps the rows behind sequences finite; else they
    end with the longest sequence. Pages are handed over without gradients alone, as later steps
    write to them, and not to operators of graphs, none of which reads pages.

    Raises:
        OperandError: tensors that do not fit the step of the cache, or another layer that has the
            number; nothing is stored.
    """
    if not isinstance(cache, InferenceParams):
        raise OperandError(
            f"{owner}: inference_params is {type(cache).__name__}; expected "
            f"fp8core.InferenceParams."
        )
    number = layer.layer_number
    assert isinstance(number, int)
    if not torch.compiler.is_compiling():
        cache.check_claim(number, layer)
    is_cached, pages = at_capacity and cache.clears_rows, None
    is_in_graph = torch.compiler.is_compiling() or is_faked()  # without operators that read pages
    if is_cached and cache.has_pages and not is_in_graph and not torch.is_grad_enabled():
        pages = cache.step_in_pages(number, new.k, new.v, layout)
        keys, values, capacity = pages.keys, pages.values, cache.read_length
    else:
        cached = cache.step(number, new.k, new.v, layout)
        keys, values, capacity = cached.k_cache, cached.v_cache, cached.k_cache.shape[1]
    if not torch.compiler.is_compiling():
        cache.claim(number, layer)
    longest = cache.max_seqlen_kv
    lengths = Lengths(*cache.step_cu_seqlens, max_seqlen_kv=longest)
    if layout == "thd":
        lengths = lengths._replace(
            cu_seqlens_kv_padded=cache.starts(capacity), max_seqlen_q=cache.max_seqlen_q
        )
    elif not is_cached:
        keys, values = keys[:, :longest], values[:, :longest]
    if pages is None:
        keys, values = in_layout(layout, keys, values)
    return Qkv(new.q, keys, values), lengths, is_cached, pages


def replayed_step(
    layer: torch.nn.Module,
    cache: InferenceParams,
    layout: str,
    attend: Callable[..., torch.Tensor],
    *,
    in_pages: bool,
) -> Callable[..., torch.Tensor | None]:
    """Return ``run(q, k, v)``, which replays the present step of ``cache`` on later tensors of the
    same sizes, and returns None in a step of another form. ``attend(q, keys, values)`` is attention
    to the cached keys and values, ``in_pages`` to the pages that have them.

    The cache is not kept alive.
    """
    number, form, cache_ref = layer.layer_number, cache.form, weakref.ref(cache)
    assert isinstance(number, int)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        cache = cache_ref()
        if cache is None or cache.form != form:
            return None
        cache.check_claim(number, layer)
        if in_pages:
            keys, values, *_ = cache.store_in_pages(number, k, v, layout)
        else:
            keys, values = in_layout(layout, *cache.store(number, k, v, layout))
        cache.claim(number, layer)
        return attend(q.flatten(-2), keys, values)

    return run


_BIASES = {"no_bias": None, "pre_scale_bias": "pre_scale", "post_scale_bias": "post_scale"}
_BIAS_TYPES = (*_BIASES, "alibi")


def bias_kind(
    owner: object, name: str, bias: torch.Tensor | None, slopes: torch.Tensor | None
) -> str | None:
    """Return the descriptor's word for a type of bias, and check that its tensors are given."""
    checked_choice(owner, "core_attention_bias_type", name, _BIAS_TYPES)
    if slopes is not None and name != "alibi":
        raise OperandError(
            f"{owner}: alibi_slopes with core_attention_bias_type={name!r}; expected 'alibi'."
        )
    kind = _BIASES.get(name)
    if (bias is None) != (kind is None):
        state = "None" if bias is None else "given"
        raise OperandError(
            f"{owner}: core_attention_bias is {state} with core_attention_bias_type={name!r}; "
            f"'pre_scale_bias' and 'post_scale_bias' take one, the other types none."
        )
    return "alibi" if name == "alibi" else kind


def alibi_slopes_of(
    owner: object,
    heads: int,
    batch: int,
    q: torch.Tensor,
    slopes: torch.Tensor | None,
    spread: Parallel,
) -> torch.Tensor:
    """Return the slopes of ALiBi, float32 ``[heads]`` or ``[b, heads]``."""
    if slopes is None:
        return torch.tensor(
            _slopes_of_rank(owner, heads, spread), dtype=torch.float32, device=q.device
        )
    check_kind(owner, "alibi_slopes", slopes)
    check_is_whole(owner, "alibi_slopes", slopes)
    is_single_row = slopes.dim() == 1 or (slopes.dim() == 2 and slopes.shape[0] in (1, batch))
    if not is_single_row or slopes.shape[-1] != heads or slopes.device != q.device:
        raise OperandError(
            f"{owner}: alibi_slopes {list(slopes.shape)} on {slopes.device}; expected [{heads}] or "
            f"[{batch}, {heads}], batch and heads, on {q.device}."
        )
    if slopes.requires_grad:
        raise UnsupportedError(
            f"{owner}: alibi_slopes requires a gradient, which is not offered; pass "
            f"alibi_slopes.detach(), or the bias itself as core_attention_bias."
        )
    return slopes.to(torch.float32)


def _slopes_of_rank(owner: object, heads: int, spread: Parallel) -> list[float]:
    """Return the slopes of the ALiBi paper for the ``heads`` that a rank has of all."""
    if spread.size > 1 and not spread.group:
        raise OperandError(
            f"{owner}: ALiBi with tp_size={spread.size} needs the rank of the layer. Give it "
            f"tp_group, call set_tensor_parallel_group, or give alibi_slopes of its heads."
        )
    return _alibi_slopes(heads * spread.size)[heads * spread.rank :][:heads]


def _alibi_slopes(heads: int) -> list[float]:
    """Return the slopes of the ALiBi paper: powers of ``2^(-8 / n)`` for n heads, n a power of two;
    further heads take every other power of ``2^(-4 / n)``.

    Source: Press et al., "Train Short, Test Long", section 3, and its code for other numbers.

    >>> _alibi_slopes(3)
    [0.0625, 0.00390625, 0.25]
    """
    whole = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * at / whole) for at in range(1, whole + 1)]
    return slopes + [2 ** (-4 * at / whole) for at in range(1, 2 * (heads - whole) + 1, 2)]


Window = tuple[int, int]
UNLIMITED: Window = (-1, -1)


class MaskType(NamedTuple):
    """The masks that a mask type names; ``bottom_right`` None leaves the diagonal to the argument
    ``bottom_right_diagonal``."""

    causal: bool = False
    padding: bool = False
    arbitrary: bool = False
    bottom_right: bool | None = None


MASK_TYPES: Mapping[str, MaskType] = {
    "no_mask": MaskType(),
    "padding": MaskType(padding=True),
    "causal": MaskType(causal=True, bottom_right=False),
    "padding_causal": MaskType(causal=True, padding=True, bottom_right=False),
    "causal_bottom_right": MaskType(causal=True, bottom_right=True),
    "padding_causal_bottom_right": MaskType(causal=True, padding=True, bottom_right=True),
    "arbitrary": MaskType(arbitrary=True),
}
"""Transformer Engine's names; ``"padding,causal"`` and ``"causal,padding"`` are also read."""

_ALIASES = {"padding,causal": "padding_causal", "causal,padding": "padding_causal"}


class Mask(NamedTuple):
    """The mask of a call, as :class:`~fp8core.backend_api.AttentionDesc` has it."""

    window: Window
    bottom_right: bool
    padding: bool
    arbitrary: bool


def mask_type_of(owner: object, name: str) -> str:
    """Return the name of a mask type in the spelling of :data:`MASK_TYPES`.

    Raises:
        OperandError: the mask type is unknown.
    """
    mask_type = _ALIASES.get(name, name) if isinstance(name, str) else name
    return checked_choice(owner, "attn_mask_type", mask_type, MASK_TYPES)


def mask_of(
    owner: object, name: str, window: Window | None, bottom_right: bool | None, *, has_alibi: bool
) -> Mask:
    """Return the mask of a type, a window and a diagonal.

    The diagonal of ``bottom_right`` None is at the bottom right, as Transformer Engine has it, and
    where neither window nor ALiBi reads it, it is False.

    Raises:
        OperandError: the window is invalid, or contradicts the mask type.
    """
    kind = MASK_TYPES[name]
    left, right = _checked_window(owner, window)
    if kind.arbitrary and (left, right) != UNLIMITED:
        raise OperandError(
            f"{owner}: window_size={(left, right)} with attn_mask_type='arbitrary'. Put the window "
            f"into attention_mask, or use the window with another mask type."
        )
    if not kind.causal and (left, right) == (-1, 0):
        raise OperandError(
            f"{owner}: window_size=(-1, 0), which is causal, with attn_mask_type={name!r}. Ask for "
            f"'causal_bottom_right' (or 'padding_causal_bottom_right'), or for no window: (-1, -1)."
        )
    if kind.causal:
        right = 0
    diagonal = kind.bottom_right if kind.bottom_right is not None else bottom_right in (None, True)
    reads_diagonal = has_alibi or (left, right) != UNLIMITED
    return Mask((left, right), diagonal and reads_diagonal, kind.padding, kind.arbitrary)


def _checked_window(owner: object, window: Window | None) -> Window:
    if window is None:
        return UNLIMITED
    sides = list(window) if isinstance(window, tuple | list) else []
    if len(sides) != 2 or any(type(side) is not int or side < -1 for side in sides):
        raise OperandError(
            f"{owner}: window_size={window!r}; expected (left, right), the numbers of keys that a "
            f"query sees before and behind its own position, -1 for no limit."
        )
    return sides[0], sides[1]


def checked_heads(
    owner: str,
    spread: Parallel,
    heads: int,
    groups: int | None,
    channels: int | tuple[int, int],
) -> Heads:
    """Return the heads that a rank has of all, their groups, and the sizes of a key's and a value's
    head."""
    pair = channels if isinstance(channels, tuple | list) else (channels, channels)
    if len(pair) != 2:
        raise OperandError(
            f"{owner}(kv_channels={channels!r}): expected a size, or those of a key's and a "
            f"value's head."
        )
    sizes = [check_size(owner, "kv_channels", size) for size in pair]
    heads = check_size(owner, "num_attention_heads", heads)
    groups = heads if groups is None else check_size(owner, "num_gqa_groups", groups)
    if heads % groups:
        divisors = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise OperandError(
            f"{owner}(num_attention_heads={heads}, num_gqa_groups={groups}): the heads are no "
            f"multiple of the groups; expected one of {', '.join(divisors)} groups."
        )
    heads = spread.part_of(owner, "num_attention_heads", heads)
    return Heads(heads, spread.part_of(owner, "num_gqa_groups", groups), *sizes)


def checked_scale(owner: object, scale: float | None, head_dim: int) -> float:
    """Return the factor of the logits; by default 1 over the root of a head's size."""
    if scale is None:
        return 1 / math.sqrt(head_dim)
    if not is_number(scale) or not math.isfinite(scale):
        raise OperandError(f"{owner}(softmax_scale={scale!r}): expected a finite number, or None.")
    return float(scale)


def checked_softcap(owner: object, softcap: float) -> float:
    """Return the cap of the logits, 0 for none."""
    if not is_number(softcap) or not 0 <= softcap < math.inf:
        raise OperandError(f"{owner}: softcap={softcap!r}; expected a finite number, 0 for none.")
    return float(softcap)
