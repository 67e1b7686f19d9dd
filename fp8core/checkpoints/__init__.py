"""Checkpoints that other libraries read and write."""

from __future__ import annotations

from fp8core.checkpoints.transformer_engine import transformer_engine_state_dict

__all__ = ["transformer_engine_state_dict"]


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
