"""What every low-precision layer shares: its bound ops, its delayed state, and its checks."""

from __future__ import annotations

import dataclasses
import inspect
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, NamedTuple

import torch

from fp8core.autocast import active, touch
from fp8core.chain import is_under_torch_autocast
from fp8core.dispatch import policy, select
from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError
from fp8core.modules.delayed import DelayedModule
from fp8core.ops.bind import LinearStates, bind_linear
from fp8core.ops.linear import LinearOp, LinearShape
from fp8core.plan import HIGH_PRECISION, LayerRole, LinearPlan
from fp8core.quantizer import Binding
from fp8core.recipe import Recipe

__all__ = ["Bound", "LowPrecisionModule", "prepare"]


# Two threads that use a layer for the first time must not make its delayed state twice.
_bind_lock = threading.RLock()


class Bound(NamedTuple):
    """A layer made ready for one combination of recipe, device, dtype and policy."""

    ops: tuple[LinearOp, ...]
    plan: LinearPlan
    states: LinearStates | None
    recipe: Recipe | None


class LowPrecisionModule(DelayedModule):
    """Base of the layers. A subclass says its ``kind`` and its :class:`LinearShape`."""

    kind: ClassVar[str]
    use_bias: bool

    def __init__(self, name: str | None) -> None:
        super().__init__()
        self.name = name

    def linear_shape(self) -> LinearShape:
        """Return what the layer is, apart from its recipe."""
        raise NotImplementedError

    def parameter(self, name: str) -> torch.Tensor | None:
        """Return the parameter called ``name``, or what a parametrization computes in its place."""
        try:
            return self._parameters[name]
        except KeyError:
            made: torch.Tensor | None = getattr(self, name)
            return made

    @property
    def label(self) -> str:
        """What messages call the layer: its name in the model, else its class and sizes."""
        shape = self.linear_shape()
        sizes = f"{type(self).__name__}({shape.in_features}, {shape.out_features})"
        return sizes if self.name is None else f"{self.name!r} ({sizes})"

    def bind(self, device: torch.device, dtype: torch.dtype) -> Bound:
        """Return the layer's ops for activations of ``dtype`` under what is active now."""
        asked = active()
        recipe = asked.quantize if asked.quantize is not None else asked.observe
        is_recording = asked.observe is not None or torch.is_grad_enabled()
        is_observing = asked.observe is not None
        key = (recipe, is_observing, is_recording, device, dtype, policy.current())
        last = self._bindings.last
        if last is not None and last[0] == key:
            bound: Bound = last[1]
        else:
            with _bind_lock:
                found: Bound | None = self._bindings.table.get(key)
                binding = Binding(device, dtype, is_observing)
                bound = found or self._bind(recipe, is_recording, binding)
                self._bindings.table[key] = bound
                self._bindings.last = (key, bound)
        if bound.states is not None and is_recording:
            touch(bound.states.forward, asked.group)
            bound.states.backward.group = asked.group
        return bound

    def _bind(self, recipe: Recipe | None, is_recording: bool, binding: Binding) -> Bound:
        try:
            role = LayerRole(self.kind, self.name)
            plan = HIGH_PRECISION if recipe is None else recipe.plan(role, binding.activation_dtype)
            shape = self.linear_shape()
            states = None
            if plan.delayed is not None:
                states = self.delayed_states(recipe, plan, shape.groups)
                states = dataclasses.replace(states, is_recording=is_recording)
            op = bind_linear(shape, plan, binding, owner=self.label, states=states)
        except Fp8CoreError as error:
            raise type(error)(f"{self.label}: {error}") from None
        return Bound((op,), plan, states, recipe)

    def check_input(self, input: torch.Tensor, weight: torch.Tensor) -> torch.dtype:
        """Return the activation dtype of ``input [..., k]`` for ``weight [n, k]``, or refuse it.

        Raises:
            OperandError: wrong last dimension, not floating point, another device than the
                parameters, or, outside torch.autocast, another dtype.
        """
        in_features = weight.shape[1]
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
        if is_under_torch_autocast(device_type):
            return torch.get_autocast_dtype(device_type)
        if input.dtype != weight.dtype:
            raise OperandError(
                f"{self.label}: input is {input.dtype}, the weight {weight.dtype}. Convert "
                f"one, or run under torch.autocast({device_type!r}, dtype=...)."
            )
        return input.dtype

    def extra_repr(self) -> str:
        """Return sizes, dtype, and how the layer last ran."""
        shape = self.linear_shape()
        words = [f"num_gemms={shape.groups}"] if shape.groups else []
        words += [
            f"in_features={shape.in_features}",
            f"out_features={shape.out_features}",
            f"bias={self.use_bias}",
            f"dtype={str(shape.weight_dtype).removeprefix('torch.')}",
        ]
        if self._bindings.last is not None:
            bound = self._bindings.last[1]
            recipe = "high precision" if bound.recipe is None else type(bound.recipe).__name__
            words.append(f"last run: {recipe} on {bound.ops[0].choices['fprop'].backend}")
        return ", ".join(words)

    def _num_gemms(self) -> int:
        return self.linear_shape().num_weights


def prepare(model: torch.nn.Module) -> torch.nn.Module:
    """Give every fp8core layer of ``model`` its path as its name, and return the model.

    Messages then name the layer, and :class:`fp8core.recipe.PerLayer` can match it.
    """
    for path, module in model.named_modules():
        if isinstance(module, LowPrecisionModule):
            module.name = path or module.name
            module.unbind()
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
