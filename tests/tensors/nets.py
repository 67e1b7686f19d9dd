"""Small models with masters, and what tests of their steps ask."""

from __future__ import annotations

from typing import Any

import torch

import fp8core
from fp8core import recipe

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0)).bfloat16()


def net_of_two(norm_dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 32, dtype=torch.bfloat16), torch.nn.LayerNorm(32, dtype=norm_dtype)
    )


def stored() -> torch.nn.Module:
    torch.manual_seed(0)
    with fp8core.quantized_model_init(True, recipe.Float8CurrentScaling(), True):
        return fp8core.Linear(32, 32, params_dtype=torch.bfloat16)


def attached(
    net: torch.nn.Module, **options: Any
) -> tuple[fp8core.MasterWeights, torch.optim.Optimizer]:
    masters = fp8core.MasterWeights(net)
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1, **options)
    masters.attach(optimizer)
    return masters, optimizer


def backward(net: torch.nn.Module) -> float:
    loss = (net(X).float() - X.float().roll(1, 1)).square().mean()
    loss.backward()
    return loss.item()


def values(net: torch.nn.Module) -> list[torch.Tensor]:
    return [own.detach().float().clone() for own in net.parameters()]


def is_moved(before: list[torch.Tensor], net: torch.nn.Module) -> bool:
    return not all(map(torch.equal, before, values(net)))
