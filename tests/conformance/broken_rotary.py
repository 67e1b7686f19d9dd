"""Backends whose rotary embedding computes as the reference does, but for one fault each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8core_backends.reference.rotary import rotary
from tests.conformance.broken import Sound


class TurnsTheOtherWay(Sound):
    """Rotates backward where it should rotate forward."""

    def rotary(self, desc: Any, *given: Any, **named: Any) -> Any:
        return rotary(replace(desc, inverse=not desc.inverse), *given, **named)


class PairsHalves(Sound):
    """Takes the pairs from the halves of the whole head, not of its rotated part."""

    def rotary(self, desc: Any, x: torch.Tensor, freqs: torch.Tensor, **named: Any) -> Any:
        if desc.interleaved:
            return rotary(desc, x, freqs, **named)
        size, rotated = x.shape[-1] // 2, freqs.shape[-1] // 2
        order = [*range(rotated), *range(size, size + rotated)]
        order += [at for at in range(x.shape[-1]) if at not in order]
        y = rotary(desc, x[..., order], freqs, **named)
        return y[..., torch.tensor(order).argsort()].contiguous()


class IgnoresStarts(Sound):
    """Has every sequence start at position 0."""

    def rotary(self, desc: Any, *given: Any, start_positions: Any = None, **named: Any) -> Any:
        return rotary(desc, *given, **named)


class CountsThrough(Sound):
    """Takes the tokens of packed sequences for one sequence."""

    def rotary(
        self, desc: Any, x: torch.Tensor, *given: Any, cu_seqlens: Any = None, **named: Any
    ) -> Any:
        if cu_seqlens is None:
            return rotary(desc, x, *given, **named)
        whole = torch.tensor([0, len(x)], dtype=torch.int32)
        named.pop("start_positions", None)
        return rotary(desc, x, *given, cu_seqlens=whole, **named)


class ClampsPositions(Sound):
    """Takes the last angles for a position that has none."""

    def rotary(self, desc: Any, x: torch.Tensor, freqs: torch.Tensor, **named: Any) -> Any:
        return rotary(desc, x, freqs, **named).nan_to_num(0.0)


class RoundsTheCosine(Sound):
    """Multiplies in the dtype of the activations."""

    def rotary(self, desc: Any, x: torch.Tensor, freqs: torch.Tensor, **named: Any) -> Any:
        return rotary(desc, x, freqs.to(desc.dtype).float(), **named)


class MixesTheHead(Sound):
    """Multiplies what is not rotated by the cosine of an angle of 0, and adds 0 times the rest."""

    def rotary(self, desc: Any, x: torch.Tensor, freqs: torch.Tensor, **named: Any) -> Any:
        return rotary(desc, x, freqs, **named) + 0 * x.sum(-1, keepdim=True)


CAUGHT_BY: dict[type[Sound], str] = {
    TurnsTheOtherWay: "law4_rotary_is_within_the_bound",
    PairsHalves: "law4_rotary_is_within_the_bound",
    IgnoresStarts: "law4_rotary_starts_at_the_given_positions",
    CountsThrough: "law4_rotary_of_sequences_of_any_length",
    ClampsPositions: "law4_rotary_is_nan_at_positions_without_angles",
    RoundsTheCosine: "law4_rotary_is_within_the_bound",
    MixesTheHead: "law4_rotary_passes_on_nan_and_inf",
}
"""Each fault, and the test of the kit whose name says what it is."""
