"""``prepare``: a model of fp8core's layers, each with its path as its name and its state made."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fp8core.errors import Fp8CoreError
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.bound import check_rules
from fp8core.modules.first_step import announce
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.choice import recipe_from
from fp8core.recipe.plan import LayerRole, Plan
from fp8core.tensors.slots import BUFFERS
from fp8core.torch_ops.private import DDP_IGNORED

__all__ = ["prepare"]


def prepare(model: torch.nn.Module, recipe: Recipe | str | None = None) -> torch.nn.Module:
    """Give every fp8core layer of ``model`` its path as its name, and return the model.

    Messages then name the layer, and :class:`fp8core.recipe.PerLayer` can match it; a pattern of it
    that matches no layer of the model is an error, here or when a layer first runs. The model's
    first forward logs what ran in low precision.

    With a ``recipe``, each layer that it gives delayed scales has their buffers at once instead of
    from its first use on. A fresh model then has every key that a checkpoint of a trained one has,
    which torch.distributed.checkpoint needs: it loads what the model's ``state_dict`` names and
    nothing else. Prepare after ``convert`` and before wrappers: DistributedDataParallel then leaves
    these buffers to each rank. A model on the meta device gets its state with its memory.

    Args:
        model: any module.
        recipe: the recipe that the model will be trained with, or its name; None makes no state.

    Raises:
        RecipeError: an unknown recipe, one with a pattern that matches no layer, or one that does
            not fit the delayed state that a layer got from a checkpoint. Nothing but names is
            changed then.
    """
    chosen = recipe_from(recipe, "prepare(recipe=...)")
    layers = {
        module: path
        for path, module in model.named_modules()
        if isinstance(module, LowPrecisionModule)
    }
    for layer, path in layers.items():
        layer.name = path or layer.name
        layer.unbind()
    peers = "\n".join(f"{layer.kind} {layer.name}" for layer in layers if layer.name is not None)
    for layer in layers:
        layer.peers = peers
    check_rules(chosen, peers)
    if chosen is not None:
        _make_states(model, chosen)
    announce(model, is_wanted=False)
    return model


def _make_states(model: torch.nn.Module, recipe: Recipe) -> None:
    plans: dict[LowPrecisionModule, Plan] = {}
    for layer in _stateful(model):
        dtype = next(layer.parameters()).dtype
        try:
            plan = plan_of(layer.plan_type, recipe, LayerRole(layer.kind, layer.name), dtype)
            if plan.delayed is not None:
                layer.check_delayed_state(plan, records=True)
                plans[layer] = plan
        except Fp8CoreError as error:
            raise type(error)(f"{layer.label}: {error}") from None
    for layer, plan in plans.items():
        layer.prepare_delayed_state(plan)
    if plans:
        own = [
            name
            for path, module in model.named_modules()
            if module in plans
            for name in (f"{path}.{buffer}".lstrip(".") for buffer in BUFFERS)
        ]
        ignored = [name for name in getattr(model, DDP_IGNORED, ()) if name not in own]
        setattr(model, DDP_IGNORED, [*ignored, *own])


def _stateful(module: torch.nn.Module) -> Iterator[LowPrecisionModule]:
    """Yield the layers with GEMMs; the operations of an ``ops.Sequential`` have theirs in it."""
    if isinstance(module, LowPrecisionModule):
        if module.count_gemms():
            yield module
        return
    for child in module.children():
        yield from _stateful(child)
