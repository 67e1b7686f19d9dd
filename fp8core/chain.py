"""The library's one autograd.Function: a layer is a tuple of links, run forward and back here."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.function import once_differentiable

from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError
from fp8core.library import operators
from fp8core.links.main_grad import Accumulating
from fp8core.links.padding import RowsChanged
from fp8core.links.protocol import DENSE, Call, Link, Program, Saved
from fp8core.parameter.tensor import QuantizedTensor
from fp8core.unwrap import PLAIN, unwrap

__all__ = ["Links", "Refusal", "capture", "is_under_torch_autocast", "run"]

Links: TypeAlias = "tuple[Link, ...] | int"
"""The links of a chain, or, while torch compiles or exports, their number from :func:`capture`."""


class Refusal(NamedTuple):
    """In the place of links that could not be bound: a graph that raises ``error`` when it runs,
    and would make ``[..., columns(k)]`` of ``[..., k]``."""

    error: Fp8CoreError
    columns: Callable[[int], int]


class _Step(NamedTuple):
    """What backward has to know of one link's forward, besides its tensors."""

    link: Link
    num_saved: int
    context: object
    needs: Sequence[bool]


class _Steps:
    """The way back through a chain of any links."""

    __slots__ = ("_steps", "frees_early")

    def __init__(self, steps: list[_Step]) -> None:
        self._steps = steps
        # A missing main_grad is refused, and backward may be called again when it is there.
        self.frees_early = not any(isinstance(step.context, Accumulating) for step in steps)

    def takes(self, grad_output: torch.Tensor, call: Call) -> bool:
        """Whether ``grad_output`` is stored quantized as the last link wants it."""
        last = self._steps[-1]
        want = last.link.wants_grad(grad_output.shape[0], last.needs, call, last.context)
        return want is not None and want.takes(grad_output)

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


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, links: tuple[Link, ...], call: Call, x: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        y, saved, program = _forward(links, call, x, params, ctx.needs_input_grad[2:])
        ctx.save_for_backward(*saved)
        ctx.program = program
        ctx.call = call
        ctx.input_shape = x.shape
        return y

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: an error only if it is used
            return _backward_once(ctx, grad_output)
        return _backward(ctx, grad_output)


# What _Chain.apply ends in. It looks for functorch's transforms first, which refuse the function
# anyway, and for tensors that outlived one; for a small layer that is a thirtieth of its time.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Chain).apply


# A graph holds numbers, so nothing that torch captured is ever removed.
_captured: list[tuple[Link, ...] | Refusal] = []
_captured_lock = threading.Lock()


def capture(links: tuple[Link, ...] | Refusal) -> int:
    """Return a number that stands for ``links`` in a graph that torch captures.

    torch.compile then calls :func:`run` on the number as one function, does not read its code, and
    traces it with the operators that the links are bound to: forward, and backward by autograd.
    """
    torch.compiler.allow_in_graph(_run_captured)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with _captured_lock:
        _captured.append(links)
        return len(_captured) - 1


def _run_captured(
    number: int,
    x: torch.Tensor,
    params: list[torch.Tensor],
    groups: list[torch.Tensor],
    splits: list[int],
) -> torch.Tensor:
    links = _captured[number]
    if isinstance(links, Refusal):
        return operators.refuse(x, links.columns(x.shape[-1]), links.error)
    rng = operators.draw_seed() if any(link.needs_rng for link in links) else None
    return run(links, x, params, Call(tuple(groups), tuple(splits), rng))


def run(
    links: Links, x: torch.Tensor, params: Sequence[torch.Tensor], call: Call = DENSE
) -> torch.Tensor:
    """Run ``x [..., k]`` through ``links``; ``params`` are theirs, in order. Returns ``[..., n]``.

    What the links save for backward is what some gradient needs, nothing where none is.
    ``torch.autocast`` is kept out of the backends: its casts would change their arithmetic.
    """
    if isinstance(links, int):
        return _run_captured(links, x, list(params), list(call.groups), list(call.splits))
    if type(x) not in PLAIN or not PLAIN.issuperset(map(type, params)):
        x, params = _unwrap(links, x, params, call)
    if is_under_torch_autocast(x):
        with torch.autocast(x.device.type, enabled=False):
            return _run(links, x, params, call)
    return _run(links, x, params, call)


