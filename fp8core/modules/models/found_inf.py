"""``found_inf``: whether a model's casts met NaN or inf, as a number on the device.

A cast to FP8 or FP4 hides them: inf becomes the largest value, and a format without NaN turns NaN
into a number. So the casts of a layer count them, once somebody has asked, in tensors on the device
which only ever grow. A caller who compares two copies of the counters learns whether there were new
ones, without a wait for the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.models.inventory import layers_in
from fp8core.torch_ops import nonfinite
from fp8core.torch_ops.capture import untraced
from fp8core.torch_ops.private import UNSCALE_GRADS, without_modes


@untraced
def watch_grad_scaler(
    scaler: torch.amp.GradScaler,
    model: torch.nn.Module,
    *,
    group: dist.ProcessGroup | None = None,
) -> GradScalerWatch:
    """Have ``scaler`` skip a step if casts of ``model`` met NaN or inf on the way to it.

    ::

        scaler = torch.amp.GradScaler("cuda")
        fp8core.watch_grad_scaler(scaler, model)

    Call it once, before training; the loop stays as it is. Wherever the scaler looks for inf in an
    optimizer's gradients, the counters of the casts are added to its result, on the device: no
    gradient changes, and the host does not wait. ``scaler.update()`` starts the next count, so
    gradients that accumulate over several backward passes are one step, and all optimizers of a
    step get the same answer. Calls that record no gradients do not count. A scaler that is not
    enabled skips nothing. A copy of the scaler, or an unpickled one, watches no model until this
    function is called for it. Where gradients are on the CPU and layers are not, the host waits.

    With torch.distributed all ranks of ``group`` (None: the default group) skip a step if one of
    them has to, as they would with the same gradients. Each rank has to call this function, and to
    step as often as the others.

    Raises:
        OperandError: ``scaler`` is no torch.amp.GradScaler, or ``model`` has no layer of fp8core.
        UnsupportedError: the GradScaler of this torch lacks the private method.
    """
    layers_of(model, "watch_grad_scaler")
    if not isinstance(scaler, torch.amp.GradScaler):
        raise OperandError(
            f"watch_grad_scaler: expected a torch.amp.GradScaler, found {type(scaler).__name__}. "
            f"Other scalers can ask fp8core.found_inf(model)."
        )
    if not callable(getattr(scaler, UNSCALE_GRADS, None)):
        raise UnsupportedError(
            f"watch_grad_scaler: the GradScaler of torch {torch.__version__} has no "
            f"{UNSCALE_GRADS}; torch 2.11 to 2.13 have. Ask fp8core.found_inf(model) before the "
            f"step instead."
        )
    return GradScalerWatch(scaler, model, group)


class GradScalerWatch:
    """A model watched for a scaler, from :func:`watch_grad_scaler` until :meth:`remove`."""

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        model: torch.nn.Module,
        group: dist.ProcessGroup | None,
    ) -> None:
        self._model: torch.nn.Module | None = model
        self._group = group
        self._before: Counts = read_counts(counted_layers(model, "watch_grad_scaler"))
        for name, after in ((UNSCALE_GRADS, self._merge), ("update", self._begin)):
            setattr(scaler, name, _Followed(scaler, name, after))

    def remove(self) -> None:
        """Stop watching: the scaler looks at gradients alone again."""
        self._model = None
        self._before = {}

    @untraced
    def _begin(self, result: None) -> None:
        if self._model is not None:
            self._before = read_counts(counted_layers(self._model, "watch_grad_scaler"))

    @untraced
    def _merge(self, found_inf: dict[torch.device, torch.Tensor]) -> None:
        """Raise one of the scaler's found-inf tensors to 1.0 if casts have met NaN or inf.

        A single tensor is enough, as the scaler adds them up. A rank without gradients has none,
        and the scaler refuses its step, but it takes part in the reduction, for which the other
        ranks wait.
        """
        if self._model is None:
            return
        now = read_counts(layers_of(self._model, "watch_grad_scaler"))
        device = next(iter(found_inf), None) or device_of(self._model, now)
        with torch.no_grad():
            met = differ(now, self._before, device, in_training=True)
            has_ranks = dist.is_available() and dist.is_initialized()
            if has_ranks and dist.get_world_size(self._group) > 1:
                dist.all_reduce(met, op=dist.ReduceOp.MAX, group=self._group)
            if found_inf:
                total = found_inf[device]
                torch.maximum(total, met.reshape(total.shape), out=total)


class _Followed:
    """The method ``name`` of ``scaler``, with ``after`` called on its result.

    A copy or a pickle of the scaler gets its plain method instead.
    """

    def __init__(
        self, scaler: torch.amp.GradScaler, name: str, after: Callable[[Any], None]
    ) -> None:
        self._scaler, self._name, self._after = scaler, name, after
        self._run = getattr(scaler, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self._run(*args, **kwargs)
        self._after(result)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._scaler, self._name)


class _Counts(NamedTuple):
    """The values of one device's ``counters`` at some time, int64 ``[n, 2]``.

    Column 0 counts in calls that record gradients, column 1 in other calls. The last counter is
    that of casts of no layer, if there is one.
    """

    counters: Sequence[torch.Tensor]
    values: torch.Tensor


Counts: TypeAlias = "dict[torch.device, _Counts]"

_remembered: weakref.WeakKeyDictionary[torch.nn.Module, Counts] = weakref.WeakKeyDictionary()


@untraced
def found_inf(model: torch.nn.Module) -> torch.Tensor:
    """Return 1.0 if a cast of ``model`` met NaN or inf since :func:`clear_found_inf`, else 0.0.

    Casts count from the first call of :func:`clear_found_inf`, :func:`watch_grad_scaler` or this
    function on: call one of them before training, and before a CUDA graph is captured. A float32
    scalar on the model's accelerator, the first one if there are several; the host does not wait
    for it. Casts of inputs, weights and gradients of all layers count, forward and backward, with
    gradients or without; layers in high precision have no casts. Casts in graphs of torch.compile
    and torch.export, and those that write a quantized parameter or a KV cache, are counted by
    device: they turn the result to 1.0 for every model.

    Raises:
        OperandError: ``model`` has no layer of fp8core, or casts ran that were not counted, as
            nobody had asked.
    """
    layers = layers_of(model, "found_inf")
    missed = begin_counts(layers)
    now = read_counts(layers)
    if missed is not None:
        raise OperandError(
            f"found_inf: casts of {missed.label} ran before anybody asked for their NaN "
            f"and inf, and were not counted; from now on they are. Call "
            f"fp8core.clear_found_inf(model) or fp8core.watch_grad_scaler(scaler, model) once, "
            f"before training."
        )
    return differ(now, _remembered.get(model, {}), device_of(model, now))


@untraced
def clear_found_inf(model: torch.nn.Module) -> None:
    """Reset :func:`found_inf` of ``model`` to 0.0, until its casts meet NaN or inf again.

    From the first call on they are counted. The result for another module with the same layers does
    not change.

    Raises:
        OperandError: ``model`` has no layer of fp8core.
    """
    _remembered[model] = read_counts(counted_layers(model, "clear_found_inf"))


def counted_layers(model: torch.nn.Module, caller: str) -> list[LowPrecisionModule]:
    """Return the layers of fp8core in ``model``, whose casts count from now on.

    Raises:
        OperandError: there is none.
    """
    layers = layers_of(model, caller)
    begin_counts(layers)
    return layers


def begin_counts(layers: Sequence[LowPrecisionModule]) -> LowPrecisionModule | None:
    """Have the casts of ``layers`` count from now on; return the first that ran some without."""
    nonfinite.ask()
    missed = None
    for layer in layers:
        bindings = layer._bindings
        if not bindings.is_counted:  # else without a call, as in each step
            if missed is None and bindings.has_uncounted:
                missed = layer
            layer.count_nonfinite()
    return missed


def layers_of(model: torch.nn.Module, caller: str) -> list[LowPrecisionModule]:
    """Return the layers of fp8core in ``model``.

    Raises:
        OperandError: there is none.
    """
    layers = list(layers_in(model).values())
    if not layers:
        raise OperandError(
            f"{caller}: {type(model).__name__} has no layer of fp8core, so no cast counts NaN and "
            f"inf. Pass a model with layers of fp8core, built with them or converted."
        )
    return layers


@without_modes()  # counters are real, whatever mode asks
def read_counts(layers: Sequence[LowPrecisionModule]) -> Counts:
    """Return a copy of the counters of ``layers``, and of casts of no layer."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for layer in layers:
        for device, counter in layer._bindings.nonfinite.items():
            by_device.setdefault(device, []).append(counter)
    for device, counter in nonfinite.counters().items():
        by_device.setdefault(device, []).append(counter)
    return {device: _Counts(counts, torch.stack(counts)) for device, counts in by_device.items()}


