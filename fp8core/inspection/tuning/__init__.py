"""The fastest recipe of each layer of a model whose error stays under a bound; ``fp8core.tune``
finds them."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from fp8core.context.autocast import autocast
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.inspection.monitoring import drawing, watched_layers
from fp8core.inspection.monitoring.rows import render
from fp8core.inspection.monitoring.what_if import pattern_of
from fp8core.inspection.tuning.replayed import LayerCall, Replay, Times, captured, relative_error
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.models import inventory
from fp8core.recipe import PerLayer, Recipe
from fp8core.recipe.data import as_data, save
from fp8core.recipe.named import recipe_from
from fp8core.reporting import folded, some

__all__ = ["HIGH_PRECISION", "RECIPES", "Group", "Times", "Tuning", "tune"]

HIGH_PRECISION = "high precision"
RECIPES = ("delayed", "current", "rowwise", "block")


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that read one tensor, which one recipe casts once for all of them; mostly one layer.

    ``us`` and ``errors`` are the time of a forward and backward pass and the largest error, by
    recipe. An error is NaN under a recipe that cannot run, or where nothing can be compared.
    """

    layers: list[str] = field(default_factory=list)
    us: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)

    def choose(self, bound: float) -> str:
        """Return the fastest recipe with an error up to ``bound``, of equally fast ones the more
        precise; high precision has none."""
        within = [name for name, error in self.errors.items() if error <= bound]  # never NaN
        return min(within, key=lambda name: (self.us[name], self.errors[name]))


@dataclass(frozen=True, slots=True)
class Tuning:
    """The answer of :func:`fp8core.tune`; ``recipe`` is the policy.

    ``groups`` are the layers with their times and errors, ``skipped`` those that stay in high
    precision as they did not run with gradients, ``times`` all times, to save.
    """

    bound: float
    groups: list[Group]
    skipped: list[str]
    times: Times
    recipe: PerLayer

    def save(self, path: str | Path) -> None:
        """Write the recipe to a file for :func:`fp8core.recipe.load`."""
        save(self.recipe, path)

    def table(self) -> str:
        """Return a line for groups of equal times and recipe, and one for each recipe alone."""
        rows: dict[tuple[object, ...], list[Group]] = {}
        for group in self.groups:
            key = group.choose(self.bound), *group.us.values()
            rows.setdefault(key, []).append(group)
        lines = []
        for (name, *_), groups in rows.items():
            paths = [path for group in groups for path in group.layers]
            points = [_at(group, self.bound) for group in groups]
            lines.append(_line(", ".join(folded(paths)), str(name), *_sum(points)))
        lines += [_line("all layers", *point) for point in self._alone()]
        lines.append(_line("all layers", "tuned", *self._total(self.bound)))
        title = f"errors up to {self.bound:g}; times on {self.times.device}, {self.times.versions}"
        text = render(title, ["layers", "recipe", "error", "us", "speed"], lines)
        left = f"\nnot tuned, high precision: {', '.join(folded(self.skipped))}"
        return text + (left if self.skipped else "")

    def plot(self, path: str | Path) -> None:
        """Draw a PNG of the trade: the speed of all layers over their largest error, for each
        bound, and for each recipe alone.

        Raises:
            UnsupportedError: matplotlib is not installed.
        """
        bounds = {error for group in self.groups for error in group.errors.values()}
        curve = sorted(self._total(bound)[::2] for bound in bounds if math.isfinite(bound))
        with drawing(path, 8, 5) as (_, axes):
            axes.plot(
                *zip(*curve, strict=True),
                drawstyle="steps-post",
                color="0.6",
                label="tuned, by bound",
            )
            for name, largest, _, speed in self._alone():
                if math.isfinite(largest):
                    axes.plot(largest, speed, "o", label=name)
            largest, _, speed = self._total(self.bound)
            axes.plot(largest, speed, "k*", markersize=12, label=f"bound {self.bound:g}")
            axes.set(title=f"all layers, on {self.times.device}", xlabel="largest relative error")
            axes.set(ylabel=f"speed over {HIGH_PRECISION}")
            axes.grid(alpha=0.3)
            axes.legend()

    def _total(self, bound: float) -> tuple[float, float, float]:
        return _sum([_at(group, bound) for group in self.groups])

    def _alone(self) -> Iterator[tuple[str, float, float, float]]:
        for name in self.groups[0].errors:
            yield name, *_sum([_under(group, name) for group in self.groups])


_Loss = Callable[[torch.nn.Module, Any], torch.Tensor]
_Point = tuple[str, float, float, float]  # recipe, error, us, speed over high precision


def _under(group: Group, name: str) -> _Point:
    us = group.us[name]
    return name, group.errors[name], us, group.us[HIGH_PRECISION] / us


def _at(group: Group, bound: float) -> _Point:
    return _under(group, group.choose(bound))


def _sum(points: Sequence[_Point]) -> tuple[float, float, float]:
    errors, us = [point[1] for point in points], sum(point[2] for point in points)
    return _largest(errors), us, sum(point[2] * point[3] for point in points) / us


