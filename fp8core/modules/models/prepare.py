"""``prepare``: gives the layers of a model their paths as names, and their delayed state."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fp8core.errors import Fp8CoreError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bound import check_rules
from fp8core.modules.models.first_step import announce
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.choice import recipe_from
from fp8core.recipe.plan import LayerRole, Plan
from fp8core.tensors.delayed_state import BUFFERS
from fp8core.torch_ops.private import DDP_IGNORED


def prepare(model: torch.nn.Module, recipe: Recipe | str | None = None) -> torch.nn.Module:
    """Give every fp8core layer of ``model`` its path as its name, and return the model.

    Messages then name the layer, and :class:`fp8core.recipe.PerLayer` can match it; a pattern that
    matches no layer of the model is an error, here or when a layer first runs. The model's first
    forward logs which layers ran in low precision.

    With a ``recipe``, the buffers of delayed scales are created now instead of at a layer's first
    use. A fresh model then has every key that a checkpoint of a trained one has, as
    torch.distributed.checkpoint loads the keys of the model's ``state_dict`` alone. Prepare after
    ``convert`` and before wrappers: DistributedDataParallel then does not broadcast these buffers.
    A model on the meta device gets its state together with its memory.

    Args:
        model: any module.
        recipe: the recipe for training the model, or its name; None creates no state.

    Raises:
        RecipeError: an unknown recipe, one with a pattern that matches no layer, or one that does
            not fit the delayed state that a layer got from a checkpoint. The layers have their
            names then, and no new state.
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
        _create_states(model, chosen)
    announce(model, is_wanted=False)
    return model


def _create_states(model: torch.nn.Module, recipe: Recipe) -> None:
    plans: dict[LowPrecisionModule, Plan] = {}
    for layer in _stateful(model):
        dtype = next(
            (parameter.dtype for parameter in layer.parameters()), torch.get_default_dtype()
        )
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
        buffers = [
            name
            for path, module in model.named_modules()
            if module in plans
            for name in (f"{path}.{buffer}".lstrip(".") for buffer in BUFFERS)
        ]
        ignored = [name for name in getattr(model, DDP_IGNORED, ()) if name not in buffers]
        setattr(model, DDP_IGNORED, [*ignored, *buffers])


def _stateful(module: torch.nn.Module) -> Iterator[LowPrecisionModule]:
    """Yield the layers with GEMMs; an ``ops.Sequential`` has the state of its chains."""
    children = list(module.children())
    if isinstance(module, LowPrecisionModule):
        if module.count_slot_sets():
            yield module
        alone = module.runs_alone()
        children = [child for name, child in module.named_children() if name in alone]
    for child in children:
        yield from _stateful(child)
