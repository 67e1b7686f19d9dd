"""What every low-precision layer shares: its bound ops, its delayed state, and its checks."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch

from fp8core import chain
from fp8core.autocast import active, active_name, named, touch
from fp8core.dispatch import policy, select
from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError
from fp8core.library.operators import constant_in_graph
from fp8core.links.bind import SHAPES, LinkShape, Site, bind_chain
from fp8core.links.linear import LinearLink, LinearShape
from fp8core.links.norm import NormShape
from fp8core.links.pointwise import OutputShape
from fp8core.links.protocol import DENSE, Call, Link
from fp8core.links.states import LinearStates
from fp8core.modules.delayed import Bindings, DelayedModule
from fp8core.plan import HIGH_PRECISION, LayerRole, LinearPlan
from fp8core.quantizer import Binding
from fp8core.recipe import Recipe

__all__ = ["Bound", "LowPrecisionModule", "prepare"]


_NO_CAPTURE = (
    "delayed scaling is not offered under torch.compile and torch.export: its scales change "
    "outside the graph. Use a recipe without state, such as Float8CurrentScaling, or keep the "
    "layer out of the graph with torch.compiler.disable."
)


class Bound(NamedTuple):
    """A layer made ready for one combination of recipe, device, dtype and policy.

    ``parts`` are the chains to run one after the other: the links, apart where a value leaves.
    """

    parts: tuple[chain.Links, ...]
    links: tuple[Link, ...]
    plan: LinearPlan
    states: LinearStates | None
    recipe: Recipe | None
    needs_rng: bool

    @property
    def linears(self) -> list[LinearLink]:
        """The chain's linear links, in order."""
        return [link for link in self.links if isinstance(link, LinearLink)]

    def call(self, first_microbatch: bool | None = None) -> Call:
        """Return what a dense call of the layer brings: a new seed if a link takes one."""
        if not self.needs_rng and first_microbatch is None:
            return DENSE
        rng = new_seed() if self.needs_rng else None
        return Call(rng=rng, first_microbatch=first_microbatch)


