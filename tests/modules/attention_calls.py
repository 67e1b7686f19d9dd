"""What tests of attention's calls share: heads, lengths, layers and gradients."""

from __future__ import annotations

from typing import Any

import torch

from fp8core import DotProductAttention

HEADS, GROUPS, SIZE = 4, 2, 8


def cu(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def qkv(*tokens: int, dtype: torch.dtype = torch.float64, groups: int = GROUPS) -> Any:
    torch.manual_seed(0)
    sizes = ((HEADS, SIZE), (groups, SIZE), (groups, SIZE))
    return [torch.randn(*tokens, *size, dtype=dtype, requires_grad=True) for size in sizes]


def layer(**options: Any) -> DotProductAttention:
    return DotProductAttention(HEADS, SIZE, options.pop("num_gqa_groups", GROUPS), **options)


def grads(out: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return list(torch.autograd.grad((out * weights).sum(), leaves, materialize_grads=True))


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
