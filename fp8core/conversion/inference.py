"""``quantize_`` has a model answer from weights that are stored in low precision."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from fp8core.context.autocast import autocast
from fp8core.conversion.convert import (
    ConversionReport,
    check_model,
    convert,
    text_of,
    unconvert,
)
from fp8core.conversion.decoder import ConvertedBlock
from fp8core.conversion.experts import ExpertsLinear
from fp8core.conversion.layers import (
    ROOT,
    Conversion,
    Converted,
    ConvertedConv1D,
    ConvertedSimilarNorm,
    freeze,
    with_attributes_of,
)
from fp8core.conversion.survey import Filter, check_patterns, skip_patterns, unwanted
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import bind
from fp8core.modules.models.inventory import ModuleNode, layers_in, uses_of_parameters, weight_sites
from fp8core.recipe import Recipe, get_default_recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.named import recipe_from
from fp8core.recipe.plan import LayerRole, LinearPlan, TensorPlan
from fp8core.reporting import grouped, some
from fp8core.tensors.checks import is_sharded
from fp8core.tensors.operators import with_room
from fp8core.tensors.parameter.shared_grad import SharedGrad, stepped_by
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import check_parameter, storage_plan
from fp8core.torch_ops.private import COMPILED_MODULE, forward_pre_hooks


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The answer of :func:`fp8core.quantize_`; ``str()`` prints it.

    Attributes:
        recipe: the recipe of the model, as text.
        stored: the names of the weights that are stored in low precision.
        high_precision: the names of weights of fp8core's layers that are not, with the
            reason.
        num_bytes: bytes of all parameters of the model before, and after.
        conversion: the report of :func:`fp8core.convert`; None if the model was converted before.
    """

    recipe: str
    stored: tuple[str, ...]
    high_precision: Mapping[str, str]
    num_bytes: tuple[int, int]
    conversion: ConversionReport | None

    def __str__(self) -> str:
        before, after = (count / 2**20 for count in self.num_bytes)
        lines = [
            f"{len(self.stored)} weights stored by {self.recipe}: parameters take {after:,.1f} MiB "
            f"instead of {before:,.1f}, {after / max(before, 1e-9):.1%}"
        ]
        entries = ((name, "weight", text) for name, text in self.high_precision.items())
        lines += [f"not stored: {line}" for line in grouped(entries)]
        return "\n".join([*lines, *([] if self.conversion is None else [str(self.conversion)])])


def quantize_(
    model: torch.nn.Module,
    recipe: Recipe | str | None = None,
    *,
    filter: Filter = None,
    skip: Sequence[str] | str = (),
    rms_norms: bool | None = None,
    fuse: bool = True,
) -> QuantizationReport:
    """Store the weights of ``model`` in low precision, in place, for inference.

    ::

        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16, device_map="cuda")
        fp8core.quantize_(model, "rowwise")
        model.generate(**inputs)

    The model is converted as by :func:`fp8core.convert`, unless it is already; its layers compute
    by the recipe, without an ``autocast``. Each weight of a linear becomes a
    :class:`fp8core.QuantizedTensor` that holds its rows alone, and its memory in high precision is
    freed before the next one is cast. All parameters are frozen: a gradient through such a layer is
    refused. :func:`fp8core.unconvert` returns the layers to their classes, with rounded weights.

    Weights that are quantized already keep their codes, as those of
    ``load_pretrained(native=True)``. What stays in high precision is named in the report: heads,
    routers, embeddings, adapters, and weights that several layers share.

    Args:
        model: any module, in evaluation mode.
        recipe: a Recipe or a recipe's name; ``recipe.WeightOnly("rowwise")`` leaves activations in
            high precision. None takes that of a converted model, else
            :func:`fp8core.get_default_recipe`.
        filter, skip, rms_norms, fuse: as of :func:`fp8core.convert`, also of a converted model.

    Raises:
        OperandError: ``model`` is no module, is in training mode, has gradients, meta tensors or
            parameters that an optimizer steps, or nothing to store; nothing is changed then. If the
            call is interrupted later, the model refuses to answer until it is repeated.
        RecipeError: as of ``convert``; the converted model has another recipe, or other options; or
            delayed scaling has no scales yet.
        UnsupportedError: no backend computes by the recipe on the model's device.
    """
    name = f"quantize_({type(model).__name__})"
    _refuse_unready(name, model)
    root, patterns = getattr(model, COMPILED_MODULE, model), skip_patterns(filter, skip)
    options: Any = {"filter": filter, "skip": patterns, "rms_norms": rms_norms, "fuse": fuse}
    present, report = _present_recipe(name, root, recipe_from(recipe, f"{name}, recipe")), None
    if present is None:
        report = convert(model, get_default_recipe() if recipe is None else recipe, **options)
        present = vars(root)[ROOT].recipe
    else:
        _refuse_options(name, root, **options)
    try:
        sites, high = _plan(name, root, present, filter, patterns, is_new=report is not None)
    except BaseException:
        if report is not None:
            unconvert(root)
        raise
    sizes, text = _store(name, root, sites), text_of(present)
    return QuantizationReport(text, tuple(site.label for site in sites), high, sizes, report)


