"""Runs a layer, which is a tuple of links, under the library's one ``autograd.Function``."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.chain.call import DENSE, Call
from fp8core.chain.differentiable import (
    Unfused,
    is_detached,
    only_once,
    refusing,
    transform_of,
    twins,
)
from fp8core.chain.once import COMPUTED_TOGETHER, OnlyOnce
from fp8core.chain.protocol import GradientSum, Link, Program, Saved, backward_with
from fp8core.chain.repeated import unrecorded
from fp8core.chain.series import Arranged, row_error
from fp8core.chain.unwrap import (
    PLAIN,
    WEIGHTS,
    address_of,
    are_readable,
    as_readable,
    has_no_plain_form,
    is_strided,
    unwrap,
)
from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError
from fp8core.reporting import log_once
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops import operators
from fp8core.torch_ops.private import (
    forward_mode_level,
    is_any_autocast_enabled,
    is_legacy_batched,
    is_transform_active,
)
from fp8core.torch_ops.repeats import Likeness, likeness_to

Links: TypeAlias = "tuple[Link, ...] | int"
"""The links of a chain, or, while torch compiles or exports, their number from :func:`capture`."""


_Brought: TypeAlias = "tuple[list[torch.Tensor], list[int], list[torch.Tensor | None], list[int]]"
"""A call's groups, splits, tensors and sizes, as torch.compile hands them over."""


class Refusal(NamedTuple):
    """Links that could not be bound while torch captures: the graph raises ``error`` when it runs.

    ``columns(k)`` is how many columns the output would have for an input of ``k``.
    """

    error: Fp8CoreError
    columns: Callable[[int], int]


class _Chain(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, links: Arranged, call: Call, x: torch.Tensor, *params: torch.Tensor
    ) -> torch.Tensor:
        ctx.links = links
        ctx.call = call
        ctx.input_shape = shape = x.shape
        needs_grad = ctx.needs_input_grad[2:]
        y, saved, ctx.context, ctx.program = _forward(links, call, x, shape, params, needs_grad)
        ctx.save_for_backward(*saved)
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
            return _backward(ctx, grad_output, added)
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


