"""Layers of a module of another library as one chain, with links of the library between them.

Each layer is bound by itself, with its own recipe, scales and name, so that a linear computes in
the chain what it computes alone. A norm is bound again for its neighbour, and so is a linear behind
an activation; linears of one input are siblings, and activations and sums are links that no layer
has.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch

from fp8core.chain import run as chain
from fp8core.chain.activation import GatedShape
from fp8core.chain.alone import is_transformed, records
from fp8core.chain.call import DENSE
from fp8core.chain.linear.program import LinearLink, saving_input
from fp8core.chain.linear.siblings import siblings
from fp8core.chain.node import is_under_torch_autocast
from fp8core.chain.packed_attention import PackedAttentionShape
from fp8core.chain.protocol import Link
from fp8core.chain.residual import ResidualLink
from fp8core.chain.series import Chain
from fp8core.chain.shape import BindContext, LinkShape, Neighbour, bind_chain
from fp8core.chain.unwrap import PLAIN, WEIGHTS, stored_in_graph
from fp8core.context.autocast import active
from fp8core.dispatch import policy, table
from fp8core.dispatch.table import TrackingResolver
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import GraphKey, bind, bind_in_graph, graph_key
from fp8core.modules.calls.bound import Bound, captured_bound
from fp8core.modules.composition import is_seen
from fp8core.modules.memo import Memo, memo_of, replay
from fp8core.modules.run import run_in_graph, run_joined
from fp8core.modules.state.in_graph import Followers, follow_amax
from fp8core.recipe.plan import HIGH_PRECISION
from fp8core.tensors.delayed_state import STATE_BUFFERS, begin_all
from fp8core.tensors.quantizer_binding import Binding
from fp8core.torch_ops.capture import constant_in_graph
from fp8core.torch_ops.private import copy_all, is_exporting, is_traced

Part: TypeAlias = "LowPrecisionModule | tuple[LowPrecisionModule, ...] | LinkShape | list[Any]"
"""A layer of one link, siblings, a link without a layer, or the parts of a branch that is added to
its input. A shape with a parameter takes that from the call."""

_MOST_CHAINS = 16


class Splice:
    """The chain of ``parts`` within one module; a copy starts without what the last calls left.

    ``blocks`` are that module and those between it and the layers; of all but the first nobody may
    want to see a call. Other modules than these in them, or modules of another class, as a
    parametrization or an adapter makes, run by themselves.

    With a :class:`PackedAttentionShape` among the parts it runs where one backend attends and
    records runs, which are repeated in one call each way. Its angles are those of a call's tokens.
    """

    def __init__(self, parts: Sequence[Part], blocks: Sequence[torch.nn.Module]) -> None:
        self.parts, self.blocks = parts, blocks
        self._inside = [dict(block._modules) for block in blocks]
        layers = {layer: None for layer, _ in _names_of(parts) if layer is not None}
        self.layers: list[LowPrecisionModule] = [*layers]
        self._names = self._names_now()
        self._forget()

    def _forget(self) -> None:
        """Begin without chains, and without a call to replay."""
        self._kinds = self._kinds_now()
        self.attention = _attention_in(self.parts)
        self.text = repr((_shown(self.parts), self.places("")))
        self._memo: Memo | None = None
        self._followers: _Followers = ([], [])
        # By the addresses of what the layers are bound to, which is held beside the chain.
        self._chains: dict[tuple[object, ...], tuple[Chain | None, _Followers, Any]] = {}

    def _names_now(self) -> tuple[tuple[int | None, str | None], ...]:
        """Return the number of the layer and the name of each parameter."""
        places: dict[Any, int] = {layer: at for at, layer in enumerate(self.layers)}
        return tuple((places.get(layer), name) for layer, name in _names_of(self.parts))

    def _is_changed(self) -> bool:
        """Return whether classes of layers, or their parameters, as a bias, are others by now."""
        return self._kinds_now() != self._kinds or self._names_now() != self._names

    def _kinds_now(self) -> list[type]:
        """Return the classes of the layers and of all within the module, any of which may compute
        otherwise by now."""
        return [*map(type, self.layers), *map(type, self.blocks[1:])]

    def __getstate__(self) -> dict[str, Any]:
        names = ("parts", "blocks", "layers", "_names", "_inside")
        return {name: vars(self)[name] for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def run(self, x: torch.Tensor, *brought: torch.Tensor) -> torch.Tensor | None:
        """Return the chain's output for ``x``; ``brought`` are the tensors that its shapes take.
        None if one of its layers has to run by itself in this call."""
        if torch.compiler.is_compiling():
            return self._run_in_graph(x, brought)
        output, memo = None, self._memo
        if memo is None and self._is_changed():
            return None
        try:
            params = _params(self.layers, self._names, brought)
        except KeyError:  # a view of a flat parameter, for one
            return None
        if memo is not None:  # which compares classes too
            output = replay(self.blocks[0], memo, x, params)
        if output is None:
            self._memo, self._followers = None, ([], [])
            if memo is not None and self._is_changed():
                return None
            output = self._run_anew(x, params, brought)
        sources, targets = self._followers
        if output is not None and targets:
            copy_all(targets, sources)
        return output

    def may_attend(self, x: torch.Tensor) -> bool:
        """Return whether attention of this chain may run for ``x``, see the class."""
        if torch.compiler.is_compiling():
            return self.may_attend_in_graph(x.device, x.dtype, policy.current().values())
        if self._memo is not None:
            return True
        attention = self.attention
        return attention is not None and records(attention.attention.desc(x.dtype), x.device)

    def _run_in_graph(
        self, x: torch.Tensor, brought: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        """Return what :meth:`run` does, in a graph that torch.compile traces."""
        attention, backends = self.attention, policy.current().values()
        if type(x) is not torch.Tensor or not self.is_whole_in_graph():
            return None
        if attention is not None and not self.may_attend(x):
            return None
        if torch.is_autocast_enabled(x.device.type):
            return None
        blocks, places, names, fields = self.blocks, *self.places(self.text)
        for block, inside in zip(blocks, self._inside, strict=True):  # guards the modules
            if any([block._modules[name] is not module for name, module in inside.items()]):
                return None
        layers: list[Any] = [blocks[at]._modules[name] for at, name in places]
        params = _params(layers, names, brought)
        unlike = [] if attention is None else brought  # angles
        if any([p.dtype != x.dtype and all([p is not a for a in unlike]) for p in params]):
            return None
        keys: Any = tuple([graph_key(layers[at], names) for at, names in enumerate(fields)])
        place = (x.device, x.dtype, 0, torch.is_grad_enabled())
        numbers = self.captured(self.text, keys, backends, place)
        if not numbers:
            return None
        stateful = [layers[at] for at in numbers[1:]]
        call = DENSE._replace(stored=self.stored_in_graph())
        output: torch.Tensor = run_in_graph(stateful, numbers[0], x, params, call)
        return output

    def is_whole_in_graph(self) -> bool:
        """Return whether nobody has to see a call of one of the layers, while torch traces."""
        named = [(self.layers[at], name) for at, name in self._names if name is not None]  # type: ignore[index]  # a shape's have no name
        has_all = all(name in layer._parameters for layer, name in named)
        return has_all and not self._is_changed() and not self._is_seen()

    def places(self, text: str) -> tuple[tuple[Any, ...], ...]:
        """Return where the layers lie, by the numbers of blocks and names in them, the names of
        their parameters, and those of what may be set of their shapes; constant in a graph, which
        is guarded by ``text``."""
        inside = enumerate(self._inside)
        places = {module: (at, name) for at, names in inside for name, module in names.items()}
        fields = tuple(layer.shape_fields for layer in self.layers)
        return tuple(map(places.__getitem__, self.layers)), self._names, fields

    def stored_in_graph(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """Return how a graph takes the parameters apart, which guard it."""
        if is_exporting() or any(at is not None and name is None for at, name in self._names):
            return ()  # a program has the parameters themselves; a layer computes its own
        params = [None if at is None else self.layers[at]._parameters[n] for at, n in self._names]  # type: ignore[index]  # it has a name
        return tuple(map(stored_in_graph, params))

    def may_attend_in_graph(
        self, device: torch.device, dtype: torch.dtype, backends: policy.Values
    ) -> bool:
        """Return what :meth:`may_attend` does for tensors of a graph; sequences of any length share
        one if angles say how long they are."""
        attention = self.attention
        if attention is None or attention.rotation is None:
            return False
        with policy.activated(policy.Policy(*backends)), table.in_eager():
            return records(attention.attention.desc(dtype), device)

    def captured(
        self,
        text: str,
        keys: Sequence[GraphKey],
        backends: policy.Values,
        place: tuple[torch.device, torch.dtype, int, bool],
    ) -> tuple[int, ...]:
        """Return the number of the chain in a graph, then those of the layers with delayed states;
        nothing if one of the layers has to run by itself. The graph is guarded by the arguments, by
        ``text`` for the parts, and by the parameters."""
        device, dtype, *_ = place
        bounds = [
            bind_in_graph(layer, key, layer.link_shapes(), backends, place)
            for layer, key in zip(self.layers, keys, strict=True)
        ]
        numbers: Any = [bound.parts[0] for bound in bounds]
        linears = [link for bound in bounds for link in bound.linears]
        is_low = all(type(link) is LinearLink and link.only_once is not None for link in linears)
        has_all = all([bound.links for bound in bounds])
        if not (is_low and has_all) or any([link.needs_rng for link in linears]):
            return ()
        stateful = [at for at, bound in enumerate(bounds) if bound.number is not None]
        unread = [None] * (len(stateful) * len(STATE_BUFFERS))
        bounds = _bound_in_graph(numbers, unread, "forward")
        links = self.links_in_graph(bounds, device, dtype, backends)
        if links is None or not stateful:
            return () if links is None else (chain.capture(Chain(links)),)
        order = {self.layers[at]: number for number, at in enumerate(stateful)}
        groups: list[Followers] = []
        by_layer = dict(zip(self.layers, bounds, strict=True))
        for layers in _siblings(self.parts):
            states = by_layer[layers[0]].states
            if states is not None and states.records_forward:
                entry = states.slot("input").entries.start  # type: ignore[attr-defined]  # of a graph
                groups.append(([order[layer] for layer in layers], entry))
        again = partial(_links_again, weakref.ref(self), numbers, (device, dtype, backends))
        after = partial(follow_amax, groups=groups)
        return chain.capture(chain.Stateful(again, after)), *stateful

    def links_in_graph(
        self,
        bounds: Sequence[Bound],
        device: torch.device,
        dtype: torch.dtype,
        backends: policy.Values,
    ) -> tuple[Link, ...] | None:
        """Return the links of all parts in a graph, whose layers are bound so, as of
        :func:`_links`; the others dispatch by the policy ``backends``."""
        by_layer = dict(zip(self.layers, bounds, strict=True))
        if bounds[0].linears:  # what comes into a chain is saved by who has computed it
            alone = tuple(saving_input(link) for link in bounds[0].links)
            by_layer[self.layers[0]] = bounds[0]._replace(links=alone)
        context = _context(by_layer, Binding(device, dtype), self.layers[0].label)
        with policy.activated(policy.Policy(*backends)), table.capturing():
            return _links(self.parts, by_layer, context)

    constant_in_graph(is_whole_in_graph)
    constant_in_graph(places)
    constant_in_graph(stored_in_graph)
    constant_in_graph(may_attend_in_graph)
    constant_in_graph(captured)

    def _run_anew(
        self, x: torch.Tensor, params: list[Any], brought: Sequence[torch.Tensor]
    ) -> torch.Tensor | None:
        attention, weights = self.attention, params
        tokens: tuple[int, ...] = ()
        if attention is not None:
            if not self.may_attend(x):
                return None
            tokens, angles = attention.of(tuple(x.shape[:-1])).tokens, {*map(id, brought)}
            weights = [each for each in params if id(each) not in angles]
        if self._is_cut(x, weights):
            return None
        bounds = {layer: bind(layer, x.device, x.dtype) for layer in self.layers}
        key = *map(id, bounds.values()), tokens
        if key not in self._chains:
            if len(self._chains) >= _MOST_CHAINS:
                self._chains.pop(next(iter(self._chains)))
            self._chains[key] = *self._chain(bounds, x), bounds
        links, followers, _ = self._chains[key]
        if links is None:
            return None
        output = run_joined([*bounds.items()], links, x, params, DENSE)
        self._followers = followers
        prepared = chain.prepared(links, x, params)
        if prepared is not None:
            outside, states = self.layers[0].outside_autocast, [b.states for b in bounds.values()]
            modules = (*self.blocks, *self.layers)
            shape = x.shape if tokens else None
            self._memo = memo_of(modules, outside, prepared, len(params), states, shape=shape)
        return output

    def _is_cut(self, x: torch.Tensor, params: Sequence[Any]) -> bool:
        """Whether a layer's own call has to be seen, or takes other tensors than these."""
        first = self.layers[0]
        if active(first.outside_autocast).observe is not None or is_traced() or is_transformed():
            return True
        tensors = (x, *params)
        if type(x) not in PLAIN or not x.numel() or is_under_torch_autocast(x):
            return True
        if not WEIGHTS.issuperset(map(type, params)):
            return True
        if any([each.dtype != x.dtype or each.device != x.device for each in tensors]):
            return True
        return self._is_seen()

    def _is_seen(self) -> bool:
        """Whether a layer's own call has to be seen, or the layers are others by now."""
        first = self.layers[0]
        for layer in self.layers:
            bindings = layer._bindings
            is_watched = bindings.watch is not None or bindings.weights.scope is not None
            is_apart = layer.outside_autocast is not first.outside_autocast
            if is_watched or is_apart or layer.local_part is not None:
                return True
        pairs = zip(self.blocks, self._inside, strict=True)
        is_changed = any([block._modules != inside for block, inside in pairs])
        return is_changed or any(map(is_seen, (*self.blocks[1:], *self.layers)))

    def _chain(
        self, bounds: dict[LowPrecisionModule, Bound], x: torch.Tensor
    ) -> tuple[Chain | None, _Followers]:
        """Return the links of all parts, None if layers bound so have to run by themselves."""
        linears = [link for bound in bounds.values() for link in bound.linears]
        is_low = all(type(link) is LinearLink and link.only_once is not None for link in linears)
        if not is_low or any([bound.needs_rng for bound in bounds.values()]):
            return None, ([], [])
        resolver = TrackingResolver(Binding(x.device, x.dtype).resolver)
        binding = Binding(x.device, x.dtype)._replace(resolver=resolver)
        context = _context(bounds, binding, self.layers[0].label)
        links = _links(self.parts, bounds, context, tuple(x.shape[:-1]))
        if links is None:
            return None, ([], [])
        recorders = {bound.parts[0].recorder for bound in bounds.values() if bound.linears}  # type: ignore[union-attr]  # nothing is captured
        is_uniform = recorders == {resolver.recorder} or not resolver._operations
        recorder = recorders.pop() if is_uniform else None
        if self.attention is not None and recorder is None:
            return None, ([], [])
        return Chain(links, recorder), _followers(self.parts, bounds)