def _unwrap(
    links: tuple[Link, ...], x: torch.Tensor, params: Sequence[torch.Tensor], call: Call
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return plain tensors, but for what is stored quantized and used as the operand that it is:
    an input as the first link wants it, and weights, which their quantizers look at."""
    first = links[0]
    want = first.wants(x.numel() // x.shape[-1], (True,) * (1 + first.num_params), call)
    if want is None or not want.takes(x):
        x = unwrap(x, "input")
    return x, [p if isinstance(p, QuantizedTensor) else unwrap(p, "a parameter") for p in params]


# One question for all types of devices; torch has no public one, and the public ones cost as much
# as an allocation.
_is_any_autocast_enabled: Callable[[], bool] = getattr(
    torch._C, "_is_any_autocast_enabled", lambda: True
)


def is_under_torch_autocast(x: torch.Tensor) -> bool:
    """Say whether ``torch.autocast`` is on for the tensor's type of device."""
    if (x.is_cuda or x.is_cpu) and not _is_any_autocast_enabled():  # it forgets mps
        return False
    device_type = x.device.type  # asking it of meta would raise
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _run(
    links: tuple[Link, ...], x: torch.Tensor, params: Sequence[torch.Tensor], call: Call
) -> torch.Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or _any_requires_grad(params)):
        is_transformed = torch._C._are_functorch_transforms_active()
        y: torch.Tensor = (_Chain.apply if is_transformed else _apply)(links, call, x, *params)
        return y
    return _forward(links, call, x, params, (False,) * (1 + len(params)))[0]


def _forward(
    links: tuple[Link, ...],
    call: Call,
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    needs: Sequence[bool],
) -> tuple[torch.Tensor, Saved, Program]:
    shape = x.shape
    value = x if len(shape) == 2 else x.reshape(-1, shape[-1])
    is_one = len(links) == 1 and not isinstance(value, QuantizedTensor)
    alone = links[0].alone(value.shape[0], needs, call) if is_one else None
    program: Program
    if alone is None:
        y, saved, program = _run_steps(links, call, value, params, needs)
    else:
        y, saved = alone.forward(value, params, call)
        program = alone
    if len(shape) != 2:
        y = y.reshape(*shape[:-1], y.shape[-1])
    return y, saved, program


def _run_steps(
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
        steps.append(_Step(link, len(kept), context, own))
    return value, saved, _Steps(steps)


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


def _backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    if is_under_torch_autocast(grad_output):
        with torch.autocast(grad_output.device.type, enabled=False):
            return _backward(ctx, grad_output)
    if type(grad_output) is not torch.Tensor and not ctx.program.takes(grad_output, ctx.call):
        grad_output = unwrap(grad_output, "grad_output")
    shape, input_shape = grad_output.shape, ctx.input_shape
    value = grad_output if len(shape) == 2 else grad_output.reshape(-1, shape[-1])
    saved = _saved(ctx)
    if ctx.program.frees_early and not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()  # unless the graph is retained: each goes once it was read
    grad_input, *grad_params = ctx.program.backward(value, saved, ctx.call)
    if grad_input is not None and len(input_shape) != 2:
        grad_input = grad_input.reshape(input_shape)
    return None, None, grad_input, *grad_params


def _saved(ctx: Any) -> list[torch.Tensor | None]:
    """Return what forward saved.

    Raises:
        UnsupportedError: a backward pass was here before. Another one that failed had read it too,
            as it is freed once read; torch frees it after a pass.
    """
    try:
        return list(ctx.saved_tensors)
    except RuntimeError as error:
        if type(error) is not RuntimeError or "second time" not in str(error):
            raise
    raise UnsupportedError(
        f"backward through a layer of fp8core a second time (its input was "
        f"{list(ctx.input_shape)}): what forward kept was freed as the first backward read it, "
        f"also if that one failed, as out of memory. Run forward again, or give the first backward "
        f"retain_graph=True, which keeps it and takes more memory."
    )


_backward_once = once_differentiable(_backward)


def _any_requires_grad(params: Sequence[torch.Tensor]) -> bool:
    for param in params:  # noqa: SIM110  a loop costs less than any() over a generator
        if param.requires_grad:
            return True
    return False
