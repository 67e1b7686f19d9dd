"""A layer's delayed-scaling state as buffers: how it is created, moved, saved, loaded, checked."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import torch

from fp8core.context.scopes import forget_interrupted, warn_of_layer
from fp8core.dispatch import policy
from fp8core.errors import Fp8CoreError, RecipeError
from fp8core.modules.memo import Bindings
from fp8core.modules.state.in_graph import add_layer, graph_states
from fp8core.modules.state.loading import (
    EXTRA_STATE,
    Imported,
    has_weights,
    import_extra_state,
    parameter_errors,
    state_errors,
)
from fp8core.recipe.plan import DelayedPlan, LinearPlan, Plan, SlotNames
from fp8core.reporting import collect, log_collected, logger
from fp8core.tensors.delayed_state import (
    BUFFERS,
    META,
    DelayedState,
    LayerStates,
    covers,
    describe,
    differing,
    maxima,
    read_meta,
)
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops.capture import (
    constant_in_graph,
    has_no_values,
    in_plain_mode,
    is_faked,
)
from fp8core.torch_ops.private import (
    CHECKPOINTED_MODULE,
    RENAMED_MODULES,
    enter_before_load,
    is_capturing,
    load_pre_hooks,
    load_pre_hooks_called,
    without_modes,
)

_RESTORED = ("_bindings", "_state_is_from_checkpoint", "_prepared", "_is_fresh")


class DelayedModule(torch.nn.Module):
    """Keeps ``scale_*``, ``amax_history_*`` (float32) and ``delayed_meta`` (uint8) buffers.

    The buffers exist from the first use of a delayed-scaling recipe, or from
    ``fp8core.prepare(model, recipe)`` on. ``delayed_meta`` is JSON: each slot's format and the
    history's length, so that a checkpoint is not taken for another recipe's. All are plain tensors:
    a ``state_dict`` loads with ``weights_only=True``.

    A layer that computes by a plan of its own kind, as attention does, names that kind as
    ``plan_type`` and says how often it computes it (:meth:`count_slot_sets`). The layer's forward
    gets the plan from :func:`fp8core.recipe.base.plan_of` and the states from
    :meth:`delayed_states`, hands them to :func:`fp8core.context.scopes.touch`, which has them
    updated when ``autocast`` ends, and binds a quantizer to the slot of each tensor: see
    ``tests/modules/test_own_plan.py``.
    """

    # The kind of plan by which the layer computes; it says which slots the state has.
    plan_type: ClassVar[type[Plan]] = LinearPlan

    _bindings: Bindings
    _state_is_from_checkpoint: bool
    # The description of the plan, and the history's length, for which fp8core.prepare creates the
    # state; None in a layer whose state is created at its first use.
    _prepared: tuple[str, int] | None
    # Whether the state was created here and has not recorded anything yet.
    _is_fresh: bool

    def __init__(self) -> None:
        super().__init__()
        self._bindings = Bindings()
        self._state_is_from_checkpoint = False
        self._prepared = None
        self._is_fresh = False

    @property
    def label(self) -> str:
        """The layer's name in messages."""
        return type(self).__name__

    @property
    def has_delayed_scales(self) -> bool:
        """Whether the layer has delayed scales that a step, or a checkpoint, gave it."""
        return self._stored_meta() is not None and not self._is_fresh

    def unbind(self) -> None:
        """Forget the bound links; the next call binds the layer again."""
        self._bindings = self._bindings.fresh()

    def reset_delayed_state(self) -> None:
        """Forget the scales and amax histories, so that delayed scaling starts fresh.

        New buffers are created at the next use, or at once in a layer that :func:`fp8core.prepare`
        gave its state.
        """
        prepared = self._prepared
        self.forget_delayed_state()
        if prepared is not None:
            self._prepared = prepared
            self._create(*prepared)

    def forget_delayed_state(self) -> None:
        """Forget the scales and amax histories, and that :func:`fp8core.prepare` created them."""
        for name in BUFFERS:
            self._buffers.pop(name, None)
        self.unbind()
        self._state_is_from_checkpoint = False
        self._prepared = None

    def delayed_snapshot(self) -> dict[str, Any]:
        """Return the delayed state and the bound links, for :meth:`restore_delayed`."""
        attributes = vars(self)
        return {name: attributes[name] for name in _RESTORED} | {"_buffers": self._buffers.copy()}

    def restore_delayed(self, saved: dict[str, Any]) -> None:
        """Restore the layer's state of before a call that failed."""
        if self._bindings is not saved["_bindings"]:
            logger.warning("%s: that failed; the delayed state stays as it was", self.label)
        self._buffers.clear()
        self._buffers.update(saved["_buffers"])
        vars(self).update({name: saved[name] for name in _RESTORED})

    def check_delayed_state(self, plan: Plan, *, records: bool) -> None:
        """Refuse ``plan`` where the layer's state is for another recipe and must not be forgotten.

        Raises:
            RecipeError: it came from a checkpoint, or the call only evaluates (``records`` False),
                which changes no state.
        """
        stored, described = self._stored_meta(), describe(plan)
        if stored is None or covers(stored, described):
            return
        state, needed = differing(stored, described, plan.slots)
        if self._state_is_from_checkpoint:
            raise RecipeError(
                f"the delayed-scaling state in the checkpoint is for {state}, the recipe "
                f"needs {needed}. Use the checkpoint's recipe, or reset_delayed_state()."
            )
        if not records:
            raise RecipeError(
                f"the layer's delayed-scaling state is for {state}, the recipe of this "
                f"evaluation needs {needed}. Evaluate with the recipe of training, or call "
                f"reset_delayed_state() first, which forgets the scales."
            )

    def prepare_delayed_state(self, plan: Plan) -> None:
        """Create the buffers that ``plan`` needs now, and whenever the layer is reset.

        Buffers for another recipe are forgotten.
        """
        self._prepared = self._make_state(plan)

    def set_scale(self, tensor: str, scale: torch.Tensor) -> None:
        """Give ``tensor``, a slot of forward, the delayed ``scale``, float32 ``[1]``, in the state
        that :meth:`prepare_delayed_state` created; it then counts as one of a checkpoint."""
        state = {name: self._buffers[name] for name in BUFFERS}
        scales = state["scale_fwd"]
        assert scales is not None
        names = self._names_of_slots().forward
        slots = [slot for slot, name in enumerate(names) if name == tensor]
        scales = scales.clone()
        scales[slots] = scale.to(scales.device)
        state["scale_fwd"] = scales
        self.unbind()
        self._take_state(state)  # type: ignore[arg-type]  # all of them are there

    def _make_state(self, plan: Plan, device: torch.device | None = None) -> tuple[str, int]:
        """Create the buffers that ``plan`` needs, unless the layer has them.

        Returns the description of the plan and the length of its history.
        """
        assert plan.delayed is not None
        stored, described = self._stored_meta(), (describe(plan), plan.delayed.history_len)
        if stored is not None and stored != described[0] and covers(stored, described[0]):
            self._register_meta(described[0], self._buffers[META].device)  # type: ignore[union-attr]  # stored
        elif stored is not None and stored != described[0]:
            before, after = differing(stored, described[0], plan.slots)
            logger.warning(
                "%s: delayed state starts fresh for %s, was %s", self.label, after, before
            )
            self.forget_delayed_state()
            stored = None
        if stored is None:
            self._create(*described, device)
        return described

    def delayed_states(
        self, recipe: Any, plan: Plan, *, records: bool, device: torch.device | None = None
    ) -> LayerStates:
        """Return the layer's states under ``plan``; fresh ones if it has none that fit.

        The states are on ``device``, or, if that is None, on the device of the layer's parameters.

        Raises:
            RecipeError: see :meth:`check_delayed_state`.
        """
        assert plan.delayed is not None
        self.check_delayed_state(plan, records=records)
        self._make_state(plan, device)
        if records:
            self._is_fresh = False
        elif self._is_fresh:
            self._warn_if_fresh()
        key = (recipe, plan.delayed, policy.current())
        if key not in self._bindings.states:
            forward, backward = (count * self.count_slot_sets() for count in maxima(plan))
            with torch.inference_mode(False):  # see _create
                self._bindings.states[key] = LayerStates(
                    self._state("fwd", recipe, plan.delayed, forward),
                    self._state("bwd", recipe, plan.delayed, backward),
                    plan.slots,
                )
        return self._bindings.states[key]

    def state_in_graph(self, number: int, is_compiled: bool) -> tuple[int, ...]:
        """Create the buffers of the :func:`~fp8core.modules.state.in_graph.graph_states` of that
        number, unless the layer has them, while torch traces.

        Returns nothing, or, if torch.compile traces, the numbers of links that raise an error
        instead.
        """
        states = graph_states(number)
        add_layer(self)
        try:
            with without_modes():
                in_plain_mode(partial(states.of, self))
        except Fp8CoreError as error:
            refused = type(error)(f"{self.label}: {error}")
            if not is_compiled:
                raise refused from None
            return states.refuse(refused)
        return ()

    constant_in_graph(state_in_graph)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        add_layer(self)  # a copy

    def _create(self, meta: str, history_len: int, device: torch.device | None = None) -> None:
        device, names = device or self._device_of_state(), self._names_of_slots()
        # Training could not update buffers that were created under inference_mode.
        with torch.inference_mode(False):
            for way, slots in (("fwd", len(names.forward)), ("bwd", len(names.backward))):
                scale = torch.ones(slots, dtype=torch.float32, device=device)
                history = scale.new_zeros(history_len, slots)
                self.register_buffer(f"scale_{way}", scale)
                self.register_buffer(f"amax_history_{way}", history)
            self._register_meta(meta, device)
        self._is_fresh = True

    def _warn_if_fresh(self) -> None:
        """Warn once that an evaluation runs at scales that no step has set.

        Looks at the history itself, as a distributed checkpoint is loaded into the buffers without
        a call of the layer.
        """
        history = self._buffers["amax_history_fwd"]
        assert history is not None
        if is_faked() or history.is_meta or (history.is_cuda and is_capturing()):
            return
        if not bool(history.any()):
            warn_of_layer(
                self.label,
                "evaluated under delayed scaling before the first training step, at scales that "
                "are still 1, where small values become zero and large ones saturate. Load a "
                "checkpoint, train a step, or run some inputs under autocast(enabled=False, "
                "calibrating=True, recipe=...) first",
            )

    def _state(
        self, way: str, recipe: Any, delayed: DelayedPlan, maxima: list[float]
    ) -> DelayedState:
        scale, history = self._buffers[f"scale_{way}"], self._buffers[f"amax_history_{way}"]
        assert scale is not None
        assert history is not None
        label = f"{self.label} {way}"
        return DelayedState(
            label,
            delayed,
            recipe,
            scale=scale,
            amax_history=history,
            maxima=maxima,
            order=self._bindings.order,
        )

    def _stored_meta(self) -> str | None:
        stored = self._buffers.get(META)
        if stored is None or has_no_values(stored):
            return None
        with without_modes():  # it is real, whatever a call is given
            meta = read_meta(stored)
        return f"metadata that is not fp8core's, {META}" if meta is None else meta[0]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # .to(), .bfloat16(), .cuda() come through here: the state moves, its dtype stays.
        self.unbind()
        state = {name: self._buffers.pop(name) for name in BUFFERS if name in self._buffers}
        try:
            with quantized_apart(self._parameters, fn):
                super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
            moved = {name: self._moved(old, fn) for name, old in state.items()}
        except BaseException:
            self._buffers.update(state)
            raise
        self._buffers.update(moved)
        if any(old is not None and old.is_meta for old in state.values()):
            self.reset_delayed_state()
        return self

    @staticmethod
    def _moved(old: Any, fn: Callable[..., torch.Tensor]) -> Any:
        moved = fn(old)
        return moved if moved.dtype == old.dtype else old.to(moved.device)

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        forget_interrupted()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        messages = (missing_keys, unexpected_keys, error_msgs)
        assigns = bool(local_metadata.get("assign_to_params_buffers", False))
        errors = self.load_errors(state_dict, prefix, assigns=assigns)
        is_saved = any(key in state_dict for key in self._state_keys(prefix))
        with contextlib.ExitStack() as stack:
            # Hooks repair or bring entries that do not fit. Entries that fit are taken before hooks
            # see them, as hooks for Transformer Engine's layers, Megatron's of experts, would
            # unpickle them.
            if errors or not is_saved:
                arguments = (state_dict, prefix, local_metadata, strict, *messages)
                stack.enter_context(load_pre_hooks_called(self, *arguments))
                errors = self.load_errors(state_dict, prefix, assigns=assigns)
            if errors:  # a layer is loaded whole or not at all
                error_msgs.extend(errors)
                return
            state = self._saved_state(state_dict, prefix).state
            for key in self._state_keys(prefix):
                state_dict.pop(key, None)
            saved = {name: self._buffers.pop(name) for name in BUFFERS if name in self._buffers}
            try:
                super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *messages)
            except BaseException:
                self._buffers.update(saved)
                raise
        if state:
            self.unbind()
            self._take_state(state)
        elif has_weights(self._parameters, state_dict, prefix):
            if saved:
                collect(self.label, "no delayed state in the checkpoint; it starts fresh")
            self.reset_delayed_state()
        else:
            self._buffers.update(saved)

    def load_errors(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        *,
        assigns: bool = False,
        checks_parameters: bool = True,
    ) -> list[str]:
        """Return a line for all that the layer cannot take from ``state_dict``; changes nothing."""
        state, errors = self._saved_state(state_dict, prefix)
        if checks_parameters:
            errors = errors + parameter_errors(
                self._parameters, state_dict, prefix, assigns=assigns
            )
        if state:
            errors = errors + state_errors(
                state, self._names_of_slots(), self._stored_meta(), self.plan_type.slots
            )
        return [f"{self.label}: {error}" for error in errors]

    def _saved_state(self, state_dict: Mapping[str, Any], prefix: str) -> Imported:
        """Return the delayed state of ``state_dict``: the layer's buffers, or what another library
        saved in their stead."""
        slots, key = self._names_of_slots(), f"{prefix}{EXTRA_STATE}"
        imported = Imported({}, [])
        if key in state_dict and not self._reads_extra_state():
            kind = self.plan_type if any(slots) else None
            imported = import_extra_state(state_dict[key], self.label, kind)
        names = [name for name in BUFFERS if any(slots) and prefix + name in state_dict]
        state = {name: state_dict[prefix + name] for name in names}
        return imported._replace(state=state or imported.state)

    def _state_keys(self, prefix: str) -> list[str]:
        """Return the keys of what :meth:`_saved_state` reads."""
        names = list(BUFFERS) if any(self._names_of_slots()) else []
        extra = [] if self._reads_extra_state() else [EXTRA_STATE]
        return [prefix + name for name in (*names, *extra)]

    def _take_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy ``state``, a delayed state that fits the layer, into new buffers."""
        device = self._device_of_state()
        with torch.inference_mode(False):
            for name in BUFFERS[:-1]:
                value = state[name].detach().clone(memory_format=torch.contiguous_format)
                self.register_buffer(name, value.to(device))
            meta = read_meta(state[META])
            assert meta is not None
            self._register_meta(meta[0], device)
        self._state_is_from_checkpoint = True
        self._is_fresh = False

    def _register_meta(self, text: str, device: torch.device) -> None:
        encoded = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
        self.register_buffer(META, encoded.to(device))
        add_layer(self)

    def _reads_extra_state(self) -> bool:
        """Whether a subclass reads ``_extra_state`` itself, by torch's methods for it."""
        kind = type(self)
        return (
            kind.get_extra_state is not torch.nn.Module.get_extra_state
            or kind.set_extra_state is not torch.nn.Module.set_extra_state
        )

    def count_slot_sets(self) -> int:
        """Return how many sets of the slots of :attr:`plan_type` the delayed state has, one after
        the other: one for each time that the layer computes its plan, 0 for none.

        A linear computes its plan once for each forward GEMM, attention once.
        """
        raise NotImplementedError

    def _names_of_slots(self) -> SlotNames:
        """Return the names of all slots of the layer: those of its plan, once a set."""
        forward, backward = self.plan_type.slots
        return SlotNames(forward * self.count_slot_sets(), backward * self.count_slot_sets())

    def _device_of_state(self) -> torch.device:
        """Return the device of the layer's parameters; torch's default one for a layer without."""
        parameter = next(self.parameters(), None)
        return torch.get_default_device() if parameter is None else parameter.device


