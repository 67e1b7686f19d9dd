"""Links that change the number of rows: those that say so fit, others are refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import fp8core
from fp8core import GroupedLinear, LayerNormLinear, OperandError, autocast, ops, recipe
from fp8core import Linear as LinearLayer
from fp8core.chain import run as chain
from fp8core.chain.call import DENSE, Call, Routes
from fp8core.chain.linear.program import LinearLink
from fp8core.chain.padding import LayerPadding
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    Out,
    Params,
    Saved,
    TensorProgram,
    over_ranks,
)
from fp8core.chain.request import QuantizeRequest
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.chain.simple import OutputShape, SimpleLink
from fp8core.modules.calls.bind import bind
from fp8core.modules.layers.operation import Operation
from tests.device import DEVICE
from tests.pairs import pairs

ROWS = 24
NAMES = ("none", "delayed", "block", "mxfp8", "nvfp4")
"""Of links without casts, with a state, with blocks, with padding and with random numbers."""


@dataclass(frozen=True, slots=True, eq=False)
class Repeat(Link):
    """Returns its rows ``times`` times; its gradient is the sum over them, as of a gather.

    It declares ``declared`` times as many rows, and gives back ``backward_times`` times as many
    gradients as rows: other numbers than ``times`` and 1 are the fault of a link.
    """

    times: int = 2
    declared: int = 2
    backward_times: int = 1
    only_once = over_ranks("gather")

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


class FirstHalf(Link):
    """Returns the first half of its rows, as one rank of a reduce-scatter does."""

    __slots__ = ()
    only_once = over_ranks("scatter")

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


def gather(times: int = 2) -> Repeat:
    """Does not say that it returns other rows than it takes."""
    return Repeat(times=times, declared=1)


GATHERED_GRADIENT = Repeat(times=1, declared=1, backward_times=2)
MISDECLARED: dict[str, tuple[Callable[[Any], tuple[Link, ...]], str]] = {
    "a gather": (lambda link: (gather(), link), "1 of 2, Repeat, returned 48 rows in forward"),
    "one behind": (lambda link: (link, gather()), "2 of 2, Repeat, returned 48 rows in forward"),
    "no rows": (lambda link: (link, gather(0)), "2 of 2, Repeat, returned 0 rows in forward"),
    "a gradient": (
        lambda link: (link, GATHERED_GRADIENT),
        "2 of 2, Repeat, returned 48 rows in backward",
    ),
    "a gradient that leaves the chain": (
        lambda link: (GATHERED_GRADIENT, link),
        "1 of 2, Repeat, returned 48 rows in backward",
    ),
}


def step(
    links: Sequence[Link],
    params: Sequence[torch.Tensor] = (),
    call: Call = DENSE,
    shape: Sequence[int] = (ROWS, 64),
    *,
    needs_input: bool = True,
) -> None:
    x = torch.randn(shape, requires_grad=needs_input)
    chain.run(tuple(links), x, params, call).sum().backward()


@pytest.mark.parametrize("fault", MISDECLARED)
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_a_link_did_not_declare_are_refused_by_its_name(fault: str, name: str) -> None:
    layer, link = linear(name)
    links, message = MISDECLARED[fault]
    for needs_input in (True, False) if fault == "a gradient" else (True,):
        with pytest.raises(OperandError, match=f"link {message}, where 24 are due") as raised:
            step(links(link), [layer.weight], call_of(link), needs_input=needs_input)
        assert "num_rows" in str(raised.value)


@pytest.mark.parametrize("shape", [(ROWS, 64), (ROWS // 3, 3, 64)])
@pytest.mark.parametrize(
    ("link", "way"), [(gather(), "forward"), (GATHERED_GRADIENT, "backward")], ids=str
)
def test_a_lone_link_with_other_rows_than_it_declares_is_refused(
    link: Link, way: str, shape: tuple[int, ...]
) -> None:
    message = f"link 1 of 1, Repeat, returned 48 rows in {way}, where 24 are due"
    with pytest.raises(OperandError, match=message):
        step((link,), shape=shape)


def test_a_link_that_keeps_the_rows_passes() -> None:
    for name in NAMES:
        layer, link = linear(name)
        same = Repeat(times=1, declared=1)
        output = OutputShape()
        passed = SimpleLink(output, output.forward, output.backward)
        step((same, link, passed, same), [layer.weight], call_of(link))
        assert layer.weight.grad is not None, name


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


def test_rows_that_do_not_fill_the_leading_dimensions_are_refused() -> None:
    for times in [1, 2]:
        links = (*(Repeat() for _ in range(times - 1)), *(FirstHalf() for _ in range(times)))
        message = r"input \[3, 5, 64\] became 7 rows, which are no multiple of 5"
        with pytest.raises(OperandError, match=message):
            chain.run(links, torch.randn(3, 5, 64), [])


@dataclass(frozen=True, slots=True)
class TileShape(LinkShape):
    """Repeats its columns; computes in float32."""

    count: int

    def columns(self, columns: int) -> int:
        return self.count * columns

    def input_columns(self, columns: int | None) -> int | None:
        return None if columns is None else columns // self.count

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def bind(self, context: BindContext) -> TileLink:
        consumer = context.output_consumer
        return TileLink(self, context.dtype if consumer is None else consumer.dtype)


@dataclass(frozen=True, slots=True, eq=False)
class TileLink(Link):
    shape: TileShape
    dtype: torch.dtype

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> TiledProgram:
        return TiledProgram(self, needs_grad)


class TiledProgram(TensorProgram[TileLink]):
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


class Tile(Operation):
    def __init__(self, count: int) -> None:
        super().__init__(None)
        self.count = count

    def link_shapes(self) -> tuple[LinkShape, ...]:
        return (TileShape(self.count),)


def between(dtype: torch.dtype = torch.float32) -> ops.Sequential:
    return ops.Sequential(ops.Linear(32, 16, dtype=dtype), Tile(2), ops.Linear(32, 32, dtype=dtype))


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
        ops.Sequential(ops.Linear(32, 16), Tile(2), ops.Linear(48, 32))


def test_a_chain_that_begins_with_it_knows_its_input() -> None:
    with pytest.raises(OperandError, match=r"the layer takes \[\.\.\., 16\]"):
        ops.Sequential(Tile(2), ops.Linear(32, 8))(torch.zeros(4, 32))


def test_it_compiles() -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    chain, x = between(), torch.randn(8, 32)
    compiled = torch.compile(chain, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), chain(x), rtol=0, atol=0)


COUNTS = ((4, 0, 8, 2), (6, 10, 0, 2))


def test_each_rank_sends_the_rows_of_the_others_experts() -> None:
    first, second = (Routes.of(COUNTS, rank) for rank in (0, 1))
    assert (first.sent, second.sent) == ((4, 10), (16, 2))
    assert (first.received, second.received) == ((4, 16), (10, 2))


def test_the_rows_of_an_expert_come_from_all_ranks() -> None:
    assert [Routes.of(COUNTS, rank).splits for rank in (0, 1)] == [(10, 10), (8, 4)]


def test_rows_are_ordered_by_expert_then_by_rank() -> None:
    order = Routes.of(COUNTS, 1).order(DEVICE)
    # Expert 2 has 8 rows from rank 0 and none from rank 1, expert 3 two from each.
    assert order.tolist() == [*range(8), 8, 9, 10, 11]
    order = Routes.of(COUNTS, 0).order(DEVICE)
    assert order.tolist() == [*range(4), *range(4, 10), *range(10, 20)]
    swapped = Routes.of(((1, 2), (3, 1)), 0)
    assert swapped.order(DEVICE).tolist() == [0, 1, 2, 3]
    both = Routes.of(((1, 2, 0, 0), (3, 1, 0, 0)), 0)
    assert both.order(DEVICE).tolist() == [0, 3, 4, 5, 1, 2, 6]


def test_the_default_device_is_not_that_of_the_order() -> None:
    with torch.device("meta"):
        order = Routes.of(COUNTS, 1).order(torch.device("cpu"))
    assert order.tolist() == list(range(12))


def test_entries_of_several_rows_have_the_same_order() -> None:
    routes = Routes.of(COUNTS, 0)
    assert routes.unit == 2
    rows, pairs = (routes.order(DEVICE, step) for step in (1, 2))
    assert torch.equal(rows[::2] // 2, pairs)