def _store(name: str, root: torch.nn.Module, sites: Sequence[_Site]) -> tuple[int, int]:
    """Store the weights one after the other, and freeze the model; return the bytes of all
    parameters before and after."""
    before = _bytes_of(root)
    with unanswering(name, [root, *(site.module for site in sites)]):
        for site in sites:
            site.store()
        for module in root.modules():
            for path, parameter in module._parameters.items():
                if parameter is not None and parameter.requires_grad:
                    freeze(module, path)
        for layer in layers_in(root).values():
            layer.has_static_scales = True
    return before, _bytes_of(root)


class _Site(NamedTuple):
    """A weight to store: the module that holds it, its name there, its name in messages, how."""

    module: torch.nn.Module
    name: str
    label: str
    plan: TensorPlan

    def store(self) -> None:
        """Store the weight; one that was stored before drops its columns."""
        old = self.module._parameters[self.name]
        assert old is not None
        if isinstance(old, QuantizedTensor):
            old.update_usage(columnwise_usage=False)
            return
        stored = with_room(QuantizedTensor.of(old.detach(), self.plan))
        new = with_attributes_of(old, torch.nn.Parameter(stored, requires_grad=False))
        freeze(self.module, self.name, is_stored=True)
        self.module._parameters[self.name] = new


def refuse_training(name: str, model: torch.nn.Module) -> None:
    """Refuse a model whose parameters have gradients, or an optimizer that steps them."""
    named = dict(model.named_parameters())
    with_grad = [path for path, parameter in named.items() if parameter.grad is not None]
    if with_grad:
        raise OperandError(
            f"{name}: {some(with_grad)} have gradients. The model becomes one for inference: "
            f"call model.zero_grad() if they are not needed any more."
        )
    paths = {id(parameter): path for path, parameter in named.items()}
    if any(_stepped(paths)):
        gc.collect()  # optimizers are in circles
    for kind, path in _stepped(paths):
        raise OperandError(
            f"{name}: {kind} steps {path!r}, whose memory would be freed. Delete that "
            f"optimizer, or take a copy of the model."
        )


def _refuse_unready(name: str, model: torch.nn.Module) -> None:
    """Refuse what is no model, a model that is being trained, and one without values."""
    check_model("quantize_", model)
    if model.training:
        raise OperandError(f"{name}: the model is in training mode. Call model.eval() first.")
    refuse_training(name, model)
    on_meta = [path for path, parameter in model.named_parameters() if parameter.is_meta]
    if on_meta:
        raise OperandError(
            f"{name}: {some(on_meta)} are on meta, without values. Load them first; "
            f"load_pretrained(directory, model, native=True) keeps the codes of a file."
        )


def _stepped(paths: Mapping[int, str]) -> Iterator[tuple[str, str]]:
    """Yield the class of each optimizer that steps one of the parameters of the ids in ``paths``,
    or its master, and the parameter's path."""
    for entity in gc.get_objects():
        if not issubclass(type(entity), torch.optim.Optimizer):  # isinstance asks proxies
            continue
        for tensor in stepped_by(entity):
            parameter = tensor._parameter if isinstance(tensor, SharedGrad) else tensor
            if id(parameter) in paths:
                yield type(entity).__name__, paths[id(parameter)]
                break


