"""The links of a chain and the programs that they have given; several programs as one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import Recorder
from fp8core.chain.call import DENSE, Call
from fp8core.chain.padding import RowsChanged
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
from fp8core.chain.repeated import Repeated
from fp8core.chain.request import QuantizeRequest
from fp8core.errors import OperandError
from fp8core.tensors.delayed_state import DelayedState, GraphState, begin_all
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops.repeats import Likeness


class _Step(NamedTuple):
    """A program of a series; its parameters are ``params[first:end]``, it is given ``rows`` rows.

    ``request`` is how the next program wants its output, and ``rows_out`` how many rows that has.
    """

    link: Link
    program: Program
    first: int
    end: int
    rows: int
    needs_input_grad: bool
    request: QuantizeRequest | None
    rows_out: int


class Series(Program):
    """The programs of ``links`` for an input of ``rows`` rows; arguments as of ``Link.program``.

    ``quantizes``: programs may want tensors from each other by requests; in high precision the
    tensors themselves serve.
    """

    __slots__ = (
        *("_backwards", "_forwards", "_graph_states", "_rows_out", "_steps"),
        *("frees_early", "input_request", "saves_copies"),
    )

    def __init__(
        self,
        links: Sequence[Link],
        rows: int,
        needs_grad: Sequence[bool],
        call: Call,
        *,
        quantizes: bool,
    ) -> None:
        steps: list[_Step] = []
        needs_input, first, frees_early, saves_copies = needs_grad[0], 0, True, False
        for link in links:
            end = first + link.num_params
            needs = (needs_input, *needs_grad[1 + first : 1 + end])
            program = link.program(rows, needs, call)
            rows_out = program.num_rows(rows)
            steps.append(_Step(link, program, first, end, rows, needs_input, None, rows_out))
            rows, first = rows_out, end
            needs_input = True in needs
            frees_early = frees_early and program.frees_early
            saves_copies = saves_copies or program.saves_copies
        sources: list[Program | None] = [None] * len(steps)
        for at in range(1, len(steps)) if quantizes else ():
            source, step = steps[at - 1], steps[at]
            if step.needs_input_grad and source.link.result in step.link.remade:
                remaking = step.link.remaking(step.program)
                if remaking is not None:
                    steps[at], sources[at] = step._replace(program=remaking), source.program
        for at in range(len(steps) - 1, 0, -1) if quantizes else ():
            request = steps[at].program.request_input(steps[at].request)
            steps[at - 1] = steps[at - 1]._replace(request=request)
        self._steps = steps
        self._rows_out = rows
        self.frees_early = frees_early
        self.saves_copies = saves_copies
        self.input_request = steps[0].program.input_request
        # What each call goes through, as plain tuples: the same series runs in every step.
        self._forwards = [
            (step.program.forward, step.first, step.end, step.request, step.rows_out)
            for step in steps
        ]
        requests: list[Callable[[Call], QuantizeRequest | None] | None] = [
            before.program.request_grad if quantizes and step.needs_input_grad else None
            for before, step in itertools.pairwise(steps)
        ]
        self._backwards = [
            (
                *(step.program.backward, step.end - step.first, step.rows, request_grad),
                None if source is None else partial(step.program.remake, source=source),
            )
            for step, request_grad, source in zip(steps, (None, *requests), sources, strict=True)
        ]
        # Those in which backward records in a graph, which notes all of them by one operator.
        recordable = self.recordable
        states: Any = () if recordable is None else recordable.backward_states
        self._graph_states = [state for state in states if isinstance(state, GraphState)]

    @property
    def recordable(self) -> Recordable | None:
        """Return what the programs refer to; None if one of them does more than operations."""
        constants: list[torch.Tensor] = []
        states: dict[DelayedState, None] = {}
        for step in self._steps:
            part = step.program.recordable
            if part is None:
                return None
            constants += part.constants
            states.update(dict.fromkeys(part.backward_states))
        return Recordable(tuple(constants), tuple(states))

    def request_grad(self, call: Call) -> QuantizeRequest | None:
        """Return how the last program wants the gradient of its output."""
        if self._graph_states:
            begin_all(self._graph_states)
        return self._steps[-1].program.request_grad(call)

    def takes_grad(self, grad_output: torch.Tensor) -> bool:
        """Whether ``grad_output`` is stored quantized as the last program wants it."""
        return self._steps[-1].program.takes_grad(grad_output)

    def num_rows(self, rows: int) -> int:
        """Return how many rows the last program returns."""
        if rows == self._steps[0].rows:
            return self._rows_out
        for step in self._steps:
            rows = step.program.num_rows(rows)
        return rows

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Run ``x [rows, k]`` through the programs.

        Raises:
            OperandError: a program returned another number of rows than it had said.
        """
        value, last = x, len(self._forwards) - 1
        saved: list[torch.Tensor | None] = []
        contexts = []
        for at, (forward, first, end, request, rows) in enumerate(self._forwards):
            try:
                value, to_save, context = forward(
                    value, params[first:end], call, out if at == last else request
                )
            except RowsChanged as error:
                raise self._row_error(at, "forward", error.rows, error.num_rows) from None
            num_rows = value.shape[0] if isinstance(value, torch.Tensor) else value.rows
            if num_rows != rows:
                raise self._row_error(at, "forward", rows, num_rows)
            saved += to_save
            contexts.append((len(to_save), context))
        return value, saved, contexts

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Return the gradients of x and of the parameters, in order; empties ``saved``.

        Raises:
            OperandError: a program returned a gradient of other rows than its input had.
        """
        if self._graph_states:
            begin_all(self._graph_states)
        value, at = grad, len(self._backwards)
        grad_params: Sequence[torch.Tensor | None] = ()
        for backward, num_params, rows, request_grad, remake in reversed(self._backwards):
            at -= 1
            num_saved, step_context = context[at]
            left = len(saved) - num_saved
            step_saved = saved[left:]
            del saved[left:]
            if value is None:  # nothing before it needs a gradient
                grad_params = (*(None,) * num_params, *grad_params)
                continue
            if remake is not None:
                remake(step_saved, source_saved=saved[left - context[at - 1][0] :], call=call)
            request = out if not at else None if request_grad is None else request_grad(call)
            try:
                value, *grads = backward(value, step_saved, step_context, call, request)
            except RowsChanged as error:
                raise self._row_error(at, "backward", error.rows, error.num_rows) from None
            grad_params = (*grads, *grad_params)
            if value is None:
                continue
            num_rows = value.shape[0] if isinstance(value, torch.Tensor) else value.rows
            if num_rows != rows:
                raise self._row_error(at, "backward", rows, num_rows)
        return (value, *grad_params)

    def _row_error(self, at: int, direction: str, due: int, returned: int) -> OperandError:
        links, rows = [step.link for step in self._steps], self._steps[at].rows
        return row_error(links, at, direction, rows=rows, due=due, returned=returned)


def row_error(
    links: Sequence[Link], at: int, direction: str, *, rows: int, due: int, returned: int
) -> OperandError:
    """Return the error of ``links[at]``, whose result does not have the rows that are due.

    ``rows`` are those of its input, ``direction`` is forward or backward.
    """
    return OperandError(
        f"link {at + 1} of {len(links)}, {type(links[at]).__name__}, returned {returned} rows in "
        f"{direction}, where {due} are due: its input has {rows} rows. A link that changes the "
        f"number of rows, as gather and scatter do, says so by its program's num_rows."
    )


_MOST_PROGRAMS = 64


class Chain(tuple[Link, ...]):
    """Links that run one after the other.

    ``only_once`` says why torch's operators may not replace them; None if they may: then each of
    ``pieces`` has an autograd node, from which second derivatives reach its input and parameters.
    A piece ``runs_again`` from these where torch differentiates its backward; otherwise it is one
    link, or two that a backend fuses. Without ``pieces`` the chain itself is the only one.
    ``like_grad`` says whether the gradient of the output is like one that needed no conversion.
    ``recorder`` records dense calls of links that torch's operators may not replace, if all
    operations of them have the same one; ``is_recorded`` says whether that one, or that of a link,
    does.
    """

    def __new__(cls, links: Sequence[Link], recorder: Recorder | None = None) -> Chain:
        """Return a tuple of ``links``."""
        return super().__new__(cls, links)

    def __init__(self, links: Sequence[Link], recorder: Recorder | None = None) -> None:
        self.only_once = only_once(links)
        self.recorder = None if self.only_once is None else recorder
        recorders = (self.recorder, *(link.recorder for link in links))
        self.is_recorded = any(each is not None for each in recorders)
        self.like_grad: Likeness | None = None
        self._programs: dict[tuple[Sequence[int], Sequence[bool]], Program] = {}
        self._comparing = [link for link in links if type(link).compare is not Link.compare]
        self.runs_again = self.only_once is None and links[0].keeps_input
        starts = [0] if self.only_once else _starts_of_pieces(links)
        ends = [*starts[1:], len(links)]
        self.pieces: tuple[Chain, ...] = ()  # a chain that refers to itself is freed late
        if len(starts) > 1:
            self.pieces = tuple(Chain(links[a:b]) for a, b in zip(starts, ends, strict=True))

    def converted(
        self, params: Sequence[torch.Tensor], dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """Return the parameters with weights as plain tensors of ``dtype``, converted by torch,
        which differentiates that; others are converted in the node."""
        converted, first = [*params], 0
        for link in self:
            for at in range(first, first + link.num_weights):
                weight = params[at]
                value = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
                converted[at] = value.to(dtype)
            first += link.num_params
        return converted

    def program(
        self, shape: Sequence[int], rows: int, needs_grad: tuple[bool, ...], call: Call
    ) -> Program:
        """Return the program of all links for an input of ``shape``, which has ``rows`` rows; the
        other arguments are as of ``Link.program``.

        That of a call that brings nothing besides its tensors is the same each time.
        """
        if call is not DENSE or type(rows) is not int or type(shape[-1]) is not int:
            return self._new_program(shape, rows, needs_grad, call)  # symbols, while torch traces
        key = shape, needs_grad
        program = self._programs.get(key)
        if program is None:
            program = self._new_program(shape, rows, needs_grad, call)
            recorder = self.recorder
            recordable = None if recorder is None else program.recordable
            if recorder is not None and recordable is not None:
                program = Repeated(program, recordable, recorder)
            if len(self._programs) >= _MOST_PROGRAMS:  # ragged sizes without end
                self._programs.pop(next(iter(self._programs)), None)
            self._programs[key] = program
        return program

    def _new_program(
        self, shape: Sequence[int], rows: int, needs_grad: Sequence[bool], call: Call
    ) -> Program:
        for link in self._comparing:
            link.compare(shape, needs_grad)
        if len(self) == 1:
            return self[0].program(rows, needs_grad, call)
        quantizes = self.only_once is not None
        return Series(self, rows, needs_grad, call, quantizes=quantizes)


def _starts_of_pieces(links: Sequence[Link]) -> list[int]:
    """Return where the pieces of ``links`` start: at each link unless it runs again from what those
    before it save, or they leave their sum to it."""
    starts = [0]
    for at in range(1, len(links)):
        runs_again = links[starts[-1]].keeps_input and not links[at].takes_activation
        if not (runs_again or links[at - 1].is_left_to_next):
            starts.append(at)
    return starts


def only_once(links: Sequence[Link]) -> OnlyOnce | None:
    """Return why torch's operators may not replace ``links``; None if they may."""
    return next((link.only_once for link in links if link.only_once is not None), None)
