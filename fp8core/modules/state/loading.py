"""Checks of a state_dict before a layer loads it: a layer is loaded whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import torch

from fp8core.errors import OperandError
from fp8core.modules.state.extra_state import (
    READABLE,
    may_be_transformer_engine_s,
    read_extra_state,
)
from fp8core.recipe.plan import Plan, SlotNames
from fp8core.reporting import collect
from fp8core.tensors.checks import fault_of, kind_fault, lacks_memory, misfit
from fp8core.tensors.delayed_state import BUFFERS, META, differing, read_meta
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import PARTS

EXTRA_STATE: Final = "_extra_state"
"""The key, behind a layer's prefix, of what torch saves besides tensors."""


class Imported(NamedTuple):
    """The buffers of delayed scaling that another library's checkpoint has, or why it has none."""

    state: dict[str, torch.Tensor]
    errors: list[str]


def import_extra_state(value: Any, label: str, plan_type: type[Plan] | None) -> Imported:
    """Return the delayed state in ``value``, Transformer Engine's ``_extra_state`` of the layer
    ``label``.

    ``plan_type`` is the layer's; None for a layer without slots.
    """
    if value is None or (kind_fault(value) is None and not value.numel()):
        return Imported({}, [])
    if plan_type not in READABLE or not may_be_transformer_engine_s(value):
        collect(label, "the checkpoint's _extra_state is another library's; not read")
        return Imported({}, [])
    try:
        return Imported(read_extra_state(value, plan_type), [])
    except OperandError as error:
        return Imported({}, [str(error)])


def has_weights(
    parameters: Mapping[str, torch.Tensor | None], state_dict: Mapping[str, Any], prefix: str
) -> bool:
    """Say whether ``state_dict`` holds a weight of the layer.

    Without one it is a checkpoint of other layers or of a bias, and the layer's delayed state still
    fits its weights.
    """
    present = [value for name, value in parameters.items() if prefix + name in state_dict]
    return any(value is not None and value.dim() > 1 for value in present)


def parameter_errors(
    parameters: Mapping[str, torch.Tensor | None],
    state_dict: Mapping[str, Any],
    prefix: str,
    *,
    assigns: bool,
) -> list[str]:
    """Return a line for each of ``parameters`` that cannot be loaded from ``state_dict``.

    ``assigns``: loading replaces the parameters instead of copying into them.
    """
    errors = []
    for name, parameter in parameters.items():
        if parameter is not None and prefix + name in state_dict:
            error = _parameter_error(parameter, state_dict[prefix + name], assigns)
            errors += [] if error is None else [f"{name} {error}"]
    return errors


def _parameter_error(parameter: torch.Tensor, value: Any, assigns: bool) -> str | None:
    error = misfit(value, parameter, replaces=assigns)
    if error is not None or not isinstance(value, QuantizedTensor):
        return error
    fault = fault_of([getattr(value, part) for part in PARTS], value.plan)
    return None if fault is None else f"cannot be loaded: {fault}"


def state_errors(
    state: Mapping[str, Any], slots: SlotNames, stored: str | None, of_plan: SlotNames
) -> list[str]:
    """Return why ``state``, a checkpoint's delayed state by name, cannot be loaded.

    ``slots`` are those of the layer, ``of_plan`` those of its plan, once; ``stored`` describes the
    state that the layer has, None if none.
    """
    missing = [name for name in BUFFERS if name not in state]
    if missing:
        return [f"the checkpoint's delayed state lacks {', '.join(missing)}"]
    kinds = [(name, _plain_error(value)) for name, value in state.items()]
    errors = [f"{name} {error}" for name, error in kinds if error is not None]
    if errors:
        return errors
    meta = read_meta(state[META])
    if meta is None:
        return [f"the checkpoint's {META} is not fp8core's"]
    text, length = meta
    errors = list(_value_errors(state, length, slots))
    if not errors and stored is not None and stored != text:
        theirs, mine = differing(text, stored, of_plan)
        return [f"the checkpoint's delayed state is for {theirs}, the layer's for {mine}"]
    return errors


def _plain_error(value: Any) -> str | None:
    error = kind_fault(value)
    if error is not None:
        return error
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        return f"is a {type(value).__name__} in the checkpoint, expected a plain tensor"
    if value.is_meta:
        return "is on the meta device in the checkpoint, where it has no values"
    if lacks_memory(value):
        return "has no memory for its elements in the checkpoint"
    if value.numel() * value.element_size() > value.untyped_storage().nbytes():
        return "is expanded in the checkpoint, so that its elements share memory"
    return None


def _value_errors(
    state: Mapping[str, torch.Tensor], length: int, slots: SlotNames
) -> Iterator[str]:
    for way, num_slots in (("fwd", len(slots.forward)), ("bwd", len(slots.backward))):
        shapes = ((num_slots,), (length, num_slots))
        for name, shape in zip((f"scale_{way}", f"amax_history_{way}"), shapes, strict=True):
            value = state[name]
            if tuple(value.shape) != shape or value.dtype != torch.float32:
                yield (
                    f"{name} is {value.dtype} {list(value.shape)} in the checkpoint, "
                    f"expected torch.float32 {list(shape)}"
                )
            elif len(shape) == 1:
                if not bool((value.isfinite() & (value > 0)).all()):
                    yield f"{name} holds scales that are NaN, infinite, zero or negative"
            # The first row belongs to a step that has not ended and may have met an infinite value.
            elif not bool((value >= 0).all() & value[1:].isfinite().all()):
                yield f"{name} holds amaxes that are NaN, infinite or negative"
