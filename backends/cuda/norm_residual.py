"""The gradient of a norm's input with that of a residual added, by the norm's own kernel."""

from __future__ import annotations

import torch

from fp8core_backends.cuda.norm import NormBackward

__all__ = ["ResidualNormBackward"]


class ResidualNormBackward(NormBackward):
    """The callable of a NormBackwardDesc, with the optional method that adds a gradient."""

    __slots__ = ()

    def run_added(
        self,
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor | None,
        rstd: torch.Tensor,
        added: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return the gradients, the first of them plus ``added``; see the backend API."""
        return self(grad_output, x, weight, mean, rstd, residual_grad=added)
