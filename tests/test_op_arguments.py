"""Arguments of the operations: Transformer Engine's keywords, first values, and what is refused."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, UnsupportedError, autocast, ops
from tests.in_process import communicators
from tests.refusals import Refusal, unrefused


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


X = torch.zeros(2, 8)


def with_channel(index: int, channel: Any) -> Any:
    return ops.AddExtraInput().set_extra_input_channel(index, channel)


def small() -> Any:
    return ops.Sequential(ops.GELU())


REFUSED: dict[str, Refusal] = {
    # What is not offered.
    **{
        message: (call, UnsupportedError, re.escape(message))
        for message, call in {
            "ops.SiTUGLU(cache_quantized_input=True)": lambda: ops.SiTUGLU(
                cache_quantized_input=True
            ),
            "ops.ScaledSReLU(activation_recompute_in_mlp=True)": lambda: ops.ScaledSReLU(
                activation_recompute_in_mlp=True
            ),
            "ops.BasicLinear(userbuffers_options={'a': 1})": lambda: ops.BasicLinear(
                8, 8, userbuffers_options={"a": 1}
            ),
        }.items()
    },
    **{
        f"more than one tensor of {type(layer).__name__}": (
            partial(ops.Sequential, layer),
            *(UnsupportedError, "more than one tensor"),
        )
        for layer in (
            fp8core.LayerNormLinear(8, 8, return_layernorm_output=True),
            fp8core.Linear(8, 8, return_bias=True),
            fp8core.GroupedLinear(2, 8, 8, return_bias=True),
        )
    },
    # Values of constructors.
    **{
        name: (call, OperandError, "expected")
        for name, call in {
            "two sizes to infer": lambda: ops.Reshape((-1, -1)),
            "a negative size": lambda: ops.Reshape((-2, 3)),
            "a fractional size": lambda: ops.Reshape((2.0, 3)),  # type: ignore[arg-type]
            "a word for a scale": lambda: ops.ConstantScale("2"),  # type: ignore[arg-type]
            "a negative eps": lambda: ops.L2Normalization(eps=-1.0),
            "a cap of zero": lambda: ops.SiTUGLU(beta1=0.0),
            "an infinite cap": lambda: ops.ScaledSiTUGLU(beta2=float("inf")),
            "a negative cap": lambda: ops.ScaledTanhSReLU(tanh_clamp_scale=-2.0),
            "blocks of nothing": lambda: ops.SwiGLU(glu_interleave_size=0),
        }.items()
    },
    "a mode of no linear": (
        lambda: ops.Linear(8, 8, tensor_parallel_mode="both"),
        *(OperandError, "expected one of 'column', 'row', None"),
    ),
    **{
        f"a probability of {p}": (partial(ops.Dropout, p), OperandError, f"p={p}")
        for p in (-0.1, 1.01, 1.5)
    },
    **{
        f"a norm of sizes {sizes}": (
            partial(fp8core.LayerNorm, sizes),
            *(OperandError, "normalized_shape"),
        )
        for sizes in ((), (3, 0), (3, 2.5))
    },
    **{
        f"channel {channel!r} of input {index}": (
            partial(with_channel, index, channel),
            *(OperandError, r"AddExtraInput: (extra input|channel)"),
        )
        for index, channel in ((1, "skip"), (-1, "skip"), (0, ""), (0, 3))
    },
    # Members of a Sequential.
    "a function": (
        lambda: ops.Sequential(ops.Linear(8, 8), torch.nn.functional.relu),
        *(OperandError, r"operation 1 is function"),
    ),
    **{
        f"to {name} no module": (change, OperandError, r"torch\.nn\.Module")
        for name, change in {
            "append": lambda: small().append("gelu"),
            "insert": lambda: small().insert(0, torch.relu),
            "set": lambda: small().__setitem__(0, None),
        }.items()
    },
    **{
        f"sizes between {operations}": (
            partial(ops.Sequential, *operations),
            *(OperandError, f"operation {len(operations) - 1}"),
        )
        for operations in (
            (ops.Linear(8, 16), ops.Linear(8, 8)),
            (ops.Linear(8, 16), ops.LayerNorm(8)),
            (ops.Linear(8, 16), ops.SwiGLU(), ops.Linear(16, 8)),
            (ops.Linear(8, 7), ops.SwiGLU()),
            (ops.RMSNorm(8), ops.Bias(9)),
        )
    },
    **{
        f"halves of {make.__name__} within": (
            lambda make=make: ops.Sequential(ops.Linear(8, 12), make(glu_interleave_size=4)),
            *(OperandError, r"operation 1.*a multiple of 8 columns"),
        )
        for make in (ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU)
    },
    # Inputs.
    **{
        f"halves of {make.__name__}": (
            lambda make=make: make(glu_interleave_size=4)(torch.zeros(2, 12)),
            *(OperandError, "multiple of 8 columns"),
        )
        for make in (ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU)
    },
    "a residual of another shape": (
        lambda: ops.Sequential(ops.AddExtraInput())(X, torch.zeros(2, 9)),
        *(OperandError, r"\[2, 9\].*\[2, 8\]"),
    ),
    **{
        f"{count} extra inputs": (
            lambda count=count: ops.Sequential(ops.Linear(8, 8), ops.AddExtraInput())(
                X, *[X] * count
            ),
            *(OperandError, rf"{count} extra inputs for 1"),
        )
        for count in (0, 2)
    },
    "no extra input": (
        lambda: ops.AddExtraInput()(X),
        *(OperandError, "got 0 extra inputs; expected 1"),
    ),
    "no scales": (
        lambda: ops.Sequential(ops.Linear(8, 8), ops.ScaledSwiGLU())(X),
        *(OperandError, "got 0 extra inputs for 1"),
    ),
    **{
        f"scales of shape {shape}": (
            lambda shape=shape: ops.ScaledSwiGLU()(torch.zeros(2, 3, 16), torch.ones(shape)),
            *(OperandError, r"scales \[.*\] for 6 rows"),
        )
        for shape in ((3,), (2, 4), (8, 1, 1), ())
    },
    "a leaf to write to": (
        lambda: ops.AddExtraInput(in_place=True)(X, torch.zeros(2, 8, requires_grad=True)),
        *(OperandError, "leaf that requires a gradient"),
    ),
    "another shape to write to": (
        lambda: ops.AddExtraInput(in_place=True)(X, torch.zeros(1, 8)),
        *(OperandError, r"\[1, 8\]; expected the input's \[2, 8\]"),
    ),
    **{
        f"a view of shape {shape}": (
            lambda shape=shape: ops.Reshape(shape)(torch.zeros(2, 3)),
            *(OperandError, r"input \[2, 3\] has no shape"),
        )
        for shape in ((5, -1), (7, 7), (-1, 0), (0, -1))
    },
    **{
        f"a norm of an input {shape}": (
            lambda shape=shape: ops.LayerNorm((3, 8))(torch.zeros(shape)),
            *(OperandError, r"the layer takes \[\.\.\., 3, 8\]"),
        )
        for shape in ((2, 8, 3), (3, 8, 1), (8,))
    },
    "a wrong hidden size": (
        lambda: ops.Sequential(ops.Quantize(), ops.Linear(8, 8))(torch.zeros(2, 9)),
        *(OperandError, r"k=9.*8"),
    ),
    "an odd input of a gate": (
        lambda: ops.SwiGLU()(torch.zeros(2, 7)),
        *(OperandError, r"\[2, 7\].*even"),
    ),
    "integers": (
        lambda: ops.Linear(8, 8)(torch.zeros(2, 8, dtype=torch.int64)),
        *(OperandError, "expected bfloat16, float16 or float32"),
    ),
    "a channel that nothing fills": (
        lambda: ops.Sequential(
            with_channel(0, "skip"),
            ops.MakeExtraOutput().set_extra_output_channel(0, "skip"),
        )(X),
        *(OperandError, "no operation before it fills channel 'skip'"),
    ),
}


def test_what_is_not_offered_or_does_not_fit_is_refused() -> None:
    assert unrefused(REFUSED) == {}


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