class LowPrecisionModule(DelayedModule):
    """Base of the layers. A subclass says its ``kind`` and the shapes of its chain."""

    kind: ClassVar[str]

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.name = name

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return what the layer is, apart from its recipe: the shapes of its chain."""
        raise NotImplementedError

    def linear_shapes(self) -> list[LinearShape]:
        """Return the shapes of the chain's linears."""
        return [shape for shape in self.link_shapes() if isinstance(shape, LinearShape)]

    def count_gemms(self) -> int:
        """Return how many forward GEMMs the layer has."""
        return sum(shape.num_weights for shape in self.linear_shapes())

    def invalidate_weight_cache(self) -> None:
        """Forget the quantized weights, after a write that torch cannot see (``.data``)."""
        self._bindings.weights.clear()

    @property
    def label(self) -> str:
        """What messages call the layer: its name in the model, else its class and sizes."""
        return _label(type(self).__name__, self.name, self.link_shapes())

    def bind(self, device: torch.device, dtype: torch.dtype) -> Bound:
        """Return the layer's ops for activations of ``dtype`` under what is active now."""
        if torch.compiler.is_compiling():
            return self._bind_captured(device, dtype)
        asked = active()
        recipe = asked.quantize if asked.quantize is not None else asked.observe
        is_recording = asked.observe is not None or torch.is_grad_enabled()
        is_observing = asked.observe is not None
        key = (recipe, is_observing, is_recording, device, dtype, policy.current())
        last = self._bindings.last
        if last is not None and last[0] == key:
            bound: Bound = last[1]
        else:
            found: Bound | None = self._bindings.table.get(key)
            bound = found or self._bind(recipe, is_recording, Binding(device, dtype, is_observing))
            self._bindings.table[key] = bound
            self._bindings.last = (key, bound)
        if bound.states is not None and is_recording:
            touch(bound.states.forward, asked.group)
            bound.states.backward.group = asked.group
        return bound

    def _bind_captured(self, device: torch.device, dtype: torch.dtype) -> Bound:
        # torch.compile reads this code. A layer's name is asked for only where it matters: graphs
        # are guarded by what they read.
        asked, backends = active_name(), policy.current()
        name = self.name if _reads_names(asked) else None
        is_compiled = torch.compiler.is_dynamo_compiling()
        return _bind_captured(
            (self.kind, type(self).__name__, name, is_compiled),
            tuple([(type(shape).__name__, *shape) for shape in self.link_shapes()]),
            asked,
            (backends.backend, backends.op_backends),
            (device, dtype),
        )

    def _bind(self, recipe: Recipe | None, is_recording: bool, binding: Binding) -> Bound:
        try:
            plan = _plan(recipe, LayerRole(self.kind, self.name), binding.activation_dtype)
            states = None
            if plan.delayed is not None and self.count_gemms():
                states = self.delayed_states(recipe, plan)
                states = dataclasses.replace(states, is_recording=is_recording)
            site = Site(plan, binding, self.label, self._bindings.weights, states)
            links = bind_chain(self.link_shapes(), site)
        except Fp8CoreError as error:
            raise type(error)(f"{self.label}: {error}") from None
        needs_rng = any(link.needs_rng for link in links)
        parts = tuple(_parts(self.link_shapes(), links))
        return Bound(parts, links, plan, states, recipe, needs_rng)

    def check_input(self, input: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
        """Return the activation dtype of ``input [..., k]`` for ``weight [..., k]``, or refuse it.

        Raises:
            OperandError: wrong last dimension, not floating point, another device than the
                parameters, or, outside torch.autocast, another dtype.
        """
        in_features = weight.shape[-1]
        if not input.is_floating_point():
            raise OperandError(
                f"{self.label}: input {list(input.shape)} is {input.dtype}; "
                f"expected bfloat16, float16 or float32."
            )
        if input.dim() == 0 or input.shape[-1] != in_features:
            found = f"has k={input.shape[-1]}" if input.dim() else "has no dimension"
            raise OperandError(
                f"fprop of {self.label}: input {list(input.shape)} {found}, but the weight is "
                f"{list(weight.shape)}.\n"
                f"  in_features={in_features} contracts the last dimension of the input."
            )
        if input.device != weight.device:
            raise OperandError(
                f"{self.label}: input is on {input.device}, the layer on {weight.device}. "
                f"Move one of them; nothing is moved silently."
            )
        device_type = input.device.type
        if torch.is_autocast_enabled(device_type):
            return torch.get_autocast_dtype(device_type)
        if input.dtype != weight.dtype:
            raise OperandError(
                f"{self.label}: input is {input.dtype}, the weight {weight.dtype}. Convert "
                f"one, or run under torch.autocast({device_type!r}, dtype=...)."
            )
        return input.dtype

    def extra_repr(self) -> str:
        """Return sizes, dtype, and how the layer last ran."""
        words = [*self._describe(), f"dtype={str(self._dtype()).removeprefix('torch.')}"]
        if self._bindings.last is not None:
            bound: Bound = self._bindings.last[1]
            recipe = "high precision" if bound.recipe is None else type(bound.recipe).__name__
            used = {link.choices["fprop"].backend for link in bound.linears}
            words.append(f"last run: {' '.join([recipe, *(f'on {name}' for name in used)])}")
        return ", ".join(words)

    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def _describe(self) -> list[str]:
        shape = self.linear_shapes()[0]
        return [
            f"in_features={shape.in_features}",
            f"out_features={shape.out_features}",
            f"bias={shape.bias_dtype is not None}",
        ]


def _label(type_name: str, name: str | None, shapes: Sequence[LinkShape]) -> str:
    linears = [shape for shape in shapes if isinstance(shape, LinearShape)]
    sizes = ", ".join(str(shape.in_features) for shape in linears)
    last = linears[-1].out_features if linears else ""
    sizes = f"{type_name}({sizes}, {last})"
    return sizes if name is None else f"{name!r} ({sizes})"


def _columns(shape: LinkShape) -> int:
    if isinstance(shape, LinearShape):
        return shape.out_features
    assert isinstance(shape, NormShape)
    return shape.size


def _plan(recipe: Recipe | None, role: LayerRole, dtype: torch.dtype) -> LinearPlan:
    return HIGH_PRECISION if recipe is None else recipe.plan(role, dtype)


def _reads_names(asked: str) -> bool:
    """Return whether the recipe that ``asked`` names depends on the layers' names."""
    request = named(asked)
    return any(
        recipe is not None and recipe.reads_names for recipe in (request.quantize, request.observe)
    )


constant_in_graph(_reads_names)


_Item = TypeVar("_Item")


def _parts(shapes: Sequence[LinkShape], items: tuple[_Item, ...]) -> list[tuple[_Item, ...]]:
    """Split ``items``, one a shape, where a value leaves the chain."""
    leaves = [at for at, shape in enumerate(shapes) if isinstance(shape, OutputShape)]
    starts = [0, *(at + 1 for at in leaves)]
    return [items[a:b] for a, b in zip(starts, [*leaves, len(items)], strict=True)]


def _bind_captured(
    layer: tuple[str, str, str | None, bool],
    shape_fields: tuple[tuple[Any, ...], ...],
    asked: str,
    backends: tuple[str | None, tuple[tuple[str, str], ...]],
    place: tuple[torch.device, torch.dtype],
) -> Bound:
    """Bind while torch compiles or exports: a graph is guarded by the values of the arguments.

    They are plain values alone, what torch.compile can hand over, and what layers of one shape
    have in common, so that they share a graph. A compiled graph raises what
    binding raises when it runs: torch.compile would dress it as an error of its own.
    """
    kind, type_name, name, is_compiled = layer
    shapes = tuple(SHAPES[shape](*fields) for shape, *fields in shape_fields)
    request = named(asked)
    recipe = request.quantize if request.quantize is not None else request.observe
    binding = Binding(*place, request.observe is not None)
    label = _label(type_name, name, shapes)
    try:
        plan = _plan(recipe, LayerRole(kind, name), binding.activation_dtype)
        if plan.delayed is not None and any(isinstance(shape, LinearShape) for shape in shapes):
            raise UnsupportedError(_NO_CAPTURE)
        links = bind_chain(shapes, Site(plan, binding, label, None))
    except Fp8CoreError as error:
        refused = type(error)(f"{label}: {error}")
        if not is_compiled:
            raise refused from None
        columns = [_columns(part[-1]) for part in _parts(shapes, shapes)]
        parts = [chain.capture(chain.Refusal(refused, size)) for size in columns]
        return Bound(tuple(parts), (), HIGH_PRECISION, None, recipe, False)
    parts = [chain.capture(part) for part in _parts(shapes, links)]
    return Bound(tuple(parts), links, plan, None, recipe, False)


constant_in_graph(_bind_captured)


def prepare(model: torch.nn.Module) -> torch.nn.Module:
    """Give every fp8core layer of ``model`` its path as its name, and return the model.

    Messages then name the layer, and :class:`fp8core.recipe.PerLayer` can match it.
    """
    for path, module in model.named_modules():
        if isinstance(module, LowPrecisionModule):
            module.name = path or module.name
            module._bindings = Bindings()
    return model


def refuse_arguments(
    function: Callable[..., object], given: Mapping[str, object], names: Iterable[str]
) -> None:
    """Raise UnsupportedError for the first of ``names`` whose value in ``given`` is not the
    default that ``function`` declares for it."""
    parameters = inspect.signature(function).parameters
    owner = function.__qualname__.removesuffix(".__init__")
    for name in names:
        default = parameters[name].default
        if given[name] != default:
            raise UnsupportedError(
                f"{owner}({name}={given[name]!r}) is not offered; leave it at {default!r}."
            )


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return ``device``, or the selected backend's preferred one."""
    if device is None:
        return select.default_device(policy.current())
    return torch.device(device)


def new_seed() -> torch.Tensor:
    """Draw a seed and offset for dropout and stochastic rounding from torch's CPU generator.

    int64 ``[2]``. ``torch.manual_seed`` fixes it, and a recompute that restores the generator's
    state repeats it.
    """
    return torch.randint(0, 2**62, (2,))
