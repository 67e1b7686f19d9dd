"""A layer made ready to run: by itself in eager, and from plain values while torch captures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch

from fp8core.chain import run as chain
from fp8core.chain.call import DENSE, Call
from fp8core.chain.protocol import Link
from fp8core.chain.series import Chain
from fp8core.chain.shape import BindContext, LinkShape, bind_chain
from fp8core.context.autocast import Active, named
from fp8core.dispatch import policy, table
from fp8core.errors import (
    Fp8CoreError,
    OperandError,
    RecipeError,
    UnsupportedError,
    did_you_mean,
)
from fp8core.modules.agreement import agree
from fp8core.modules.state.in_graph import GraphStates, graph_states
from fp8core.recipe import PerLayer, Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import HIGH_PRECISION, LayerRole, LinearPlan, Plan
from fp8core.reporting import log_once, some
from fp8core.tensors.delayed_state import STATE_BUFFERS, LayerStates
from fp8core.tensors.quantizer_binding import Binding
from fp8core.torch_ops.capture import constant_in_graph
from fp8core.torch_ops.nonfinite import counter_of
from fp8core.torch_ops.private import is_capturing, is_exporting, is_transform_active, without_modes

_NO_CAPTURE = (
    "delayed scaling is not offered under torch.compile and torch.export for attention in FP8 and "
    "while calibrating, nor under make_fx: its scales change outside the graph. Use a recipe "
    "without state, such as Float8CurrentScaling, or keep the layer out of the graph with "
    "torch.compiler.disable."
)

_NO_WATCH = (
    "a monitored layer cannot take part in torch.compile and torch.export: a graph leaves no value "
    "to look at before its cast. Close the monitor, or run the uncompiled model while it is open."
)
_NO_MAKERS = (
    "a quantizer object with code of its own, which CustomRecipe's qfactory returned, is not "
    "offered under torch.compile and torch.export: a graph holds operations of backends. Let the "
    "factory return a TensorPlan, or keep the layer out of the graph with torch.compiler.disable."
)
_NO_MAIN_GRAD = (
    "fuse_wgrad_accumulation is not offered under torch.compile and torch.export: a graph cannot "
    "find weight.main_grad. Keep the layer out of the graph with torch.compiler.disable."
)


_NO_QUEUE = (
    "delay_wgrad_compute is not offered under torch.compile and torch.export: a graph leaves no "
    "gradient to a later call. Keep the layer out of the graph with torch.compiler.disable."
)


class Bound(NamedTuple):
    """A layer bound for one combination of recipe, device, dtype and policy.

    ``parts`` are the chains that run one after the other: ``links``, split where the layer returns
    a value besides its output. ``number`` is that of the
    :class:`~fp8core.modules.state.in_graph.GraphStates` of links in a captured graph that have
    some.
    """

    parts: tuple[chain.Links, ...]
    links: tuple[Link, ...]
    plan: Plan
    states: LayerStates | None
    recipe: Recipe | None
    needs_rng: bool
    number: int | None = None

    @property
    def linears(self) -> list[Link]:
        """The chain's links that have GEMMs, in order."""
        return [link for link in self.links if link.choices]

    def call(self, first_microbatch: bool | None) -> Call:
        """Return the :class:`Call` of dense tensors, with a new seed if a link takes one."""
        if not self.needs_rng and first_microbatch is None:
            return DENSE
        if first_microbatch is not None and not isinstance(first_microbatch, bool):
            raise OperandError(
                f"is_first_microbatch={first_microbatch!r}: expected True, False or None."
            )
        rng = new_seed() if self.needs_rng else None
        return Call(rng=rng, first_microbatch=first_microbatch)

    def call_on(self, device: torch.device) -> Call:
        """Return the :class:`Call` whose links also take a seed on ``device``."""
        return Call(rng=new_seed(device)) if self.needs_rng else DENSE


def new_seed(graph_seed: torch.device | None = None) -> torch.Tensor | None:
    """Draw a seed and offset for dropout and stochastic rounding from torch's CPU generator.

    int64 ``[2]``. ``torch.manual_seed`` fixes it, and a recompute that restores the generator's
    state repeats it. None under a transform of torch.func, where torch's own dropout draws.

    ``graph_seed`` is the device of a call whose operations also take a seed there. While a CUDA
    graph is captured, and while torch compiles a graph, the seed is drawn on the device, by the
    device's generator: a graph repeats a seed of the CPU in every replay, and draws anew on the
    device.
    """
    if is_transform_active():
        return None
    device = torch.device("cpu")
    if graph_seed is not None and graph_seed.type == "cuda" and _is_graph():
        device = graph_seed
    return torch.randint(0, 2**62, (2,), device=device)


def _is_graph() -> bool:
    return torch.compiler.is_compiling() or is_capturing()


