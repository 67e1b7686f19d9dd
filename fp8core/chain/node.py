"""The one ``autograd.Function`` of the library: forward and backward of a chain as a node.

Backward frees what forward saved as it is read. Its gradients can be differentiated again in high
precision; elsewhere, and for batches of gradients, the request is refused by name.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fp8core.chain.call import Call
from fp8core.chain.differentiable import refusing, twins
from fp8core.chain.protocol import (
    COMPUTED_TOGETHER,
    GradientSum,
    Link,
    OnlyOnce,
    Program,
    Saved,
    SavedList,
    backward_with,
)
from fp8core.chain.repeated import unrecorded
from fp8core.chain.series import Chain, row_error
from fp8core.chain.unwrap import (
    are_readable,
    as_readable,
    is_strided,
    unwrap,
)
from fp8core.errors import OperandError, UnsupportedError
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops.capture import is_faked, untraced
from fp8core.torch_ops.private import (
    FakeTensor,
    FunctionalTensor,
    input_metadata,
    is_any_autocast_enabled,
    is_legacy_batched,
    is_traced,
    is_transform_active,
    legacy_vmap,
    without_keys,
)
from fp8core.torch_ops.repeats import likeness_to


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, links: Chain, call: Call, x: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.links = links
        ctx.call = call
        ctx.input_shape = shape = x.shape
        needs_grad = ctx.needs_input_grad[2:]
        y, saved, ctx.context, ctx.program = run_forward(links, call, x, shape, params, needs_grad)
        if links.runs_again:
            tensors, places = (x, *params), dict(zip(map(id, saved), itertools.count()))
            ctx.sources = [*map(places.get, map(id, tensors), tensors)]
            ctx.num_saved = len(saved)
            if not _SOURCES.issuperset(map(type, ctx.sources)):
                saved = _with_sources(saved, ctx.sources)
        ctx.save_for_backward(*saved)
        if links.runs_again:
            ctx.num_writes = sum(map(getattr, ctx.sources, _VERSION, _NO_WRITES))
        base = y._base
        if base is not None and base is not x and base is not x._base:
            # torch refuses writes to a view that a function returns. Its version stays shared, so
            # that one to what backward reads is noticed.
            return y.detach()
        return y

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor, added: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _backward_again(ctx, grad_output, added)
        if torch.compiler.is_compiling():  # compiled autograd reads this, and knows no batches
            run = _untraced_backward if ctx.links.is_recorded else _backward
            return run(ctx, grad_output, added)
        if is_transform_active():
            return _backward_again(ctx, grad_output, added)
        links = ctx.links
        like = links.like_grad
        if like is not None and like(grad_output) and grad_output.data_ptr():
            return _gradients(ctx, grad_output, added, frees_early=True)
        if is_legacy_batched(grad_output):
            return _backward_again(ctx, grad_output, added)
        if type(grad_output) is torch.Tensor:
            if not are_readable(grad_output):
                grad_output = _readable_grad(ctx, grad_output)
            elif not is_under_torch_autocast(grad_output):
                links.like_grad = likeness_to(grad_output)
        return _backward(ctx, grad_output, added)


class _ReturningNode(_Node):
    """The chain with its input as a second output, whose gradient ``added`` is that of the same
    tensor: a link that adds gradients adds it before autograd sees a rounded one."""

    @staticmethod
    def forward(  # type: ignore[override]  # one tensor more
        ctx: Any, links: Chain, call: Call, x: torch.Tensor, *params: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return _Node.forward(ctx, links, call, x, *params), x.detach()

    @staticmethod
    def backward(  # type: ignore[override]  # either gradient may be missing
        ctx: Any, grad_output: torch.Tensor | None, added: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_output is None:
            return None, None, added, *(None for _ in ctx.needs_input_grad[3:])
        if added is None:
            return _Node.backward(ctx, grad_output)
        if is_legacy_batched(added):
            return _backward_again(ctx, grad_output, added)
        added = unwrap(added, "the gradient of the extra output")
        return _Node.backward(ctx, grad_output, _readable_grad(ctx, added))


# The C++ functions that apply of the classes ends in. apply first looks for torch.func's
# transforms, under which no call arrives here, and for tensors left over from one.
apply_node: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Node).apply


apply_returning: Callable[..., Any] = super(torch.autograd.Function, _ReturningNode).apply


def run_forward(
    links: Chain,
    call: Call,
    x: torch.Tensor,
    shape: torch.Size,
    params: Sequence[torch.Tensor],
    needs_grad: tuple[bool, ...],
) -> tuple[torch.Tensor, Saved, Any, Program]:
    """Return the output, what backward needs, and the program that computed it, of ``x [*shape]``.

    ``needs_grad`` says whose gradient backward has to return: the input's, then the parameters'.
    """
    is_rows = len(shape) == 2
    value: Any = x if is_rows else x.reshape(-1, shape[-1])
    rows = shape[0] if is_rows else value.shape[0]
    program = links.program(shape, rows, needs_grad, call)
    if isinstance(value, QuantizedTensor) and program.input_request is not None:
        value = program.input_request(value)
    y, saved, context = program.forward(value, params, call)
    has_rows = y.shape[0] == rows
    if is_rows and has_rows:
        return y, saved, context, program
    leading: Sequence[int] = shape[:-1]
    if not has_rows or not rows:  # gathered, scattered; without rows neither is seen
        leading = _leading_of(y, shape, program, links)
    if not is_rows:
        y = y.reshape(*leading, y.shape[-1])
        if links.only_once is None and saved and saved[0] is value:
            saved = (x, *saved[1:])  # x has a history, the reshaped view has none
    return y, saved, context, program


# What stands for the source of a piece: its place among the saved tensors, or the tensor itself if
# that is a parameter of a module, which lives on.
_SOURCES = frozenset((int, torch.nn.Parameter))
_VERSION, _NO_WRITES = itertools.repeat("_version"), itertools.repeat(0)


def _with_sources(saved: Saved, sources: list[Any]) -> Saved:
    """Return ``saved`` and the ``sources`` that would be freed, each of which becomes its place."""
    more = [*saved]
    for at, source in enumerate(sources):
        if type(source) not in _SOURCES:
            sources[at] = len(more)
            more.append(source)
    return more


def _leading_of(
    y: torch.Tensor, shape: torch.Size, program: Program, links: Sequence[Link]
) -> Sequence[int]:
    """Return the leading dimensions of ``y``, which ``program`` returned for ``[*shape]``."""
    num_rows, inner, rows = y.shape[0], math.prod(shape[1:-1]), math.prod(shape[:-1])
    due = program.num_rows(rows)
    if num_rows != due:  # of a lone link; a series has looked at the rows of each
        raise row_error(links, 0, "forward", rows=rows, due=due, returned=num_rows)
    if not inner:  # no row says how many the first dimension has
        return (program.num_rows(shape[0]), *shape[1:-1])
    if num_rows % inner:
        raise OperandError(
            f"{', '.join(type(link).__name__ for link in links)}: input {list(shape)} became "
            f"{num_rows} rows, which are no multiple of {inner}, the product of the dimensions "
            f"between the first and the last. Ranks of sequence parallelism split the first "
            f"dimension, here {shape[0]}: pad it to a multiple of their number, or give the input "
            f"as [rows, {shape[-1]}]."
        )
    return (num_rows // inner, *shape[1:-1])


def _of_kernels(saved: SavedList) -> bool:
    """Return whether a forward that saved these computed values, so that its links are bound to
    kernels."""
    return not any([isinstance(tensor, FakeTensor | FunctionalTensor) for tensor in saved])


def _without_values(ctx: Any) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of a FakeTensorMode, in which a kernel would read memory that a fake
    gradient has not."""
    needed = [None if node is None else input_metadata(node)[at] for node, at in ctx.next_functions]
    gradients = [x and torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in needed]
    return None, None, *gradients


