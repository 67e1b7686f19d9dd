"""The inputs of a call of attention: layouts, packed tensors, lengths and masks, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fp8core.chain.node import is_under_torch_autocast
from fp8core.chain.unwrap import unwrap
from fp8core.errors import OperandError
from fp8core.modules.calls.inputs import check_is_whole, check_kind, check_mode
from fp8core.torch_ops.capture import is_captured
from fp8core.torch_ops.private import is_transform_wrapped

PaddingMask = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


class Heads(NamedTuple):
    """The numbers and sizes of heads that a layer takes."""

    heads: int
    groups: int
    head_dim: int
    head_dim_v: int


class Qkv(NamedTuple):
    """Queries, keys and values in one layout."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Lengths(NamedTuple):
    """Where the sequences of a call are, as :class:`~fp8core.backend_api.AttentionDesc` has it."""

    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None

    @property
    def offsets(self) -> dict[str, torch.Tensor | None]:
        """The four cu_seqlens by name."""
        return dict(zip(Lengths._fields, self[:4], strict=False))


def unpacked(
    owner: object,
    tensors: Sequence[torch.Tensor | None],
    qkv: torch.Tensor | None,
    kv: torch.Tensor | None,
    dim: int,
) -> Qkv:
    """Return queries, keys and values; views of the packed tensor if there is one.

    ``tensors`` are the separate ones. ``qkv`` has 3, and ``kv`` 2, in dimension ``dim``: -3 before
    the heads or -2 behind them.

    Raises:
        OperandError: tensors are missing, given twice or not packed so.
    """
    q, k, v = tensors
    if qkv is None and kv is None and q is not None and k is not None and v is not None:
        return Qkv(q, k, v)
    if qkv is not None and (kv is not None or any(tensor is not None for tensor in tensors)):
        raise OperandError(
            f"{owner}: qkv_layer holds queries, keys and values; give no other tensor with it."
        )
    if kv is not None and any(tensor is not None for tensor in tensors[1:]):
        raise OperandError(
            f"{owner}: kv_layer holds keys and values; give key_layer and value_layer, or kv_layer."
        )
    packed, name, count = (qkv, "qkv_layer", 3) if qkv is not None else (kv, "kv_layer", 2)
    if packed is not None:
        check_kind(owner, name, packed)
        if dim not in (-3, -2):
            raise OperandError(f"{owner}: qkv_interleave_dim={dim}; expected -3 or -2.")
        if packed.dim() < 4 or packed.shape[dim] != count:
            raise OperandError(
                f"{owner}: {name} {list(packed.shape)} with qkv_interleave_dim={dim}; expected "
                f"{count} in that dimension, as in [s, b, {count}, h, d] for -3 or "
                f"[s, b, h, {count}, d] for -2."
            )
        parts = packed.unbind(dim)
        tensors = (*tensors[: 3 - count], *parts)
    names = ("query_layer", "key_layer", "value_layer")
    missing = [name for name, tensor in zip(names, tensors, strict=True) if tensor is None]
    if missing:
        raise OperandError(f"{owner}: {missing[0]} is None; give it, or qkv_layer or kv_layer.")
    q, k, v = tensors
    assert q is not None
    assert k is not None
    assert v is not None
    return Qkv(q, k, v)


def checked_qkv(owner: object, heads: Heads, layout: str, qkv: Qkv) -> Qkv:
    """Return the tensors in the dtype of the activations, their sizes checked.

    Raises:
        OperandError: one is no dense floating-point tensor, or has another device, dtype, or size.
    """
    q, k, v = qkv
    num_dims = 3 if layout == "thd" else 4
    sizes = {
        "query_layer": (heads.heads, heads.head_dim),
        "key_layer": (heads.groups, heads.head_dim),
        "value_layer": (heads.groups, heads.head_dim_v),
    }
    for (name, size), tensor in zip(sizes.items(), qkv, strict=True):
        check_kind(owner, name, tensor)
        check_is_whole(owner, name, tensor)
        check_mode(owner, tensor)
        if tensor.dim() != num_dims or tuple(tensor.shape[-2:]) != size:
            dims = "t" if layout == "thd" else ", ".join(layout[:2])
            raise OperandError(
                f"{owner}: {name} {list(tensor.shape)}; expected [{dims}, {size[0]}, {size[1]}] "
                f"for qkv_format={layout!r}."
            )
        if tensor.device != q.device or tensor.dtype != q.dtype:
            raise OperandError(
                f"{owner}: {name} is {tensor.dtype} on {tensor.device}, query_layer {q.dtype} on "
                f"{q.device}; expected one dtype on one device."
            )
    if k.shape[:-2] != v.shape[:-2]:
        raise OperandError(
            f"{owner}: key_layer {list(k.shape)} and value_layer {list(v.shape)} differ before "
            f"their heads; expected as many values as keys."
        )
    if layout != "thd":
        at = layout.index("b")
        if q.shape[at] != k.shape[at]:
            raise OperandError(
                f"{owner}: query_layer {list(q.shape)} has batch {q.shape[at]}, key_layer "
                f"{list(k.shape)} {k.shape[at]}, in qkv_format={layout!r}."
            )
    if is_under_torch_autocast(q):
        dtype = torch.get_autocast_dtype(q.device.type)
        return Qkv(q.to(dtype), k.to(dtype), v.to(dtype))
    return qkv