def _line(layers: str, name: str, largest: float, us: float, speed: float) -> list[str]:
    numbers = [f"{largest:.3g}", f"{us:,.1f}", f"{speed:.2f}"]
    return [layers, name, *("-" if "nan" in number else number for number in numbers)]


def tune(
    model: torch.nn.Module,
    batches: Iterable[Any],
    *,
    bound: float,
    loss: _Loss | None = None,
    recipes: Sequence[str | Recipe] = RECIPES,
    exclude: Sequence[str] = (),
    times: Times | str | Path | None = None,
) -> Tuning:
    """Find, for each layer of ``model``, the fastest recipe whose error stays under ``bound``.

    The model runs forward and backward on each batch in high precision. Then a copy of each layer
    runs again on its input and the gradient of its output, under each recipe. The error is the
    largest relative one, ``norm(found - expected) / norm(expected)``, of the output and of each
    gradient, of a whole tensor or of a row of one; it is 0 in high precision, which is expected.
    The time is that of the layer's forward and backward pass, with nothing in the L2 cache. Layers
    that read one tensor get one recipe. Parameters, their gradients and the scales of delayed
    scaling stay as they are; buffers change as in any forward.

    Args:
        model: a model with fp8core layers, uncompiled, in one process.
        batches: a few batches of training; the largest error of all counts, and the first's times.
        bound: the largest error, 0 or more; 0 gives high precision.
        loss: ``loss(model, batch)`` returns the loss, of one element. None calls the model with
            the batch (``**`` of a mapping, ``*`` of a tuple or list), and takes the result or its
            ``loss``.
        recipes: the recipes to try, or their names; high precision is tried in any case. One that a
            backend does not run for a layer is not chosen for it.
        exclude: patterns of paths of layers that stay in high precision.
        times: times of an earlier tuning, or the file of them, instead of measuring; for a model
            on a CPU, of any device.

    Raises:
        OperandError: no batch, no layer to tune, a loss that is not one; or the times are of
            another device than the model's, or lack a layer or a recipe.
        RecipeError: ``bound``, ``recipes`` or ``exclude`` is invalid.
        UnsupportedError: there is neither an accelerator nor ``times``; several ranks, compiled
            models, and layers that delay or accumulate the weight's gradient are refused.
    """
    _check(bound, batches)
    candidates = _candidates(recipes)
    layers = watched_layers(model, "tune")
    tried = _tried(layers, exclude)
    device = next(tensor.device for layer in tried.values() for tensor in layer.parameters())
    clock, is_measuring = _times(device, times)
    inventory.claim(layers)
    try:
        calls = (_calls(model, tried, batch, loss or _loss_of) for batch in batches)
        groups = _groups(calls, candidates, clock, is_measuring)
    finally:
        inventory.release(layers.values())
    chosen = {path: group.choose(bound) for group in groups for path in group.layers}
    is_only = len(layers) == 1
    rules = {
        pattern_of(path, layers[path], is_only=is_only): candidates[name]
        for path, name in chosen.items()
    }
    skipped = [path for path in layers if path not in chosen]
    return Tuning(bound, groups, skipped, clock, PerLayer(rules))


def _check(bound: object, batches: object) -> None:
    if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 <= bound < math.inf:
        raise RecipeError(f"tune(bound={bound!r}): expected a relative error, 0 or more.")
    if isinstance(batches, torch.Tensor | Mapping):
        raise OperandError("tune(batches=...): expected several batches, found one; pass [batch].")


def _groups(
    batches: Iterable[Mapping[str, LayerCall]],
    candidates: Mapping[str, Recipe | None],
    clock: Times,
    is_measuring: bool,
) -> list[Group]:
    """Measure the calls of each batch."""
    us: dict[str, dict[str, float]] = {}
    errors: dict[str, dict[str, float]] = {}
    sources: dict[tuple[int, int], list[str]] = {}
    for number, calls in enumerate(batches):
        for path, call in _shown(calls, number):
            if path not in us:
                sources.setdefault((number, id(call.source)), []).append(path)
                us[path] = _us(call, candidates, clock, is_measuring)
            errors[path] = _worst([_errors(call, candidates), errors.get(path, {})])
    if not us:
        raise OperandError(
            "tune: in the batches passed, no gradient reached a layer to tune. Pass "
            "batches that train the model."
        )
    return [
        Group(
            paths,
            {name: sum(us[path][name] for path in paths) for name in candidates},
            _worst([errors[path] for path in paths]),
        )
        for paths in sources.values()
    ]


