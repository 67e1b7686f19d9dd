"""``prepare``: gives the layers of a model their paths as names, and their delayed state.

The model's first step then logs a line: which layers ran in low precision, by which recipe and
backend.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.context.autocast import is_switched_off
from fp8core.dispatch import settings
from fp8core.errors import Fp8CoreError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bound import Bound, check_rules, engine_of
from fp8core.modules.models.inventory import flops_of, layers_in, module_nodes
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.named import recipe_from
from fp8core.recipe.plan import LayerRole, Plan
from fp8core.reporting import logger, some, tell
from fp8core.tensors.delayed_state import BUFFERS
from fp8core.torch_ops.private import DDP_IGNORED, forward_hooks, is_compiled


def announce(model: torch.nn.Module, *, warns: bool) -> None:
    """Have the model's next forward in eager log how its layers ran, by a hook that removes itself:
    on rank 0, unless ``FP8CORE_FIRST_STEP=0``, and, as a warning, on every rank.

    With ``warns`` the line is a warning if no layer ran in low precision and no autocast switched
    it off: the caller expects low precision. A later call without it keeps the warning. After a
    forward without a recipe a second line is logged for the first forward with one. In a graph of
    torch.compile the hook logs nothing and stays.
    """
    warns |= _Hook(logging.WARNING) in forward_hooks(model).values()
    silence(model)
    model.register_forward_hook(_Hook(logging.WARNING if warns else logging.INFO))


def silence(model: torch.nn.Module) -> bool:
    """Undo :func:`announce`; return whether its hook was there, True to one thread of several."""
    hooks = forward_hooks(model)
    keys = [key for key, hook in list(hooks.items()) if isinstance(hook, _Hook)]
    return any([hooks.pop(key, None) for key in keys])


@dataclass(frozen=True)
class _Hook:
    """Logs the line of :func:`announce`.

    ``level_if_idle`` is the level of the line if no layer ran in low precision and no autocast
    switched it off. A hook with None follows the line of a forward without a recipe, and waits for
    the first forward with one.
    """

    level_if_idle: int | None

    def __call__(self, model: torch.nn.Module, arguments: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # All modules, as layers inside other layers count too; the walk is short beside a forward.
        has_recipe = _has_recipe(_bounds(model.modules()))
        if self.level_if_idle is None and (is_switched_off() or not has_recipe):
            return
        if not silence(model):  # another thread's forward logs
            return
        line, is_unexpected = _summarize(model)
        if is_unexpected and self.level_if_idle == logging.WARNING:
            logger.warning("%s", line)
        elif settings.tells_first_step() and _is_first_rank():
            tell(line)
        if not has_recipe:  # a later forward, under a recipe, is announced as well
            model.register_forward_hook(_Hook(None))


def _is_first_rank() -> bool:
    group = torch.distributed
    return not (group.is_available() and group.is_initialized() and group.get_rank())


# The names of the hooks in pickled models of an earlier version.
_warn, _inform, _wait = _Hook(logging.WARNING), _Hook(logging.INFO), _Hook(None)


def _bounds(modules: Iterable[torch.nn.Module]) -> dict[LowPrecisionModule, Bound]:
    """Return how each of fp8core's layers in ``modules`` that was called ran last."""
    layers = (module for module in modules if isinstance(module, LowPrecisionModule))
    return {layer: last[1] for layer in layers if (last := layer._bindings.last) is not None}


def _has_recipe(bounds: Mapping[LowPrecisionModule, Bound]) -> bool:
    return any(bound.recipe is not None for bound in bounds.values())


def _summarize(model: torch.nn.Module) -> tuple[str, bool]:
    """Return the line, and whether all layers ran in high precision though no autocast switched low
    precision off."""
    names: dict[torch.nn.Module, str] = {}
    for path, module, _ in module_nodes(model):
        if flops_of(module):
            names.setdefault(module, path or type(module).__name__)
    bounds = _bounds(names)
    roles = {layer: LayerRole(layer.kind, layer.name) for layer in bounds}
    engines = {layer: engine_of(bound, roles[layer]) for layer, bound in bounds.items()}
    low = {layer: engine for layer, engine in engines.items() if engine}
    idle = [n for m, n in names.items() if isinstance(m, LowPrecisionModule) and m not in bounds]
    high = [name for module, name in names.items() if module not in low and name not in idle]
    share = sum(map(flops_of, low)) / (sum(map(flops_of, names)) or 1)
    counts = f"{len(low)} of {len(names)} linear layers ({share:.1%} of their FLOPs a token)"
    parts = [f"{type(model).__name__}, first step: {counts} ran in low precision"]
    for engine, count in Counter(low.values()).items():
        parts.append(engine if count == len(low) else f"{count} in {engine}")
    parts += [f"in high precision: {some(high)}"] if high else []
    parts += [f"not called, or in a compiled graph: {some(idle)}"] if idle else []
    parts += dict.fromkeys(
        f"substituted: {step} on {choice.backend}: {choice.substitution}"
        for bound in bounds.values()
        for link in bound.linears
        for step, choice in link.choices.items()
        if choice.substitution
    )
    compiled = {inner for each in model.modules() if is_compiled(each) for inner in each.modules()}
    ran_without = any(bound.recipe is None for bound in bounds.values())
    may_be_low = not ran_without and any(names.get(layer) in idle for layer in compiled)
    if low or not high or may_be_low:  # in the graphs of compiled modules
        return "; ".join(parts), False
    # A layer that has a recipe outside of autocast, and ran without one, was switched off.
    requests = [layer.outside_autocast for layer, bound in bounds.items() if bound.recipe is None]
    is_off = is_switched_off() or any(
        request is not None and request.quantize is not None for request in requests
    )
    if is_off:
        parts.append("fp8core.autocast(enabled=False) switched it off")
    elif _has_recipe(bounds):
        parts.append("the active recipe leaves all of them in high precision")
    else:
        parts.append("no recipe is active: enter fp8core.autocast, or convert with a recipe")
    return "; ".join(parts), not is_off


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
            not fit the delayed state that a layer got from a checkpoint. After the error the layers
            have their names, and no new state.
    """
    chosen = recipe_from(recipe, "prepare(recipe=...)")
    layers = layers_in(model)
    for path, layer in layers.items():
        layer.name = path or layer.name
        layer.unbind()
    peers = "\n".join(
        f"{layer.kind} {layer.name}" for layer in layers.values() if layer.name is not None
    )
    for layer in layers.values():
        layer.peers = peers
    check_rules(chosen, peers)
    if chosen is not None:
        _create_states(model, chosen)
    announce(model, warns=False)
    return model


def _create_states(model: torch.nn.Module, recipe: Recipe) -> None:
    plans: dict[LowPrecisionModule, Plan] = {}
    for layer in _layers_with_slots(model):
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


def _layers_with_slots(module: torch.nn.Module) -> Iterator[LowPrecisionModule]:
    """Yield the layers with slots for delayed scales; an ``ops.Sequential`` has the slots of the
    operations in its chains."""
    children = list(module.children())
    if isinstance(module, LowPrecisionModule):
        if module.count_slot_sets():
            yield module
        run_alone = module.runs_alone()
        children = [child for name, child in module.named_children() if name in run_alone]
    for child in children:
        yield from _layers_with_slots(child)
