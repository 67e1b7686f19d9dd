"""Rotary position embedding by torch_npu's kernel, in float32."""

from __future__ import annotations

import torch

from fp8core.backend_api import RotaryDesc
from fp8core_backends.ascend.operators import arguments, rotation


def refused_rotary(desc: RotaryDesc) -> str | None:
    """Return why ``desc`` is not computed, or None."""
    if desc.layout not in ("sbhd", "bshd"):
        return f"no rotary embedding in {desc.layout}, whose sequences' ends are on the device"
    is_supported = desc.dtype in (torch.float32, *arguments.QUANTIZABLE)
    return None if is_supported else f"no rotary embedding of {desc.dtype}"


def rotary(
    desc: RotaryDesc,
    x: torch.Tensor,
    freqs: torch.Tensor,
    *,
    start_positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return ``y`` of the shape of ``x``; see the backend API.

    Sequences with different positions take one call each.
    """
    if x.numel() == 0:
        return x.to(desc.dtype, memory_format=torch.contiguous_format, copy=True)
    sequences, length = desc.layout.index("b"), x.shape[desc.layout.index("s")]
    if start_positions is None:
        return _rotated(desc, x, _first(freqs, length))
    parts = [
        _rotated(desc, part, _from(freqs, start, length))
        for part, start in zip(
            torch.split(x, 1, sequences), torch.split(start_positions, 1), strict=True
        )
    ]
    return torch.cat(parts, sequences)


def _first(freqs: torch.Tensor, length: int) -> torch.Tensor:
    """Return the angles ``[length, r]`` of the first positions, NaN where there are none."""
    table = freqs.reshape(freqs.shape[0], freqs.shape[-1])
    missing = length - table.shape[0]
    if missing <= 0:
        return table[:length]
    return torch.nn.functional.pad(table, (0, 0, 0, missing), value=torch.nan)


def _from(freqs: torch.Tensor, start: torch.Tensor, length: int) -> torch.Tensor:
    """Return the angles ``[length, r]`` from position ``start [1]``, NaN where there are none."""
    table = _first(freqs, freqs.shape[0] + 1)  # one row of NaN behind the last position
    positions = torch.arange(length, device=start.device, dtype=start.dtype) + start
    is_valid = (positions >= 0) & (positions < freqs.shape[0])
    rows = torch.where(is_valid, positions, freqs.shape[0])
    return table.index_select(0, rows)


def _rotated(desc: RotaryDesc, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    size = angles.shape[-1]
    by_position = angles[:, None, None] if desc.layout == "sbhd" else angles[None, :, None]
    values = x[..., :size].to(torch.float32).contiguous()
    pair = (by_position.cos().contiguous(), by_position.sin().contiguous())
    run = rotation.rotary_mul_backward if desc.inverse else rotation.rotary_mul
    rotated = run(values, *pair, interleaved=desc.interleaved).to(desc.dtype)
    return torch.cat((rotated, x[..., size:].to(desc.dtype)), dim=-1).contiguous()
