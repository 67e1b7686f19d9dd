"""Delayed scaling as Transformer Engine's modules save it: the state of a model, and of experts
under Megatron.

Megatron asks a new model for the names that it reads from a checkpoint, before a step has created
the buffers of delayed scaling. Megatron saves each expert of a grouped linear under its number
among all experts, so that a checkpoint loads with another number of ranks; the state of one has the
form of that of a linear with one GEMM.

Megatron 0.16.1 takes slots ``i``, ``n + i`` and ``2 n + i`` for those of expert ``i`` of n, where
Transformer Engine 2 has the slots of an expert side by side, and puts them back where they were if
the number of experts is the same. States are written and read so, and have the expert's slots under
a key of their own besides, which a layer of fp8core takes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bound import recipe_in
from fp8core.modules.models.inventory import keyed_modules
from fp8core.modules.state.delayed import DelayedModule
from fp8core.modules.state.extra_state import READABLE, read_expert_state, to_three_gemms
from fp8core.modules.state.writing import fields_of, write_extra_state
from fp8core.recipe import DelayedScaling, Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.named import recipe_from
from fp8core.recipe.plan import AttentionPlan, LayerRole, LinearPlan, Plan
from fp8core.reporting import log_once
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
        written = _empty()
        if buffers[META] is not None:
            used = _recipe_for(layer, path, buffers, chosen)
            written = _written(buffers, layer.plan_type, used)
        elif any(isinstance(child, DelayedModule) for child in layer.children()):
            continue  # a container, as ops.Sequential
        state[f"{prefix}_extra_state"] = written
    return state


def _recipe_for(
    layer: DelayedModule, path: str, buffers: dict[str, Any], recipe: Recipe | None
) -> DelayedScaling:
    """Return the recipe of training for ``layer``, checked to be that of its delayed state."""
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
    return used


_TENSORS = tuple(name for name in BUFFERS if name != META)
_ROLES = {LinearPlan: LayerRole("linear"), AttentionPlan: LayerRole("attention")}


def written_state(
    buffers: Mapping[str, torch.Tensor | None], plan_type: type[Plan]
) -> torch.Tensor:
    """Return the ``_extra_state`` of a layer, uint8 ``[bytes]``; an empty one without a state.

    Args:
        buffers: the layer's delayed state, ``scale_fwd`` and so on.
        plan_type: that of the layer.
    """
    recipe = _recipe_of(buffers, plan_type)
    # An empty one says that the slots are those of an expert, where the layer is one of several.
    return _empty() if recipe is None else _written(buffers, plan_type, recipe, expert={})


def _written(
    buffers: Mapping[str, torch.Tensor | None],
    plan_type: type[Plan],
    recipe: DelayedScaling,
    expert: Mapping[str, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the ``_extra_state`` of ``buffers``, the delayed state of ``recipe``."""
    tensors = _on_cpu(buffers)
    if plan_type is AttentionPlan:
        tensors = to_three_gemms(tensors)
    content = write_extra_state(tensors, fields_of(recipe), expert)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def split_state(buffers: Mapping[str, torch.Tensor | None], num_experts: int) -> list[torch.Tensor]:
    """Return an ``_extra_state`` for each expert, uint8 ``[bytes]``; empty ones without a state.

    Args:
        buffers: the delayed state of a grouped linear, ``scale_fwd [3 num_experts]`` and so on.
        num_experts: the number of its GEMMs.
    """
    recipe = _recipe_of(buffers, LinearPlan)
    if recipe is None:
        return [_empty()] * num_experts
    whole = _on_cpu(buffers)
    states = []
    for number in range(num_experts):
        of_expert = {
            name: tensor.chunk(num_experts, dim=-1)[number] for name, tensor in whole.items()
        }
        theirs = {name: tensor[..., number::num_experts] for name, tensor in whole.items()}
        states.append(_written(theirs, LinearPlan, recipe, of_expert))
    return states


def merge_states(states: Sequence[Any]) -> dict[str, torch.Tensor]:
    """Return the buffers of a grouped linear whose experts have ``states``; none if all are empty.

    Raises:
        OperandError: a state is missing (None), damaged, or of another recipe or library than the
            first.
    """
    read = [({}, True) if state is None else _read(state) for state in states]
    absent = [number for number, (buffers, _) in enumerate(read) if not buffers]
    if len(absent) == len(read) and not any(state is None for state in states):
        return {}
    if absent:
        raise OperandError(
            f"the checkpoint has no delayed state of the experts {absent} of {len(read)}, but has "
            f"that of the others. Leave out every _extra_state to start the scales fresh"
        )
    experts, origins = [buffers for buffers, _ in read], {is_native for _, is_native in read}
    if any(not torch.equal(buffers[META], experts[0][META]) for buffers in experts):
        raise OperandError("the experts' delayed states in the checkpoint are of several recipes")
    if len(origins) > 1:
        raise OperandError("the experts' delayed states in the checkpoint are of two libraries")
    merged = {}
    for name in _TENSORS:
        parts = [buffers[name] for buffers in experts]
        merged[name] = (
            torch.cat(parts, -1) if origins == {True} else torch.stack(parts, -1).flatten(-2)
        )
    return {**merged, META: experts[0][META]}


def _read(state: Any) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the buffers of an expert's state, and whether they hold the slots of this expert
    alone."""
    is_empty = isinstance(state, torch.Tensor) and not state.numel()
    return ({}, True) if is_empty else read_expert_state(state)


def _recipe_of(
    buffers: Mapping[str, torch.Tensor | None], plan_type: type[Plan]
) -> DelayedScaling | None:
    """Return a recipe whose state ``buffers`` are; None without a state, or where Transformer
    Engine has no such recipe, which is logged once."""
    stored = buffers.get(META)
    meta = None if stored is None or stored.is_meta else read_meta(stored)
    if meta is None or plan_type not in READABLE:
        return None
    for recipe in _recipes(meta[1]):
        plan = plan_of(plan_type, recipe, _ROLES[plan_type], torch.bfloat16)
        if plan.delayed is not None and describe(plan) == meta[0]:
            return recipe
    log_once(
        f"delayed scales for {meta[0]} are those of no recipe of Transformer Engine: they are left "
        f"out of Megatron's checkpoint, and start fresh when it is loaded",
        logging.WARNING,
    )
    return None


def _recipes(history_len: int) -> Iterator[DelayedScaling]:
    for pair in ("hybrid", "e4m3"):
        for backward in ("dequantized", "fp8"):
            yield DelayedScaling(
                amax_history_len=history_len,
                fp8_format=pair,
                fp8_dpa=True,
                fp8_dpa_backward=backward,
            )


def _on_cpu(buffers: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor]:
    tensors = {name: buffers[name] for name in _TENSORS}
    return {name: tensor.cpu() for name, tensor in tensors.items() if tensor is not None}


def _empty() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu")
