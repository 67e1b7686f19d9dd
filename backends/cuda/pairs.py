"""Two tensors quantized in one launch: a layer's input and its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from fp8core.backend_api import Quantized
from fp8core_backends.cuda.stream import raw_stream

__all__ = ["Place", "QuantizePair", "Whole"]

Place: TypeAlias = "tuple[int, int, int, int, int, int, int, int, int, int]"
"""x, its rows and columns, the rowwise and the columnwise codes, scale_inv, scale, amax_out,
nonfinite_out and workspace: addresses, 0 for what there is none of."""

Slots: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None]"


class Whole(Protocol):
    """A cast with one scale for the whole tensor."""

    native_cast: Any

    def __call__(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized:
        """Quantize ``x``."""

    def place(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        nonfinite_out: torch.Tensor | None,
    ) -> tuple[Quantized, Place, torch.Tensor | None]:
        """Return room for the operands, where all of it is, and what holds the workspace."""


class QuantizePair:
    """What ``beside`` returns: the cast of two tensors, each keyword a pair."""

    __slots__ = ("_casts", "_index", "_run")

    def __init__(self, one: Whole, other: Whole, run: Callable[..., None], index: int) -> None:
        self._casts = (one, other)
        self._run = run
        self._index = index

    def __call__(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        *,
        scale: Slots = (None, None),
        amax_out: Slots = (None, None),
        nonfinite_out: Slots = (None, None),
    ) -> tuple[Quantized, Quantized]:
        """Quantize both, at once if both lie in one piece."""
        (one, two), (s, t), (a, b), (n, o) = self._casts, scale, amax_out, nonfinite_out
        if not (x.is_contiguous() and other.is_contiguous() and x.numel() and other.numel()):
            made = one(x, scale=s, amax_out=a, nonfinite_out=n)
            return made, two(other, scale=t, amax_out=b, nonfinite_out=o)
        # The first workspace has to stay until both are enqueued.
        made, place, _room = one.place(x, s, a, n)
        also, beside, _more = two.place(other, t, b, o)
        self._run(one.native_cast, place, two.native_cast, beside, raw_stream(self._index))
        return made, also
