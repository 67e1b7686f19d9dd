"""One logged line at a model's first step: which layers ran in low precision, and on what."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch

from fp8core.context.autocast import is_switched_off
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bound import Bound, engine_of
from fp8core.modules.models.inventory import flops_of, module_nodes
from fp8core.recipe.plan import LayerRole
from fp8core.reporting import logger, some
from fp8core.torch_ops.private import forward_hooks


def announce(model: torch.nn.Module, *, is_wanted: bool) -> None:
    """Have the model's next forward in eager log how its layers ran, by a hook that removes itself.

    With ``is_wanted``, low precision is expected: the line is a warning if no layer ran in it and
    no autocast switched it off. A later call without ``is_wanted`` does not change that. After such
    a line the hook stays until the first forward that runs in low precision. In a graph of
    torch.compile the hook logs nothing and stays.
    """
    is_wanted |= _Hook(logging.WARNING) in forward_hooks(model).values()
    silence(model)
    model.register_forward_hook(_Hook(logging.WARNING if is_wanted else logging.INFO))


def silence(model: torch.nn.Module) -> None:
    """Undo :func:`announce`."""
    hooks = forward_hooks(model)
    for key in [key for key, hook in hooks.items() if isinstance(hook, _Hook)]:
        del hooks[key]


@dataclass(frozen=True)
class _Hook:
    """Logs the line, at ``level_if_idle`` if no layer ran in low precision though one could.

    None waits for the first forward with a recipe, after a line of a forward without one.
    """

    level_if_idle: int | None

    def __call__(self, model: torch.nn.Module, arguments: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        # Cheap enough for each forward; layers inside others, as of attention, count as well.
        has_recipe = _has_recipe(_bounds(model.modules()))
        if self.level_if_idle is None and (is_switched_off() or not has_recipe):
            return
        silence(model)
        line, is_unexpected = _summarize(model)
        logger.log((is_unexpected and self.level_if_idle) or logging.INFO, "%s", line)
        if not has_recipe:  # so that no layer ran in low precision
            model.register_forward_hook(_Hook(None))


# Pickled models of an earlier version name their hook so.
_warn, _inform, _wait = _Hook(logging.WARNING), _Hook(logging.INFO), _Hook(None)


def _bounds(modules: Iterable[torch.nn.Module]) -> dict[LowPrecisionModule, Bound]:
    """Return how each of fp8core's layers in ``modules`` that was called ran last."""
    layers = (module for module in modules if isinstance(module, LowPrecisionModule))
    return {layer: last[1] for layer in layers if (last := layer._bindings.last) is not None}


def _has_recipe(bounds: Mapping[LowPrecisionModule, Bound]) -> bool:
    return any(bound.recipe is not None for bound in bounds.values())


def _is_overridden(layer: LowPrecisionModule, bound: Bound) -> bool:
    """Whether the layer has a recipe outside any autocast, and ran without one."""
    outside = layer.outside_autocast
    return bound.recipe is None and outside is not None and outside.quantize is not None


def _summarize(model: torch.nn.Module) -> tuple[str, bool]:
    """Return the line, and whether no layer ran in low precision, with no autocast to forbid it."""
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
    if low or not high:
        return "; ".join(parts), False
    is_off = is_switched_off() or any(starmap(_is_overridden, bounds.items()))
    if is_off:
        parts.append("fp8core.autocast(enabled=False) switched it off")
    elif _has_recipe(bounds):
        parts.append("the active recipe leaves all of them in high precision")
    else:
        parts.append("no recipe is active: enter fp8core.autocast, or convert with a recipe")
    return "; ".join(parts), not is_off
