"""Links that change the number of rows: those that say so fit, others are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fp8core import GroupedLinear, LayerNormLinear, OperandError, autocast, recipe
from fp8core import Linear as LinearLayer
from fp8core.chain import run as chain
from fp8core.chain.call import DENSE, Call
from fp8core.chain.linear.link import LinearLink
from fp8core.chain.padding import LayerPadding
from fp8core.chain.pointwise import OutputLink
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    Out,
    Params,
    TensorProgram,
)
from fp8core.modules.bind import bind
from tests.device import DEVICE
from tests.pairs import pairs, turns

ROWS = 24
NAMES = ("none", "delayed", "block", "mxfp8", "nvfp4")
"""Of links without casts, with a state, with blocks, with padding and with random numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Repeat(OutputLink):
    """Returns its rows ``times`` times; its gradient is the sum over them, as of a gather.

    It declares ``declared`` times as many rows, and gives back ``backward_times`` times as many
    gradients as rows: other numbers than ``times`` and 1 are the fault of a link.
    """

    times: int = 2
    declared: int = 2
    backward_times: int = 1

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> Any:
        return RepeatProgram(self, needs_grad)


class RepeatProgram(TensorProgram[Repeat]):
    def num_rows(self, rows: int) -> int:
        return rows * self._link.declared

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        y: Any = x.repeat(self._link.times, 1)
        return (y if out is None else out(y)), (), len(x)

    def backward(
        self, grad: Any, saved: Any, context: Any, call: Call, out: Out = None
    ) -> Backward:
        made: Any = grad.reshape(self._link.times, context, grad.shape[1]).sum(0)
        made = made.repeat(self._link.backward_times, 1)
        return (made if out is None else out(made),)


class FirstHalf(OutputLink):
    """Returns the first half of its rows, as one rank of a reduce-scatter does."""

    __slots__ = ()

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> Any:
        return FirstHalfProgram(self, needs_grad)