def _readable_grad(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
    if ctx.links.only_once is None and not is_strided(grad_output):
        grad_output = grad_output.to_dense()  # torch's layers take sparse gradients as well
    return as_readable(grad_output, grad_output.device, "grad_output")


def _backward(
    ctx: Any, grad_output: torch.Tensor, added: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    if is_under_torch_autocast(grad_output):
        with torch.autocast(grad_output.device.type, enabled=False):
            return _backward(ctx, grad_output, added)
    if type(grad_output) is not torch.Tensor and not ctx.program.takes_grad(grad_output):
        grad_output = unwrap(grad_output, "grad_output")
        grad_output = as_readable(grad_output, grad_output.device, "grad_output")
    return _gradients(ctx, grad_output, added, frees_early=not torch.compiler.is_compiling())


_untraced_backward = untraced(_backward)
"""For operations of a native library, which torch cannot read: it would break the graph at each of
them, and compile what lies in between."""


def _gradients(
    ctx: Any, grad_output: torch.Tensor, added: torch.Tensor | None, *, frees_early: bool
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients from a ``grad_output`` that can be read.

    ``added`` is another gradient of the input. ``frees_early``: saved tensors may be freed as they
    are read; not while torch compiles.
    """
    program, call, input_shape = ctx.program, ctx.call, ctx.input_shape
    if not frees_early:
        program = unrecorded(program)
    value: Any = grad_output  # it has as many dimensions as the input
    if len(input_shape) != 2:
        value = grad_output.reshape(-1, grad_output.shape[-1])
    saved = _saved(ctx)
    if is_faked() and not is_traced() and _of_kernels(saved):
        return _without_values(ctx)
    if ctx.links.runs_again:
        del saved[ctx.num_saved :]
    if frees_early and program.frees_early:
        ctx.maybe_clear_saved_tensors()  # of a graph that is not retained: each is freed once read
    if isinstance(value, QuantizedTensor):
        value = program.request_grad(call)(value)
    grad_input, *grad_params = _added_backward(ctx, program, value, saved, ctx.context, added)
    if grad_input is not None and grad_input.shape != input_shape:
        # Of a lone link; a series has looked at the rows of each.
        if grad_input.numel() != input_shape.numel():
            rows, returned = math.prod(input_shape[:-1]), grad_input.shape[0]
            raise row_error(ctx.links, 0, "backward", rows=rows, due=rows, returned=returned)
        grad_input = grad_input.reshape(input_shape)
    return None, None, grad_input, *grad_params


def _added_backward(
    ctx: Any,
    program: Program,
    grad: Any,
    saved: SavedList,
    context: object,
    added: torch.Tensor | None,
) -> Sequence[Any]:
    """Return what the backward of ``program`` does; ``added``, if there is one, is added to the
    gradient of the input."""
    if added is None:
        return program.backward(grad, saved, context, ctx.call)
    rows = GradientSum(added.reshape(-1, added.shape[-1]))
    return backward_with(rows, program, grad, saved, context, ctx.call, first=ctx.links[0])


def _saved(ctx: Any) -> SavedList:
    """Return the tensors that forward saved, the input as rows.

    Raises:
        UnsupportedError: they are freed, because an earlier backward pass read them; also if that
            pass failed.
        OperandError: in low precision, one of them was written since forward.
    """
    saved: SavedList | None = None
    written: OnlyOnce | None = None
    try:
        saved = list(ctx.saved_tensors)
    except RuntimeError as error:
        message = str(error) if type(error) is RuntimeError else ""
        written = ctx.links.only_once if "modified" in message else None
        if written is None and "second time" not in message:
            raise
    if saved is not None and ctx.links.only_once is not None:
        return saved
    if written is not None:
        raise OperandError(
            f"{written.owner}: what backward needs was written in place since forward, a weight or "
            f"input that is stored quantized, or that this recipe takes in high precision or, "
            f'unless it has holding="fastest" and no requantize_weights, quantizes again on the '
            f"way back. Step the optimizer after backward, or write to a clone."
        )
    if saved is None:
        raise UnsupportedError(
            f"backward through a layer of fp8core a second time (its input was "
            f"{list(ctx.input_shape)}): what forward kept was freed as the first backward read it, "
            f"also if that one failed, as out of memory. Run forward again, or give the first "
            f"backward retain_graph=True, which keeps it and takes more memory."
        )
    shape, x = ctx.input_shape, saved[0] if saved else None
    if x is not None and len(shape) != 2 and x.shape == shape:
        saved[0] = x.reshape(-1, shape[-1])
    return saved


def _backward_again(
    ctx: Any, grad_output: torch.Tensor, added: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients that can be differentiated (create_graph), or those of a batch.

    They are what the links compute by torch's operators. Where forward has more in it than the
    saved tensors, it runs again, so that backward reads tensors with a history.
    """
    if is_under_torch_autocast(grad_output):
        with torch.autocast(grad_output.device.type, enabled=False):
            return _backward_again(ctx, grad_output, added)
    links, call, needs = ctx.links, ctx.call, ctx.needs_input_grad[2:]
    reason = links.only_once or (COMPUTED_TOGETHER if ctx.program.saves_copies else None)
    if reason is not None:
        return _refused(ctx, grad_output, added, reason)
    with torch.enable_grad():  # the input reshaped to rows has to keep its history
        saved = _saved(ctx)
    value, context = grad_output.reshape(-1, grad_output.shape[-1]), ctx.context
    twin = twins(links, grad_output).program(ctx.input_shape, value.shape[0], needs, call)
    if links.runs_again:
        x, *params = _sources(ctx, saved)
        with without_keys(legacy_vmap):  # none of these is a batch of gradients
            _, to_save, context = twin.forward(x.reshape(-1, x.shape[-1]), params, call)
        saved = list(to_save)
    grad_input, *grad_params = _added_backward(ctx, twin, value, saved, context, added)
    if grad_input is not None:
        grad_input = grad_input.reshape(ctx.input_shape)
    return None, None, grad_input, *grad_params


def _sources(ctx: Any, saved: SavedList) -> list[Any]:
    """Return the input and the parameters of forward."""
    if sum(map(getattr, ctx.sources, _VERSION, _NO_WRITES)) != ctx.num_writes:
        raise OperandError(
            "a second derivative (create_graph=True): a parameter was written in place since "
            "forward. Step the optimizer after backward, or write to a clone."
        )
    return [saved[source] if type(source) is int else source for source in ctx.sources]


def _refused(
    ctx: Any, grad_output: torch.Tensor, added: torch.Tensor | None, reason: OnlyOnce
) -> tuple[torch.Tensor | None, ...]:
    """Return first derivatives that raise when differentiated; raise for a batch of them."""
    grad_outputs = [grad_output] if added is None else [grad_output, added]
    if any(map(is_legacy_batched, grad_outputs)) or is_transform_active():
        raise reason.error("a batch of gradients in one backward (is_grads_batched, vectorize)")
    with torch.no_grad():
        grads = _backward(ctx, grad_output, added)
    error = reason.error("a second derivative (create_graph=True)")
    return refusing(grads, error, ctx, grad_outputs)


def is_under_torch_autocast(x: torch.Tensor) -> bool:
    """Say whether ``torch.autocast`` is on for the tensor's type of device."""
    if (x.is_cuda or x.is_cpu) and not is_any_autocast_enabled():  # does not know mps
        return False
    device_type = x.device.type  # torch raises for meta
    return device_type != "meta" and torch.is_autocast_enabled(device_type)