_Followers: TypeAlias = "tuple[list[torch.Tensor], list[torch.Tensor]]"
"""Amaxes of casts, and those of tensors that were cast by these casts for other layers."""


def _params(
    layers: Sequence[LowPrecisionModule],
    names: Sequence[tuple[int | None, str | None]],
    brought: Sequence[torch.Tensor],
) -> list[Any]:
    """Return the parameters of a chain of ``layers``; each layer that computes its own does so
    once, and those of no layer are ``brought``."""
    params: list[Any] = []
    rest = iter(brought)
    for at, name in names:
        if at is None:
            params.append(next(rest))
        elif name is None:
            params += layers[at].link_params()
        else:
            params.append(layers[at]._parameters[name])
    return params


def _names_of(parts: Sequence[Part]) -> Iterator[tuple[LowPrecisionModule | None, str | None]]:
    """Yield the layer and the name of each parameter of the chain: no layer for one of a shape, no
    name for all those of a layer that computes them."""
    for part in parts:
        if isinstance(part, list | tuple):
            yield from _names_of(part)
        elif isinstance(part, LowPrecisionModule):
            names = part.link_names()
            yield from [(part, None)] if names is None else [(part, "".join(n)) for n in names]
        elif part.num_params:
            yield None, None


def _attention_in(parts: Sequence[Part]) -> PackedAttentionShape | None:
    for part in parts:
        inner = _attention_in(part) if isinstance(part, list) else part
        if isinstance(inner, PackedAttentionShape):
            return inner
    return None


