"""Rotary position embedding: pairs of elements of a head, rotated by the angles of a position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fp8core.backend_api.descriptor_text import dtype_text, text

__all__ = ["RotaryDesc"]


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

    def __str__(self) -> str:
        return text(self, dtype_text(self.dtype), self.layout)