def _worst(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest error by recipe; NaN where one is."""
    return {name: _largest([each[name] for each in errors if each]) for name in errors[0]}


def _largest(errors: Sequence[float]) -> float:
    return math.nan if any(map(math.isnan, errors)) else max(errors)


def _candidates(recipes: Sequence[str | Recipe]) -> dict[str, Recipe | None]:
    """Return the recipes by their names in files, with high precision."""
    if isinstance(recipes, str | Recipe):
        recipes = [recipes]
    named: dict[str, Recipe | None] = {HIGH_PRECISION: None}
    for entry in recipes:
        recipe = recipe_from(entry, "tune(recipes=...)")
        if recipe is None or isinstance(recipe, PerLayer):
            raise RecipeError(f"tune(recipes={recipes!r}): expected recipes of a layer, or names.")
        data = as_data(recipe)
        named[data if isinstance(data, str) else json.dumps(data)] = recipe
    return named


def _tried(
    layers: Mapping[str, LowPrecisionModule], exclude: Sequence[str]
) -> dict[str, LowPrecisionModule]:
    """Return the layers that ``exclude`` does not name."""
    distributed = torch.distributed
    is_started = distributed.is_available() and distributed.is_initialized()
    if is_started and distributed.get_world_size() > 1:
        raise UnsupportedError("tune runs in one process; its recipe file serves all ranks.")
    patterns = [exclude] if isinstance(exclude, str) else list(exclude)
    for pattern in patterns:
        if not fnmatch.filter(layers, pattern):
            raise RecipeError(
                f"tune(exclude={exclude!r}): {pattern!r} matches none of {some([*layers])}."
            )
    tried = {
        path: layer
        for path, layer in layers.items()
        if not any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
    }
    later = [
        p for p, layer in tried.items() if layer.fuse_wgrad_accumulation or layer.need_backward_dw()
    ]
    if later:
        raise UnsupportedError(
            f"tune: {some(later)} accumulates or delays the gradient of its weight, which a tuning "
            f"would change. Tune a model without fuse_wgrad_accumulation and delay_wgrad_compute."
        )
    if not tried:
        raise OperandError(f"tune(exclude={exclude!r}): that is every layer; none is left to tune.")
    return tried


def _times(device: torch.device, times: Times | str | Path | None) -> tuple[Times, bool]:
    """Return the times, and whether they are measured here."""
    is_cpu = device.type == "cpu"
    here = "cpu" if is_cpu else str(torch.get_device_module(device).get_device_name(device))
    if times is not None:
        clock = times if isinstance(times, Times) else Times.load(times)
        if not is_cpu and clock.device != here:
            raise OperandError(
                f"tune: the times are of {clock.device!r}, the model is on {here!r}."
            )
        return clock, False
    if is_cpu:
        raise UnsupportedError(
            "tune: the model is on a CPU, whose times say nothing of a training on an accelerator. "
            "Move the model to one, or pass times=, the file that tuning.times.save(path) wrote "
            "there."
        )
    version = sys.modules["fp8core"].__version__
    versions = f"fp8core {version}, torch {torch.__version__}"
    return Times(here, versions), True


def _loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    if isinstance(batch, Mapping):
        result = model(**batch)
    else:
        result = model(*batch) if isinstance(batch, tuple | list) else model(batch)
    value: torch.Tensor = getattr(result, "loss", result)
    return value


def _calls(
    model: torch.nn.Module,
    layers: Mapping[str, LowPrecisionModule],
    batch: Any,
    loss: _Loss,
) -> dict[str, LayerCall]:
    """Return the calls of the layers that a gradient reached."""
    with captured(layers) as calls, torch.enable_grad():
        with autocast(enabled=False):
            value = loss(model, batch)
        if not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.requires_grad:
            raise OperandError(
                f"tune: expected a loss of one element with a gradient, found {_brief(value)}. "
                f"Pass loss=, a function of model and batch that returns one."
            )
        learned = [param for param in model.parameters() if param.requires_grad]
        torch.autograd.grad(value.sum(), learned, allow_unused=True)  # fills no .grad
    return {path: call for path, call in calls.items() if call.gradients}


def _brief(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"a tensor {[*value.shape]}{'' if value.requires_grad else ' without one'}"


def _us(
    call: LayerCall, candidates: Mapping[str, Recipe | None], clock: Times, is_measuring: bool
) -> dict[str, float]:
    """Return the times of a layer, each of which is measured once for its shapes."""
    if not is_measuring:
        return {name: clock.find(str(call), name) for name in candidates}
    us = clock.layers.setdefault(str(call), {})
    for name, recipe in candidates.items():
        if name not in us:
            with contextlib.suppress(UnsupportedError):
                us[name] = Replay(call, recipe).microseconds()
    return {name: us.get(name, math.nan) for name in candidates}


def _errors(call: LayerCall, candidates: Mapping[str, Recipe | None]) -> dict[str, float]:
    expected = Replay(call, None).results()
    errors = dict.fromkeys(candidates, math.nan) | {HIGH_PRECISION: 0.0}
    for name, recipe in candidates.items():
        if recipe is not None:
            with contextlib.suppress(UnsupportedError):
                errors[name] = relative_error(expected, Replay(call, recipe).results())
    return errors


def _shown(calls: Mapping[str, LayerCall], batch: int) -> Iterable[tuple[str, LayerCall]]:
    """Return the calls; on a terminal, rich shows how many are done."""
    if find_spec("rich") is None or not sys.stderr.isatty():
        return calls.items()
    from rich.console import Console
    from rich.progress import track

    return track(calls.items(), f"batch {batch}", total=len(calls), console=Console(stderr=True))
