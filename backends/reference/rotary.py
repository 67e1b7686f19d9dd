"""Rotary position embedding, in float32 throughout (float64 for float64), rounded once."""

from __future__ import annotations

import torch

from fp8core.backend_api import RotaryDesc

__all__ = ["rotary"]


def rotary(
    desc: RotaryDesc,
    x: torch.Tensor,
    freqs: torch.Tensor,
    *,
    start_positions: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``y`` of the shape of ``x``; see the backend API."""
    if cu_seqlens is None:
        is_token, positions = None, _positions(desc, x, start_positions)
    else:
        is_token, positions = _positions_in_sequences(x, start_positions, cu_seqlens)
    values = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    angles = _angles(freqs.to(values.dtype), positions)
    size = angles.shape[-1]
    turned = _turned(desc, values[..., :size], angles)
    y = torch.cat((turned, values[..., size:]), dim=-1)
    if is_token is not None:
        y = torch.where(is_token[:, None, None], y, 0)
    return y.to(desc.dtype).contiguous()


def _positions(desc: RotaryDesc, x: torch.Tensor, starts: torch.Tensor | None) -> torch.Tensor:
    """Return positions ``[s, b]`` in sbhd, ``[b, s]`` in bshd; b is 1 without ``starts``."""
    positions = torch.arange(x.shape[desc.layout.index("s")], device=x.device)[None]
    if starts is not None:
        positions = positions + starts[:, None]
    return positions.t() if desc.layout == "sbhd" else positions


def _positions_in_sequences(
    x: torch.Tensor, starts: torch.Tensor | None, cu_seqlens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which of the tokens ``[t]`` belong to a sequence, and their positions in it."""
    tokens = torch.arange(x.shape[0], device=x.device, dtype=cu_seqlens.dtype)
    # From -1, before the first sequence, to b, behind the last one, which both are indices.
    sequence = torch.searchsorted(cu_seqlens, tokens, right=True) - 1
    is_token = (sequence >= 0) & (sequence < len(cu_seqlens) - 1)
    positions = tokens - cu_seqlens[sequence]
    if starts is not None:
        positions = positions + torch.nn.functional.pad(starts, (0, 1))[sequence]
    return is_token, positions


def _angles(freqs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the angles ``[..., 1, r]`` of ``positions [...]``, NaN where ``freqs`` has none."""
    table = freqs.reshape(freqs.shape[0], freqs.shape[-1])
    table = torch.nn.functional.pad(table, (0, 0, 0, 1), value=torch.nan)
    is_valid = (positions >= 0) & (positions < freqs.shape[0])
    return table[torch.where(is_valid, positions, freqs.shape[0])].unsqueeze(-2)


def _turned(desc: RotaryDesc, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Return ``x`` rotated by ``angles``, or the transposed map of it."""
    if desc.inverse:
        return x * angles.cos() - _quarter_turn(desc, x * angles.sin())
    return x * angles.cos() + _quarter_turn(desc, x) * angles.sin()


def _quarter_turn(desc: RotaryDesc, x: torch.Tensor) -> torch.Tensor:
    """Return ``(-x[j], x[i])`` for each pair ``(i, j)``."""
    if desc.interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
