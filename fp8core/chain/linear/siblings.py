"""Linears of one input as one link: the input is cast once, and held once for backward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fp8core.backend_api import GemmDesc
from fp8core.chain.call import Call
from fp8core.chain.linear.program import LinearLink
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    OnlyOnce,
    Out,
    Params,
    Program,
    Recordable,
    SavedList,
)
from fp8core.chain.request import Handover, QuantizeRequest, SplitRequest
from fp8core.chain.shape import BindContext
from fp8core.torch_ops.repeats import called_in_repeats

_FEW_ROWS = 64
"""Up to so many rows each result has memory of its own: kernels for few rows write whole rows."""


@dataclass(frozen=True, slots=True, eq=False)
class SiblingsLink(Link):
    """``y[m, n1 + n2 + ...]``, the results of ``links`` for the same ``x[m, k]``, in low precision.

    Weights and gradients of the output are cast for each linear as if it ran alone; the input is
    cast by the first for all, which have to cast it alike.
    """

    links: tuple[LinearLink, ...]

    @property
    def num_params(self) -> int:  # type: ignore[override]  # a field's default there
        """The number of the parameters of all."""
        return sum(link.num_params for link in self.links)

    @property
    def only_once(self) -> OnlyOnce | None:
        """As the first."""
        return self.links[0].only_once

    @property
    def input_consumer(self) -> QuantizeRequest:
        """How the first quantizes the input."""
        return self.links[0].input_consumer

    @property
    def grad_consumer(self) -> QuantizeRequest | None:
        """How two of them quantize the halves of the gradient; None of others."""
        if len({link.shape.out_features for link in self.links}) > 1:
            return None
        return SplitRequest.of([link.grad_consumer for link in self.links])

    @property
    def remade(self) -> Sequence[str]:  # type: ignore[override]  # as num_params
        """As the first."""
        return self.links[0].remade

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> Program:
        """Return the program of a dense call."""
        return SiblingsProgram(self, rows, needs_grad, call)

    def remaking(self, program: Program) -> Program | None:
        """As the first."""
        return self.links[0].remaking(program)


def siblings(links: Sequence[LinearLink], context: BindContext) -> SiblingsLink:
    """Return the link of ``links``; all but the last, where backward begins, add their gradients of
    the input within their products, if their backend does."""

    def adding(link: LinearLink) -> LinearLink:
        desc, backend = link.choices["dgrad"].desc, link.choices["dgrad"].backend
        if type(desc) is not GemmDesc or not desc.low_precision:
            return link
        added = context.resolve_optional("dgrad", replace(desc, accumulate=True), backend)
        return link if added is None else replace(link, dgrad_sum=added.run, _programs={})

    return SiblingsLink((*map(adding, links[:-1]), links[-1]))


class SiblingsProgram(Program):
    """Runs the programs of ``link`` on one handover; backward goes from the last to the first, as
    torch's engine does, and each adds its gradient of the input to those of the ones before it: in
    its product, where that is rounded once.

    Where a call pads an operand of one of them, each casts the input by itself.
    """

    __slots__ = (
        *("_columns", "_dtype", "_is_split", "_params", "_programs", "_trained", "frees_early"),
        "input_request",
    )

    def __init__(
        self, link: SiblingsLink, rows: int, needs_grad: Sequence[bool], call: Call
    ) -> None:
        links = link.links
        self._is_split = link.grad_consumer is not None
        widths = itertools.accumulate([each.shape.out_features for each in links], initial=0)
        counts = itertools.accumulate([each.num_params for each in links], initial=0)
        self._columns, self._params = ([*itertools.pairwise(ends)] for ends in (widths, counts))
        needs = [(needs_grad[0], *needs_grad[1 + a : 1 + b]) for a, b in self._params]
        self._trained = [need[1] for need in needs]
        self._dtype = links[0].out_dtype("fprop")
        self._programs = [
            each.program(rows, need, call) for each, need in zip(links, needs, strict=True)
        ]
        self.frees_early = all([program.frees_early for program in self._programs])
        self.input_request: QuantizeRequest | None = None
        requests = [program.input_request for program in self._programs]
        first = requests[0]
        if first is not None and all(
            [each is not None and each.cast is not None and not each.shards for each in requests]
        ):
            columnwise = True in self._trained
            cast = links[0].input.cast_to(rowwise=True, columnwise=columnwise)
            self.input_request = replace(first, columnwise=columnwise, cast=cast)

    @property
    def recordable(self) -> Recordable | None:
        """Return what all of them refer to; None if one of them does more than operations."""
        parts = [program.recordable for program in self._programs]
        if self.input_request is None or None in parts:
            return None
        constants, states = ([*itertools.chain(*each)] for each in zip(*parts, strict=True))
        return Recordable(tuple(constants), tuple(states))

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """Return the request for the gradient in two halves, if it may be cast so."""
        if not self._is_split:
            return None
        # From the last to the first, as backward goes.
        requests = [program.request_grad(call) for program in reversed(self._programs)]
        return SplitRequest.of(requests[::-1])

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute the columns of each; save what several of them need once."""
        request, operands = self.input_request, None
        rows = x.shape[0] if isinstance(x, torch.Tensor) else x.rows
        if request is not None:
            operands = (x if isinstance(x, Handover) else request(x)).take()
        # Codes that are made again before backward come first, in the places of their operand.
        column: Any = None if operands is None else operands.columnwise
        is_remade = column is not None and column[0] is None
        saved: SavedList = [*column] if is_remade else []
        places: dict[int, int] = {}
        contexts, outputs = [], []
        joined: Any = None
        # A graph whose rows are free has one form for all.
        if operands is not None and type(rows) is int and rows > _FEW_ROWS:
            sizes = rows, self._columns[-1][1]
            joined = operands.rowwise.data.new_empty(sizes, dtype=self._dtype)
        for program, is_trained, (first, end), (begin, stop) in zip(
            self._programs, self._trained, self._params, self._columns, strict=True
        ):
            value = x
            if operands is not None:
                mine = operands if is_trained else operands._replace(columnwise=None)
                value = Handover(mine, rows)
            if joined is not None:
                call = call._replace(output=joined[:, begin:stop])
            y, tensors, context = program.forward(value, params[first:end], call)
            before, at = len(saved), [0, 1, 2] if is_remade and is_trained else []
            for tensor in tensors[len(at) :]:
                at.append(places.setdefault(id(tensor), len(saved)))
                if at[-1] == len(saved):
                    saved.append(tensor)
            contexts.append((at, before, context))
            outputs.append(y)
        del operands, value
        if joined is None:
            joined = called_in_repeats(_side_by_side, *outputs)
        return joined if out is None else out(joined), saved, contexts

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute the gradients of each from its columns of ``grad``."""
        halves = grad.take() if isinstance(grad, Handover) else None
        grads: Sequence[torch.Tensor | None] = ()
        total: torch.Tensor | None = None
        for number in range(len(self._programs) - 1, -1, -1):
            at, before, inner_context = context[number]
            begin, end = self._columns[number]
            tensors = [saved[place] for place in at]
            del saved[before:]  # none of those in front of it needs the rest
            program = self._programs[number]
            columns = grad[:, begin:end] if halves is None else halves[number]
            adding = call if total is None else call._replace(grad_sum=total)
            total, *grad_params = program.backward(columns, tensors, inner_context, adding)
            grads = (*grad_params, *grads)
        return (total if out is None or total is None else out(total), *grads)


def _side_by_side(*columns: torch.Tensor) -> torch.Tensor:
    return torch.cat(columns, dim=1)
