"""Attention with the keys and values of earlier tokens."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch

from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.attention_arguments import MASK_TYPES
from fp8core.modules.attention_inputs import Lengths, Qkv
from fp8core.modules.inference import InferenceParams


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
) -> tuple[Qkv, Lengths, bool]:
    """Store the keys and values of new tokens under the ``layer_number`` of ``layer``; return the
    queries with all keys and values, where the sequences are among them, and whether these are
    those of :class:`~fp8core.backend_api.CachedAttentionDesc`.

    With ``at_capacity`` they are, where the cache keeps the rows behind sequences finite; else they
    end with the longest sequence.

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
    cached = cache.step(number, new.k, new.v, layout)
    if not torch.compiler.is_compiling():
        cache.claim(number, layer)
    keys, values, longest = cached.k_cache, cached.v_cache, cached.max_seqlen_kv
    is_cached = at_capacity and cache.clears_rows
    lengths = Lengths(cached.cu_seqlens_q, cached.cu_seqlens_kv, max_seqlen_kv=longest)
    if layout == "thd":
        lengths = lengths._replace(
            cu_seqlens_kv_padded=cache.starts(keys.shape[1]), max_seqlen_q=cache.max_seqlen_q
        )
    elif not is_cached:
        keys, values = keys[:, :longest], values[:, :longest]
    return Qkv(new.q, *_in_layout(layout, keys, values)), lengths, is_cached


def _in_layout(
    layout: str, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values ``[b, tokens, heads, head size]`` in a layout, without copies."""
    if layout == "thd":
        return keys.flatten(0, 1), values.flatten(0, 1)
    if layout == "sbhd":
        return keys.transpose(0, 1), values.transpose(0, 1)
    return keys, values


def repeated_step(
    layer: torch.nn.Module,
    cache: InferenceParams,
    layout: str,
    attend: Callable[..., torch.Tensor],
) -> Callable[..., torch.Tensor | None]:
    """Return ``run(q, k, v)``, which repeats the present step of ``cache`` on later tensors of the
    same sizes, and returns None in a step of another form. ``attend(q, keys, values)`` is attention
    to the cached keys and values.

    The cache is not kept alive.
    """
    number, form, cache_ref = layer.layer_number, cache.form, weakref.ref(cache)
    assert isinstance(number, int)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor | None:
        cache = cache_ref()
        if cache is None or cache.form != form:
            return None
        cache.check_claim(number, layer)
        keys, values = cache.store(number, k, v, layout)
        cache.claim(number, layer)
        return attend(q.flatten(-2), *_in_layout(layout, keys, values))

    return run
