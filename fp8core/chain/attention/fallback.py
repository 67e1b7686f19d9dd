"""The memory that a backend for other devices may take for attention."""

from __future__ import annotations

import math

import torch

from fp8core.chain.attention.spec import AttentionSpec
from fp8core.chain.attention.tensors import AttentionTensors
from fp8core.chain.call import Call
from fp8core.dispatch.select import Choice
from fp8core.errors import UnsupportedError

_MAX_FALLBACK_BYTES = 2 * 2**30
"""The logits of a call that a backend nobody asked for may hold at once."""


def check_memory(
    choice: Choice | None, shape: AttentionSpec, q: torch.Tensor, k: torch.Tensor, call: Call
) -> None:
    """Refuse a call whose logits are many bytes where ``choice``, a backend for other devices that
    nobody asked for, runs it; None: another runs it.

    Raises:
        UnsupportedError: says how many, and why no backend for the device runs it.
    """
    if choice is None:
        return
    if shape.layout == "thd":
        cu_seqlens = AttentionTensors(*call.tensors).cu_seqlens_q
        assert cu_seqlens is not None
        sizes = (cu_seqlens.shape[0] - 1, shape.heads, *call.sizes)
    else:
        batch, length = shape.layout.index("b"), shape.layout.index("s")
        sizes = (q.shape[batch], shape.heads, q.shape[length], k.shape[length])
    num_bytes = math.prod(sizes) * (8 if q.dtype == torch.float64 else 4)
    if num_bytes > _MAX_FALLBACK_BYTES:
        name, device = choice.backend, q.device
        raise UnsupportedError(
            f"attention on {device} would run on {name}, which may hold all logits of a call at "
            f"once: {' x '.join(map(str, sizes))} of batch, heads, queries and keys are "
            f"{num_bytes / 2**30:.1f} GiB, and without being asked for it takes "
            f"{_MAX_FALLBACK_BYTES // 2**30} GiB. Call with less at a time, choose attention that "
            f"a backend for {device.type} runs, or use_backend({name!r}) to run it so. "
            f"{choice}"
        )
