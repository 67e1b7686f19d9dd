"""Links one after the other: forward, and back by what each has left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fp8core.chain.main_grad import Accumulating
from fp8core.chain.padding import RowsChanged
from fp8core.chain.protocol import Call, Link, Program, Saved
from fp8core.errors import OperandError

__all__ = ["Step", "Steps", "run_steps"]


class Step(NamedTuple):
    """What backward has to know of one link's forward, besides its tensors."""

    link: Link
    num_saved: int
    context: object
    needs: Sequence[bool]


class Steps:
    """The way back through a chain of any links."""

    __slots__ = ("_steps", "frees_early")

    def __init__(self, steps: list[Step]) -> None:
        self._steps = steps
        # A missing main_grad is refused, and backward may be called again when it is there.
        self.frees_early = not any(isinstance(step.context, Accumulating) for step in steps)

    def takes(self, grad_output: torch.Tensor, call: Call) -> bool:
        """Whether ``grad_output`` is stored quantized as the last link wants it."""
        last = self._steps[-1]
        want = last.link.wants_grad(grad_output.shape[0], last.needs, call, last.context)
        return want is not None and want.takes(grad_output)

    @property
    def first_context(self) -> object:
        """What the first link has to know of its forward."""
        return self._steps[0].context

    def backward(
        self, grad_output: torch.Tensor, saved: list[torch.Tensor | None], call: Call
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of x and of the parameters, in order; empties ``saved``."""
        rows, steps = grad_output.shape[0], self._steps
        value: Any = grad_output
        grad_params: Sequence[torch.Tensor | None] = ()
        last = len(steps) - 1
        step = steps[last]
        out = step.link.wants_grad(rows, step.needs, call, step.context)
        if out is not None:
            value = out(value)
        for at in range(last, -1, -1):
            step = steps[at]
            kept = saved[len(saved) - step.num_saved :]
            del saved[len(saved) - step.num_saved :]
            if value is None:  # nothing further up needs a gradient
                grad_params = (*(None,) * (len(step.needs) - 1), *grad_params)
                continue
            out = None
            if at and step.needs[0]:
                before = steps[at - 1]
                out = before.link.wants_grad(rows, before.needs, call, before.context)
            try:
                value, own = step.link.backward(value, kept, step.context, call, step.needs, out)
                if value is not None:
                    _check_rows(value, rows)
            except RowsChanged as error:
                raise _row_error(step.link, (at, len(steps)), "backward", error) from None
            grad_params = (*own, *grad_params)
        return value, *grad_params


def run_steps(
    links: tuple[Link, ...],
    call: Call,
    value: Any,
    params: Sequence[torch.Tensor],
    needs: Sequence[bool],
) -> tuple[torch.Tensor, Saved, Program]:
    """Run ``value [rows, k]`` through the links one after the other."""
    rows = value.shape[0]
    spans = _spans(links, needs)
    out = links[0].wants(rows, spans[0][2], call)
    if out is not None:
        value = out(value)
    saved: list[torch.Tensor | None] = []
    steps = []
    last = len(links) - 1
    for at, link in enumerate(links):
        first, end, own = spans[at]
        out = None if at == last else links[at + 1].wants(rows, spans[at + 1][2], call)
        try:
            value, kept, context = link.forward(value, params[first:end], call, own, out)
            _check_rows(value, rows)
        except RowsChanged as error:
            raise _row_error(link, (at, len(links)), "forward", error) from None
        saved.extend(kept)
        steps.append(Step(link, len(kept), context, own))
    return value, saved, Steps(steps)


def _check_rows(value: Any, rows: int) -> None:
    """Raise RowsChanged unless what one link hands to the next, a tensor or made of one, has
    ``rows`` rows."""
    found = value.shape[0] if isinstance(value, torch.Tensor) else value.rows
    if found != rows:
        raise RowsChanged("chain", rows, (found,))


def _row_error(link: Link, place: tuple[int, int], way: str, error: RowsChanged) -> OperandError:
    """Return the error of a link that changed the number of rows, which groups, padding and the
    way back of the others are laid out for."""
    at, count = place
    return OperandError(
        f"link {at + 1} of {count}, {type(link).__name__}, was given {error.rows} rows and "
        f"returned {error.found} in {way}. Every link of a chain has to return as many rows as it "
        f"gets: gather or scatter rows before or behind the layer."
    )


def _spans(links: tuple[Link, ...], needs: Sequence[bool]) -> list[tuple[int, int, Sequence[bool]]]:
    """Return, for each link, where its parameters are, and whose gradients it has to give."""
    if len(links) == 1:
        return [(0, len(needs) - 1, needs)]
    spans: list[tuple[int, int, Sequence[bool]]] = []
    need_input, first = needs[0], 0
    for link in links:
        end = first + link.num_params
        own = (need_input, *needs[1 + first : 1 + end])
        spans.append((first, end, own))
        need_input, first = True in own, end
    return spans
