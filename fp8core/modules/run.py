"""How a layer runs its links: as in the call before, or anew, or as a checkpoint's forward did."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from fp8core.chain import run as chain
from fp8core.chain.arranged import Arranged
from fp8core.chain.call import Call
from fp8core.chain.delayed_wgrad import DelayedCall
from fp8core.chain.shape import LinkShape
from fp8core.context import recompute
from fp8core.context.autocast import Active, active
from fp8core.context.scopes import touch
from fp8core.dispatch import policy
from fp8core.dispatch.policy import Policy
from fp8core.modules.bindings import Repeat
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import bind
from fp8core.modules.calls.bound import Bound, new_seed
from fp8core.modules.calls.inputs import check_input
from fp8core.tensors.delayed_state import BUFFERS
from fp8core.tensors.scaling import offered_scale
from fp8core.torch_ops.private import (
    NO_BACKWARD_PASS,
    current_backward_pass,
    forward_mode_level,
    is_traced,
    is_transform_active,
)

__all__ = [
    *("delaying", "is_ordinary_call", "is_remembered", "remember", "remember_call", "run_again"),
    *("run_joined", "run_layer", "run_links", "run_links_by"),
]

_Result = TypeVar("_Result")


def run_layer(
    layer: LowPrecisionModule,
    input: torch.Tensor,
    params: Sequence[torch.Tensor],
    first_microbatch: bool | None = None,
    *,
    like: torch.Tensor | None,
    columns: int | None,
    num_inner: int = 0,
    shapes: tuple[LinkShape, ...] | None = None,
) -> list[torch.Tensor]:
    """Run ``layer`` with ``params`` on ``input [..., columns]``.

    Where ``columns`` is None a tensor of no dimension is one of one element.
    Returns the output, and a value that leaves the chain within, if one does: ``num_inner`` of the
    parameters belong to the links before it. The input is compared with the parameter ``like``, see
    :func:`~fp8core.modules.calls.inputs.check_input`. ``shapes``: the chain of a call whose
    arguments decide about it, with the parameters of the layer's; None: the layer's own.
    """
    if columns is None and isinstance(input, torch.Tensor) and not input.dim():
        like_one = run_layer(layer, input.reshape(1), params, like=like, columns=None)
        return [output.reshape(()) for output in like_one]
    may_repeat = first_microbatch is None and shapes is None and not torch.compiler.is_compiling()
    if may_repeat:
        output = run_again(layer, input, params)
        if output is not None:
            return [output]
    dtype = check_input(layer, input, like, columns)
    if shapes is None:
        bound = bind(layer, input.device, dtype)
    else:
        bound = bind(layer, input.device, dtype, shapes=shapes)
    converted = input if input.dtype == dtype else input.to(dtype)
    call, parts = bound.call(first_microbatch), bound.parts
    if layer.wgrad_queue is not None:
        delayed = DelayedCall(layer.wgrad_queue)
        call, params = delaying(layer.link_shapes(), delayed, call, params)
    if len(parts) == 2:
        inner = run_links(layer, bound, parts[0], converted, params[:num_inner], call)
        return [run_links(layer, bound, parts[1], inner, params[num_inner:], call), inner]
    output = run_links(layer, bound, parts[0], converted, params, call)
    if may_repeat and layer.wgrad_queue is None and converted is input:
        remember_call(layer, bound, input, params, call)
    return [output]


def delaying(
    shapes: Sequence[LinkShape], delayed: DelayedCall, call: Call, params: Sequence[torch.Tensor]
) -> tuple[Call, Sequence[torch.Tensor]]:
    """Return ``call`` and ``params`` of a chain of ``shapes`` whose weight gradients ``delayed``
    takes."""
    given, first = list(params), 0
    for shape in shapes:
        if shape.delays_wgrad:
            for at in range(first, first + shape.num_weights):
                given[at] = delayed.stand_in(params[at])
        first += shape.num_params
    return call._replace(delayed_wgrads=delayed), given


def remember_call(
    layer: LowPrecisionModule,
    bound: Bound,
    input: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
    arguments: tuple[object, ...] = (),
) -> None:
    """Keep what ``call``, which has just run, does with these tensors, if it computes from them as
    they are. Where it brought a seed, each call like it draws one, whether gradients need it or
    not: a recompute has to draw as often as its forward.

    ``arguments`` are those of :func:`remember`.
    """
    links, store = bound.parts[0], layer._bindings.weights
    if store.scope is not None:
        origins = partial(_origins_of, weakref.ref(layer))  # what it remembers keeps no layer alive
        call = call._replace(keeping=store.keeping(None, origins))
    prepared = chain.prepared(links, input, params, call)
    if prepared is None:
        return
    if call.rng is not None:
        prepared = prepared._replace(run=partial(_run_with_new_seed, links, call))
    remember(layer, bound, prepared, len(params), arguments)


def _run_with_new_seed(
    links: chain.Links, call: Call, input: torch.Tensor, *params: torch.Tensor
) -> torch.Tensor:
    return chain.run(links, input, params, call._replace(rng=new_seed()))


def remember(
    layer: LowPrecisionModule,
    bound: Bound,
    prepared: chain.Prepared,
    num_params: int,
    arguments: tuple[object, ...] = (),
) -> None:
    """Keep what the call that has just run does, for calls like it, unless it repeats another.

    ``arguments`` are plain values that a call has besides ``num_params`` tensors and its input.
    """
    if recompute.current() is not None or recompute.is_in_backward():
        return
    asked, is_grad_enabled = active(layer.outside_autocast), torch.is_grad_enabled()
    states = None
    if bound.states is not None and (asked.observe is not None or is_grad_enabled):
        states = bound.states.forward, bound.states.backward
    layer._bindings.repeat = Repeat(
        arguments,
        *prepared,
        num_params,
        (asked, policy.current()),
        (is_grad_enabled, layer.training),
        states,
        layer._bindings.weights.scope,
    )


def is_ordinary_call(asked: Active, before: tuple[Active, Policy], has_grad: bool) -> bool:
    """Say whether a call that is asked for ``asked`` is like one of before in all that surrounds
    it, and no transform, trace or recompute sees it."""
    asked_before, backends = before
    policy_now = policy.current()
    return (
        asked is asked_before
        and (policy_now is backends or policy_now == backends)
        and recompute.current() is None
        and current_backward_pass() == NO_BACKWARD_PASS
        and torch.is_grad_enabled() is has_grad
        and not is_transform_active()
        and not is_traced()
        and forward_mode_level() < 0
    )


def is_remembered(
    before: Sequence[LowPrecisionModule], lasts: Sequence[object], now: Sequence[LowPrecisionModule]
) -> bool:
    """Say whether ``now`` are the layers of ``before``, and each is bound as it was: to ``lasts``,
    the keys and links of their bindings."""
    for layer, last, one in zip(before, lasts, now, strict=True):
        if one is not layer or one._bindings.last is not last:
            return False
    return True


def run_again(
    layer: LowPrecisionModule,
    input: torch.Tensor,
    params: Sequence[torch.Tensor],
    arguments: tuple[object, ...] = (),
) -> torch.Tensor | None:
    """Run the layer as in the call that it remembers, or return None if this one is another.

    Whatever a call depends on is compared: here, or in ``is_like`` at once.
    """
    bindings = layer._bindings
    repeat = bindings.repeat
    if repeat is None or repeat[0] != arguments:
        return None
    _, is_like, address, run, num_params, before, (has_grad, is_training), states, scope = repeat
    asked = active(layer.outside_autocast)
    if (
        not is_ordinary_call(asked, before, has_grad)
        or layer.training is not is_training
        or bindings.weights.scope is not scope
        or len(params) != num_params
        or not is_like(input, *params)
        or not input.data_ptr()
        or not all(map(address, params))
    ):
        return None
    if states is not None:
        touch(*states, asked.group)
    return run(input, *params)


def run_links(
    layer: LowPrecisionModule,
    bound: Bound,
    links: chain.Links,
    input: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
) -> torch.Tensor:
    """Run some of the links of ``layer``, or repeat exactly what a checkpoint's forward ran.

    ``links`` is one of ``bound.parts``. A graph that torch captures has no tape.
    """
    return run_links_by(layer, bound, links, input, params, call, run=chain.run)


def run_links_by(
    layer: LowPrecisionModule,
    bound: Bound,
    links: chain.Links,
    input: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
    *,
    run: Callable[..., _Result],
) -> _Result:
    """Return what ``run`` does, a function like :func:`fp8core.chain.run.run`, as in
    :func:`run_links`."""
    if isinstance(links, int):
        return run(links, input, params, call)
    first, store, tape = call.first_microbatch, layer._bindings.weights, recompute.current()
    if first is not None or store.scope is not None:
        call = call._replace(keeping=store.keeping(first, partial(_weight_origins, layer)))
    if tape is None:
        if bound.states is None or not recompute.is_in_backward():
            return run(links, input, params, call)
        with recompute.scale_of(bound.states.forward, offered_scale(bound.states.forward)):
            return run(links, input, params, call)
    state = None if bound.states is None else bound.states.forward
    key = (bound.recipe, input.device, input.dtype, policy.current())
    entry = tape.visit(layer.label, key, layer, state, first)
    if not tape.is_repeating:
        if first is not None and tape.is_grad_enabled and call.keeping is not None:
            call = call._replace(keeping=call.keeping._replace(used=entry.weights))
        return run(links, input, params, call)
    keeping = store.keeping(entry.first_microbatch, partial(_weight_origins, layer))
    if keeping is not None and entry.weights:
        keeping = keeping._replace(used=entry.weights)
    call = call._replace(backward_pass=tape.backward_pass, keeping=keeping)
    with recompute.scale_of(state, entry.scale):
        return run(links, input, params, call)


def run_joined(
    layers: Sequence[tuple[LowPrecisionModule, Bound]],
    links: Arranged,
    input: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
) -> torch.Tensor:
    """Run the ``links`` of several layers as one chain, or repeat what a checkpoint's forward ran.

    Each layer is recorded and repeated as if it ran alone.
    """
    tape = recompute.current()
    with contextlib.ExitStack() as scales:
        for layer, bound in layers:
            state, scale = None if bound.states is None else bound.states.forward, None
            if tape is not None:
                key = (bound.recipe, input.device, input.dtype, policy.current())
                entry = tape.visit(layer.label, key, layer, state, None)
                scale = entry.scale if tape.is_repeating else None
            elif state is not None and recompute.is_in_backward():
                scale = offered_scale(state)
            scales.enter_context(recompute.scale_of(state, scale))
        if tape is not None and tape.is_repeating:
            call = call._replace(backward_pass=tape.backward_pass)
        return chain.run(links, input, params, call)


def _weight_origins(layer: LowPrecisionModule) -> list[torch.Tensor]:
    """Return the tensors that a weight may be computed from in each forward, as by a
    parametrization: the layer's parameters, and its buffers but for delayed scales."""
    buffers = (buffer for name, buffer in layer.named_buffers() if name not in BUFFERS)
    return [*layer.parameters(), *buffers]


def _origins_of(layer: weakref.ref[LowPrecisionModule]) -> list[torch.Tensor]:
    running = layer()
    assert running is not None
    return _weight_origins(running)