class FirstHalfProgram(TensorProgram[FirstHalf]):
    def num_rows(self, rows: int) -> int:
        return rows // 2

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        y: Any = x[: len(x) // 2]
        return (y if out is None else out(y)), (), None

    def backward(
        self, grad: Any, saved: Any, context: Any, call: Call, out: Out = None
    ) -> Backward:
        made: Any = torch.cat([grad, torch.zeros_like(grad)])
        return (made if out is None else out(made),)


def linear(name: str, rows: int = ROWS, size: int = 64) -> tuple[LinearLayer, LinearLink]:
    torch.manual_seed(0)
    layer = LinearLayer(size, 64, bias=False, name="fc1")
    chosen = None if name == "none" else recipe.by_name(name)
    with autocast(enabled=chosen is not None, recipe=chosen):
        layer(torch.ones(rows, size))  # delayed states, weights
        (link,) = bind(layer, DEVICE, torch.float32).linears
    return layer, link


def call_of(link: LinearLink) -> Call:
    return Call(rng=torch.tensor([1, 2])) if link.needs_rng else DENSE


def gradients(x: torch.Tensor, layer: torch.nn.Module) -> list[torch.Tensor | None]:
    found = [x.grad, *(parameter.grad for parameter in layer.parameters())]
    layer.zero_grad()
    return found


@pytest.mark.parametrize(("name", "rows"), pairs(NAMES, [ROWS, 32, 5, 0]))
def test_a_gather_before_a_linear_equals_a_gathered_input(name: str, rows: int) -> None:
    layer, link = linear(name, rows)
    torch.manual_seed(1)
    x, dy = torch.randn(rows, 64, requires_grad=True), torch.randn(2 * rows, 64)
    y = chain.run((Repeat(), link), x, [layer.weight], call_of(link))
    y.backward(dy)
    made = [y.detach(), *gradients(x, layer)]
    layer, link = linear(name, rows)  # with the scales of the start
    whole = x.detach().repeat(2, 1).requires_grad_()
    want = chain.run((link,), whole, [layer.weight], call_of(link))
    want.backward(dy)
    grad_whole, grad_weight = gradients(whole, layer)
    assert grad_whole is not None
    expected = [want.detach(), grad_whole.reshape(2, rows, 64).sum(0), grad_weight]
    for one, other in zip(made, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize(("name", "rows"), pairs(NAMES, [ROWS, 32, 6]))
def test_a_scatter_behind_a_linear_equals_half_of_its_output(name: str, rows: int) -> None:
    layer, link = linear(name, rows)
    torch.manual_seed(1)
    x, dy = torch.randn(rows, 64, requires_grad=True), torch.randn(rows // 2, 64)
    y = chain.run((link, FirstHalf()), x, [layer.weight], call_of(link))
    y.backward(dy)
    made = [y.detach(), *gradients(x, layer)]
    layer, link = linear(name, rows)  # with the scales of the start
    same = x.detach().requires_grad_()
    want = chain.run((link,), same, [layer.weight], call_of(link))
    want.backward(torch.cat([dy, torch.zeros_like(dy)]))
    expected = [want.detach()[: rows // 2], *gradients(same, layer)]
    for one, other in zip(made, expected, strict=True):
        assert one is not None
        assert other is not None
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", NAMES)
def test_sequence_parallelism_of_one_process_keeps_the_leading_dimensions(name: str) -> None:
    layer = LayerNormLinear(64, 64, bias=False)
    chosen = None if name == "none" else recipe.by_name(name)
    with autocast(enabled=chosen is not None, recipe=chosen):
        layer(torch.ones(ROWS, 64))
        links = bind(layer, DEVICE, torch.float32).links
    norm, link = links
    call = call_of(link)  # type: ignore[arg-type]
    x = torch.randn(ROWS // 2, 3, 64, requires_grad=True)
    params = list(layer.link_params())
    y = chain.run((norm, Repeat(), link), x, params, call)
    assert y.shape == (ROWS, 3, 64)
    y.sum().backward()
    assert x.grad is not None
    half = chain.run((norm, link, FirstHalf()), x.detach(), params, call)
    assert half.shape == (ROWS // 4, 3, 64)


def test_an_undeclared_gather_before_a_linear_is_refused_by_name() -> None:
    for name in NAMES:
        layer, link = linear(name)
        links: tuple[Link, ...] = (Repeat(declared=1), link)
        message = r"link 1 of 2, Repeat, returned 48 rows in forward, where 24 are due"
        with pytest.raises(OperandError, match=message) as raised:
            chain.run(links, torch.randn(ROWS, 64), [layer.weight], call_of(link))
        assert "num_rows" in str(raised.value)


def test_an_undeclared_gather_behind_a_linear_is_refused_by_name() -> None:
    for name, times in turns(NAMES, [2, 0]):
        layer, link = linear(name)
        links: tuple[Link, ...] = (link, Repeat(times=times, declared=1))
        message = f"link 2 of 2, Repeat, returned {24 * times} rows in forward, where 24"
        with pytest.raises(OperandError, match=message):
            chain.run(links, torch.randn(ROWS, 64), [layer.weight], call_of(link))


def test_a_gradient_of_other_rows_is_refused_by_name() -> None:
    for name, needs_input in turns(NAMES, [True, False]):
        layer, link = linear(name)
        links: tuple[Link, ...] = (link, Repeat(times=1, declared=1, backward_times=2))
        x = torch.randn(ROWS, 64, requires_grad=needs_input)
        y = chain.run(links, x, [layer.weight], call_of(link))
        message = "link 2 of 2, Repeat, returned 48 rows in backward, where 24"
        with pytest.raises(OperandError, match=message):
            y.sum().backward()


def test_a_gradient_that_leaves_the_chain_with_other_rows_is_refused() -> None:
    for name in NAMES:
        layer, link = linear(name)
        links: tuple[Link, ...] = (Repeat(times=1, declared=1, backward_times=2), link)
        x = torch.randn(ROWS, 64, requires_grad=True)
        y = chain.run(links, x, [layer.weight], call_of(link))
        message = "link 1 of 2, Repeat, returned 48 rows in backward, where 24"
        with pytest.raises(OperandError, match=message):
            y.sum().backward()


def test_a_link_that_keeps_the_rows_passes() -> None:
    for name in NAMES:
        layer, link = linear(name)
        same = Repeat(times=1, declared=1)
        x = torch.randn(ROWS, 64, requires_grad=True)
        chain.run(
            (same, link, OutputLink(), same), x, [layer.weight], call_of(link)
        ).sum().backward()
        assert x.grad is not None, name


def test_an_undeclared_gather_before_groups_is_refused_by_name() -> None:
    for name in NAMES:
        layer = GroupedLinear(2, 64, 64, bias=False)
        chosen = None if name == "none" else recipe.by_name(name)
        with autocast(enabled=chosen is not None, recipe=chosen):
            layer(torch.ones(ROWS, 64), [8, 16])
            (link,) = bind(layer, DEVICE, torch.float32).linears
        call = call_of(link)._replace(groups=(torch.tensor([0, 8, 24]),), splits=(8, 16))
        params = [layer.weight0, layer.weight1]
        with pytest.raises(OperandError, match=r"link 1 of 2, Repeat, returned 48 rows"):
            chain.run((Repeat(declared=1), link), torch.randn(ROWS, 64), params, call)


def test_padding_of_other_rows_is_refused_by_its_owner_s_name() -> None:
    for rows in [48, 8, 0]:
        padded = LayerPadding("fc1", (1, 1, 32), 0, 0).for_call(ROWS, DENSE)
        assert padded is not None
        for pad in (padded.pad_input, padded.pad_grad_output):
            with pytest.raises(OperandError, match=f"fc1: .*24 rows.*{rows}"):
                pad(torch.ones(rows, 64))


def test_padding_of_groups_with_other_rows_is_refused() -> None:
    call = Call((torch.tensor([0, 8, 24]),), (8, 16))
    padded = LayerPadding("fc1", (1, 1, 32), 0, 0).for_call(ROWS, call)
    assert padded is not None
    with pytest.raises(OperandError, match=r"fc1: .*24 rows.*\[48, 64\]"):
        padded.pad_input(torch.ones(48, 64))


def test_a_lone_link_that_returns_other_rows_than_it_says_is_refused() -> None:
    for shape in [(ROWS, 64), (ROWS // 3, 3, 64)]:
        message = r"link 1 of 1, Repeat, returned 48 rows in forward, where 24 are due"
        with pytest.raises(OperandError, match=message):
            chain.run((Repeat(declared=1),), torch.randn(shape), [])


def test_a_lone_link_whose_gradient_has_other_rows_is_refused() -> None:
    for shape in [(ROWS, 64), (ROWS // 3, 3, 64)]:
        x = torch.randn(shape, requires_grad=True)
        y = chain.run((Repeat(times=1, declared=1, backward_times=2),), x, [])
        message = r"link 1 of 1, Repeat, returned 48 rows in backward, where 24 are due"
        with pytest.raises(OperandError, match=message):
            y.sum().backward()


def test_rows_that_do_not_fill_the_leading_dimensions_are_refused() -> None:
    for times in [1, 2]:
        links = (*(Repeat() for _ in range(times - 1)), *(FirstHalf() for _ in range(times)))
        message = r"input \[3, 5, 64\] became 7 rows, which are no multiple of 5"
        with pytest.raises(OperandError, match=message):
            chain.run(links, torch.randn(3, 5, 64), [])