def lengths_of(
    owner: object,
    layout: str,
    qkv: Qkv,
    mask: PaddingMask,
    lengths_of_call: Lengths,
    *,
    num_ranks: int = 1,
) -> Lengths:
    """Return the lengths of the sequences of a call with padding, from cu_seqlens or the mask.

    The lengths are those of whole sequences, whose tokens ``num_ranks`` share.

    Where torch captures a graph, the longest sequence of thd is as long as all of them together
    unless it is given: a graph does not read lengths.

    Raises:
        OperandError: there are none, or they do not fit.
    """
    q, k, _ = qkv
    if (
        layout == "thd"
        or lengths_of_call.cu_seqlens_q is not None
        or lengths_of_call.cu_seqlens_kv is not None
    ):
        lengths = lengths_of_call
    else:
        lengths = _from_mask(owner, layout, qkv, mask, num_ranks)
    offsets = lengths.offsets
    for name, cu_seqlens in offsets.items():
        if name.endswith("padded") and cu_seqlens is None:
            continue
        offsets[name] = _checked_cu_seqlens(owner, name, cu_seqlens, q.device)
    longest_q, longest_kv = lengths.max_seqlen_q, lengths.max_seqlen_kv
    lengths = Lengths(**offsets, max_seqlen_q=longest_q, max_seqlen_kv=longest_kv)
    _check_lengths(owner, layout, qkv, lengths, num_ranks)
    cu_q, cu_kv = lengths.cu_seqlens_q, lengths.cu_seqlens_kv
    assert cu_q is not None
    assert cu_kv is not None
    if layout != "thd":
        _check_batch(owner, "cu_seqlens_q", cu_q, q.shape[layout.index("b")])
        return Lengths(cu_q, cu_kv)
    most_q, most_kv = num_ranks * q.shape[0], num_ranks * k.shape[0]
    return lengths._replace(
        max_seqlen_q=_longest(owner, "max_seqlen_q", longest_q, cu_q, most_q),
        max_seqlen_kv=_longest(owner, "max_seqlen_kv", longest_kv, cu_kv, most_kv),
    )


def _check_lengths(owner: object, layout: str, qkv: Qkv, lengths: Lengths, num_ranks: int) -> None:
    """Check that all cu_seqlens have one number of sequences, which lie within the tokens."""
    offsets = lengths.offsets
    sizes = [bounds.shape[0] for bounds in offsets.values() if bounds is not None]
    if any(size != sizes[0] for size in sizes):
        raise OperandError(
            f"{owner}: cu_seqlens of {sizes} entries; expected one number of sequences, batch + 1 "
            f"entries each."
        )
    for name, cu_seqlens in offsets.items():
        x = qkv.k if name.startswith("cu_seqlens_kv") else qkv.q
        limit = num_ranks * x.shape[0 if layout == "thd" else layout.index("s")]
        _check_offsets(owner, name, cu_seqlens, limit, is_each=layout != "thd")
    for name in ("cu_seqlens_q", "cu_seqlens_kv") if layout == "thd" else ():
        starts, bounds = offsets[f"{name}_padded"], offsets[name]
        assert bounds is not None
        _check_starts(owner, f"{name}_padded", starts, bounds)


def check_unread_lengths(owner: object, layout: str, qkv: Qkv, lengths: Lengths) -> None:
    """Check shapes and dtypes of cu_seqlens that a mask without padding leaves unused.

    Raises:
        OperandError: one is not int32 ``[batch + 1]`` on the device of the queries.
    """
    for name, cu_seqlens in lengths.offsets.items():
        if cu_seqlens is not None:
            checked = _checked_cu_seqlens(owner, name, cu_seqlens, qkv.q.device)
            _check_batch(owner, name, checked, qkv.q.shape[layout.index("b")])


def _check_batch(owner: object, name: str, cu_seqlens: torch.Tensor, batch: int) -> None:
    if cu_seqlens.shape[0] != batch + 1:
        raise OperandError(
            f"{owner}: {name} has {cu_seqlens.shape[0]} entries for a batch of {batch}; "
            f"expected {batch + 1}."
        )


