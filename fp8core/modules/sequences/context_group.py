"""Transformer Engine's arguments of context parallelism, and the checks of a call over a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from fp8core.chain.attention.shape import CONTEXT_WAYS, AttentionShape
from fp8core.collectives import of_group
from fp8core.collectives.base import is_process_group
from fp8core.errors import OperandError, UnsupportedError, checked_choice
from fp8core.modules.sequences.attention_inputs import Lengths, Qkv


class ContextGroup(NamedTuple):
    """The ranks that share the tokens of attention.

    ``names`` are those of the process groups: two for ``way`` ``"a2a+p2p"``, else one; none if the
    layer runs on one rank. ``size`` and ``rank`` are those of all of them together; ``head_ranks``
    exchange heads. A plain value, which torch.compile compares and which a copy of the layer keeps.
    """

    way: str = "p2p"
    names: tuple[str, ...] = ()
    size: int = 1
    rank: int = 0
    head_ranks: int = 1

    @classmethod
    def of(
        cls, owner: str, group: object, global_ranks: Sequence[int] | None, way: str
    ) -> ContextGroup:
        """Return the context group of ``group``, a process group, or for ``"a2a+p2p"`` a list of
        two: the group whose ranks exchange heads, and the group whose ranks hand keys and values
        on.

        Raises:
            OperandError: no such way, no such group, or other ranks than ``global_ranks``.
        """
        checked_choice(owner, "cp_comm_type", way, CONTEXT_WAYS)
        if group is None:
            return cls(way)
        count = 2 if way == "a2a+p2p" else 1
        groups = list(group) if isinstance(group, list | tuple) else [group]
        if len(groups) != count or not all(map(is_process_group, groups)):
            expected = "a list of two process groups" if count == 2 else "a process group"
            raise OperandError(
                f"{owner}(cp_group={group!r}, cp_comm_type={way!r}): expected {expected} of "
                f"torch.distributed."
            )
        members = [of_group(member) for member in groups]  # type: ignore[arg-type]  # checked above
        ranks = dist.get_process_group_ranks(groups[-1])  # type: ignore[arg-type]  # checked above
        if count == 1 and global_ranks is not None and list(global_ranks) != ranks:
            raise OperandError(
                f"{owner}(cp_global_ranks={list(global_ranks)}): the given cp_group has the ranks "
                f"{ranks}."
            )
        size, rank = members[0].size, members[0].rank
        head_ranks = size if way.startswith("a2a") else 1
        if count == 2:
            size, rank = size * members[1].size, rank + size * members[1].rank
        names = tuple(member.group_name for member in members) if size > 1 else ()
        return cls(way, names, size, rank, head_ranks)

    @property
    def context(self) -> tuple[str, ...]:
        """The field of :class:`~fp8core.chain.attention.shape.AttentionShape`."""
        return (self.way, *self.names) if self.names else ()


ALONE = ContextGroup()
"""A layer of one rank."""


def check_context(
    owner: object, group: ContextGroup, shape: AttentionShape, qkv: Qkv, lengths: Lengths
) -> str:
    """Refuse what a call over several ranks does not offer; return the call in words, which have
    to be the same on all of them. No rank communicates before this.

    Raises:
        OperandError: sizes that the ranks do not divide.
        UnsupportedError: a mask or a bias that the way of sharing does not offer.
    """
    _check_options(owner, group, shape)
    size = group.head_ranks
    if shape.heads % size or shape.gqa_groups % size:
        raise OperandError(
            f"{owner}: {shape.heads} heads in {shape.gqa_groups} groups with "
            f"cp_comm_type={group.way!r} over {size} ranks, which do not divide both. Choose "
            f"cp_comm_type='p2p' or 'all_gather', or a group of another size."
        )
    starts: object = None
    if shape.layout == "thd":
        starts = _check_packed(owner, group, qkv, lengths)
    else:
        _check_dense(owner, group, shape.layout, qkv)
    if shape.window[1] == 0 and group.way != "a2a":
        _check_same(owner, group, qkv, lengths, shape)
    offsets = [None if x is None else _values(x) for x in lengths[:2]]
    sizes = [list(x.shape) for x in qkv]
    call = f"{group.way}, {shape.desc(qkv.q.dtype)} of {sizes}"
    return f"{call}, cu_seqlens {offsets}, starts {starts}" if shape.padding else call


def _check_options(owner: object, group: ContextGroup, shape: AttentionShape) -> None:
    way, is_causal = group.way, shape.window[1] == 0
    has_window = shape.window[0] >= 0 or shape.window[1] > 0
    for is_used, option, ways in (
        (shape.arbitrary, "attn_mask_type='arbitrary'", ()),
        (shape.has_bias, "core_attention_bias", ()),
        (shape.bias == "alibi", "core_attention_bias_type='alibi'", ("a2a",)),
        (has_window and is_causal, f"window_size={shape.window}", ("a2a", "all_gather")),
        (has_window and not is_causal, f"window_size={shape.window}", ("a2a",)),
    ):
        if is_used and way not in ways:
            remedy = f"; choose {' or '.join(map(repr, ways))}" if ways else ""
            raise UnsupportedError(
                f"{owner}: {option} with cp_comm_type={way!r} is not offered{remedy}."
            )


def _check_dense(owner: object, group: ContextGroup, layout: str, qkv: Qkv) -> None:
    dim = layout.index("s")
    for name, x in (("query_layer", qkv.q), ("key_layer", qkv.k)):
        if x.shape[dim] % 2:
            raise OperandError(
                f"{owner}: {name} {list(x.shape)} has {x.shape[dim]} tokens of each sequence on "
                f"this rank; expected the two chunks of a rank of {group.size}: pad sequences to "
                f"a multiple of {2 * group.size} tokens, and split them by "
                f"fp8core.distributed.get_batch_on_this_cp_rank."
            )


def _check_packed(owner: object, group: ContextGroup, qkv: Qkv, lengths: Lengths) -> object:
    starts = []
    for name, x, cu_seqlens, padded in (
        ("q", qkv.q, lengths.cu_seqlens_q, lengths.cu_seqlens_q_padded),
        ("kv", qkv.k, lengths.cu_seqlens_kv, lengths.cu_seqlens_kv_padded),
    ):
        begins = cu_seqlens if padded is None else padded
        assert begins is not None
        values = _values(begins)
        chunks = 2 * group.size
        if x.shape[0] % 2 or any(start % chunks for start in values or ()):  # a chunk is cut short
            raise OperandError(
                f"{owner}: {x.shape[0]} tokens of {name} on this rank, sequences that begin at "
                f"{values}: expected two chunks of each sequence. Pad every sequence to a multiple "
                f"of {chunks} tokens, with cu_seqlens_{name}_padded, and split them by "
                f"fp8core.distributed.thd_get_partitioned_indices."
            )
        starts.append(values)
    return starts


def _check_same(
    owner: object, group: ContextGroup, qkv: Qkv, lengths: Lengths, shape: AttentionShape
) -> None:
    """Refuse a causal mask over queries and keys that are not the same tokens."""
    pairs = (
        (lengths.cu_seqlens_q_padded, lengths.cu_seqlens_kv_padded),
        (lengths.cu_seqlens_q, lengths.cu_seqlens_kv),
    )
    is_same = qkv.q.shape[:-2] == qkv.k.shape[:-2]
    for first, second in pairs if shape.padding else ():
        if (first is None) != (second is None):
            is_same = False
        elif first is not None and second is not None and first is not second:
            is_same = is_same and _values(first) == _values(second)
    if not is_same:
        raise UnsupportedError(
            f"{owner}: a causal mask of queries and keys with different lengths and "
            f"cp_comm_type={group.way!r} is not offered; choose 'a2a', or give both the same "
            f"lengths."
        )


def _values(x: torch.Tensor) -> list[int] | None:
    """Return the values that the host reads without waiting for a device."""
    is_readable = x.device.type == "cpu" and not torch.compiler.is_compiling()
    return list(map(int, x.tolist())) if is_readable else None
