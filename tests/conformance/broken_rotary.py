"""Backends whose rotary embedding computes as the reference does, but for one fault each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from fp8core.backend_api import OpDesc, PackedRotaryDesc
from fp8core_backends.reference.layers import rotary
from tests.conformance.broken import Run, Sound, caught_by, fault


@fault("rotary", "law4_rotary_is_within_the_bound")
def turns_the_other_way(desc: Any, *given: Any, **named: Any) -> Any:
    """Rotates backward where it should rotate forward."""
    return rotary(replace(desc, inverse=not desc.inverse), *given, **named)


@fault("rotary", "law4_rotary_is_within_the_bound")
def pairs_halves(desc: Any, x: torch.Tensor, freqs: torch.Tensor, **named: Any) -> Any:
    """Takes the pairs from the halves of the whole head, not of its rotated part."""
    if desc.interleaved:
        return rotary(desc, x, freqs, **named)
    size, rotated = x.shape[-1] // 2, freqs.shape[-1] // 2
    order = [*range(rotated), *range(size, size + rotated)]
    order += [at for at in range(x.shape[-1]) if at not in order]
    y = rotary(desc, x[..., order], freqs, **named)
    return y[..., torch.tensor(order).argsort()].contiguous()


@fault("rotary", "law4_rotary_starts_at_the_given_positions")
def ignores_starts(desc: Any, *given: Any, start_positions: Any = None, **named: Any) -> Any:
    """Has every sequence start at position 0."""
    return rotary(desc, *given, **named)


@fault("rotary", "law4_rotary_of_sequences_of_any_length")
def counts_through(
    desc: Any, x: torch.Tensor, *given: Any, cu_seqlens: Any = None, **named: Any
) -> Any:
    """Takes the tokens of packed sequences for one sequence."""
    if cu_seqlens is None:
        return rotary(desc, x, *given, **named)
    whole = torch.tensor([0, len(x)], dtype=torch.int32)
    named.pop("start_positions", None)
    return rotary(desc, x, *given, cu_seqlens=whole, **named)


@fault("rotary", "law4_rotary_is_nan_at_positions_without_angles")
def clamps_positions(desc: Any, x: torch.Tensor, freqs: torch.Tensor, **named: Any) -> Any:
    """Takes the last angles for a position that has none."""
    return rotary(desc, x, freqs, **named).nan_to_num(0.0)


@fault("rotary", "law4_rotary_is_within_the_bound")
def rounds_the_cosine(desc: Any, x: torch.Tensor, freqs: torch.Tensor, **named: Any) -> Any:
    """Multiplies in the dtype of the activations."""
    return rotary(desc, x, freqs.to(desc.dtype).float(), **named)


@fault("rotary", "law4_rotary_passes_on_nan_and_inf")
def mixes_the_head(desc: Any, x: torch.Tensor, freqs: torch.Tensor, **named: Any) -> Any:
    """Multiplies what is not rotated by the cosine of an angle of 0, and adds 0 times the rest."""
    return rotary(desc, x, freqs, **named) + 0 * x.sum(-1, keepdim=True)


@caught_by("law6_rotary_of_packed_heads_equals_that_of_each")
class TurnsValues(Sound):
    """Rotates the values beside queries and keys, as if they were keys."""

    def bind(self, desc: OpDesc, device: torch.device) -> Run:
        if not isinstance(desc, PackedRotaryDesc):
            return super().bind(desc, device)
        turn = super().bind(desc.plain(), device)

        def run(x: torch.Tensor, freqs: torch.Tensor, *, k: Any, v: Any, **named: Any) -> Any:
            return turn(torch.cat((x, k, v), dim=-2), freqs, **named)

        return run
