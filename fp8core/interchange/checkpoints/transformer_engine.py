"""A model's state as Transformer Engine's modules save it."""

from __future__ import annotations

from typing import Any

import torch

from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.bound import recipe_in
from fp8core.modules.delayed import DelayedModule
from fp8core.modules.extra_state.attention import to_three_gemms
from fp8core.modules.extra_state.state import READABLE
from fp8core.modules.extra_state.writing import fields_of, write_extra_state
from fp8core.modules.inventory import keyed_modules
from fp8core.recipe import DelayedScaling, Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.choice import recipe_from
from fp8core.recipe.plan import AttentionPlan, LayerRole
from fp8core.tensors.delayed_state import BUFFERS, META, describe, read_meta

_FUNCTION = "transformer_engine_state_dict"


def transformer_engine_state_dict(
    model: torch.nn.Module, recipe: Recipe | str | None = None
) -> dict[str, Any]:
    """Return ``model.state_dict()`` with delayed scaling as Transformer Engine's modules hold it.

    Each layer has an ``_extra_state``, uint8 ``[bytes]``, in the stead of its buffers of delayed
    scaling; it is empty for a layer without them. Scales and amax histories are the same numbers,
    and ``load_state_dict`` of fp8core's layers reads them back. In attention queries, keys and
    values have one scale together in Transformer Engine, the smallest of the three.

    Transformer Engine stores this state as a pickle, and from 2.20 on loads it only where
    ``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1`` says that the file is trusted.

    Args:
        model: any module with fp8core's layers.
        recipe: the recipe of training, a :class:`~fp8core.recipe.DelayedScaling` or a PerLayer of
            them; None takes that of :func:`fp8core.convert`. Without delayed state none is needed.

    Raises:
        RecipeError: a layer has delayed state, and there is no recipe, or another than the state's.
        UnsupportedError: the recipe computes by functions, or the state is that of a layer by a
            plan of its own; or a model on meta.
    """
    if not isinstance(model, torch.nn.Module):
        raise OperandError(f"{_FUNCTION}({model!r}): expected a torch.nn.Module.")
    chosen = recipe_from(recipe, f"{_FUNCTION}(recipe=...)")
    state: dict[str, Any] = dict(model.state_dict())
    for path, layer in keyed_modules(model):
        if not isinstance(layer, DelayedModule):
            continue
        prefix = f"{path}." if path else ""
        buffers = {name: state.pop(prefix + name, None) for name in BUFFERS}
        content = b""
        if buffers[META] is not None:
            content = _content(layer, path, buffers, chosen)
        elif any(isinstance(child, DelayedModule) for child in layer.children()):
            continue  # a container, as ops.Sequential
        written = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else None
        empty = torch.empty(0, dtype=torch.uint8, device="cpu")
        state[f"{prefix}_extra_state"] = empty if written is None else written
    return state


def _content(
    layer: DelayedModule, path: str, buffers: dict[str, Any], recipe: Recipe | None
) -> bytes:
    """Return the pickle of the delayed state of ``layer``."""
    kind = layer.plan_type
    if kind not in READABLE or not isinstance(layer, LowPrecisionModule):
        raise UnsupportedError(
            f"{_FUNCTION}: {path!r} has delayed scales of {type(layer).__name__}, for which "
            f"Transformer Engine has no state. Call reset_delayed_state() of this layer first."
        )
    if any(buffer.is_meta for buffer in buffers.values()):
        raise UnsupportedError(
            f"{_FUNCTION}: {path!r} is on the meta device, where it has no values."
        )
    role = LayerRole(layer.kind, layer.name)
    outside = layer.outside_autocast
    used = recipe_in(recipe if recipe is not None or outside is None else outside.quantize, role)
    meta = read_meta(buffers[META])
    stored = "metadata that is not fp8core's" if meta is None else meta[0]
    if not isinstance(used, DelayedScaling):
        raise RecipeError(
            f"{_FUNCTION}: {path!r} has delayed state for {stored}, and the recipe for it is "
            f"{used!r}. Pass the DelayedScaling that it was trained by as recipe."
        )
    plan = plan_of(kind, used, role, torch.bfloat16)
    if plan.delayed is None or describe(plan) != stored:
        raise RecipeError(
            f"{_FUNCTION}: {path!r} has delayed state for {stored}, the recipe needs "
            f"{describe(plan) if plan.delayed else 'none'}. Pass the recipe that it was trained by."
        )
    if callable(used.amax_compute_algo) or used.scaling_factor_compute_algo is not None:
        raise UnsupportedError(
            f"{_FUNCTION}: the recipe computes scales by a function, which a state without code "
            f"cannot hold. Use amax_compute_algo 'max' or 'most_recent'."
        )
    tensors = {name: value for name, value in buffers.items() if name != META}
    if kind is AttentionPlan:
        tensors = to_three_gemms(tensors)
    return write_extra_state(tensors, fields_of(used))
