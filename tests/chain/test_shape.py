"""A kind of link that no file of the library names takes part in everything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, ops, recipe
from fp8core.chain.call import Call
from fp8core.chain.link_defaults import LinkDefaults
from fp8core.chain.protocol import Backward, Forward, Saved, TensorProgram
from fp8core.chain.request import QuantizeRequest
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.modules.bind import bind
from fp8core.modules.operation import Operation
from tests.device import DEVICE


@dataclass(frozen=True, slots=True)
class RepeatShape(LinkShape):
    """Repeats its columns; computes in float32."""

    count: int

    def columns(self, columns: int) -> int:
        return self.count * columns

    def input_columns(self, columns: int | None) -> int | None:
        return None if columns is None else columns // self.count

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def bind(self, context: BindContext) -> RepeatLink:
        consumer = context.output_consumer
        return RepeatLink(self, context.dtype if consumer is None else consumer.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class RepeatLink(LinkDefaults):
    shape: RepeatShape
    dtype: torch.dtype

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> RepeatProgram:
        return RepeatProgram(self, needs_grad)


class RepeatProgram(TensorProgram[RepeatLink]):
    def forward(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        call: Call,
        out: QuantizeRequest | None = None,
    ) -> Forward:
        link = self._link
        y: Any = x.repeat(1, link.shape.count).to(link.dtype)
        return y if out is None else out(y), (), None

    def backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        context: object,
        call: Call,
        out: QuantizeRequest | None = None,
    ) -> Backward:
        grad_x: Any = grad.reshape(len(grad), self._link.shape.count, -1).sum(1)
        return (grad_x if out is None else out(grad_x),)


class Repeat(Operation):
    def __init__(self, count: int) -> None:
        super().__init__(None)
        self.count = count

    def link_shapes(self) -> tuple[LinkShape, ...]:
        return (RepeatShape(self.count),)


def between(dtype: torch.dtype = torch.float32) -> ops.Sequential:
    return ops.Sequential(
        ops.Linear(32, 16, dtype=dtype), Repeat(2), ops.Linear(32, 32, dtype=dtype)
    )


@pytest.mark.parametrize("name", [None, "mxfp8", "current"])
def test_it_computes_between_two_linears(name: str | None) -> None:
    torch.manual_seed(0)
    chain, x = between(), torch.randn(8, 32, requires_grad=True)
    first, _, last = chain.children()
    with fp8core.autocast(enabled=name is not None, recipe=name and recipe.by_name(name)):
        y = chain(x)
        expected = last(first(x).repeat(1, 2))
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert grad.isfinite().all()
    assert grad.any()


def test_a_linear_behind_takes_its_result_before_it_is_rounded() -> None:
    chain = between(torch.bfloat16)
    with fp8core.autocast(recipe=recipe.DelayedScaling()):
        links = bind(chain, DEVICE, torch.bfloat16).links
    assert (links[1].dtype, links[2].input_dtype) == (torch.float32, torch.float32)


def test_its_columns_are_checked() -> None:
    with pytest.raises(OperandError, match=r"operation 2, Linear.*takes 48 columns, but gets 32"):
        ops.Sequential(ops.Linear(32, 16), Repeat(2), ops.Linear(48, 32))


def test_a_chain_that_begins_with_it_knows_its_input() -> None:
    with pytest.raises(OperandError, match=r"the layer takes \[\.\.\., 16\]"):
        ops.Sequential(Repeat(2), ops.Linear(32, 8))(torch.zeros(4, 32))


def test_it_compiles() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    chain, x = between(), torch.randn(8, 32)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), chain(x), rtol=0, atol=0)