class _ReturningInput(_Chain):
    """The chain with its input as a second output, whose gradient ``added`` is that of the same
    tensor: a link that adds gradients adds it before autograd sees a rounded one."""

    @staticmethod
    def forward(  # type: ignore[override]  # one tensor more
        ctx: Any, links: Arranged, call: Call, x: torch.Tensor, *params: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return _Chain.forward(ctx, links, call, x, *params), x.detach()

    @staticmethod
    def backward(  # type: ignore[override]  # either gradient may be missing
        ctx: Any, grad_output: torch.Tensor | None, added: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        if grad_output is None:
            return None, None, added, *(None for _ in ctx.needs_input_grad[3:])
        if added is None:
            return _Chain.backward(ctx, grad_output)
        if is_legacy_batched(added):
            return _backward_again(ctx, grad_output, added)
        added = unwrap(added, "the gradient of the extra output")
        return _Chain.backward(ctx, grad_output, _readable_grad(ctx, added))


# The C++ functions that apply of the classes ends in. apply first looks for torch.func's
# transforms, under which no call arrives here, and for tensors left over from one.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Chain).apply
_apply_returning: Callable[..., Any] = super(torch.autograd.Function, _ReturningInput).apply


# Graphs refer to entries by number for as long as they live, so none is ever removed.
_captured: list[tuple[Link, ...] | Refusal] = []
_captured_lock = threading.Lock()


def capture(links: tuple[Link, ...] | Refusal) -> int:
    """Return a number that stands for ``links`` in a graph that torch captures.

    torch.compile does not read the code of :func:`run` for a number. It records the torch operators
    that the links are bound to: those of forward, and of backward by way of autograd.
    """
    torch.compiler.allow_in_graph([_run_captured, _run_captured_returning])  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with _captured_lock:
        _captured.append(links)
        return len(_captured) - 1


def _run_captured(
    number: int, x: torch.Tensor, params: list[torch.Tensor], brought: _Brought
) -> torch.Tensor:
    y: torch.Tensor = _run_number(number, x, params, brought, _apply)
    return y


def _run_captured_returning(
    number: int, x: torch.Tensor, params: list[torch.Tensor], brought: _Brought
) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_input(_run_number(number, x, params, brought, _apply_returning), x)


def _run_number(
    number: int,
    x: torch.Tensor,
    params: list[torch.Tensor],
    brought: _Brought,
    apply: Callable[..., Any],
) -> Any:
    links = _captured[number]
    if isinstance(links, Refusal):
        return operators.refuse(x, links.columns(x.shape[-1]), links.error)
    rng = operators.draw_seed() if any(link.needs_rng for link in links) else None
    groups, splits, tensors, sizes = brought
    call = Call(tuple(groups), tuple(splits), rng, tensors=tuple(tensors), sizes=tuple(sizes))
    return _run(links, x, params, call, apply)


def _brought(call: Call) -> _Brought:
    return list(call.groups), list(call.splits), list(call.tensors), list(call.sizes)


def run(
    links: Links, x: torch.Tensor, params: Sequence[torch.Tensor], call: Call = DENSE
) -> torch.Tensor:
    """Run ``x [..., k]`` through ``links``; ``params`` are theirs, in order. Returns ``[..., n]``.

    Only tensors that some requested gradient needs are saved for backward. ``torch.autocast`` is
    switched off around the backends, whose arithmetic its casts would change.
    """
    if isinstance(links, int):
        return _run_captured(links, x, list(params), _brought(call))
    y: torch.Tensor = _run(links, x, params, call, _apply)
    return y


def run_returning_input(
    links: Links, x: torch.Tensor, params: Sequence[torch.Tensor], call: Call = DENSE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what :func:`run` does, and ``x``, of the same memory, for other uses of it.

    The gradient of these is added to that of the links where it is computed, by the first of them
    if it adds gradients.
    """
    if type(x) not in PLAIN or not x.requires_grad or not torch.is_grad_enabled():
        return run(links, x, params, call), x
    if isinstance(links, int):
        return _run_captured_returning(links, x, list(params), _brought(call))
    return _with_input(_run(links, x, params, call, _apply_returning), x)


def _with_input(result: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both outputs of a node that returned ``result``; without one, as under a transform,
    ``x`` itself is the second."""
    return result if isinstance(result, tuple) else (result, x)


def _run(
    links: tuple[Link, ...],
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
    apply: Callable[..., Any],
) -> Any:
    """Return what ``apply`` does in the place of :data:`_apply`, or the output without a node."""
    chain = links if isinstance(links, Arranged) else Arranged(links)
    if _is_direct(chain, x, params):
        return _run_direct(chain, x, params, call, apply)
    if type(x) not in PLAIN or not PLAIN.issuperset(map(type, params)):
        if type(chain) is Unfused and any(map(has_no_plain_form, (x, *params))):
            with torch.autocast(x.device.type, enabled=False):
                return _run_in_torch(chain, x, params, call, f"a {type(x).__name__}")
        x, params = _unwrap(chain, x, params, call)
        x, params = _readable(x, params)
    elif not are_readable(x, params):
        if type(chain) is Unfused and not all(map(is_strided, (x, *params))):
            with torch.autocast(x.device.type, enabled=False):
                return _run_in_torch(chain, x, params, call, "a sparse tensor")
        x, params = _readable(x, params)
    if is_under_torch_autocast(x):
        with torch.autocast(x.device.type, enabled=False):
            return _run(chain, x, params, call, apply)
    if is_transform_active() or forward_mode_level() >= 0:
        transform = transform_of((x, *params))
        if transform is not None:
            return _run_in_torch(chain, x, params, call, transform)
    if type(chain) is Unfused and _needs_node(x, params) and not _is_single_piece(chain, x, params):
        return _run_in_pieces(chain, x, params, call, apply)
    return _run_direct(chain, x, params, call, apply)


class Prepared(NamedTuple):
    """The work of :func:`run` for the tensors of a call, ``run(x, *params)``; None where more than
    tensors take part in it, and are others.

    It is right for others if they have memory, each parameter by ``address``, and
    ``is_like(x, *params)``, outside of forward-mode differentiation and where gradients are
    enabled, or not, as before.
    """

    is_like: Likeness
    address: Callable[[torch.Tensor], int]
    run: Callable[..., torch.Tensor | None]


def prepared(
    links: Links, x: torch.Tensor, params: Sequence[torch.Tensor], call: Call = DENSE
) -> Prepared | None:
    """Return what :func:`run` does in ``call`` with these tensors, if it computes from them as they
    are."""
    is_like = likeness_to(x, params)
    run = None if is_like is None else prepared_run(links, x, params, call)
    if is_like is None or run is None:
        return None
    is_plain = PLAIN.issuperset(map(type, params))
    return Prepared(is_like, torch.Tensor.data_ptr if is_plain else address_of, run)


def prepared_run(
    links: Links, x: torch.Tensor, params: Sequence[torch.Tensor], call: Call
) -> Callable[..., torch.Tensor] | None:
    """Return what :func:`run` does in ``call``, as ``run(x, *params)``, if it computes from the
    tensors as they are."""
    if not isinstance(links, Arranged) or not _are_read_directly(x, params):
        return None
    if _needs_node(x, params):
        if type(links) is not Unfused or _is_single_piece(links, x, params):
            return partial(_apply, links, call)
        pieces = links

        def run_pieces(x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = _run_in_pieces(pieces, x, params, call, _apply)
            return y

        return run_pieces
    needs_grad = (False,) * (1 + len(params))

    def run(x: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        return _forward(links, call, x, x.shape, params, needs_grad)[0]

    return run


def _is_direct(links: Arranged, x: torch.Tensor, params: Sequence[torch.Tensor]) -> bool:
    """Say whether :func:`run` computes from the tensors as they are, with at most one node."""
    return _are_read_directly(x, params) and (
        type(links) is not Unfused or _is_single_piece(links, x, params)
    )


def _are_read_directly(x: torch.Tensor, params: Sequence[torch.Tensor]) -> bool:
    """Say whether :func:`run` computes from the tensors as they are, in however many nodes."""
    return (
        type(x) in PLAIN
        and WEIGHTS.issuperset(map(type, params))
        and are_readable(x, params)
        and not is_under_torch_autocast(x)
        and not is_transform_active()
        and forward_mode_level() < 0
    )


def _run_direct(
    links: Arranged,
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
    apply: Callable[..., Any],
) -> Any:
    if _needs_node(x, params):
        return apply(links, call, x, *params)
    return _forward(links, call, x, x.shape, params, (False,) * (1 + len(params)))[0]


def _needs_node(x: torch.Tensor, params: Sequence[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or _any_requires_grad(params))


def _is_single_piece(links: Unfused, x: torch.Tensor, params: Sequence[torch.Tensor]) -> bool:
    """Say whether ``links`` in high precision need one node, and no weight is converted first."""
    if len(links) > 1:
        return False
    return not params or (params[0].dtype == x.dtype and type(params[0]) in PLAIN)


def _unwrap(
    links: Arranged, x: torch.Tensor, params: Sequence[torch.Tensor], call: Call
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    """Return plain tensors, except quantized ones whose operands can be used as they are.

    Those are an input that is stored as the first link wants it, and weights, about which their
    quantizers decide.
    """
    first = links[0]
    if isinstance(x, QuantizedTensor) and x.shape[-1]:
        rows, is_grad_enabled = x.numel() // x.shape[-1], torch.is_grad_enabled()
        tensors = (x, *params[: first.num_params])
        needs_grad = [is_grad_enabled and tensor.requires_grad for tensor in tensors]
        request = first.program(rows, needs_grad, call).input_request
        if request is not None and not request.takes(x) and first.only_once is not None:
            log_once(
                f"{first.only_once.owner}: its input is {x}, which it does not cast to: it is "
                f"dequantized and cast again. Quantize it by the layer's recipe, in both "
                f"orientations for training."
            )
        if request is None or not request.takes(x):
            x = unwrap(x, "input")
    else:
        x = unwrap(x, "input")
    return x, [p if isinstance(p, QuantizedTensor) else unwrap(p, "a parameter") for p in params]


def _readable(
    x: torch.Tensor, params: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
    device = x.device
    readable = [as_readable(param, device, "a parameter") for param in params]
    return as_readable(x, device, "input"), readable


def is_under_torch_autocast(x: torch.Tensor) -> bool:
    """Say whether ``torch.autocast`` is on for the tensor's type of device."""
    if (x.is_cuda or x.is_cpu) and not is_any_autocast_enabled():  # does not know mps
        return False
    device_type = x.device.type  # torch raises for meta
    return device_type != "meta" and torch.is_autocast_enabled(device_type)


def _run_in_pieces(
    links: Unfused,
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
    apply: Callable[..., Any],
) -> Any:
    """Run ``links`` with one autograd node for each piece, that of the first by ``apply``.

    Weights are converted to the dtype of ``x`` by torch, outside of the nodes, so that the
    conversion is differentiated too. Biases are converted inside, so that their gradients are
    rounded once, from the float32 sum.
    """
    first, dtype = 0, x.dtype
    extra: Sequence[torch.Tensor] = ()  # besides the output of the first piece
    for piece in links.pieces:
        end = first + sum(link.num_params for link in piece)
        converted = piece[0].converted(params[first:end], dtype)
        if x.requires_grad or _any_requires_grad(converted):
            result = apply(piece, call, x, *converted)
            x, *extra = result if isinstance(result, tuple) else (result, *extra)
        else:
            x = _forward(piece, call, x, x.shape, converted, (False,) * (1 + len(converted)))[0]
        first, apply = end, _apply
    return (x, *extra) if extra else x


def refuse_transform(links: tuple[Link, ...]) -> None:
    """Raise if a transform of torch.func is active that ``links`` cannot run under.

    Raises:
        UnsupportedError: names the transform.
    """
    transform, refused = transform_of(()), only_once(links)
    if transform is not None and refused is not None:
        raise refused.error(transform)


def _run_in_torch(
    links: Arranged,
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
    transform: str,
) -> torch.Tensor:
    """Run torch's operators instead of ``links``, so that ``transform`` sees each of them."""
    refused = only_once(links)
    if refused is not None:
        raise refused.error(transform)
    needs_grad = (False,) * (1 + len(params))
    return _forward(twins(links, x), call, x, x.shape, params, needs_grad)[0]


def _forward(
    links: Arranged,
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
        if type(links) is Unfused and saved and saved[0] is value:
            saved = (x, *saved[1:])  # x has a history, the reshaped view has none
    return y, saved, context, program


def _leading_of(
    y: torch.Tensor, shape: torch.Size, program: Program, links: Sequence[Link]
) -> Sequence[int]:
    """Return the leading dimensions of ``y``, which ``program`` returned for ``[*shape]``.

    Raises:
        OperandError: it has other rows than are due, or they do not fill those dimensions.
    """
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


def _readable_grad(ctx: Any, grad_output: torch.Tensor) -> torch.Tensor:
    if type(ctx.links) is Unfused and not is_strided(grad_output):
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
    if frees_early and program.frees_early:
        ctx.maybe_clear_saved_tensors()  # of a graph that is not retained: each is freed once read
    if isinstance(value, QuantizedTensor):
        value = program.request_grad(call)(value)
    grad_input, *grad_params = _added_backward(ctx, program, value, saved, added)
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
    saved: list[torch.Tensor | None],
    added: torch.Tensor | None,
) -> Sequence[Any]:
    """Return what the backward of ``program`` does; ``added``, if there is one, is added to the
    gradient of the input."""
    if added is None:
        return program.backward(grad, saved, ctx.context, ctx.call)
    rows = GradientSum(added.reshape(-1, added.shape[-1]))
    return backward_with(rows, program, grad, saved, ctx.context, ctx.call, first=ctx.links[0])


def _saved(ctx: Any) -> list[torch.Tensor | None]:
    """Return the tensors that forward saved, the input as rows.

    Raises:
        UnsupportedError: they are freed, because an earlier backward pass read them; also if that
            pass failed.
        OperandError: in low precision, one of them was written since forward.
    """
    saved: list[torch.Tensor | None] | None = None
    written: OnlyOnce | None = None
    try:
        saved = list(ctx.saved_tensors)
    except RuntimeError as error:
        message = str(error) if type(error) is RuntimeError else ""
        written = only_once(ctx.links) if "modified" in message else None
        if written is None and "second time" not in message:
            raise
    if saved is not None and type(ctx.links) is not Unfused:
        return saved
    if written is not None:
        raise OperandError(
            f"{written.owner}: what backward needs was written in place since forward, a weight or "
            f"input that is stored quantized, or that this recipe takes in high precision or "
            f"quantizes again (requantize_weights) on the way back. Step the optimizer after "
            f"backward, or write to a clone."
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

    The backward of a single link consists of torch's operators on the saved tensors, so it saves no
    more than a first derivative needs.
    """
    if is_under_torch_autocast(grad_output):
        with torch.autocast(grad_output.device.type, enabled=False):
            return _backward_again(ctx, grad_output, added)
    links, needs = ctx.links, ctx.needs_input_grad[2:]
    if type(links) is not Unfused or len(links) > 1:
        return _refused(ctx, grad_output, added, only_once(links) or COMPUTED_TOGETHER)
    program = ctx.program
    with torch.enable_grad():  # the input reshaped to rows has to keep its history
        saved = _saved(ctx)
    if is_detached(program, saved, needs):
        return _refused(ctx, grad_output, added, COMPUTED_TOGETHER)
    value = grad_output.reshape(-1, grad_output.shape[-1])
    twin = twins(links, grad_output)[0].program(value.shape[0], needs, ctx.call)
    grad_input, *grad_params = _added_backward(ctx, twin, value, saved, added)
    if grad_input is not None:
        grad_input = grad_input.reshape(ctx.input_shape)
    return None, None, grad_input, *grad_params


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


def _any_requires_grad(params: Sequence[torch.Tensor]) -> bool:
    for param in params:  # noqa: SIM110  a loop costs less than any() over a generator
        if param.requires_grad:
            return True
    return False
