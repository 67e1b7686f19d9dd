"""Attention on CUDA: by torch's operators where they do what is asked for, else by cuDNN's graphs;
of one query a sequence over a cache by a kernel of this backend.

A graph is built once for a descriptor, the shapes and the strides, in each thread, and executed on
torch's current stream with a workspace from torch's allocator; nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc, AttentionPartBackwardDesc
from fp8core_backends.cuda.attention_backward import GraphAttentionBackward
from fp8core_backends.cuda.attention_cached import CachedAttention, cached_problem
from fp8core_backends.cuda.attention_codes import CodesAttentionBackward
from fp8core_backends.cuda.attention_forward import GraphAttention
from fp8core_backends.cuda.attention_support import FRONTEND, TORCH, KernelNames, kernels
from fp8core_backends.cuda.attention_torch import TorchAttention, TorchAttentionBackward


def bind_attention(
    desc: AttentionDesc, device: torch.device, native: Any = None
) -> Callable[..., Any]:
    """Return the callable of forward; over a cache, with the native library if there is one."""
    is_plain, names = _kernels(desc)
    if native is not None and cached_problem(desc) is None:
        return CachedAttention(desc, device, names, native)
    return (TorchAttention if is_plain else GraphAttention)(desc, device, names)


def bind_attention_backward(
    desc: AttentionBackwardDesc, device: torch.device
) -> Callable[..., Any]:
    """Return the callable of backward."""
    if desc.low_precision:
        return CodesAttentionBackward(desc, device, KernelNames(FRONTEND, ()))
    if isinstance(desc, AttentionPartBackwardDesc):
        return GraphAttentionBackward(desc, device, KernelNames(FRONTEND, ()))
    is_plain, names = _kernels(desc.attention)
    return (TorchAttentionBackward if is_plain else GraphAttentionBackward)(desc, device, names)


def _kernels(desc: AttentionDesc) -> tuple[bool, KernelNames]:
    """Return whether torch's operator computes ``desc``, and the names of the kernels."""
    reasons = kernels(desc)
    chosen = next(name for name, reason in reasons.items() if reason is None)
    rejected = tuple((name, why) for name, why in reasons.items() if why is not None)
    return chosen == TORCH, KernelNames(chosen, rejected)
