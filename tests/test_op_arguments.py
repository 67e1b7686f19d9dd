"""Constructors of the operations: Transformer Engine's keywords, and the values they start with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core import OperandError, UnsupportedError, autocast, ops
from fp8core.conformance.in_process import communicators


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_starts_as_transformer_engines_operation(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    want = torch.nn.Linear(32, 16, bias=False, dtype=dtype)
    torch.manual_seed(0)
    made = ops.Linear(32, 16, dtype=dtype)
    assert torch.equal(made.weight, want.weight)
    assert made.bias is not None
    assert not made.bias.any()
    assert made.bias.dtype == dtype


def test_a_linear_on_meta_starts_alike() -> None:
    made = ops.Linear(32, 16, device="meta")
    torch.manual_seed(0)
    made.reset_parameters()
    torch.manual_seed(0)
    assert torch.equal(made.weight, ops.Linear(32, 16).weight)


def test_a_linear_adds_to_main_grad_where_asked() -> None:
    made = ops.Linear(32, 32, bias=False, accumulate_into_main_grad=True)
    made.weight.main_grad = torch.zeros(32, 32)
    with autocast(recipe="current"):
        made(torch.ones(32, 32)).sum().backward()
    assert made.weight.grad is None
    assert made.weight.main_grad.all()


@pytest.mark.parametrize("value", [False, True])
def test_a_bias_is_asked_for_by_keyword(value: bool) -> None:
    make: Any = ops.Linear
    with pytest.raises(TypeError, match="positional"):
        make(32, 32, value)


NOT_OFFERED: dict[str, Callable[[], Any]] = {
    "ops.GELU(cache_quantized_input=True)": lambda: ops.GELU(cache_quantized_input=True),
    "ops.ScaledSReLU(activation_recompute_in_mlp=True)": lambda: ops.ScaledSReLU(
        activation_recompute_in_mlp=True
    ),
    "ops.GroupedLinear(scale_bias=True)": lambda: ops.GroupedLinear(2, 8, 8, scale_bias=True),
    "ops.BasicLinear(userbuffers_options={'a': 1})": lambda: ops.BasicLinear(
        8, 8, userbuffers_options={"a": 1}
    ),
}


@pytest.mark.parametrize("message", NOT_OFFERED)
def test_what_an_operation_does_not_offer_is_refused(message: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        NOT_OFFERED[message]()


def test_a_mode_of_no_linear_is_refused() -> None:
    with pytest.raises(OperandError, match="expected 'column', 'row' or None"):
        ops.Linear(8, 8, tensor_parallel_mode="both")


def test_operations_of_ranks_have_their_share_of_the_features() -> None:
    group = communicators(2)[0]
    column = ops.Linear(8, 6, tensor_parallel_mode="column", tensor_parallel_group=group)
    row = ops.BasicLinear(8, 6, tensor_parallel_mode="row", tensor_parallel_group=group)
    bias = ops.Bias(8, tensor_parallel=True, tensor_parallel_group=group)
    shapes = [tuple(one.shape) for one in (column.weight, row.weight, bias.bias)]
    assert shapes == [(3, 8), (6, 4), (4,)]


def test_without_a_group_of_processes_an_operation_has_one_rank() -> None:
    assert ops.Linear(8, 6, tensor_parallel_mode="row").weight.shape == (6, 8)
    assert ops.Bias(8, tensor_parallel=True).bias.shape == (8,)


def test_what_asks_an_operation_for_nothing_passes() -> None:
    ops.Linear(8, 8, tensor_parallel_mode="column", tensor_parallel_group=None)
    ops.ClampedSwiGLU(limit=5.0, cache_quantized_input=False, glu_interleave_size=None)
    ops.AddExtraInput(in_place=False)
