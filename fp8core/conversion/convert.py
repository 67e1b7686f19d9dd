"""``convert`` and ``unconvert``: a model of torch's layers computes in low precision, and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.parameter import is_lazy

from fp8core.context.autocast import Active
from fp8core.conversion.layers import (
    RECORD,
    Conversion,
    Converted,
    Record,
    adopt,
    release,
)
from fp8core.conversion.notes import is_forward_low, notes
from fp8core.conversion.report import ConversionReport, LayerEntry, text_of
from fp8core.conversion.steps import ROOT, delimit, undelimit
from fp8core.conversion.survey import Filter, Survey, survey
from fp8core.errors import OperandError, RecipeError
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.first_step import announce, silence
from fp8core.modules.inventory import Place, flops_of
from fp8core.modules.watched import refuse_watched
from fp8core.recipe import Recipe
from fp8core.recipe.choice import recipe_from
from fp8core.recipe.plan import LayerRole, LinearPlan
from fp8core.torch_ops.private import COMPILED_MODULE

__all__ = ["convert", "unconvert"]


def convert(
    model: torch.nn.Module,
    recipe: Recipe | str | None = None,
    *,
    filter: Filter = None,
    skip: Sequence[str] | str = (),
) -> ConversionReport:
    """Have the ``Linear``, ``LayerNorm`` and ``RMSNorm`` of ``model`` compute as ``recipe`` says.

    The layers are swapped in place: modules, parameters, names in the state_dict, hooks, buffers
    and training mode stay, an optimizer made before goes on training them, and
    ``isinstance(layer, torch.nn.Linear)`` holds. Each layer has its path as its name, for
    :class:`fp8core.recipe.PerLayer` and messages. Nothing is changed if an error is raised.

    The recipe is active outside any ``autocast``; inside one, that one's counts, ``enabled=False``
    included. A step of delayed scaling is one forward of ``model``, or an autocast around several:
    then the scales follow the largest amax of them all. The first forward logs what ran.

    The output head, routers of experts and low-rank factors of adapters are left out, and named in
    the report with every other layer that was; :func:`unconvert` undoes it all.

    Args:
        model: any module; fp8core's own layers in it take the recipe too.
        recipe: a Recipe or a recipe's name (:func:`fp8core.recipe.names`); None leaves everything
            in high precision outside an autocast.
        filter: which layers to convert, instead of all but those three:
            ``(module, path) -> bool``, or patterns of paths, one of which has to match. A pattern
            with ``*``, ``?`` or ``[`` matches the whole path as in a shell, one without matches
            whole words of it: ``"mlp"`` is in ``"blocks.3.mlp.fc1"``.
        skip: patterns of layers to leave out as well.

    Raises:
        OperandError: ``model`` is no module, is converted already, or nothing in it can be; or a
            monitor watches one of its layers.
        RecipeError: an unknown recipe, or a pattern that matches nothing; names the nearest.
        UnsupportedError: a filter pattern that names a layer which cannot be converted.
    """
    if not isinstance(model, torch.nn.Module):
        raise OperandError(f"convert({model!r}): expected a torch.nn.Module.")
    chosen = recipe_from(recipe, "convert(recipe=...)")
    if filter is not None and not callable(filter) and not isinstance(filter, str | Sequence):
        raise RecipeError(f"convert(filter={filter!r}): expected a function or patterns of names.")
    if not isinstance(skip, str | Sequence):
        raise RecipeError(f"convert(skip={skip!r}): expected patterns of names.")
    found = survey(model, filter, [skip] if isinstance(skip, str) else skip)
    refuse_watched(f"convert({type(model).__name__})", {p.module: p.path for p in found.native})
    plans = _plans(found, chosen)
    report = _report(model, found, chosen, plans)
    conversion = Conversion(None if chosen is None else Active(quantize=chosen))
    _swap([*found.chosen, *found.native], conversion)
    # A wrapper of torch.compile is eager around its graph, and so cannot know what ran in it.
    root = getattr(model, COMPILED_MODULE, model)
    vars(root)[ROOT] = conversion
    if any(plan.delayed is not None for plan in plans.values()):
        for module in dict.fromkeys([root, *(p.module for p in (*found.chosen, *found.native))]):
            delimit(module)
    announce(root, is_wanted=True)
    return report


def unconvert(model: torch.nn.Module) -> torch.nn.Module:
    """Undo :func:`convert` for all of ``model``, and return it.

    Classes are those of before, parameters the same objects with the bytes that they have now,
    and the buffers of delayed scaling are gone.

    Raises:
        OperandError: nothing in it is converted, a monitor watches one of its layers, or something
            was made of a converted layer since (a parametrization, a sharded module), which has to
            be undone first. Nothing is changed then.
    """
    if not isinstance(model, torch.nn.Module):
        raise OperandError(f"unconvert({model!r}): expected a torch.nn.Module.")
    modules = list(model.modules())
    layers = [own for own in modules if RECORD in vars(own) and isinstance(own, LowPrecisionModule)]
    roots = [own for own in modules if ROOT in vars(own)]
    if not layers and not roots:
        raise OperandError(f"unconvert({type(model).__name__}): nothing in it is converted.")
    names: dict[torch.nn.Module, str] = {own: own.name or type(own).__name__ for own in layers}
    refuse_watched(f"unconvert({type(model).__name__})", names)
    for layer in layers:
        record: Record = vars(layer)[RECORD]
        if record.original is None:
            continue
        is_another, is_patched = Converted not in type(layer).__bases__, "forward" in vars(layer)
        if is_another or is_patched:
            what = "has its forward replaced" if is_patched else f"is a {type(layer).__name__}"
            raise OperandError(
                f"unconvert: {layer.label} {what} since it was converted; undo that first."
            )
    for root in roots:
        del vars(root)[ROOT]
        silence(root)
        undelimit(root)
    for layer in layers:
        undelimit(layer)
        release(layer)
    return model


def _swap(wanted: Sequence[Place], conversion: Conversion) -> None:
    done: list[torch.nn.Module] = []
    try:
        for place in wanted:
            adopt(place.module, place.path, conversion)  # type: ignore[arg-type]  # survey saw to it
            done.append(place.module)
    except BaseException:
        for module in done:
            release(module)  # type: ignore[arg-type]  # adopted above
        raise


def _plans(found: Survey, recipe: Recipe | None) -> dict[Place, LinearPlan]:
    """Return the plan of every linear layer; a recipe that cannot plan one raises here."""
    if recipe is None:
        return {}
    plans = {}
    for place in (*found.chosen, *found.native):
        if flops_of(place.module):
            kind = place.module.kind if isinstance(place.module, LowPrecisionModule) else "linear"
            dtype = next(place.module.parameters()).dtype
            plans[place] = recipe.plan(LayerRole(kind, place.path or None), dtype)
    return plans


def _report(
    model: torch.nn.Module,
    found: Survey,
    recipe: Recipe | None,
    plans: dict[Place, LinearPlan],
) -> ConversionReport:
    own = {p for place in (*found.chosen, *found.native) for p in place.module.parameters()}
    return ConversionReport(
        recipe=None if recipe is None else text_of(recipe),
        converted=tuple(_entry(place, plans.get(place)) for place in found.chosen),
        native=tuple(_entry(place, plans.get(place)) for place in found.native),
        skipped=tuple(
            _entry(place, None, reason, is_repeat=is_repeat)
            for place, reason, is_repeat in found.refused
        ),
        notes=tuple(notes(model, found, recipe, plans)),
        num_parameters=_count(set(model.parameters())),
        num_converted_parameters=_count(own),
    )


def _entry(
    place: Place, plan: LinearPlan | None, reason: str = "", *, is_repeat: bool = False
) -> LayerEntry:
    is_native = isinstance(place.module, LowPrecisionModule)
    own = set(place.module.parameters(recurse=is_native))
    sizes = _count(own), flops_of(place.module)
    if is_repeat:  # counted where it was met first
        sizes = 0, 0
    is_low = plan is not None and is_forward_low(plan)
    return LayerEntry(place.path, type(place.module).__name__, *sizes, reason, is_low)


def _count(parameters: set[torch.nn.Parameter]) -> int:
    # The sizes of a lazy layer's parameters are not known yet.
    return sum(p.numel() for p in parameters if not is_lazy(p))
