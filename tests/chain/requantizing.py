"""Layers under both recipes of a pair, one of which quantizes weights again in backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from fp8core import Linear, autocast, recipe
from fp8core.backend_api import OperandSpec
from fp8core.tensors.requantized import RequantizedWeight

BF16 = torch.bfloat16
NAMES = ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4")
E4M3 = OperandSpec("e4m3", (0, 0), 448.0)


def both_ways(chosen: Any) -> tuple[Any, Any]:
    """Return a recipe that holds weights' codes, and one that quantizes weights again."""
    return chosen, dataclasses.replace(chosen, requantize_weights=True)


def recipes(name: str) -> tuple[Any, Any]:
    if name == "delayed":
        return both_ways(recipe.DelayedScaling(amax_history_len=2))
    return both_ways(recipe.by_name(name))


CURRENT = recipes("current")[1]


def assert_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


@contextmanager
def saved_tensors() -> Iterator[list[torch.Tensor]]:
    """Yield the list to which autograd adds each tensor that it saves."""
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


def bytes_held(saved: list[torch.Tensor], *modules: nn.Module) -> int:
    """Return the bytes of the distinct storages of ``saved``, without those of parameters."""
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved}
    for module in modules:
        for parameter in module.parameters():
            storages.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(storages.values())


@contextmanager
def counted_requantizations(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Yield a list to which each weight that backward takes adds whether it was quantized again."""
    found: list[bool] = []
    requantize = RequantizedWeight.requantize

    def counted(self: Any, saved: Any) -> Any:
        operand = requantize(self, saved)
        found.append(operand[0] is not saved[0])
        return operand

    with monkeypatch.context() as patch:
        patch.setattr(RequantizedWeight, "requantize", counted)
        yield found


def values(seed: int = 5, columns: int = 32) -> torch.Tensor:
    own = torch.randn(32, columns, generator=torch.Generator().manual_seed(seed))
    return own.requires_grad_()


def layer(**options: Any) -> Linear:
    torch.manual_seed(1)
    return Linear(32, 48, **options)


def forward(own: nn.Module, x: torch.Tensor, chosen: Any, **options: Any) -> torch.Tensor:
    torch.manual_seed(11)  # of stochastic rounding
    with autocast(recipe=chosen):
        y: torch.Tensor = own(x, **options)
    return y


def step(own: nn.Module, chosen: Any, x: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Return what forward and backward give, and the layer's buffers after both."""
    x = values() if x is None else x
    y = forward(own, x, chosen)
    y.square().sum().backward()
    grads = [parameter.grad for parameter in own.parameters() if parameter.grad is not None]
    assert x.grad is not None
    return [y.detach(), x.grad, *grads, *own.buffers()]
