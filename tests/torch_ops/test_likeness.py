"""Which tensors are like others, and what they may not differ in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fp8core.torch_ops import repeats
from fp8core.torch_ops.private import lazily_negated, lazy_zeros
from fp8core.torch_ops.repeats import likeness_to, sameness_to

Tensors = Callable[[], torch.Tensor]


def activations(rows: int = 4) -> torch.Tensor:
    return torch.ones(rows, 8, requires_grad=True)


def weight() -> torch.Tensor:
    return torch.nn.Parameter(torch.ones(8, 8))


class Subclass(torch.Tensor):
    pass


def test_tensors_alike_may_have_other_rows_and_strides() -> None:
    is_like = likeness_to(activations(), [weight()])
    assert is_like is not None
    for other in (activations(), activations(5), torch.ones(8, 4).t().requires_grad_()):
        assert is_like(other, weight())


def test_a_tensor_of_another_kind_is_not_alike() -> None:
    is_like = likeness_to(activations(), [weight()])
    assert is_like is not None
    others = {
        "no gradient": torch.ones(4, 8),
        "columns": torch.ones(4, 9, requires_grad=True),
        "dimensions": torch.ones(2, 2, 8, requires_grad=True),
        "dtype": torch.ones(4, 8, dtype=torch.bfloat16, requires_grad=True),
        "device": torch.ones(4, 8, device="meta", requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(4, 8)),
        "subclass": torch.ones(4, 8).as_subclass(Subclass).requires_grad_(),
        "sparse": torch.ones(4, 8).to_sparse().requires_grad_(),
        "negated": lazily_negated(torch.ones(4, 8)).requires_grad_(),
        "zeros": lazy_zeros((4, 8), dtype=torch.float32).requires_grad_(),
        "no tensor": None,
    }
    assert [name for name, other in others.items() if is_like(other, weight())] == []
    assert not is_like(activations(), weight().detach())


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.inference_mode,
        lambda: FlopCounterMode(display=False),
    ],
    ids=["torch.autocast", "inference mode", "a mode"],
)
def test_the_same_tensors_within_a_context_are_not_alike(
    around: Callable[[], AbstractContextManager[Any]],
) -> None:
    x, w = activations(), weight()
    is_like = likeness_to(x, [w])
    assert is_like is not None
    with around():
        assert not is_like(x, w)
    with nullcontext():
        assert is_like(x, w)


@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
def test_the_same_tensors_under_a_transform_are_not_alike(transform: str) -> None:
    x, w = activations(), weight()
    is_like = likeness_to(x, [w])
    assert is_like is not None
    answers = []

    def look(value: torch.Tensor) -> torch.Tensor:
        answers.append(is_like(x, w))
        return value.sum()

    getattr(torch.func, transform)(look)(torch.ones(3))
    assert answers == [False]


def test_a_torch_without_guards_finds_nothing_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeats, "tensor_guards", None)
    assert likeness_to(activations()) is None
    assert sameness_to([activations()]) is None


def test_the_same_sizes_and_strides_in_other_memory_are_the_same() -> None:
    is_same = sameness_to([activations(), torch.ones(8, 8).t()])
    assert is_same is not None
    assert is_same(activations(), torch.zeros(8, 8).t())


def test_other_sizes_and_strides_are_not_the_same() -> None:
    is_same = sameness_to([activations(), weight()])
    assert is_same is not None
    others = {
        "rows": activations(5),
        "strides": torch.ones(8, 4).t().requires_grad_(),
        "no gradient": torch.ones(4, 8),
        "dtype": torch.ones(4, 8, dtype=torch.float64, requires_grad=True),
        "None": None,
        "text": "text",
    }
    assert [name for name, other in others.items() if is_same(other, weight())] == []