def _context(bounds: dict[LowPrecisionModule, Bound], binding: Binding, owner: str) -> BindContext:
    """Return the context of links between layers so bound, which make again what these do."""
    remade = [link.remade for bound in bounds.values() for link in bound.linears]
    plan = replace(HIGH_PRECISION, remade=tuple(remade[0]))
    return BindContext(plan, binding, owner)


def _shown(parts: Sequence[Part]) -> list[Any]:
    """Return ``parts`` with values in the place of shapes, and the names of classes of layers."""
    shown: list[Any] = []
    for part in parts:
        if isinstance(part, list | tuple):
            shown.append(type(part)(_shown(part)))
        elif isinstance(part, LinkShape):
            shown.append(part.values())
        else:
            shown.append(type(part).__name__)
    return shown


def _links(
    parts: Sequence[Part],
    bounds: dict[LowPrecisionModule, Bound],
    context: BindContext,
    tokens: tuple[int, ...] = (),
) -> tuple[Link, ...] | None:
    """Return the links of ``parts``, whose layers are bound as ``bounds`` say; None if siblings
    cast their input otherwise than each other. ``tokens`` are the first dimensions of the rows.
    """
    shapes: list[LinkShape] = []
    links: dict[int, Link] = {}
    for at, part in enumerate(parts):
        shapes.append(LinkShape())
        if isinstance(part, list):
            branch = _links(part, bounds, context, tokens)
            if branch is None:
                return None
            links[at] = ResidualLink(branch, context.owner)
        elif isinstance(part, tuple):
            linears = [bounds[layer].links[0] for layer in part]
            casts = [_cast_of_input(bounds[layer].plan) for layer in part]
            if any([cast != casts[0] for cast in casts]):
                return None
            links[at] = siblings(linears, context)  # type: ignore[arg-type]  # linears alone are siblings
        elif isinstance(part, LinkShape):
            shapes[at] = part
            if isinstance(part, PackedAttentionShape):  # a function to the recorder, whose ever
                alone = Binding(context.binding.device, context.dtype)
                links[at] = part.of(tokens).bind(context._replace(binding=alone))
        else:
            (link,) = bounds[part].links
            (shapes[at],) = part.link_shapes()
            if bounds[part].linears:
                is_behind = at > 0 and isinstance(parts[at - 1], GatedShape)
                around = _behind(shapes[at - 1], part, bounds[part], context) if is_behind else None
                links[at] = link if around is None else shapes[at].bind(around)
    return bind_chain(shapes, context, links)


