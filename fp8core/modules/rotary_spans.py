"""Where the sequences of a rotated tensor lie, and at which positions they start."""

from __future__ import annotations

import itertools
import operator
from typing import NamedTuple

import torch

from fp8core.chain.unwrap import made_readable, unwrap
from fp8core.errors import OperandError
from fp8core.torch_ops.private import is_transform_active
from fp8core.torch_ops.shapes import is_captured

__all__ = ["Spans", "spans_of"]


class Spans(NamedTuple):
    """The first positions of the sequences, int32 ``[b]``, and where these lie among the tokens, or
    sums of their lengths, int32 ``[b + 1]``; None where the call does not say."""

    starts: torch.Tensor | None
    cu_seqlens: torch.Tensor | None

    def check(self, label: str, layout: str, t: torch.Tensor, positions: int) -> None:
        """Refuse a token at a position that is not below ``positions``, and sequences that do not
        lie among the tokens, where the host knows the values without waiting for a device."""
        if self.cu_seqlens is None:
            _check_end(label, t.shape[layout.index("s")], positions)
            if self.starts is None:
                return
        if t.device.type == "cpu" and not (is_captured(t) or is_transform_active()):
            self._check_values(label, layout, t, positions)

    def _check_values(self, label: str, layout: str, t: torch.Tensor, positions: int) -> None:
        if self.cu_seqlens is None:
            lengths = [t.shape[layout.index("s")]] * t.shape[layout.index("b")]
        else:
            bounds = self.cu_seqlens.tolist()
            lengths = [after - before for before, after in itertools.pairwise(bounds)]
            is_thd = layout == "thd"
            last = bounds[-1] if is_thd else max(lengths, default=0)
            limit = t.shape[0 if is_thd else layout.index("s")]
            if bounds[0] < 0 or last > limit or min(lengths, default=0) < 0:
                what = "bounds that rise from 0 to at most that" if is_thd else "no longer sequence"
                raise OperandError(
                    f"{label}: cu_seqlens {bounds} of {limit} tokens; expected {what}."
                )
        starts = [0] * len(lengths) if self.starts is None else self.starts.tolist()
        if min(starts, default=0) < 0:
            raise OperandError(
                f"{label}: start_positions {starts} has one below 0; expected the number of tokens "
                f"before each sequence."
            )
        _check_end(label, max(map(operator.add, lengths, starts), default=0), positions)


def _check_end(label: str, end: int, positions: int) -> None:
    if end > positions:
        raise OperandError(
            f"{label}: a sequence reaches position {end - 1}, but freqs has the angles of "
            f"{positions} positions; ask RotaryPositionEmbedding for at least {end}."
        )


def spans_of(
    label: str,
    layout: str,
    t: torch.Tensor,
    starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> Spans:
    """Return the sequences of a call, their numbers as int32.

    Raises:
        OperandError: numbers of another kind or on another device, or not one for each sequence.
    """
    if cu_seqlens is None and layout == "thd":
        raise OperandError(
            f"{label}: cu_seqlens is None for tensor_format='thd'; expected int32 [b + 1], where "
            f"its sequences begin and end."
        )
    batch = 0 if layout == "thd" else t.shape[layout.index("b")]
    if cu_seqlens is not None:
        cu_seqlens = _integers(label, "cu_seqlens", cu_seqlens, t)
        batch = cu_seqlens.shape[0] - 1 if layout == "thd" else batch
        if cu_seqlens.shape[0] != batch + 1 or batch < 0:
            raise OperandError(
                f"{label}: cu_seqlens has {cu_seqlens.shape[0]} entries; expected one more than "
                f"there are sequences."
            )
    if starts is not None:
        starts = _integers(label, "start_positions", starts, t)
        if starts.shape[0] != batch:
            raise OperandError(
                f"{label}: start_positions has {starts.shape[0]} entries; expected one for each of "
                f"the {batch} sequences."
            )
    return Spans(starts, cu_seqlens)


def _integers(label: str, name: str, given: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Return a vector of integers as int32."""
    if not isinstance(given, torch.Tensor):
        raise OperandError(f"{label}: {name} is {type(given).__name__}; expected a torch.Tensor.")
    if not torch.compiler.is_compiling():
        given = made_readable(unwrap(given, name), t.device, f"{label}: {name}")
    if given.dim() != 1 or given.dtype not in (torch.int32, torch.int64):
        raise OperandError(
            f"{label}: {name} is {given.dtype} {list(given.shape)}; expected a vector of int32."
        )
    if given.dtype == torch.int64:  # beyond int32 is beyond all angles, and must not wrap around
        limits = torch.iinfo(torch.int32)
        given = given.clamp(limits.min, limits.max)
    return given.to(torch.int32)
