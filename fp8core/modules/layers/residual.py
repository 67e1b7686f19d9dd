"""The branches of a residual block: dropout, dropped paths, and the sum with the residual."""

from __future__ import annotations

from typing import NamedTuple

import torch

from fp8core.collectives import named
from fp8core.errors import OperandError
from fp8core.modules.calls.parameters import check_probability
from fp8core.torch_ops.shapes import is_captured

_BATCH_DIM = {"sbhd": 1, "bshd": 0}


class SampleSplit(NamedTuple):
    """How ranks share the tokens of samples.

    ``groups`` are the names of the groups whose ranks have tokens of the same samples. In thd each
    rank has one ``parts``-th of each sample, one sample after the other, and of those the rows of
    number ``at`` of equally many.
    """

    groups: tuple[str, ...] = ()
    parts: int = 1
    at: int = 0


_WHOLE = SampleSplit()


class DropPath(torch.nn.Module):
    """Stochastic depth: in training a sample's branch is zero with probability ``rate``, and is
    multiplied by ``1 / (1 - rate)`` otherwise. torch's generator decides; that of the first of the
    ranks that share a sample.

    Args:
        rate: the probability.
        layout: ``"sbhd"``, ``"bshd"`` or ``"thd"``: which dimension holds the samples.

    Source: Huang et al. 2016, Deep Networks with Stochastic Depth, sec. 3.
    """

    def __init__(self, rate: float, layout: str) -> None:
        super().__init__()
        self.rate = check_probability("DropPath", "rate", rate)
        self.layout = layout

    def forward(
        self,
        branch: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        split: SampleSplit = _WHOLE,
    ) -> torch.Tensor:
        """Drop samples of ``branch``: ``[s, b, n]``, ``[b, s, n]`` or, in thd, ``[t, n]``, where
        ``cu_seqlens [b + 1]`` says which tokens of whole samples are a sample's.

        Raises:
            OperandError: thd without ``cu_seqlens``; or, raised on every rank, other numbers of
                samples on ranks that share them.
        """
        if not self.rate or not self.training:
            return branch
        keep_rate = 1 - self.rate or 1  # 0 would give a gradient of NaN where nothing is kept
        return torch.where(self._keep_mask(branch, cu_seqlens, split), branch / keep_rate, 0)

    def _keep_mask(
        self, branch: torch.Tensor, cu_seqlens: torch.Tensor | None, split: SampleSplit
    ) -> torch.Tensor:
        if self.layout in _BATCH_DIM:
            dim = _BATCH_DIM[self.layout]
            sizes = [1] * branch.dim()
            sizes[dim] = branch.shape[dim]
            return self._draw(branch.shape[dim], branch.device, split).view(sizes)
        if cu_seqlens is None:
            raise OperandError(
                f"DropPath(layout={self.layout!r}) drops whole sequences; cu_seqlens_q says where "
                f"they begin, and it is None."
            )
        num_samples, rows = cu_seqlens.numel() - 1, branch.shape[0]
        mask = self._draw(num_samples, branch.device, split)
        tokens = torch.arange(split.at * rows, (split.at + 1) * rows, device=branch.device)
        ends = cu_seqlens.to(branch.device)[1:] // split.parts
        sample = torch.bucketize(tokens, ends, right=True)
        return mask[sample.clamp(max=num_samples - 1)].unsqueeze(-1)

    def _draw(self, num_samples: int, device: torch.device, split: SampleSplit) -> torch.Tensor:
        """Return which samples are kept, the same on all ranks that share them."""
        drawn = torch.rand(num_samples, device=device)
        for group in split.groups:
            communicator = named(group)
            if not (drawn.is_meta or is_captured(drawn)):
                communicator.agree_once(f"{num_samples} samples", "samples to drop")
            drawn = communicator.gather(drawn, "dropped samples").wait()[:num_samples]
        return drawn >= self.rate

    def extra_repr(self) -> str:
        """Return the rate."""
        return f"rate={self.rate}"