@without_modes()
def differ(
    now: Counts, before: Counts, to: torch.device, *, in_training: bool = False
) -> torch.Tensor:
    """Return 1.0 if a counter has grown since ``before``, else 0.0; a float32 scalar on ``to``.

    ``in_training`` looks at calls that record gradients, and casts of no layer, alone.
    """
    flags = []
    for device, counts in now.items():
        changed = counts.values != _earlier_values(counts, before.get(device))
        changed = changed[:, 0] if in_training else changed
        # A copy to the CPU waits, as it could be read before it arrives.
        flags.append(changed.any().to(torch.float32).to(to, non_blocking=to.type != "cpu"))
    return torch.stack(flags).amax() if flags else torch.zeros((), device=to)


def _earlier_values(now: _Counts, before: _Counts | None) -> torch.Tensor:
    """Return the values in ``before`` of the counters of ``now``: 0 for newer counters."""
    if before is None:
        return torch.zeros_like(now.values)
    if [*map(id, now.counters)] == [*map(id, before.counters)]:
        return before.values
    rows = {id(counter): row for counter, row in zip(before.counters, before.values, strict=True)}
    zeros = before.values.new_zeros(2)
    return torch.stack([rows.get(id(counter), zeros) for counter in now.counters])


def device_of(model: torch.nn.Module, now: Counts) -> torch.device:
    """Return the device for the answer: an accelerator of the casts or the model, else the CPU."""
    devices = [*now, *(parameter.device for parameter in model.parameters())]
    accelerators = (device for device in devices if device.type not in ("cpu", "meta"))
    return next(accelerators, torch.device("cpu"))