@contextlib.contextmanager
def quantized_apart(parameters: dict[str, Any], fn: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Hide quantized ``parameters`` from torch's ``_apply``, which decodes; then move them."""
    quantized = {n: p for n, p in parameters.items() if isinstance(p, QuantizedTensor)}
    parameters.update(dict.fromkeys(quantized))
    try:
        yield
        for weight in quantized.values():
            _apply_quantized(weight, fn)
    finally:
        parameters.update(quantized)


def _apply_quantized(weight: QuantizedTensor, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Move ``weight`` by ``fn``; a change of dtype changes its nominal dtype alone."""
    with torch.no_grad():
        result = fn(weight)
        if not isinstance(result, QuantizedTensor):
            is_same = (result.dtype, result.device) == (weight.dtype, weight.device)
            result = weight if is_same else weight.with_dtype(result.dtype).to(result.device)
        if result is weight:
            return
        grad = None if weight.grad is None else fn(weight.grad)
        weight.grad = None
        # As torch.nn.Module does for subclasses: every reference to the parameter sees it moved.
        moved = torch.nn.Parameter(result, weight.requires_grad)
        if weakref.getweakrefs(weight):  # which swap_tensors refuses; traces leave circles of them
            gc.collect()
        torch.utils.swap_tensors(weight, moved)  # type: ignore[no-untyped-call]  # torch's
        weight.grad = grad


def _layers_below(
    module: torch.nn.Module, prefix: str, gets_parameters: bool = True
) -> Iterator[tuple[DelayedModule, str, bool]]:
    """Yield the layers in and below ``module`` that load what a state_dict has for them: each with
    the prefix of its entries, and whether it loads its parameters unchanged, as its delayed state.

    Layers behind a user's hook, or a user's method that loads, are left out, as the user may repair
    the entries there first. Hooks of torch shard, gather or wrap parameters, or rename the keys of
    a wrapped module.
    """
    hooks = [hook.hook for hook in load_pre_hooks(module).values()]
    defined_in = [getattr(f, "__module__", "") for f in (*hooks, module._load_from_state_dict)]
    if not all(str(place).startswith(("torch.", "fp8core.")) for place in defined_in):
        return
    if hooks and CHECKPOINTED_MODULE not in module._modules:
        gets_parameters = False
    if isinstance(module, DelayedModule):
        yield module, prefix, gets_parameters
    for name, child in module._modules.items():
        if child is not None:
            below = prefix if name in RENAMED_MODULES else f"{prefix}{name}."
            yield from _layers_below(child, below, gets_parameters)


@contextlib.contextmanager
def _loading(model: torch.nn.Module, state_dict: Any, *, assigns: bool) -> Iterator[None]:
    """Refuse ``state_dict`` before ``model`` loads any entry, if a layer would refuse an entry; log
    after the load what layers say of it, in one line for all.

    Errors that show only when torch loads a layer (:func:`_layers_below`) are left to the layer.

    Raises:
        RuntimeError: as torch's load_state_dict does.
    """
    errors: list[str] = []
    layers = _layers_below(model, "") if isinstance(state_dict, Mapping) else ()
    for layer, prefix, gets_parameters in layers:
        errors += layer.load_errors(
            state_dict, prefix, assigns=assigns, checks_parameters=gets_parameters
        )
    if errors:
        lines = "\n\t".join(errors)
        raise RuntimeError(
            f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{lines}\n"
            f"Nothing was loaded."
        )
    try:
        yield
    finally:
        log_collected()


enter_before_load(_loading)
