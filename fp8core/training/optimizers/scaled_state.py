"""A tensor of an optimizer's state in fewer bits: codes of float16 or FP8, and one scale."""

from __future__ import annotations

from typing import NamedTuple

import torch

LARGEST: dict[torch.dtype, float] = {
    torch.float16: torch.finfo(torch.float16).max / 2,
    torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max,
}
"""What the largest magnitude of a tensor becomes."""


class ScaledState(NamedTuple):
    """``codes * scale``; ``scale`` is float32 ``[1]``. 0 where all values are 0."""

    codes: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def zeros(cls, like: torch.Tensor, dtype: torch.dtype) -> ScaledState:
        """Return zeros of the shape of ``like``."""
        codes = torch.zeros_like(like, dtype=torch.float32).to(dtype)
        return cls(codes, torch.zeros(1, dtype=torch.float32, device=like.device))

    def value(self) -> torch.Tensor:
        """Return the values, float32."""
        return self.codes.float() * self.scale.reshape(())

    def write(self, value: torch.Tensor) -> None:
        """Store ``value``, float32, by a scale that its largest magnitude takes."""
        amax = value.abs().amax() if value.numel() else value.new_zeros(())
        # A smaller scale has no finite reciprocal.
        scale = (amax / LARGEST[self.codes.dtype]).clamp(min=torch.finfo(torch.float32).tiny)
        scale = torch.where(amax != 0, scale, 0)
        factor = torch.where(scale > 0, 1 / scale, 0)
        self.codes.copy_((value * factor).to(self.codes.dtype))
        self.scale.copy_(scale.reshape(1))