def _cast_of_input(plan: Any) -> tuple[object, ...]:
    """Return what decides how a linear under ``plan`` casts its input."""
    maker = dict(plan.makers).get("input")
    return plan.tensors["input"], plan.nonfinite, plan.delayed, maker


def _behind(
    activation: LinkShape, layer: LowPrecisionModule, bound: Bound, context: BindContext
) -> BindContext:
    """Return the context in which ``layer`` is bound again behind an ``activation``, which hands
    over what a cast by a delayed scale need not have rounded."""
    binding, before = context.binding, Neighbour(activation, None)
    count = None
    if isinstance(bound.parts[0], Chain):  # casts of a graph have a count of their own
        is_training = torch.is_grad_enabled()
        count = layer._bindings.nonfinite_of(binding.device, is_training=is_training)
    again = BindContext.of(bound.plan, binding, layer.label, bound.states, None, count)
    return again._replace(before=before, source=before)


def _siblings(parts: Sequence[Part]) -> Iterator[tuple[LowPrecisionModule, ...]]:
    for part in parts:
        if isinstance(part, tuple):
            yield part
        elif isinstance(part, list):
            yield from _siblings(part)


def _followers(parts: Sequence[Part], bounds: dict[LowPrecisionModule, Bound]) -> _Followers:
    """Return the amaxes of the inputs of siblings, which the first of them casts."""
    followers: _Followers = ([], [])
    for layers in _siblings(parts):
        states = [bounds[layer].states for layer in layers]
        slots = [each.slot("input").amax for each in states if each is not None]
        source, *targets = slots or [None]
        for target in targets:
            if source is not None and target is not None:
                followers[0].append(source)
                followers[1].append(target)
    return followers


def _bound_in_graph(numbers: Sequence[int], buffers: Sequence[Any], phase: str) -> list[Bound]:
    """Return what layers of these ``numbers`` are bound to in a graph; those with delayed states
    read their share of the ``buffers``. The first of these begins the step, if a layer does."""
    bounds, unread, count = [], [*buffers], len(STATE_BUFFERS)
    for number in numbers:
        bound = captured_bound(number)
        if bound.number is not None:
            bound = captured_bound(number, unread[:count], phase)
            del unread[:count]
            phase = "step" if phase == "begin" else phase
        bounds.append(bound)
    return bounds


def _links_again(
    splice: weakref.ref[Splice],
    numbers: Sequence[int],
    place: tuple[torch.device, torch.dtype, policy.Values],
    buffers: Sequence[Any],
    phase: str,
) -> tuple[Link, ...]:
    """Return the links of ``splice`` that read the ``buffers``; torch traces while it lives."""
    running = splice()
    assert running is not None
    bounds = _bound_in_graph(numbers, buffers, phase)
    begin_all([bound.states.forward for bound in bounds if bound.states is not None])
    links = running.links_in_graph(bounds, *place)
    assert links is not None
    return Chain(links)