def _present_recipe(name: str, root: torch.nn.Module, recipe: Recipe | None) -> Recipe | None:
    """Return the recipe by which ``root`` is converted, None if nothing in it is converted."""
    roots = {path: vars(m)[ROOT] for path, m in root.named_modules() if ROOT in vars(m)}
    if not roots:
        return None
    conversion: Conversion | None = roots.get("")
    if conversion is None or len(roots) > 1:
        raise OperandError(
            f"{name}: parts of it are converted by themselves: {some([*roots])}. Quantize each, or "
            f"unconvert the model first."
        )
    if conversion.recipe is None or recipe not in (None, conversion.recipe):
        present = "none" if conversion.recipe is None else text_of(conversion.recipe)
        raise RecipeError(
            f"{name}: the model is converted, with the recipe {present}. Leave out the recipe to "
            f"store weights by it, or call fp8core.unconvert(model) first."
        )
    return conversion.recipe


def _refuse_options(
    name: str,
    root: torch.nn.Module,
    *,
    filter: Filter,
    skip: Sequence[str],
    rms_norms: bool | None,
    fuse: bool,
) -> None:
    """Refuse patterns that match nothing, and options that would undo what is converted."""
    check_patterns(filter, skip, [path for path, _ in root.named_modules()], {})
    options: Any = ("rms_norms", rms_norms, ConvertedSimilarNorm), ("fuse", fuse, ConvertedBlock)
    for option, value, kind in options:
        paths = [path for path, module in root.named_modules() if isinstance(module, kind)]
        if value is False and paths:
            raise RecipeError(
                f"{name}, {option}=False: the model is converted, {some(paths)} with "
                f"{option}=True. Leave out the option, or call fp8core.unconvert(model) first."
            )


def _plan(
    name: str,
    root: torch.nn.Module,
    recipe: Recipe,
    filter: Filter,
    skip: Sequence[str],
    *,
    is_new: bool,
) -> tuple[list[_Site], dict[str, str]]:
    """Return the weights to store, and the reasons against the others; binds their layers.

    ``filter`` and ``skip`` choose among the layers of fp8core, and among others unless these were
    converted by them now (``is_new``).
    """
    uses = uses_of_parameters(root)
    leaves_out = unwanted(root, filter, skip, _KINDS)
    leaves_out_converted = unwanted(root, *((None, ()) if is_new else (filter, skip)), ())
    sites: list[_Site] = []
    high: dict[str, str] = {}
    planned: dict[LowPrecisionModule, tuple[torch.nn.Parameter, LinearPlan]] = {}
    for layer, module, parameter_name, label in _weights(root, high):
        parameter = module._parameters[parameter_name]
        assert parameter is not None
        plan = plan_of(LinearPlan, recipe, LayerRole(layer.kind, layer.name), parameter.dtype)
        stored = TensorPlan(storage_plan(plan.weight).rowwise, None)
        is_native = layer is module and not isinstance(layer, Converted)
        reason_of = leaves_out if is_native else leaves_out_converted
        reason = reason_of(ModuleNode(label.rpartition(".")[0], module, None))
        reason = reason or _obstacle(layer, parameter, plan, stored)
        # Codes stay where they are: no other tensor takes the place of the shared one.
        if uses[parameter] > 1 and not isinstance(parameter, QuantizedTensor):
            reason = reason or "several layers have this weight"
        if reason:
            high[label] = reason
            continue
        _refuse_recoding(name, label, parameter, stored)
        sites.append(_Site(module, parameter_name, label, stored))
        planned[layer] = parameter, plan
    if not sites:
        reasons = "; ".join(grouped((label, "weight", text) for label, text in high.items()))
        raise OperandError(f"{name}: no weight would be stored by {text_of(recipe)}. {reasons}")
    for layer, (parameter, plan) in planned.items():
        _check_runs(layer, parameter, plan, recipe)
    return sites, high


_KINDS = (torch.nn.Linear, LowPrecisionModule)


