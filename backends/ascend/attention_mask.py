"""The arguments of torch_npu's attention kernels that say which keys a query looks at."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fp8core.backend_api import AttentionDesc
from fp8core_backends.ascend.operators.fused_attention import (
    BAND,
    CAUSAL_BOTTOM_RIGHT,
    CAUSAL_TOP_LEFT,
    NO_MASK,
)

_NO_LIMIT = 2**31 - 1
NEVER = torch.finfo(torch.float32).max / 2
"""The statistic of a query without keys in backward: all its weights become 0."""


class Mask(NamedTuple):
    """The arguments of a kernel that say which keys a query looks at."""

    mode: int
    mask: torch.Tensor | None = None
    before: int = _NO_LIMIT
    after: int = _NO_LIMIT
    query_ends: Sequence[int] | None = None
    key_ends: Sequence[int] | None = None


@functools.lru_cache(maxsize=8)
def _causal(device: torch.device) -> torch.Tensor:
    """Return the mask that stands for every causal one: bool ``[2048, 2048]``, True above the
    diagonal."""
    return torch.ones(2048, 2048, dtype=torch.bool, device="cpu").triu(1).to(device)


def mask_of(desc: AttentionDesc, device: torch.device) -> Mask:
    """Return the mask's arguments for the window of ``desc``."""
    left, right = desc.window
    if desc.window == (-1, -1):
        return Mask(NO_MASK)
    if desc.window == (-1, 0):
        mode = CAUSAL_BOTTOM_RIGHT if desc.bottom_right else CAUSAL_TOP_LEFT
        return Mask(mode, _causal(device))
    before, after = (_NO_LIMIT if limit < 0 else limit for limit in (left, right))
    return Mask(BAND, _causal(device), before, after)
