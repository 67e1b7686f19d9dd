"""What a call of attention brings besides what is differentiated."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8core.chain.call import Call
from fp8core.chain.protocol import Saved


class AttentionTensors(NamedTuple):
    """What a call of attention brings in ``Call.tensors``, besides what is differentiated.

    The first six are keywords of :class:`~fp8core.backend_api.AttentionDesc`; ``max_logit_out``,
    of the statistics' dtype ``[heads]``, is filled with the largest logits. ``Call.sizes`` are, of
    a dense batch, the first two dimensions of the queries, and with a cache the longest sequence of
    keys; in thd the longest sequence of queries and of keys.
    """

    alibi_slopes: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_kv: torch.Tensor | None = None
    cu_seqlens_q_padded: torch.Tensor | None = None
    cu_seqlens_kv_padded: torch.Tensor | None = None
    max_logit_out: torch.Tensor | None = None

    def keywords(self) -> dict[str, torch.Tensor]:
        """Return the operation's keywords among them that are given."""
        pairs = zip(self._fields[:-1], self[:-1], strict=True)
        return {name: tensor for name, tensor in pairs if tensor is not None}


NUM_KEPT = len(AttentionTensors._fields) - 1
"""How many tensors :func:`kept` returns."""


def hand_out(max_logit: torch.Tensor, call: Call) -> None:
    """Write the largest logits where the call asks for them."""
    max_logit_out = AttentionTensors(*call.tensors).max_logit_out
    assert max_logit_out is not None
    max_logit_out.copy_(max_logit)


def kept(call: Call) -> Saved:
    """Return the tensors of the call that backward reads: autograd then notices a write to them."""
    return AttentionTensors(*call.tensors)[:-1]


def of_forward(call: Call, saved: Saved) -> Call:
    """Return ``call`` with the tensors that forward kept at the end of ``saved``."""
    tensors = saved[-NUM_KEPT:]
    is_empty = not any([one is not None for one in tensors])
    return call if is_empty else call._replace(tensors=(*tensors, None))
