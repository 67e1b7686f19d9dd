"""Binding a layer: its shapes become bound links under the active recipe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from fp8core.chain import run as chain
from fp8core.chain.series import Chain, only_once
from fp8core.chain.shape import BindContext, LinkShape, bind_chain
from fp8core.collectives import named
from fp8core.context import recompute, timeline
from fp8core.context.autocast import Active, active, active_before, active_name
from fp8core.context.scopes import touch, warn_of_layer
from fp8core.dispatch import policy, settings
from fp8core.dispatch.table import TrackingResolver
from fp8core.errors import Fp8CoreError, UnsupportedError
from fp8core.modules.agreement import agree
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bound import (
    Bound,
    bind_captured,
    check_rules,
    parts_of,
    reads_names,
    recipe_in,
    refused_in_graph,
)
from fp8core.modules.memo import bind_lock
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole
from fp8core.reporting import log_once
from fp8core.tensors.delayed_state import DelayedState
from fp8core.tensors.quantizer_binding import Binding
from fp8core.tensors.scaling import is_of_two_forwards, offered_scale
from fp8core.torch_ops.capture import in_plain_mode
from fp8core.torch_ops.private import (
    NO_BACKWARD_PASS,
    current_backward_pass,
    is_traced,
    is_transform_active,
)


def is_recompute(layer: LowPrecisionModule, requested: Active) -> bool:
    """Say whether a call of ``layer`` inside backward repeats a forward.

    ``requested`` are the recipes that are active now. The calls of :func:`fp8core.checkpoint` are
    told by their tape instead.

    Raises:
        UnsupportedError: the call repeats a forward that ran, or may have run, under another
            recipe.
    """
    repeated = timeline.recompute()
    if not (torch.is_grad_enabled() or repeated.is_requested):
        return False  # a call of a hook, for an evaluation
    if timeline.is_entered_in_backward():
        return True
    now = (requested.quantize, requested.observe)
    if active_before(repeated, layer.outside_autocast) == {now}:
        return True
    if now == (None, None):
        raise UnsupportedError(
            f"{layer.label} is recomputed in backward outside the autocast it ran in. Use "
            f"fp8core.checkpoint, or enter autocast inside the checkpointed function."
        )
    raise UnsupportedError(
        f"{layer.label} is recomputed in backward under another recipe than it ran with. "
        f"Use fp8core.checkpoint, which keeps the recipe."
    )


def check_scales(layer: LowPrecisionModule, state: DelayedState) -> None:
    """Refuse a recompute whose delayed scales may differ from those of its forward.

    Raises:
        UnsupportedError: the scales of the forward are not known in this backward pass.
    """
    if offered_scale(state) is not None:
        return
    if is_of_two_forwards(state):
        raise UnsupportedError(
            f"{layer.label} is recomputed in a backward pass over two forwards of the model, "
            f"each with delayed scales of its own, and torch does not say which of them it "
            f"repeats. Run backward after each forward, or use fp8core.checkpoint, which keeps "
            f"the scales."
        )
    raise UnsupportedError(
        f"{layer.label} is recomputed in backward under delayed scaling, whose scales have "
        f"moved on since. Use fp8core.checkpoint, which keeps them, or, in a model that "
        f"fp8core.convert gave the recipe, use_reentrant=False."
    )


def bind(
    layer: LowPrecisionModule,
    device: torch.device,
    dtype: torch.dtype,
    *,
    offsets_on_device: bool = False,
    shapes: tuple[LinkShape, ...] | None = None,
    first_gemm: int = 0,
) -> Bound:
    """Return the links of ``layer`` for activations of ``dtype`` under the active recipe.

    ``offsets_on_device``: as in :class:`~fp8core.chain.linear.shape.LinearShape`, for a grouped
    layer. ``shapes``: the chain, where the arguments of a call choose the chain; None for
    the layer's own. ``first_gemm`` is the number of the layer's GEMMs in front of that chain.

    Raises:
        UnsupportedError: a recompute that cannot equal its forward.
    """
    if torch.compiler.is_compiling() or is_traced():
        shapes = shapes or _shapes(layer, offsets_on_device)
        place = (device, dtype, first_gemm, torch.is_grad_enabled())
        return bind_in_graph(layer, graph_key(layer), shapes, policy.current().values(), place)
    requested, tape = active(layer.outside_autocast), recompute.current()
    recipe = requested.quantize if requested.quantize is not None else requested.observe
    is_observing = requested.observe is not None
    is_grad_enabled, is_static = torch.is_grad_enabled(), layer.has_static_scales
    repeats = False
    if tape is None:
        records = is_observing or (is_grad_enabled and not is_static)
        if current_backward_pass() != NO_BACKWARD_PASS:
            repeats = is_recompute(layer, requested)
            records = records and not is_grad_enabled
    else:
        records = not tape.is_repeating and (
            is_observing or (tape.is_grad_enabled and not is_static)
        )
    mode = (is_observing, records, is_grad_enabled, layer.training)
    options = offsets_on_device, shapes, first_gemm
    key = (recipe, device, dtype, policy.current(), mode, *options, layer.shape_values())
    last = layer._bindings.last
    if last is not None and last[0] == key:
        bound: Bound = last[1]
    else:
        bound = _changed(layer, key)
    if bound.states is not None and repeats:
        check_scales(layer, bound.states.forward)
    if bound.states is not None and records:
        if is_transform_active():
            chain.refuse_transform(bound.links)  # before autocast notes a state to update
        if not bound.states.forward.is_faked:
            touch(bound.states.forward, bound.states.backward, requested.group)
    return bound


def _changed(layer: LowPrecisionModule, key: tuple[Any, ...]) -> Bound:
    """Return the links of ``layer`` for ``key``, other ones than those of its last call: ranks that
    compute it together agree on them, or on the change to those that it has run before.

    ``key`` has recipe, device, dtype, policy, mode, the options of :func:`bind`, and the layer's
    ``shape_values``: all that decides.
    """
    recipe, device, dtype, _, mode, offsets_on_device, shapes, first_gemm, values = key
    chain_shapes = shapes or _shapes(layer, offsets_on_device)
    binding = Binding(device, dtype, mode[0])
    bindings = layer._bindings
    agreement, last = bindings.agreement, bindings.last
    if key not in bindings.table and any(shape.process_groups for shape in chain_shapes):
        text = agree(
            layer.label,
            LayerRole(layer.kind, layer.name),
            layer.plan_type,
            recipe,
            binding,
            chain_shapes,
            mode=_mode_text(mode),
            scales=[layer._buffers.get(name) for name in ("scale_fwd", "scale_bwd")],
        )
        agreement.add(key, text, chain_shapes)
    elif last is not None and agreement.covers(key) and agreement.covers(last[0]):
        agreement.change(layer.label, last[0], key)
    with bind_lock:
        if last is not None and last[0][-1] != values:  # as a probability that falls in each step
            bindings.table.clear()
        bound: Bound | None = layer._bindings.table.get(key)
        if bound is None:
            arguments = (layer, recipe, mode, binding, chain_shapes, first_gemm)
            bound = in_plain_mode(partial(_bind, *arguments))
        layer._bindings.table.pop(key, None)  # the last one is that of the last call
        layer._bindings.table[key] = bound
        layer._bindings.last = (key, bound)
        _note_change(layer, recipe, bound)
    return bound


def _mode_text(mode: tuple[bool, bool, bool, bool]) -> str:
    _, _, is_grad_enabled, is_training = mode
    grad = "gradients enabled" if is_grad_enabled else "no gradients"
    return f"{grad}, {'training' if is_training else 'evaluation'}"


def _note_change(layer: LowPrecisionModule, recipe: Recipe | None, bound: Bound) -> None:
    """Log once that the class of a layer's recipe changed from one call to the next.

    A layer that computes in high precision under every recipe, as a rotation, logs nothing.
    """
    inner_recipe = recipe_in(recipe, LayerRole(layer.kind, layer.name))
    if inner_recipe is None or only_once(bound.links) is None:
        return
    kind = type(inner_recipe)
    before, layer._bindings.recipe = layer._bindings.recipe, kind
    kinds = before or kind, kind
    if issubclass(*kinds) or issubclass(*reversed(kinds)):
        return
    names = [kind.__name__ for kind in kinds]
    log_once(
        f"{layer.label}: its recipe changed from {names[0]} to {names[1]}, which may change how "
        f"the model behaves; delayed scales that only one of them has start fresh.",
        about=f"recipe changed from {names[0]} to {names[1]}",
    )


GraphKey: TypeAlias = "tuple[tuple[str | None, str, bool, bool], str, tuple[object, ...]]"


def graph_key(layer: LowPrecisionModule, fields: Sequence[str] = ()) -> GraphKey:
    """Return what decides about ``layer`` in a graph besides its class and its parameters: what
    :func:`~fp8core.modules.calls.bound.bind_captured` takes, the name of the active request, and
    the values of ``fields``.

    torch.compile traces this code, and compares each attribute that is read in each call of the
    graph: the name of a layer is read only if the recipe depends on names.
    """
    active_text = active_name(layer.outside_autocast)
    name, peers = (layer.name, layer.peers) if reads_names(active_text) else (None, "")
    is_compiled = torch.compiler.is_dynamo_compiling()
    is_watched = layer._bindings.watch is not None
    _ = layer.forward  # compared, too: one may be set on the object
    values = tuple([getattr(layer, field) for field in fields])
    return (name, peers, is_compiled, is_watched), active_text, values


def bind_in_graph(
    layer: LowPrecisionModule,
    key: GraphKey,
    shapes: Sequence[LinkShape],
    backends: policy.Values,
    place: tuple[torch.device, torch.dtype, int, bool],
) -> Bound:
    """Return the links of ``layer`` in a graph, where it also gets its delayed state; ``place`` as
    of :func:`~fp8core.modules.calls.bound.bind_captured`."""
    described, active_text, _ = key
    values = tuple([shape.values() for shape in shapes])
    kind = layer.kind, type(layer).__name__
    bound: Bound = bind_captured((*kind, *described), values, active_text, backends, place)
    if bound.number is not None:
        refused = layer.state_in_graph(bound.number, described[2])
        return refused_in_graph(refused) if refused else bound
    return bound


def _shapes(layer: LowPrecisionModule, offsets_on_device: bool) -> tuple[LinkShape, ...]:
    shapes = layer.link_shapes()
    if not offsets_on_device:
        return shapes
    return tuple(shape.with_offsets_on_device() for shape in shapes)


def _bind(
    layer: LowPrecisionModule,
    recipe: Recipe | None,
    mode: tuple[bool, bool, bool, bool],
    binding: Binding,
    shapes: tuple[LinkShape, ...],
    first_gemm: int,
) -> Bound:
    """Bind ``shapes``; after an error the layer has the delayed state from before the call."""
    check_rules(recipe, layer.peers)
    before = layer.delayed_snapshot()
    try:
        role = LayerRole(layer.kind, layer.name)
        plan = plan_of(layer.plan_type, recipe, role, binding.activation_dtype)
        states = None
        if binding.is_observing and plan.delayed is None:
            recipe_name = type(recipe).__name__
            text = f"calibrating records nothing, as {recipe_name} has no delayed scales"
            warn_of_layer(layer.label, text)
        if plan.delayed is not None and layer.count_slot_sets():
            _, records_forward, records_backward, _ = mode
            states = layer.delayed_states(
                recipe, plan, records=records_forward, device=binding.device
            )
            states = dataclasses.replace(
                states, records_forward=records_forward, records_backward=records_backward
            )
        watch, count = layer._bindings.watch, None
        if not plan.is_high_precision and not binding.is_observing:
            count = layer._bindings.nonfinite_of(binding.device, is_training=mode[2])
        resolver = TrackingResolver(binding.resolver)
        binding = binding._replace(resolver=resolver)
        context = BindContext.of(plan, binding, layer.label, states, watch, count)
        context = context._replace(first_gemm=first_gemm)
        links = bind_chain(shapes, context)
        if states is not None:
            for name in dict.fromkeys(shape.shares_scales_over for shape in shapes):
                if name is not None:
                    states.spread_over(named(name))
    except BaseException as error:
        layer.restore_delayed(before)
        if not isinstance(error, Fp8CoreError):
            raise
        raise type(error)(f"{layer.label}: {error}") from None
    if count is None and resolver.has_casts and binding.device.type != "meta":
        layer._bindings.has_uncounted = True
    needs_rng = any(link.needs_rng for link in links)
    # In debug mode each operation checks its results on every run, which no recording would.
    recorder = None if settings.read().debug else resolver.recorder
    parts = tuple(Chain(part, recorder) for part in parts_of(shapes, links))
    return Bound(parts, links, plan, states, recipe, needs_rng)
