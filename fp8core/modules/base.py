"""What every low-precision layer shares: its bound ops, its delayed state, and its checks."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Sequence
from typing import ClassVar

import torch

from fp8core.chain import run as chain
from fp8core.chain.bind import LinkShape, Site, Watch, bind_chain
from fp8core.chain.differentiable import arranged
from fp8core.chain.linear import LinearShape
from fp8core.chain.protocol import Call
from fp8core.chain.run import is_under_torch_autocast
from fp8core.context import recompute, timeline
from fp8core.context.autocast import Active, active, active_before, active_name
from fp8core.context.scopes import touch
from fp8core.dispatch import policy, select
from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError
from fp8core.modules.bound import (
    Bound,
    bind_captured,
    check_rules,
    label_of,
    parts_of,
    plan_of,
    reads_names,
    recipe_of,
)
from fp8core.modules.delayed import DelayedModule
from fp8core.modules.inputs import check_kind
from fp8core.modules.parameters import materialize
from fp8core.parameter.init import DTYPES
from fp8core.recipe import Recipe
from fp8core.recipe.plan import HIGH_PRECISION, LayerRole
from fp8core.reporting import log_once
from fp8core.tensors.quantizer import Binding
from fp8core.tensors.scaling import DelayedState, is_of_two_forwards, offered_scale
from fp8core.tensors.slots import BUFFERS
from fp8core.torch_ops.private import (
    NO_BACKWARD_PASS,
    DeviceContext,
    current_backward_pass,
    function_modes,
    is_transform_active,
)

__all__ = ["Bound", "LowPrecisionModule"]


# Two threads that use a layer for the first time must not make its delayed state twice.
_bind_lock = threading.RLock()


class LowPrecisionModule(DelayedModule):
    """Base of the layers. A subclass says its ``kind`` and the shapes of its chain."""

    kind: ClassVar[str]
    use_bias: bool
    fuse_wgrad_accumulation = False
    # What the layer does outside any autocast; high precision if None.
    outside_autocast: Active | None = None
    # Kind and name of each layer of the prepared model, a line each; one text, which torch.compile
    # compares at once.
    peers: str = ""

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.name = name

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return what the layer is, apart from its recipe: the shapes of its chain."""
        raise NotImplementedError

    def link_params(self) -> list[torch.Tensor]:
        """Return the chain's parameters, in order."""
        return []

    def linear_shapes(self) -> list[LinearShape]:
        """Return the shapes of the chain's linears."""
        return [shape for shape in self.link_shapes() if isinstance(shape, LinearShape)]

    def count_gemms(self) -> int:
        """Return how many forward GEMMs the layer has."""
        return sum(shape.num_weights for shape in self.linear_shapes())

    def set_watch(self, watch: Watch | None) -> None:
        """Have ``watch`` look at what the layer's linears compute; None ends it.

        The layer runs what ``watch`` makes of each link, and afterwards the objects it ran before.
        Quantized weights and delayed scales stay as they are.
        """
        with _bind_lock:
            self._bindings.set_watch(watch)

    def parameter(self, name: str) -> torch.Tensor | None:
        """Return the parameter called ``name``, or what a parametrization computes in its place."""
        try:
            return self._parameters[name]
        except KeyError:
            made: torch.Tensor | None = getattr(self, name)
            return made

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill the parameters as at first, and forget the delayed state.

        Parameters on meta are put on a device before: the default that torch was given, else the
        selected backend's. Where that is meta, and with ``defer_init``, nothing is filled; what a
        parametrization computes stays as it is.
        """
        if defer_init:
            return
        materialize(self, resolve_device(None))
        self.reset_delayed_state()
        self._fill_parameters()

    def _fill_parameters(self) -> None:
        """Give each own parameter its first value."""

    @property
    def label(self) -> str:
        """What messages call the layer: its name in the model, else its class and sizes."""
        return label_of(type(self).__name__, self.name, self.link_shapes())

    def bind(
        self, device: torch.device, dtype: torch.dtype, *, offsets_on_device: bool = False
    ) -> Bound:
        """Return the layer's links for activations of ``dtype`` under what is active now.

        ``offsets_on_device``: as in :class:`LinearShape`, for a grouped layer in eager.

        Raises:
            UnsupportedError: a recompute that cannot equal its forward.
        """
        if torch.compiler.is_compiling():
            return self._bind_captured(device, dtype)
        asked, tape = active(self.outside_autocast), recompute.current()
        recipe = asked.quantize if asked.quantize is not None else asked.observe
        is_observing = asked.observe is not None
        is_grad_enabled = torch.is_grad_enabled()
        is_recompute = False
        if tape is None:
            records = is_observing or is_grad_enabled
            if current_backward_pass() != NO_BACKWARD_PASS:
                is_recompute = self._is_recompute(asked)
                records = records and not is_grad_enabled
        else:
            records = not tape.is_repeating and (is_observing or tape.is_grad_enabled)
        mode = (is_observing, records, is_grad_enabled, self.training)
        key = (recipe, device, dtype, policy.current(), mode, offsets_on_device)
        last = self._bindings.last
        if last is not None and last[0] == key:
            bound: Bound = last[1]
        else:
            with _bind_lock:
                found: Bound | None = self._bindings.table.get(key)
                binding = Binding(device, dtype, is_observing)
                bound = found or self._bind(recipe, mode, binding, self._shapes(offsets_on_device))
                self._bindings.table[key] = bound
                self._bindings.last = (key, bound)
        if bound.states is not None and is_recompute:
            self._check_scales(bound.states.forward)
        if bound.states is not None and records:
            if is_transform_active():
                chain.refuse_transform(bound.links)  # before autocast has something to forget
            touch(bound.states.forward, bound.states.backward, asked.group)
        return bound

    def _bind_captured(self, device: torch.device, dtype: torch.dtype) -> Bound:
        # torch.compile reads this code. A layer's name is asked for only where it matters: graphs
        # are guarded by what they read.
        asked, backends = active_name(self.outside_autocast), policy.current()
        name, peers = (self.name, self.peers) if reads_names(asked) else (None, "")
        is_compiled = torch.compiler.is_dynamo_compiling()
        is_watched = self._bindings.watch is not None
        return bind_captured(
            (self.kind, type(self).__name__, name, peers, is_compiled, is_watched),
            tuple([(type(shape).__name__, *shape) for shape in self.link_shapes()]),
            asked,
            (backends.backend, backends.op_backends),
            (device, dtype),
        )

    def _is_recompute(self, asked: Active) -> bool:
        """Say whether the forward that runs in backward, not by fp8core.checkpoint, repeats one.

        Raises:
            UnsupportedError: that ran, or may have run, under another recipe than ``asked``.
        """
        repeated = timeline.recompute()
        if not (torch.is_grad_enabled() or repeated.is_asked_for):
            return False  # a hook evaluates something
        now = (asked.quantize, asked.observe)
        if timeline.is_entered_in_backward() or active_before(repeated, self.outside_autocast) == {
            now
        }:
            return True
        if now == (None, None):
            raise UnsupportedError(
                f"{self.label} is recomputed in backward outside the autocast it ran in. Use "
                f"fp8core.checkpoint, or enter autocast inside the checkpointed function."
            )
        raise UnsupportedError(
            f"{self.label} is recomputed in backward under another recipe than it ran with. "
            f"Use fp8core.checkpoint, which keeps the recipe."
        )

    def _check_scales(self, state: DelayedState) -> None:
        """Refuse a recompute whose scales may not be those of its forward."""
        if offered_scale(state) is not None:
            return
        if is_of_two_forwards(state):
            raise UnsupportedError(
                f"{self.label} is recomputed in a backward pass over two forwards of the model, "
                f"each with delayed scales of its own, and torch does not say which of them it "
                f"repeats. Run backward after each forward, or use fp8core.checkpoint, which keeps "
                f"the scales."
            )
        raise UnsupportedError(
            f"{self.label} is recomputed in backward under delayed scaling, whose scales have "
            f"moved on since. Use fp8core.checkpoint, which keeps them, or, in a model that "
            f"fp8core.convert gave the recipe, use_reentrant=False."
        )

    def run_links(
        self,
        bound: Bound,
        links: chain.Links,
        input: torch.Tensor,
        params: Sequence[torch.Tensor],
        call: Call,
    ) -> torch.Tensor:
        """Run some of the layer's links, or repeat exactly what a checkpoint's forward ran.

        ``links`` is one of ``bound.parts``. A graph that torch captures has no tape.
        """
        if isinstance(links, int):
            return chain.run(links, input, params, call)
        first, store, tape = call.first_microbatch, self._bindings.weights, recompute.current()
        if first is not None or store.scope is not None:
            call = call._replace(keeping=store.keeping(first, self._weight_origins))
        if tape is None:
            if bound.states is None or not recompute.is_in_backward():
                return chain.run(links, input, params, call)
            with recompute.scale_of(bound.states.forward, offered_scale(bound.states.forward)):
                return chain.run(links, input, params, call)
        state = None if bound.states is None else bound.states.forward
        key = (bound.recipe, input.device, input.dtype, policy.current())
        entry = tape.visit(self.label, key, list(self.parameters()), state, first)
        if not tape.is_repeating:
            if first is not None and tape.is_grad_enabled and call.keeping is not None:
                call = call._replace(keeping=call.keeping._replace(used=entry.weights))
            return chain.run(links, input, params, call)
        keeping = store.keeping(entry.first_microbatch, self._weight_origins)
        if keeping is not None and entry.weights:
            keeping = keeping._replace(used=entry.weights)
        call = call._replace(backward_pass=tape.backward_pass, keeping=keeping)
        with recompute.scale_of(state, entry.scale):
            return chain.run(links, input, params, call)

    def _weight_origins(self) -> list[torch.Tensor]:
        """Return what a weight that is computed in each forward is computed from, and more."""
        buffers = (own for name, own in self.named_buffers() if name not in BUFFERS)
        return [*self.parameters(), *buffers]

    def _shapes(self, offsets_on_device: bool) -> tuple[LinkShape, ...]:
        shapes = self.link_shapes()
        if not offsets_on_device:
            return shapes
        return tuple(
            shape._replace(offsets_on_device=True) if isinstance(shape, LinearShape) else shape
            for shape in shapes
        )

    def _bind(
        self,
        recipe: Recipe | None,
        mode: tuple[bool, bool, bool, bool],
        binding: Binding,
        shapes: tuple[LinkShape, ...],
    ) -> Bound:
        check_rules(recipe, self.peers)
        before = self.kept_state()
        try:
            plan = plan_of(recipe, LayerRole(self.kind, self.name), binding.activation_dtype)
            states = None
            if binding.is_observing and plan.delayed is None:
                log_once(
                    f"{self.label}: calibrating records nothing, as {type(recipe).__name__} has no "
                    f"delayed scales"
                )
            if plan.delayed is not None and self.count_gemms():
                _, records_forward, records_backward, _ = mode
                states = self.delayed_states(recipe, plan, records=records_forward)
                states = dataclasses.replace(
                    states, records_forward=records_forward, records_backward=records_backward
                )
            watch, count = self._bindings.watch, None
            if plan != HIGH_PRECISION and not binding.is_observing:
                count = self._bindings.nonfinite_of(binding.device, is_training=mode[2])
            site = Site(plan, binding, self.label, states, watch, count)
            links = bind_chain(shapes, site)
        except BaseException as error:
            self.put_back_state(before)
            if not isinstance(error, Fp8CoreError):
                raise
            raise type(error)(f"{self.label}: {error}") from None
        needs_rng = any(link.needs_rng for link in links)
        parts = tuple(map(arranged, parts_of(shapes, links)))
        return Bound(parts, links, plan, states, recipe, needs_rng)

    def check_input(
        self, input: torch.Tensor, weight: torch.Tensor | None, size: int | None
    ) -> torch.dtype:
        """Return the activation dtype of ``input [..., size]``, or refuse it.

        ``weight`` is a parameter to compare dtype and device with, ``size`` None takes any.

        Raises:
            OperandError: no dense floating-point tensor, wrong last dimension, another device than
                the parameters, or, outside torch.autocast, another dtype.
        """
        layout = getattr(input, "layout", None)
        if layout is not torch.strided or input.dtype not in DTYPES or input.is_nested:
            check_kind(self.label, "input", input)
        if input.dim() == 0 or (size is not None and input.shape[-1] != size):
            found = f"has k={input.shape[-1]}" if input.dim() else "has no dimension"
            held = "" if weight is None else f", but the weight is {list(weight.shape)}"
            raise OperandError(
                f"fprop of {self.label}: input {list(input.shape)} {found}{held}; "
                f"the layer takes [..., {size}]."
            )
        if weight is None:
            return input.dtype
        if input.device != weight.device:
            raise OperandError(
                f"{self.label}: input is on {input.device}, the layer on {weight.device}. "
                f"Move one of them; nothing is moved silently."
            )
        if is_under_torch_autocast(input):
            return torch.get_autocast_dtype(input.device.type)
        if input.dtype != weight.dtype:
            raise OperandError(
                f"{self.label}: input is {input.dtype}, the weight {weight.dtype}. Convert "
                f"one, or run under torch.autocast({input.device.type!r}, dtype=...)."
            )
        return input.dtype

    def extra_repr(self) -> str:
        """Return sizes, dtype, and how the layer last ran."""
        words = self._describe()
        for parameter in itertools.islice(self.parameters(), 1):
            words.append(f"dtype={str(parameter.dtype).removeprefix('torch.')}")
        if self._bindings.last is not None:
            bound: Bound = self._bindings.last[1]
            chosen = recipe_of(bound, LayerRole(self.kind, self.name))
            ran = [choice for link in bound.linears for choice in link.choices.values()]
            is_low = not ran or any(choice.desc.low_precision for choice in ran)
            recipe = type(chosen).__name__ if chosen is not None and is_low else "high precision"
            used = dict.fromkeys(link.choices["fprop"].backend for link in bound.linears)
            words.append(f"last run: {' '.join([recipe, *(f'on {name}' for name in used)])}")
        return ", ".join(words)

    def _dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def _describe(self) -> list[str]:
        shape = self.linear_shapes()[0]
        words = [f"num_gemms={shape.groups}"] if shape.groups else []
        return [
            *words,
            f"in_features={shape.in_features}",
            f"out_features={shape.out_features}",
            f"bias={self.use_bias}",
        ]


def resolve_device(device: torch.device | str | None) -> torch.device:
    """Return ``device``; if None, the default that torch was given, else the selected backend's.

    torch is given one by ``with torch.device(...)`` or ``torch.set_default_device``.
    """
    if device is not None:
        return torch.device(device)
    # torch.get_default_device() answers cpu also where nobody has set one.
    if any(isinstance(mode, DeviceContext) for mode in function_modes()):
        return torch.get_default_device()
    return select.default_device(policy.current())
