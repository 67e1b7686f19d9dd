"""Two tensors quantized in one launch: a layer's input and its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import torch

from fp8core.backend_api import Quantized
from fp8core_backends.cuda.stream import raw_stream

Addresses: TypeAlias = "tuple[int, ...]"
"""The arguments of a native cast: the fields of ``QuantizeArguments`` in their order (see
csrc/include/fp8core/quantize.h), 0 where there is no tensor."""

Slots: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None]"


class PairableCast(Protocol):
    """A cast with one scale for the whole tensor, in both orientations."""

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

    def addresses(
        self,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        nonfinite_out: torch.Tensor | None,
    ) -> tuple[Quantized, Addresses, torch.Tensor | None]:
        """Allocate the result of quantizing a contiguous ``x``, and the workspace of the cast.

        Returns the result, the arguments of the native cast that fills it, and the workspace, which
        the caller holds until that cast is enqueued.
        """


class QuantizePair:
    """The cast of two tensors that ``bind_pair`` returns; each keyword is a pair."""

    __slots__ = ("_casts", "_index", "_run")

    def __init__(
        self, first: PairableCast, second: PairableCast, run: Callable[..., None], index: int
    ) -> None:
        self._casts = (first, second)
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
        """Quantize both: in one launch if both are contiguous and not empty."""
        (first, second), (s, t), (a, b), (n, o) = self._casts, scale, amax_out, nonfinite_out
        if not (x.is_contiguous() and other.is_contiguous() and x.numel() and other.numel()):
            quantized = first(x, scale=s, amax_out=a, nonfinite_out=n)
            return quantized, second(other, scale=t, amax_out=b, nonfinite_out=o)
        # Freed memory may be handed out again at once: both workspaces are held over the launch.
        quantized, addresses, _workspace = first.addresses(x, s, a, n)
        second_quantized, second_addresses, _second_workspace = second.addresses(other, t, b, o)
        self._run(
            first.native_cast,
            addresses,
            second.native_cast,
            second_addresses,
            raw_stream(self._index),
        )
        return quantized, second_quantized
