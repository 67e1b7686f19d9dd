"""The logged line at a model's first step: which layers ran in low precision, and on what."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from fp8core.context.autocast import is_switched_off
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.bound import Bound, engines_of
from fp8core.modules.inventory import flops_of, module_nodes
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
    is_wanted |= _warn in forward_hooks(model).values()
    silence(model)
    model.register_forward_hook(_warn if is_wanted else _inform)


def silence(model: torch.nn.Module) -> None:
    """Undo :func:`announce`."""
    hooks = forward_hooks(model)
    for key, hook in list(hooks.items()):
        if hook in (_warn, _inform, _wait):
            del hooks[key]


def _warn(model: torch.nn.Module, arguments: Any, output: Any) -> None:
    _say(model, logging.WARNING)


def _inform(model: torch.nn.Module, arguments: Any, output: Any) -> None:
    _say(model, logging.INFO)


def _wait(model: torch.nn.Module, arguments: Any, output: Any) -> None:
    """Log the line at the first forward in low precision, after one that said none ran in it."""
    if torch.compiler.is_compiling() or is_switched_off():
        return
    if _ran_with_recipe(model):
        _say(model, logging.INFO)


def _say(model: torch.nn.Module, level_if_idle: int) -> None:
    if torch.compiler.is_compiling():
        return
    silence(model)
    summary = _summarize(model)
    logger.log(logging.INFO if summary.is_good else level_if_idle, "%s", summary.line)
    if not summary.is_low and not _ran_with_recipe(model):
        model.register_forward_hook(_wait)


def _ran_with_recipe(model: torch.nn.Module) -> bool:
    """Say whether a layer's latest call had a recipe: a question cheap enough for each forward."""
    for module in model.modules():
        if isinstance(module, LowPrecisionModule):
            last = module._bindings.last
            if last is not None and last[1].recipe is not None:
                return True
    return False


class _Layer(NamedTuple):
    """A linear layer, and how its first call computed; None for a layer of torch."""

    name: str
    flops: int
    layer: LowPrecisionModule | None
    bound: Bound | None

    @property
    def is_low(self) -> bool:
        return bool(self.engines)

    @property
    def engines(self) -> list[str]:
        """Recipe and backends of the GEMMs that ran in low precision."""
        if self.layer is None or self.bound is None:
            return []
        return engines_of(self.bound, LayerRole(self.layer.kind, self.layer.name))

    @property
    def is_overridden(self) -> bool:
        """Whether it has a recipe outside any autocast, and ran without one."""
        if self.layer is None or self.bound is None or self.bound.recipe is not None:
            return False
        outside = self.layer.outside_autocast
        return outside is not None and outside.quantize is not None

    def substitutions(self) -> Iterator[str]:
        for link in self.bound.linears if self.bound is not None else ():
            for step, choice in link.choices.items():
                if choice.substitution:
                    yield f"{step} on {choice.backend}: {choice.substitution}"


def _layers(model: torch.nn.Module) -> list[_Layer]:
    layers = {}
    for node in module_nodes(model):
        flops = flops_of(node.module)
        if flops and node.module not in layers:
            layer = node.module if isinstance(node.module, LowPrecisionModule) else None
            last = None if layer is None else layer._bindings.last
            name = node.path or type(node.module).__name__
            layers[node.module] = _Layer(name, flops, layer, None if last is None else last[1])
    return list(layers.values())


class _Summary(NamedTuple):
    """How a model ran: whether in low precision, whether as asked for, and the line to log."""

    is_low: bool
    is_good: bool
    line: str


def _summarize(model: torch.nn.Module) -> _Summary:
    layers = _layers(model)
    low = [layer for layer in layers if layer.is_low]
    total = sum(layer.flops for layer in layers)
    share = sum(layer.flops for layer in low) / total if total else 0.0
    owner = type(model).__name__
    first = f"{owner}, first step: {len(low)} of {len(layers)} linear layers"
    parts = [f"{first} ({share:.1%} of their FLOPs a token) ran in low precision"]
    for engine in dict.fromkeys(engine for layer in low for engine in layer.engines):
        count = sum(engine in layer.engines for layer in low)
        parts.append(engine if count == len(low) else f"{count} in {engine}")
    idle = [layer.name for layer in layers if layer.layer is not None and layer.bound is None]
    high = [layer.name for layer in layers if not layer.is_low and layer.name not in idle]
    parts += [f"in high precision: {some(high)}"] if high else []
    parts += [f"not called, or in a compiled graph: {some(idle)}"] if idle else []
    substitutions = dict.fromkeys(text for layer in layers for text in layer.substitutions())
    parts += [f"substituted: {text}" for text in substitutions]
    if low or not high:
        return _Summary(bool(low), True, "; ".join(parts))
    ran = [layer for layer in layers if layer.bound is not None]
    if is_switched_off() or any(layer.is_overridden for layer in ran):
        parts.append("fp8core.autocast(enabled=False) switched it off")
        return _Summary(False, True, "; ".join(parts))
    if any(layer.bound is not None and layer.bound.recipe is not None for layer in ran):
        parts.append("the active recipe leaves all of them in high precision")
    else:
        parts.append("no recipe is active: enter fp8core.autocast, or convert with a recipe")
    return _Summary(False, False, "; ".join(parts))