def _checked_cu_seqlens(
    owner: object, name: str, cu_seqlens: object, device: torch.device
) -> torch.Tensor:
    """Return ``cu_seqlens`` as a plain tensor, its dtype, dimensions and device checked."""
    if not isinstance(cu_seqlens, torch.Tensor):
        raise OperandError(
            f"{owner}: {name} is {type(cu_seqlens).__name__}; padding and qkv_format='thd' need "
            f"cu_seqlens_q and cu_seqlens_kv, int32 [batch + 1]."
        )
    if not torch.compiler.is_compiling():
        cu_seqlens = unwrap(cu_seqlens, f"{owner}: {name}")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or not cu_seqlens.shape[0]:
        raise OperandError(
            f"{owner}: {name} is {cu_seqlens.dtype} {list(cu_seqlens.shape)}; expected int32 "
            f"[batch + 1]."
        )
    if cu_seqlens.device != device:
        raise OperandError(
            f"{owner}: {name} is on {cu_seqlens.device}, the queries on {device}; move it there."
        )
    return cu_seqlens


def _longest(
    owner: object, name: str, bound: int | None, cu_seqlens: torch.Tensor, num_tokens: int
) -> int:
    """Return the length of the longest sequence, or the length ``bound``, which is no shorter."""
    if bound is not None and (not isinstance(bound, int | torch.SymInt) or bound < 0):
        raise OperandError(
            f"{owner}: {name}={bound!r}; expected an integer that no sequence exceeds."
        )
    is_unread = not _has_values(cu_seqlens) or cu_seqlens.shape[0] == 1
    if is_unread or (bound is not None and not _is_readable(cu_seqlens)):
        return num_tokens if bound is None else bound
    longest = int((cu_seqlens[1:] - cu_seqlens[:-1]).max())
    if bound is not None and bound < longest:
        raise OperandError(f"{owner}: {name}={bound}, but a sequence has {longest} tokens.")
    return longest if bound is None else bound


def _is_readable(x: torch.Tensor) -> bool:
    """Return whether the host reads values of ``x`` without waiting for a device."""
    return x.device.type == "cpu" and _has_values(x)


def _has_values(x: torch.Tensor) -> bool:
    """Return whether ``x`` has values to read, unlike one of a captured graph or in a vmap."""
    return not (x.is_meta or is_captured(x) or is_transform_wrapped(x))


def _check_offsets(
    owner: object, name: str, cu_seqlens: torch.Tensor | None, limit: int, *, is_each: bool
) -> None:
    """Refuse offsets that fall or exceed ``limit``, with ``is_each`` each of their differences;
    where the host can read them."""
    if cu_seqlens is None or not _is_readable(cu_seqlens):
        return
    lengths = cu_seqlens.long().diff()  # differences of int32 may overflow
    last = lengths.max() if is_each and len(lengths) else cu_seqlens[-1]
    if int(cu_seqlens[0]) < 0 or bool((lengths < 0).any()) or int(last) > limit:
        shown = cu_seqlens.tolist() if len(cu_seqlens) <= 9 else f"{len(cu_seqlens)} offsets"
        of = "sequences of at most" if is_each else "offsets of at most"
        raise OperandError(f"{owner}: {name} is {shown}; expected {of} {limit} tokens, ascending.")


def _check_starts(
    owner: object, name: str, padded: torch.Tensor | None, cu_seqlens: torch.Tensor
) -> None:
    """Refuse offsets with padding between which a sequence of ``cu_seqlens`` does not fit; where
    the host can read them."""
    if padded is None or not _is_readable(padded):
        return
    tokens, lengths = padded.diff(), cu_seqlens.diff()
    if bool((tokens < lengths).any()):
        at = int((tokens < lengths).nonzero()[0])
        raise OperandError(
            f"{owner}: {name} leaves {int(tokens[at])} tokens to sequence {at}, which has "
            f"{int(lengths[at])}; expected where each sequence begins among the tokens and where "
            f"the last one ends, each with its padding."
        )


def _from_mask(owner: object, layout: str, qkv: Qkv, mask: PaddingMask, num_ranks: int) -> Lengths:
    """Return the lengths that padding masks ``[b, 1, 1, s]`` have, True behind each sequence."""
    if mask is None:
        raise OperandError(
            f"{owner}: a padding mask type needs attention_mask, bool [b, 1, 1, s] that is True "
            f"behind the end of a sequence (a tuple of two where keys have other lengths), or "
            f"cu_seqlens_q and cu_seqlens_kv."
        )
    pair = (mask, mask) if isinstance(mask, torch.Tensor) else mask
    if not isinstance(pair, tuple | list) or not all(isinstance(x, torch.Tensor) for x in pair):
        raise OperandError(
            f"{owner}: attention_mask is {_kinds(mask)}; expected a bool tensor, or a tuple of "
            f"that of the queries and that of the keys."
        )
    if len(pair) != 2:
        raise OperandError(
            f"{owner}: attention_mask of {len(pair)} tensors; expected that of the queries and "
            f"that of the keys."
        )
    cu_seqlens = []
    for x, padding in zip(qkv, pair, strict=False):
        batch, length = x.shape[layout.index("b")], num_ranks * x.shape[layout.index("s")]
        if padding.dtype != torch.bool or tuple(padding.shape) != (batch, 1, 1, length):
            raise OperandError(
                f"{owner}: attention_mask {padding.dtype} {list(padding.shape)}; expected bool "
                f"[{batch}, 1, 1, {length}], True behind the end of a sequence."
            )
        _check_is_at_the_end(owner, padding)
        lengths = padding.logical_not().flatten(1).sum(1, dtype=torch.int32)
        cu_seqlens.append(torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)))
    return Lengths(cu_seqlens[0], cu_seqlens[1])


