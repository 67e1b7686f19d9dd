"""How a layer runs its links: as its memo has it, or anew, or as a checkpoint's forward did."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fp8core.chain import run as chain
from fp8core.chain.call import Call
from fp8core.chain.delayed_wgrad import DelayedCall
from fp8core.chain.series import Chain
from fp8core.chain.shape import LinkShape
from fp8core.context import recompute
from fp8core.context.scopes import computed_in_graph, phase_in_graph
from fp8core.dispatch import policy
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import bind
from fp8core.modules.calls.bound import Bound, new_seed
from fp8core.modules.calls.inputs import check_input
from fp8core.modules.memo import memo_of, replay, sources_of
from fp8core.tensors.delayed_state import BUFFERS, STATE_BUFFERS
from fp8core.tensors.scaling import offered_scale


def run_layer(
    layer: LowPrecisionModule,
    input: torch.Tensor,
    first_microbatch: bool | None = None,
    *,
    columns: int | None,
    num_inner: int = 0,
    shapes: tuple[LinkShape, ...] | None = None,
    params: Sequence[torch.Tensor] | None = None,
    like: torch.Tensor | None = None,
    prepare: Callable[[torch.Tensor, torch.dtype], tuple[Bound, Call]] | None = None,
    arguments: object = (),
) -> list[torch.Tensor]:
    """Run ``layer`` on ``input [..., columns]``.

    Where ``columns`` is None a tensor of no dimension is one of one element.
    Returns the output, and a value that leaves the chain within, if one does: ``num_inner`` of the
    parameters belong to the links before it. ``shapes``: the chain of a call whose arguments decide
    about it, with the parameters of the layer's; None: the layer's own. ``params`` None: the
    layer's own, whose number ``num_inner`` is compared with the input; those that a call brings are
    compared by ``like``, see :func:`~fp8core.modules.calls.inputs.check_input`. ``prepare`` binds
    the layer for an input of that dtype whose call has more ``arguments``, as of a
    :class:`~fp8core.modules.memo.Memo`; None: no other call is like this one.
    """
    if columns is None and isinstance(input, torch.Tensor) and not input.dim():
        flat = run_layer(layer, input.reshape(1), columns=None, params=params, like=like)
        return [output.reshape(()) for output in flat]
    may_replay = first_microbatch is None and shapes is None and arguments is not None
    may_replay = may_replay and not torch.compiler.is_compiling()
    memo, brings = layer._bindings.memo if may_replay else None, params is not None
    if memo is not None:
        if params is None and memo.sources is None:
            params = layer.link_params()  # once in a call, as a parametrization may draw numbers
        output = replay(layer, memo, input, params, arguments)
        if output is not None:
            return [output]
    if params is None:
        params = layer.link_params()
    if not brings:
        like = params[num_inner]
    dtype = check_input(layer, input, like, columns)
    if prepare is not None:
        bound, call = prepare(input, dtype)
    else:
        bound = bind(layer, input.device, dtype, shapes=shapes)
        call = bound.call(first_microbatch)
    converted, parts = input if input.dtype == dtype else input.to(dtype), bound.parts
    if layer.wgrad_queue is not None:
        delayed = DelayedCall(layer.wgrad_queue)
        call, params = delaying(layer.link_shapes(), delayed, call, params)
    if len(parts) == 2:
        inner = run_links(layer, bound, parts[0], converted, params[:num_inner], call)
        return [run_links(layer, bound, parts[1], inner, params[num_inner:], call), inner]
    output = run_links(layer, bound, parts[0], converted, params, call)
    if may_replay and layer.wgrad_queue is None and converted is input:
        shape = None if prepare is None else input.shape
        note_call(layer, bound, input, params, call, brings, arguments=arguments, shape=shape)
    return [output]


def delaying(
    shapes: Sequence[LinkShape], delayed: DelayedCall, call: Call, params: Sequence[torch.Tensor]
) -> tuple[Call, Sequence[torch.Tensor]]:
    """Return ``call`` and ``params`` of a chain of ``shapes`` whose weight gradients ``delayed``
    takes."""
    stand_ins, first = list(params), 0
    for shape in shapes:
        if shape.delays_wgrad:
            for at in range(first, first + shape.num_weights):
                stand_ins[at] = delayed.stand_in(params[at])
        first += shape.num_params
    return call._replace(delayed_wgrads=delayed), stand_ins


def note_call(
    layer: LowPrecisionModule,
    bound: Bound,
    input: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
    brings_params: bool,
    **attributes: Any,
) -> None:
    """Note what ``call``, which has just run, does with these tensors, if it computes from them as
    they are. Where it brought a seed, each call like it draws one, whether gradients need it or
    not: a recompute has to draw as often as its forward.

    ``attributes`` as of :func:`~fp8core.modules.memo.memo_of`.
    """
    links, store = bound.parts[0], layer._bindings.weights
    if store.scope is not None:
        origins = partial(_weight_origins, weakref.ref(layer))
        call = call._replace(keeping=store.keeping(None, origins))
    prepared = chain.prepared(links, input, params, call)
    if prepared is None:
        return
    if call.rng is not None:
        prepared = prepared._replace(run=partial(_run_with_new_seed, links, call))
    sources = None if brings_params else sources_of((layer,))
    is_new = note(layer, bound, prepared, len(params), sources=sources, **attributes)
    if is_new and layer.siblings is not None:
        layer.siblings.note(layer, bound, input, params, call)


def _run_with_new_seed(
    links: chain.Links, call: Call, input: torch.Tensor, *params: torch.Tensor
) -> torch.Tensor:
    return chain.run(links, input, params, call._replace(rng=new_seed()))


def note(
    layer: LowPrecisionModule,
    bound: Bound,
    prepared: chain.Prepared,
    num_params: int,
    **attributes: Any,
) -> bool:
    """Keep the memo of the call of ``layer`` that has just run, unless it repeated another, and
    return whether it did not; ``attributes`` as of :func:`~fp8core.modules.memo.memo_of`."""
    outside, states = layer.outside_autocast, (bound.states,)
    memo = memo_of((layer,), outside, prepared, num_params, states, **attributes)
    if memo is not None:
        layer._bindings.memo = memo
    return memo is not None


def run_links(
    layer: LowPrecisionModule,
    bound: Bound,
    links: chain.Links,
    input: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
    *,
    run: Callable[..., Any] = chain.run,
) -> Any:
    """Run some of the links of ``layer``, or repeat exactly what a checkpoint's forward ran.

    ``links`` is one of ``bound.parts``, and ``run`` a function like :func:`fp8core.chain.run.run`,
    whose result is returned. A graph that torch captures has no tape.
    """
    if isinstance(links, int):
        stateful = [layer] if bound.number is not None else []
        return run_in_graph(stateful, links, input, params, call, run=run)
    first, store, tape = call.first_microbatch, layer._bindings.weights, recompute.current()
    if first is not None or store.scope is not None:
        call = call._replace(
            keeping=store.keeping(first, partial(_weight_origins, weakref.ref(layer)))
        )
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
    origins = partial(_weight_origins, weakref.ref(layer))
    keeping = store.keeping(entry.first_microbatch, origins)
    if keeping is not None and entry.weights:
        keeping = keeping._replace(used=entry.weights)
    call = call._replace(backward_pass=tape.backward_pass, keeping=keeping)
    with recompute.scale_of(state, entry.scale):
        return run(links, input, params, call)


def run_in_graph(
    stateful: Sequence[LowPrecisionModule],
    number: int,
    input: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
    *,
    run: Callable[..., Any] = chain.run,
) -> Any:
    """Run the links of that ``number``, which read the delayed states of the layers ``stateful``,
    while torch captures; ``run`` as of :func:`run_links`."""
    if stateful:
        buffers: Any = [layer._buffers[name] for layer in stateful for name in STATE_BUFFERS]
        phase = phase_in_graph() if torch.is_grad_enabled() else call.phase
        call = call._replace(buffers=buffers, phase=phase)
    result = run(number, input, params, call)
    if call.phase != "forward":
        computed_in_graph(result if isinstance(result, torch.Tensor) else result[0])
    return result


def run_joined(
    layers: Sequence[tuple[LowPrecisionModule, Bound]],
    links: Chain,
    input: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
) -> torch.Tensor:
    """Run the ``links`` of several layers as one chain, or repeat what a checkpoint's forward ran.

    Each layer is recorded and repeated as if it ran alone.
    """
    run: Callable[..., Any] = chain.run
    for layer, bound in reversed(layers):
        run = partial(run_links, layer, bound, run=run)
    output: torch.Tensor = run(links, input, params, call)
    return output


def _weight_origins(layer: weakref.ref[LowPrecisionModule]) -> list[torch.Tensor]:
    """Return the tensors that a weight may be computed from in each forward, as by a
    parametrization: the layer's parameters, and its buffers but for delayed scales. ``layer`` is
    not kept alive by a memo."""
    running = layer()
    assert running is not None
    buffers = (buffer for name, buffer in running.named_buffers() if name not in BUFFERS)
    return [*running.parameters(), *buffers]
