"""``convert`` has a model of torch's layers compute in low precision; ``unconvert`` undoes it."""

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
from fp8core.modules.inventory import ModuleNode, flops_of
from fp8core.modules.watched import refuse_watched
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
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

    The layers change their class in place: modules, parameters, names in the state_dict, hooks,
    buffers and training mode stay, an existing optimizer goes on training them, and
    ``isinstance(layer, torch.nn.Linear)`` holds. Each layer takes its path as its name, for
    :class:`fp8core.recipe.PerLayer` and messages. Nothing is changed if an error is raised.

    The recipe is active outside any ``autocast``; inside one, the autocast's recipe is active
    instead, also with ``enabled=False``. A step of delayed scaling is one forward of ``model``, or
    an autocast around several, whose scales follow the largest amax of all. The first forward logs
    how many layers ran in low precision, and on which backend.

    The output head, routers of experts and low-rank factors of adapters stay as they are. The
    report names every layer that stays, and why; :func:`unconvert` undoes the conversion.

    Args:
        model: any module; fp8core's layers inside it take the recipe too.
        recipe: a Recipe or a recipe's name (:func:`fp8core.recipe.names`); None leaves everything
            in high precision outside an autocast.
        filter: the layers to convert, instead of all but the three kinds above:
            ``(module, path) -> bool``, or patterns of paths, one of which has to match. A pattern
            with ``*``, ``?`` or ``[`` matches the whole path as in a shell, one without matches
            whole words: ``"mlp"`` matches ``"blocks.3.mlp.fc1"``.
        skip: patterns of layers to leave out, also if the filter names them.

    Raises:
        OperandError: ``model`` is no module, is converted already, or has no layer that can be
            converted; or a monitor watches one of its layers.
        RecipeError: the recipe is unknown, or a pattern matches nothing; names the nearest.
        UnsupportedError: a pattern of ``filter`` names a layer that cannot be converted.
    """
    if not isinstance(model, torch.nn.Module):
        raise OperandError(f"convert({model!r}): expected a torch.nn.Module.")
    chosen = recipe_from(recipe, "convert(recipe=...)")
    if filter is not None and not callable(filter) and not isinstance(filter, str | Sequence):
        raise RecipeError(f"convert(filter={filter!r}): expected a function or patterns of names.")
    if not isinstance(skip, str | Sequence):
        raise RecipeError(f"convert(skip={skip!r}): expected patterns of names.")
    surveyed = survey(model, filter, [skip] if isinstance(skip, str) else skip)
    refuse_watched(f"convert({type(model).__name__})", {p.module: p.path for p in surveyed.native})
    plans = _plans(surveyed, chosen)
    report = _report(model, surveyed, chosen, plans)
    conversion = Conversion(None if chosen is None else Active(quantize=chosen))
    _swap([*surveyed.chosen, *surveyed.native], conversion)
    # torch.compile's wrapper runs outside its graph, where it is not known which layers ran.
    root = getattr(model, COMPILED_MODULE, model)
    vars(root)[ROOT] = conversion
    if any(plan.delayed is not None for plan in plans.values()):
        for module in dict.fromkeys(
            [root, *(p.module for p in (*surveyed.chosen, *surveyed.native))]
        ):
            delimit(module)
    announce(root, is_wanted=True)
    return report


def unconvert(model: torch.nn.Module) -> torch.nn.Module:
    """Undo :func:`convert` for all of ``model``, and return it.

    The layers have their former classes, the parameters stay the same objects with their present
    values, and the buffers of delayed scaling are gone.

    Raises:
        OperandError: no layer is converted, a monitor watches one of them, or a converted layer was
            parametrized, sharded or patched since, which has to be undone first. Nothing is
            changed then.
    """
    if not isinstance(model, torch.nn.Module):
        raise OperandError(f"unconvert({model!r}): expected a torch.nn.Module.")
    modules = list(model.modules())
    layers = [one for one in modules if RECORD in vars(one) and isinstance(one, LowPrecisionModule)]
    roots = [one for one in modules if ROOT in vars(one)]
    if not layers and not roots:
        raise OperandError(f"unconvert({type(model).__name__}): nothing in it is converted.")
    names: dict[torch.nn.Module, str] = {one: one.name or type(one).__name__ for one in layers}
    refuse_watched(f"unconvert({type(model).__name__})", names)
    for layer in layers:
        record: Record = vars(layer)[RECORD]
        if record.original is None:
            continue
        is_another, is_patched = Converted not in type(layer).__bases__, "forward" in vars(layer)
        if is_another or is_patched:
            change = "has its forward replaced" if is_patched else f"is a {type(layer).__name__}"
            raise OperandError(
                f"unconvert: {layer.label} {change} since it was converted; undo that first."
            )
    for root in roots:
        del vars(root)[ROOT]
        silence(root)
        undelimit(root)
    for layer in layers:
        undelimit(layer)
        release(layer)
    return model


def _swap(wanted: Sequence[ModuleNode], conversion: Conversion) -> None:
    done: list[torch.nn.Module] = []
    try:
        for node in wanted:
            adopt(node.module, node.path, conversion)  # type: ignore[arg-type]  # survey saw to it
            done.append(node.module)
    except BaseException:
        for module in done:
            release(module)  # type: ignore[arg-type]  # adopted above
        raise


def _plans(surveyed: Survey, recipe: Recipe | None) -> dict[ModuleNode, LinearPlan]:
    """Return the plan of every linear layer; a recipe that cannot plan one raises here."""
    if recipe is None:
        return {}
    plans = {}
    for node in (*surveyed.chosen, *surveyed.native):
        if flops_of(node.module):
            kind = node.module.kind if isinstance(node.module, LowPrecisionModule) else "linear"
            dtype = next(node.module.parameters()).dtype
            plans[node] = plan_of(LinearPlan, recipe, LayerRole(kind, node.path or None), dtype)
    return plans


def _report(
    model: torch.nn.Module,
    surveyed: Survey,
    recipe: Recipe | None,
    plans: dict[ModuleNode, LinearPlan],
) -> ConversionReport:
    taking = {p for node in (*surveyed.chosen, *surveyed.native) for p in node.module.parameters()}
    return ConversionReport(
        recipe=None if recipe is None else text_of(recipe),
        converted=tuple(_entry(node, plans.get(node)) for node in surveyed.chosen),
        native=tuple(_entry(node, plans.get(node)) for node in surveyed.native),
        skipped=tuple(
            _entry(node, None, reason, is_repeat=is_repeat)
            for node, reason, is_repeat in surveyed.refused
        ),
        notes=tuple(notes(model, surveyed, recipe, plans)),
        num_parameters=_count(set(model.parameters())),
        num_converted_parameters=_count(taking),
    )


def _entry(
    node: ModuleNode, plan: LinearPlan | None, reason: str = "", *, is_repeat: bool = False
) -> LayerEntry:
    is_native = isinstance(node.module, LowPrecisionModule)
    counted = set(node.module.parameters(recurse=is_native))
    sizes = _count(counted), flops_of(node.module)
    if is_repeat:  # counted at the layer's first path
        sizes = 0, 0
    is_low = plan is not None and is_forward_low(plan)
    return LayerEntry(node.path, type(node.module).__name__, *sizes, reason, is_low)


def _count(parameters: set[torch.nn.Parameter]) -> int:
    # The sizes of a lazy layer's parameters are not known yet.
    return sum(p.numel() for p in parameters if not is_lazy(p))