def _kinds(value: object) -> str:
    """Return the class of ``value``, of a tuple or list with those of its items."""
    name = type(value).__name__
    if not isinstance(value, tuple | list):
        return name
    return f"{name} of {', '.join(type(item).__name__ for item in value)}"


def _check_is_at_the_end(owner: object, mask: torch.Tensor) -> None:
    """Refuse padding before or inside a sequence, where the host can read the mask."""
    if _is_readable(mask) and bool((mask[..., :-1] & ~mask[..., 1:]).any()):
        raise OperandError(
            f"{owner}: attention_mask excludes tokens before others that it keeps. Padding is "
            f"behind the end of a sequence; for another mask, use attn_mask_type='arbitrary'."
        )


def check_pad_between(owner: object, pads_between: bool | None, lengths: Lengths) -> None:
    """Refuse padding between sequences of which nothing says where they begin.

    Where offsets with padding are given, they say it, also if no padding is announced.
    """
    has_padded = lengths.cu_seqlens_q_padded is not None or lengths.cu_seqlens_kv_padded is not None
    if pads_between is True and not has_padded:
        raise OperandError(
            f"{owner}: pad_between_seqs=True needs cu_seqlens_q_padded and cu_seqlens_kv_padded, "
            f"where sequences begin, in qkv_format='thd'."
        )


def check_mask(owner: object, qkv: Qkv, layout: str, heads: int, mask: object) -> torch.Tensor:
    """Return an arbitrary mask as four dimensions that broadcast to ``[b, heads, s_q, s_kv]``.

    Raises:
        OperandError: it is no such mask.
    """
    full = _full_size(qkv, layout, heads)
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        kind = mask.dtype if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise OperandError(
            f"{owner}: attention_mask is {kind}; attn_mask_type='arbitrary' needs a bool tensor "
            f"that broadcasts to {full}, True where a key is excluded."
        )
    check_is_whole(owner, "attention_mask", mask)
    return _broadcasting(owner, "attention_mask", mask, full, qkv.q.device)


def check_bias(
    owner: object, qkv: Qkv, layout: str, heads: int, lengths: Lengths, bias: torch.Tensor
) -> torch.Tensor:
    """Return a bias as four dimensions that broadcast to ``[b, heads, s_q, s_kv]``.

    Raises:
        OperandError: it is no such bias.
    """
    check_kind(owner, "core_attention_bias", bias)
    check_is_whole(owner, "core_attention_bias", bias)
    if layout == "thd":
        assert lengths.max_seqlen_q is not None
        assert lengths.max_seqlen_kv is not None
        full = [batch_of(layout, qkv, lengths), heads, lengths.max_seqlen_q, lengths.max_seqlen_kv]
    else:
        full = _full_size(qkv, layout, heads)
    return _broadcasting(owner, "core_attention_bias", bias, full, qkv.q.device)


def batch_of(layout: str, qkv: Qkv, lengths: Lengths) -> int:
    """Return the number of sequences of a call."""
    if layout != "thd":
        return qkv.q.shape[layout.index("b")]
    assert lengths.cu_seqlens_q is not None
    return lengths.cu_seqlens_q.shape[0] - 1


def _full_size(qkv: Qkv, layout: str, heads: int) -> list[int]:
    batch, sequence = layout.index("b"), layout.index("s")
    return [qkv.q.shape[batch], heads, qkv.q.shape[sequence], qkv.k.shape[sequence]]


def _broadcasting(
    owner: object, name: str, x: torch.Tensor, full: Sequence[int], device: torch.device
) -> torch.Tensor:
    if x.device != device:
        raise OperandError(f"{owner}: {name} is on {x.device}, the queries on {device}.")
    sizes = [1] * (4 - x.dim()) + list(x.shape)
    if x.dim() > 4 or any(size not in (1, of) for size, of in zip(sizes, full, strict=True)):
        raise OperandError(
            f"{owner}: {name} {list(x.shape)}; expected a shape that broadcasts to {list(full)}, "
            f"[batch, heads, queries, keys]."
        )
    return x.reshape(sizes)