def label_of(type_name: str, name: str | None, shapes: Sequence[LinkShape]) -> str:
    """Return the layer's name in messages: its name in the model, else its class and sizes."""
    features = [shape.features for shape in shapes if shape.features is not None]
    sizes = type_name
    if features:
        inputs = ", ".join(str(in_features) for in_features, _ in features)
        sizes += f"({inputs}, {features[-1][1]})"
    return sizes if name is None else f"{name!r} ({sizes})"


def recipe_in(recipe: Recipe | None, role: LayerRole) -> Recipe | None:
    """Return the recipe that ``recipe``, perhaps a PerLayer, has for the layer of ``role``; None:
    high precision."""
    while isinstance(recipe, PerLayer):
        recipe = recipe.choose(role)
    return recipe


def engine_of(bound: Bound, role: LayerRole) -> str:
    """Return the recipe and the backends of the forward GEMMs in low precision, "" if none are; and
    of a backend for other devices that it emulates them."""
    choices = [link.choices["fprop"] for link in bound.linears]
    backends = dict.fromkeys(
        f"{choice.backend}{' (emulated)' if choice.is_emulated else ''}"
        for choice in choices
        if choice.desc.low_precision
    )
    if isinstance(bound.plan, LinearPlan) and bound.plan.stored_by_users:
        backends = {"qgemm() of its quantizers": None}
    if not backends:
        return ""
    return f"{type(recipe_in(bound.recipe, role)).__name__} on {' and '.join(backends)}"


@lru_cache(maxsize=64)  # asked by each layer of a model
def check_rules(recipe: Recipe | None, peers: str) -> None:
    """Refuse a name pattern that matches no layer of a prepared model; ``peers`` are its layers.

    Raises:
        RecipeError: there is one; lists the layers.
    """
    if not peers or not isinstance(recipe, PerLayer):
        return
    roles = [LayerRole(*line.split(" ", 1)) for line in peers.splitlines()]
    unmatched = recipe.unmatched(roles)
    if unmatched:
        names = [role.name for role in roles if role.name is not None]
        raise RecipeError(
            f"PerLayer's rule {unmatched[0]!r} matches no layer of the model that fp8core.prepare "
            f"named; its layers: {some(names, shown=20)}.{did_you_mean(unmatched[0], names)}"
        )


_Item = TypeVar("_Item")


def parts_of(shapes: Sequence[LinkShape], items: tuple[_Item, ...]) -> list[tuple[_Item, ...]]:
    """Split ``items``, an item for each shape, where a value leaves the chain: a chain whose input
    leaves has no first part."""
    leaves = [at for at, shape in enumerate(shapes) if shape.leaves_chain]
    starts = [0, *(at + 1 for at in leaves)]
    parts = [items[a:b] for a, b in zip(starts, [*leaves, len(items)], strict=True)]
    return [part for part in parts if part]


def reads_names(name: str) -> bool:
    """Return whether the recipe that ``name`` names depends on the layers' names."""
    request = named(name)
    return any(
        recipe is not None and recipe.reads_names for recipe in (request.quantize, request.observe)
    )


constant_in_graph(reads_names)


def bind_captured(
    layer: tuple[str, str, str | None, str, bool, bool],
    shape_values: tuple[tuple[Any, ...], ...],
    active_text: str,
    backends: policy.Values,
    place: tuple[torch.device, torch.dtype, int, bool],
) -> Bound:
    """Bind while torch compiles or exports: a graph is guarded by the values of the arguments.

    The arguments are classes and plain values alone, which torch.compile can hand over and which
    layers of one shape have in common, so that these layers share a graph. A compiled graph raises
    what binding raises when it runs: torch.compile would replace the error by its own. ``place``
    has device, dtype, the number of the first GEMM, and whether gradients are enabled.
    """
    kind, type_name, name, peers, is_compiled, is_watched = layer
    shapes: tuple[LinkShape, ...] = tuple(shape(*values) for shape, *values in shape_values)
    request = named(active_text)
    recipe = request.quantize if request.quantize is not None else request.observe
    device, dtype, first_gemm, is_grad_enabled = place
    binding = Binding(device, dtype, request.observe is not None)
    label, states = label_of(type_name, name, shapes), None
    try:
        check_rules(recipe, peers)
        plan = plan_of(shapes[0].plan_type, recipe, LayerRole(kind, name), binding.activation_dtype)
        if plan.delayed is not None:
            modes = {"records": is_grad_enabled, "is_compiled": is_compiled}
            states = _states(plan, shapes, request, **modes)
        _check_offered(plan, shapes, is_watched)
        if binding.device.type != "meta":
            with without_modes():  # neither traced, nor recorded in a CUDA graph of torch's
                counter_of(binding.device)
                role = LayerRole(kind, name)
                agree(label, role, shapes[0].plan_type, recipe, binding, shapes, once=True)
        context = BindContext.of(plan, binding, label)._replace(first_gemm=first_gemm)
        bind = partial(_bind_in_graph, shapes, context, chosen=policy.Policy(*backends))
        unread = [None] * len(STATE_BUFFERS)
        links = bind(None if states is None else states.in_graph(unread, "forward"))
    except Fp8CoreError as error:
        refused = type(error)(f"{label}: {error}")
        if not is_compiled:
            raise refused from None
        return refused_in_graph(_refusals(shapes, refused))
    parts, number = [chain.capture(Chain(part)) for part in parts_of(shapes, links)], None
    if states is not None:
        number = states.number
        parts = [
            chain.capture(chain.Stateful(partial(_part_in_graph, shapes, bind, states, at)))
            for at in range(len(parts))
        ]
    bound = Bound(tuple(parts), links, plan, None, recipe, False, number)
    _captured[parts[0]] = bound, bind
    if bound.linears:
        engine = engine_of(bound, LayerRole(kind, name)) or "high precision"
        log_once(f"{label}, in a captured graph: {engine}", logging.INFO)
    return bound


