"""Attention of a context-parallel group bound to operations of backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc, AttentionPartBackwardDesc
from fp8core.chain.context_parallel import GatheredKeys, HeadExchange, Pair
from fp8core.chain.ring_attention import KeysInParts, descs_of_parts
from fp8core.collectives import Communicator, named

CONTEXT_WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p")
"""How the ranks of a context-parallel group share attention, as Transformer Engine names it."""

Resolve = Callable[[AttentionDesc, AttentionBackwardDesc], Pair]


def bind_context(
    context: tuple[str, ...],
    desc: AttentionDesc,
    backward: AttentionBackwardDesc,
    resolve: Resolve,
) -> Pair:
    """Return attention by ``desc``, and its gradients by ``backward``, over the ranks of
    ``context``: one of :data:`CONTEXT_WAYS`, and the names of its groups. ``resolve`` returns what
    a backend computes."""
    way, *names = context
    groups = [named(name) for name in names]
    if way == "p2p":
        return _in_parts(desc, backward, groups[0], resolve)
    if way == "all_gather":
        part = GatheredKeys.desc_of_parts(desc)
        inner = resolve(part, _of(backward, GatheredKeys.desc_of_parts(backward.attention)))
        gathered = GatheredKeys(desc, groups[0], inner)
        return Pair(gathered.forward, gathered.backward)
    size = groups[0].size
    fewer = _with_heads(desc, size)
    fewer_backward = _of(backward, _with_heads(backward.attention, size))
    if way == "a2a":
        inner, outer_size = resolve(fewer, fewer_backward), 1
    else:
        inner = _in_parts(fewer, fewer_backward, groups[1], resolve)
        outer_size = groups[1].size
    exchange = HeadExchange(fewer, groups[0], inner, outer_size)
    return Pair(exchange.forward, exchange.backward)


def _in_parts(
    desc: AttentionDesc,
    backward: AttentionBackwardDesc,
    communicator: Communicator,
    resolve: Resolve,
) -> Pair:
    pairs = [
        resolve(
            forward,
            AttentionPartBackwardDesc(of, False, backward.grad_output, backward.dp),
        )
        for forward, of in zip(
            descs_of_parts(desc), descs_of_parts(backward.attention), strict=True
        )
    ]
    parts = KeysInParts(desc, communicator, *pairs)
    return Pair(parts.forward, parts.backward)


def _with_heads(desc: AttentionDesc, size: int) -> AttentionDesc:
    return dataclasses.replace(desc, heads=desc.heads // size, groups=desc.groups // size)


def _of(backward: AttentionBackwardDesc, desc: AttentionDesc) -> AttentionBackwardDesc:
    return dataclasses.replace(backward, attention=desc)
