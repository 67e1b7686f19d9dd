"""A model to convert that may raise, and what its delayed state is."""

from __future__ import annotations

import torch
from torch import nn

import fp8core
from fp8core import recipe

CHOSEN = recipe.DelayedScaling(amax_history_len=4)
NEWEST = recipe.DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent")
E4M3_MAX = 448.0


class Twice(nn.Module):
    """One layer used twice, and one that may raise after it."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.last = nn.Linear(32, 32), nn.Linear(32, 32)
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.shared(self.shared(x))
        if self.error is not None:
            raise self.error
        made: torch.Tensor = self.last(y)
        return made


def converted(chosen: recipe.Recipe = CHOSEN) -> Twice:
    torch.manual_seed(0)
    own = Twice()
    fp8core.convert(own, chosen)
    return own


def rows(scale: float = 1.0) -> torch.Tensor:
    return torch.randn(8, 32, generator=torch.Generator().manual_seed(4)) * scale


def state(own: nn.Module) -> dict[str, torch.Tensor]:
    buffers = dict(own.named_buffers())
    assert buffers
    return {name: value.clone() for name, value in buffers.items()}


def same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