constant_in_graph(bind_captured)


def _check_offered(plan: Plan, shapes: tuple[LinkShape, ...], is_watched: bool) -> None:
    """Raise UnsupportedError if a layer does what a graph cannot."""
    refusals = (
        (is_watched, _NO_WATCH),
        (any(shape.accumulates for shape in shapes), _NO_MAIN_GRAD),
        (isinstance(plan, LinearPlan) and plan.makers, _NO_MAKERS),
        (any(shape.delays_wgrad for shape in shapes), _NO_QUEUE),
    )
    for is_refused, refusal in refusals:
        if is_refused:
            raise UnsupportedError(refusal)


_captured: dict[int, tuple[Bound, Callable[[LayerStates | None], tuple[Link, ...]]]] = {}


def captured_bound(number: int, buffers: Sequence[Any] = (), phase: str = "forward") -> Bound:
    """Return what a layer in a captured graph is bound to, by the number of its first part; under
    delayed scaling to the ``buffers`` that the graph has, at that ``phase`` of the step."""
    if number not in _captured:
        return refused_in_graph((number,))
    bound, bind = _captured[number]
    if bound.number is None or not buffers:
        return bound
    states = graph_states(bound.number).in_graph(buffers, phase)
    return bound._replace(links=bind(states), states=states)


def _states(
    plan: Plan,
    shapes: tuple[LinkShape, ...],
    request: Active,
    *,
    records: bool,
    is_compiled: bool,
) -> GraphStates | None:
    """Return the delayed states of ``shapes`` in graphs under ``plan``; None if they have none."""
    is_linear = isinstance(plan, LinearPlan)
    if is_linear and not any(shape.num_weights for shape in shapes):
        return None
    is_exported = is_exporting()
    if not is_linear or not (is_compiled or is_exported) or request.observe is not None:
        raise UnsupportedError(_NO_CAPTURE)
    groups = [x.shares_scales_over for x in shapes if x.shares_scales_over is not None]
    records = records and not is_exported
    return GraphStates(plan, request, groups, partial(_refusals, shapes), records=records)


def _bind_in_graph(
    shapes: tuple[LinkShape, ...],
    context: BindContext,
    states: LayerStates | None,
    *,
    chosen: policy.Policy,
) -> tuple[Link, ...]:
    """Return the links of ``shapes`` that read the ``states`` of a graph; ``chosen`` is the policy
    of the call, which torch.compile has not put into force in the thread."""
    with policy.activated(chosen), table.capturing():
        return bind_chain(shapes, context._replace(states=states))


def _part_in_graph(
    shapes: tuple[LinkShape, ...],
    bind: Callable[[LayerStates | None], tuple[Link, ...]],
    states: GraphStates,
    at: int,
    buffers: Sequence[Any],
    phase: str,
) -> Chain:
    """Return the part of number ``at`` of the links that ``bind`` has read the ``buffers``."""
    return Chain(parts_of(shapes, bind(states.in_graph(buffers, phase)))[at])


def refused_in_graph(parts: tuple[int, ...]) -> Bound:
    """Return a layer whose parts of these numbers raise when the graph runs."""
    return Bound(parts, (), HIGH_PRECISION, None, None, False)


constant_in_graph(refused_in_graph)


def _refusals(shapes: tuple[LinkShape, ...], error: Fp8CoreError) -> tuple[int, ...]:
    """Return numbers of the parts of ``shapes``, each of which raises ``error`` in a graph."""
    refusals = [chain.Refusal(error, partial(_columns, part)) for part in parts_of(shapes, shapes)]
    return tuple(map(chain.capture, refusals))


def _columns(shapes: Sequence[LinkShape], columns: int) -> int:
    """Return how many columns ``shapes`` make of ``columns``."""
    for shape in shapes:
        columns = shape.columns(columns)
    return columns