def _weights(
    root: torch.nn.Module, high: dict[str, str]
) -> Iterator[tuple[LowPrecisionModule, torch.nn.Module, str, str]]:
    """Yield the weights that are parameters: the layer that multiplies one, the module that holds
    it, its name there and its path. Add the reasons against the others to ``high``."""
    for site in weight_sites(root):
        yield site.module, site.module, site.name, site.label
    sites = {(site.module, site.name) for site in weight_sites(root)}
    for path, layer in layers_in(root).items():
        for names in layer.weight_names():
            if (layer, names[0]) not in sites:
                reason = "one product has several parameters"
                if len(names) == 1:
                    reason = "computed by a parametrization"
                high[f"{path}.{names[0]}".lstrip(".")] = reason
        if isinstance(layer, ConvertedConv1D):
            high[f"{path}.weight".lstrip(".")] = "the transposed weight of a Conv1D"
        elif isinstance(layer, ExpertsLinear):
            owner, name = layer.owner, layer.stacked_name
            label = f"{path.rpartition('.')[0]}.{name}".lstrip(".")
            if layer.is_transposed:
                high[label] = "the transposed weights of experts"
            else:
                yield layer, owner, name, label


def _obstacle(
    layer: LowPrecisionModule, parameter: torch.Tensor, plan: LinearPlan, stored: TensorPlan
) -> str:
    """Return why a weight stays in high precision, or an empty string."""
    spec, rows = stored.rowwise, parameter.shape[-2]
    if dict(plan.makers).get("weight") is not None:
        return "an object of the user quantizes it"
    if spec is None:
        return "the recipe leaves it in high precision"
    if is_sharded(parameter) or layer.local_part is not None:
        return "spread over ranks"
    is_shared = spec.scale_format == "e4m3" or not spec.block[0] or rows % spec.block[0] != 0
    if parameter.dim() > 2 and is_shared:
        return "the scales of its experts would be others than by themselves"
    try:
        check_parameter(stored, tuple(parameter.shape))
        QuantizedTensor.check_sizes(parameter.shape, stored)
    except UnsupportedError as error:
        return str(error).partition(". ")[0]
    return ""


def _refuse_recoding(name: str, label: str, parameter: torch.Tensor, stored: TensorPlan) -> None:
    if isinstance(parameter, QuantizedTensor) and parameter.plan.rowwise != stored.rowwise:
        raise RecipeError(
            f"{name}: {label!r} is stored as {parameter.plan.rowwise} already, and the recipe "
            f"needs {stored.rowwise}. Take the recipe that it was stored by."
        )


def _check_runs(
    layer: LowPrecisionModule, parameter: torch.Tensor, plan: LinearPlan, recipe: Recipe
) -> None:
    """Raise unless ``layer`` computes by ``recipe`` on its device, with scales that it has."""
    if plan.delayed is not None and not layer.has_delayed_scales:
        raise RecipeError(
            f"{layer.label}: the recipe takes delayed scales of activations, and the layer has "
            f"none. Train a step, load a checkpoint, or run some inputs under "
            f"autocast(enabled=False, calibrating=True, recipe=...) first; or take "
            f"Float8CurrentScaling."
        )
    with torch.no_grad(), autocast(recipe=recipe):
        bind(layer, parameter.device, parameter.dtype)


def _bytes_of(model: torch.nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


@dataclass(frozen=True)
class _Refusal:
    """A hook that refuses to call a module."""

    call_name: str

    def __call__(self, module: torch.nn.Module, arguments: Any) -> NoReturn:
        raise OperandError(
            f"{self.call_name} was interrupted, and left some weights of the model changed, others "
            f"not. Repeat it, or load the model again."
        )


@contextlib.contextmanager
def unanswering(call_name: str, modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Have calls of ``modules`` raise OperandError, from now on to the end of the block; for good
    after an error in it, until the block ends well."""
    every = list(dict.fromkeys(modules))
    for module in every:
        if not isinstance(module, torch.jit.ScriptModule):
            module.register_forward_pre_hook(_Refusal(call_name))
    yield
    for module in every:
        hooks = forward_pre_hooks(module)
        for key in [key for key, hook in hooks.items() if isinstance(hook, _Refusal)]:
            del hooks[key]
