"""A link that changes the number of rows is refused by name, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fp8core import GroupedLinear, OperandError, autocast, recipe
from fp8core import Linear as LinearLayer
from fp8core.chain import run as chain
from fp8core.chain.call import DENSE, Call
from fp8core.chain.linear import LinearLink
from fp8core.chain.padding import LayerPadding
from fp8core.chain.pointwise import OutputLink
from fp8core.chain.protocol import Backward, Forward, Link, Want
from fp8core.modules.bind import bind

ROWS = 24
NAMES = ("none", *recipe.names())


@dataclass(frozen=True, slots=True, eq=False)
class Gather(OutputLink):
    """Returns its rows ``forward_times`` times, as an all-gather does, and ``backward`` times its
    gradient's: the two numbers need not agree, as a reduce-scatter may be forgotten."""

    forward_times: int = 2
    backward_times: int = 1

    def forward(
        self,
        x: torch.Tensor,
        params: Sequence[torch.Tensor],
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Forward:
        y: Any = x.repeat(self.forward_times, 1)
        return Forward(y if out is None else out(y), ())

    def backward(
        self,
        grad: torch.Tensor,
        saved: Any,
        context: object,
        call: Call,
        needs: Sequence[bool],
        out: Want | None,
    ) -> Backward:
        made: Any = grad.repeat(self.backward_times, 1)
        return Backward(made if out is None else out(made), ())


def linear(name: str, rows: int = ROWS, size: int = 64) -> tuple[LinearLayer, LinearLink]:
    layer = LinearLayer(size, 64, bias=False, name="fc1")
    chosen = None if name == "none" else recipe.by_name(name)
    with autocast(enabled=chosen is not None, recipe=chosen):
        layer(torch.ones(rows, size))  # delayed states, weights
        (link,) = bind(layer, torch.device("cpu"), torch.float32).linears
    return layer, link


def call_of(link: LinearLink) -> Call:
    return Call(rng=torch.tensor([1, 2])) if link.needs_rng else DENSE


@pytest.mark.parametrize("name", NAMES)
def test_gather_before_a_linear_is_refused_by_name(name: str) -> None:
    layer, link = linear(name)
    links: tuple[Link, ...] = (Gather(), link)
    with pytest.raises(OperandError, match=r"link 1 of 2, Gather, .* 24 rows .* 48") as raised:
        chain.run(links, torch.randn(ROWS, 64), [layer.weight], call_of(link))
    assert "as many rows as it gets" in str(raised.value)


@pytest.mark.parametrize("times", [2, 0], ids=["gather", "drop"])
@pytest.mark.parametrize("name", NAMES)
def test_gather_behind_a_linear_is_refused_by_name(name: str, times: int) -> None:
    layer, link = linear(name)
    links: tuple[Link, ...] = (link, Gather(forward_times=times))
    message = f"link 2 of 2, Gather, .* 24 rows .* {24 * times}"
    with pytest.raises(OperandError, match=message):
        chain.run(links, torch.randn(ROWS, 64), [layer.weight], call_of(link))


@pytest.mark.parametrize("needs_input", [True, False], ids=["both", "weight alone"])
@pytest.mark.parametrize("name", NAMES)
def test_gradient_of_other_rows_is_refused_by_name(name: str, needs_input: bool) -> None:
    layer, link = linear(name)
    links: tuple[Link, ...] = (link, Gather(forward_times=1, backward_times=2))
    x = torch.randn(ROWS, 64, requires_grad=needs_input)
    y = chain.run(links, x, [layer.weight], call_of(link))
    message = "link 2 of 2, Gather, .* 24 rows .* 48 in backward"
    with pytest.raises(OperandError, match=message):
        y.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_gradient_that_leaves_the_chain_with_other_rows_is_refused(name: str) -> None:
    layer, link = linear(name)
    links: tuple[Link, ...] = (Gather(forward_times=1, backward_times=2), link)
    x = torch.randn(ROWS, 64, requires_grad=True)
    y = chain.run(links, x, [layer.weight], call_of(link))
    with pytest.raises(OperandError, match=r"link 1 of 2, Gather, .* 24 rows .* 48 in backward"):
        y.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_link_that_keeps_the_rows_passes(name: str) -> None:
    layer, link = linear(name)
    same = Gather(forward_times=1)
    x = torch.randn(ROWS, 64, requires_grad=True)
    chain.run((same, link, OutputLink(), same), x, [layer.weight], call_of(link)).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("name", NAMES)
def test_gather_before_groups_is_refused_by_name(name: str) -> None:
    layer = GroupedLinear(2, 64, 64, bias=False)
    chosen = None if name == "none" else recipe.by_name(name)
    with autocast(enabled=chosen is not None, recipe=chosen):
        layer(torch.ones(ROWS, 64), [8, 16])
        (link,) = bind(layer, torch.device("cpu"), torch.float32).linears
    call = call_of(link)._replace(groups=(torch.tensor([0, 8, 24]),), splits=(8, 16))
    with pytest.raises(OperandError, match=r"link 1 of 2, Gather, .* 24 rows .* 48"):
        chain.run((Gather(), link), torch.randn(ROWS, 64), [layer.weight0, layer.weight1], call)


@pytest.mark.parametrize("rows", [48, 8, 0])
def test_padding_of_other_rows_is_refused_by_its_owner_s_name(rows: int) -> None:
    padded = LayerPadding("fc1", 32, 0, 0).for_call(ROWS, DENSE)
    assert padded is not None
    for pad in (padded.pad_input, padded.pad_grad_output):
        with pytest.raises(OperandError, match=f"fc1: .*24 rows.*{rows}"):
            pad(torch.ones(rows, 64))


def test_padding_of_groups_with_other_rows_is_refused() -> None:
    call = Call((torch.tensor([0, 8, 24]),), (8, 16))
    padded = LayerPadding("fc1", 32, 0, 0).for_call(ROWS, call)
    assert padded is not None
    with pytest.raises(OperandError, match=r"fc1: .*24 rows.*\[48, 64\]"):
        padded.pad_input(torch.ones(48, 64))
