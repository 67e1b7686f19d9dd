"""Runs a layer, which is a tuple of links, under the library's one ``autograd.Function``."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.chain.call import DENSE, Call
from fp8core.chain.differentiable import transform_of, twins
from fp8core.chain.node import (
    apply_node,
    apply_returning,
    is_under_torch_autocast,
    run_forward,
)
from fp8core.chain.protocol import Link
from fp8core.chain.series import Chain, only_once
from fp8core.chain.unwrap import (
    PLAIN,
    WEIGHTS,
    address_of,
    are_readable,
    as_readable,
    has_no_plain_form,
    is_strided,
    put_together,
    unwrap,
)
from fp8core.context.scopes import warn_of_layer
from fp8core.errors import Fp8CoreError
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops import operators
from fp8core.torch_ops.private import (
    forward_mode_level,
    is_transform_active,
)
from fp8core.torch_ops.repeats import Likeness, likeness_to

Links: TypeAlias = "tuple[Link, ...] | int"
"""The links of a chain, or, while torch compiles or exports, their number from :func:`capture`."""

_Brought: TypeAlias = (
    "tuple[list[torch.Tensor], list[int], list[torch.Tensor | None], list[int], _State, list[int]]"
)
"""A call's groups, splits, tensors, sizes, state, and the numbers of how its parameters are stored,
as torch.compile hands them over."""

_Parts: TypeAlias = "list[list[torch.Tensor]]"
"""The plain tensors of each parameter that a graph takes apart, or the parameter."""

_State: TypeAlias = "tuple[list[torch.Tensor], str]"


class Refusal(NamedTuple):
    """Links that could not be bound while torch captures: the graph raises ``error`` when it runs.

    ``columns(k)`` is how many columns the output would have for an input of ``k``.
    """

    error: Fp8CoreError
    columns: Callable[[int], int]


class Stateful(NamedTuple):
    """Links of delayed scaling, which ``bind(buffers, phase)`` binds in each graph, as
    of a :class:`Call`; ``after(output, buffers)`` puts into the graph what follows them."""

    bind: Callable[[Sequence[torch.Tensor], str], tuple[Link, ...]]
    after: Callable[[torch.Tensor, Sequence[torch.Tensor]], None] | None = None


# Graphs refer to entries by number for as long as they live, so none is ever removed.
_captured: list[tuple[Link, ...] | Refusal | Stateful] = []
_captured_lock = threading.Lock()


def capture(links: tuple[Link, ...] | Refusal | Stateful) -> int:
    """Return a number that stands for ``links`` in a graph that torch captures.

    torch.compile does not read the code of :func:`run` for a number. It records the torch operators
    that the links are bound to: those of forward, and of backward by way of autograd.
    """
    torch.compiler.allow_in_graph([_run_captured, _run_captured_returning])  # type: ignore[no-untyped-call]  # torch leaves it untyped
    with _captured_lock:
        _captured.append(links)
        return len(_captured) - 1


def _run_captured(number: int, x: torch.Tensor, params: _Parts, brought: _Brought) -> torch.Tensor:
    y: torch.Tensor = _run_number(number, x, params, brought, apply_node)
    return y


def _run_captured_returning(
    number: int, x: torch.Tensor, params: _Parts, brought: _Brought
) -> tuple[torch.Tensor, torch.Tensor]:
    return _with_input(_run_number(number, x, params, brought, apply_returning), x)


def _run_number(
    number: int,
    x: torch.Tensor,
    params: _Parts,
    brought: _Brought,
    apply: Callable[..., Any],
) -> Any:
    links = _captured[number]
    if isinstance(links, Refusal):
        return operators.refuse(x, links.columns(x.shape[-1]), links.error)
    groups, splits, tensors, sizes, state, stored = brought
    after = None
    if isinstance(links, Stateful):
        after, links = links.after, links.bind(*state)
    rng = operators.draw_seed() if any(link.needs_rng for link in links) else None
    call = Call(tuple(groups), tuple(splits), rng, tensors=tuple(tensors), sizes=tuple(sizes))
    whole = [*map(put_together, stored, params)] if stored else [param for (param,) in params]
    result = _run(links, x, whole, call, apply)
    if after is not None:
        after(result, state[0])
    return result


def _brought(call: Call) -> _Brought:
    tensors, state = list(call.tensors), (list(call.buffers), call.phase)
    numbers = [number for number, _ in call.stored]
    return list(call.groups), list(call.splits), tensors, list(call.sizes), state, numbers


def _parts_of(params: Sequence[torch.Tensor], call: Call) -> _Parts:
    if not call.stored:
        return [[param] for param in params]
    pairs = zip(params, call.stored, strict=True)
    return [[getattr(p, n) for n in names] if names else [p] for p, (_, names) in pairs]


def run(
    links: Links, x: torch.Tensor, params: Sequence[torch.Tensor], call: Call = DENSE
) -> torch.Tensor:
    """Run ``x [..., k]`` through ``links``; ``params`` are theirs, in order. Returns ``[..., n]``.

    Only tensors that some requested gradient needs are saved for backward. ``torch.autocast`` is
    switched off around the backends, whose arithmetic its casts would change.
    """
    if isinstance(links, int):
        return _run_captured(links, x, _parts_of(params, call), _brought(call))
    y: torch.Tensor = _run(links, x, params, call, apply_node)
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
        return _run_captured_returning(links, x, _parts_of(params, call), _brought(call))
    return _with_input(_run(links, x, params, call, apply_returning), x)


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
    """Return what ``apply`` does in the place of :data:`apply_node`; without a node, the output."""
    chain = links if isinstance(links, Chain) else Chain(links)
    if _are_read_directly(x, params):
        return _way_of(chain, x, params, call, apply)(x, *params)
    if type(x) not in PLAIN or not PLAIN.issuperset(map(type, params)):
        if chain.only_once is None and any(map(has_no_plain_form, (x, *params))):
            with torch.autocast(x.device.type, enabled=False):
                return _run_in_torch(chain, x, params, call, f"a {type(x).__name__}")
        x, params = _unwrap(chain, x, params, call)
        x, params = _readable(x, params)
    elif not are_readable(x, params):
        if chain.only_once is None and not all(map(is_strided, (x, *params))):
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
    return _way_of(chain, x, params, call, apply)(x, *params)


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
    if not isinstance(links, Chain) or not _are_read_directly(x, params):
        return None
    return _way_of(links, x, params, call, apply_node)


def _way_of(
    links: Chain,
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
    apply: Callable[..., Any],
) -> Callable[..., Any]:
    """Return ``f(x, *params)``, the work of :func:`run` for tensors like these as they are."""
    if not (torch.is_grad_enabled() and (x.requires_grad or True in map(_requires_grad, params))):
        needs_grad = (False,) * (1 + len(params))
        return lambda x, *params: run_forward(links, call, x, x.shape, params, needs_grad)[0]
    if links.only_once is not None or _is_single_piece(links, x, params):
        return partial(apply, links, call)
    return lambda x, *params: _run_in_pieces(links, x, params, call, apply)


def _are_read_directly(x: torch.Tensor, params: Sequence[torch.Tensor]) -> bool:
    """Say whether :func:`run` computes from the tensors as they are."""
    return (
        type(x) in PLAIN
        and WEIGHTS.issuperset(map(type, params))
        and are_readable(x, params)
        and not is_under_torch_autocast(x)
        and not is_transform_active()
        and forward_mode_level() < 0
    )


_dtype_of, _requires_grad = attrgetter("dtype"), attrgetter("requires_grad")


def _is_single_piece(links: Chain, x: torch.Tensor, params: Sequence[torch.Tensor]) -> bool:
    """Say whether ``links`` in high precision need one node, and no weight is converted first."""
    is_plain = not links.pieces and PLAIN.issuperset(map(type, params))
    return is_plain and {x.dtype}.issuperset(map(_dtype_of, params))


def _unwrap(
    links: Chain, x: torch.Tensor, params: Sequence[torch.Tensor], call: Call
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
            warn_of_layer(
                first.only_once.owner,
                f"its input is {x}, which it does not cast to: it is dequantized and cast again. "
                f"Quantize it by the layer's recipe, in both orientations for training",
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


def _run_in_pieces(
    links: Chain,
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
    for piece in links.pieces or (links,):
        end = first + sum(link.num_params for link in piece)
        converted = piece.converted(params[first:end], dtype)
        if x.requires_grad or True in map(_requires_grad, converted):
            result = apply(piece, call, x, *converted)
            x, *extra = result if isinstance(result, tuple) else (result, *extra)
        else:
            x = run_forward(piece, call, x, x.shape, converted, (False,) * (1 + len(converted)))[0]
        first, apply = end, apply_node
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
    links: Chain,
    x: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
    transform: str,
) -> torch.Tensor:
    """Run torch's operators instead of ``links``, so that ``transform`` sees each of them."""
    if links.only_once is not None:
        raise links.only_once.error(transform)
    needs_grad = (False,) * (1 + len(params))
    return run_forward(twins(links, x), call, x, x.shape, params, needs_grad)[0]
