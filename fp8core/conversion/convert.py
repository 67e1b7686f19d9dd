"""``convert`` has a model of torch's layers compute in low precision; ``unconvert`` undoes it.

The notes of its report are about layers that compute otherwise than its reader may expect.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.nn.parameter import is_lazy

from fp8core.context.autocast import request
from fp8core.conversion.decoder import ConvertedBlock
from fp8core.conversion.decoder import fuse as fuse_blocks
from fp8core.conversion.experts import ConvertedExperts, adopt_experts, layer_names, release_experts
from fp8core.conversion.layers import (
    RECORD,
    ROOT,
    Conversion,
    Record,
    adopt,
    delimit,
    release,
    share_input,
    thaw,
    undelimit,
)
from fp8core.conversion.survey import Filter, Survey, skip_patterns, survey
from fp8core.errors import OperandError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.models.inventory import (
    ModuleNode,
    experts_of,
    flops_of,
    module_nodes,
    refuse_watched,
)
from fp8core.modules.models.prepare import announce, silence
from fp8core.recipe import PerLayer, Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.named import recipe_from
from fp8core.recipe.plan import LayerRole, LinearPlan
from fp8core.reporting import grouped, some
from fp8core.torch_ops.private import COMPILED_MODULE


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """A layer of the model.

    Attributes:
        name: its path; empty for the model itself.
        layer: the name of its class before the conversion.
        num_parameters: elements of its direct parameters.
        flops: forward matmul FLOPs a token, ``2 in_features out_features``, of experts those that
            a token goes through; 0 if it is no linear layer.
        reason: why it was not converted; empty for a layer that takes the recipe.
        is_low_precision: whether the recipe runs its forward GEMM in low precision; False without a
            recipe, and for a layer that the recipe leaves in high precision.
        num_experts: the number of experts of a mixture that it holds; 0 for another layer.
    """

    name: str
    layer: str
    num_parameters: int
    flops: int
    reason: str = ""
    is_low_precision: bool = False
    num_experts: int = 0


_IN_PLACE = (
    "fp8core.convert changed the model in place and returned this report. Go on with the model: "
    "write `fp8core.convert(model, ...)` instead of `model = fp8core.convert(model, ...)`."
)


@dataclass(frozen=True, slots=True)
class ConversionReport:
    """The answer of :func:`fp8core.convert`; ``str()`` prints it, ``as_dict()`` is JSON-able.

    The model itself was converted in place: a report that is used as one says so.

    Attributes:
        recipe: the recipe that is active outside any autocast, as text; None if there is none.
        converted: the layers of torch that changed their class.
        native: the fp8core layers of the model; they take the recipe, and their path as name.
        skipped: every other layer that has parameters, with the reason.
        fused: decoder layers, and feed-forward blocks outside of these, whose layers run as chains,
            but where something has to be seen; with what does not in any call.
        apart: those whose layers run by themselves, with the reason.
        decoding: attentions in other layers than those that are fused, which attend to one query a
            sequence by a kernel, with what they lack for it.
        notes: sentences about layers that compute otherwise than may be expected.
        num_parameters: elements of all parameters of the model, a shared one counted once.
        num_converted_parameters: elements of those in ``converted`` and ``native``.
    """

    recipe: str | None
    converted: tuple[LayerEntry, ...]
    native: tuple[LayerEntry, ...]
    skipped: tuple[LayerEntry, ...]
    notes: tuple[str, ...]
    num_parameters: int
    num_converted_parameters: int
    fused: tuple[LayerEntry, ...] = ()
    apart: tuple[LayerEntry, ...] = ()
    decoding: tuple[LayerEntry, ...] = ()

    @property
    def parameter_share(self) -> float:
        """Share of the parameters that the converted layers hold, 0 to 1."""
        return self.num_converted_parameters / max(self.num_parameters, 1)

    @property
    def flop_share(self) -> float:
        """Share of the linear layers' matmul FLOPs a token that were converted, 0 to 1."""
        return self._share_of_flops((*self.converted, *self.native))

    @property
    def low_precision_flop_share(self) -> float:
        """Share of the linear layers' matmul FLOPs a token that the recipe runs in low precision,
        0 to 1; 0 without a recipe."""
        return self._share_of_flops(self._low())

    def as_dict(self) -> dict[str, Any]:
        """Return the report, with its three shares, as dictionaries, lists, strings and numbers."""
        return {
            **dataclasses.asdict(self),
            "parameter_share": self.parameter_share,
            "flop_share": self.flop_share,
            "low_precision_flop_share": self.low_precision_flop_share,
        }

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(f"a ConversionReport has no {name!r}: {_IN_PLACE}", name=name)

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse a call as if this was the model.

        Raises:
            OperandError: always.
        """
        raise OperandError(f"a ConversionReport cannot be called: {_IN_PLACE}")

    def _low(self) -> list[LayerEntry]:
        return [entry for entry in (*self.converted, *self.native) if entry.is_low_precision]

    def _share_of_flops(self, entries: Iterable[LayerEntry]) -> float:
        total = sum(entry.flops for entry in (*self.converted, *self.native, *self.skipped))
        return sum(entry.flops for entry in entries) / total if total else 0.0

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        taking = (*self.converted, *self.native)
        linears, rest = _num_linears(taking), _num_linears(self.skipped)
        experts = sum(entry.num_experts for entry in taking)
        all_experts = experts + sum(entry.num_experts for entry in self.skipped)
        and_experts = f" and {experts} of {all_experts} experts" if all_experts else ""
        yield (
            f"{linears} of {linears + rest} linear layers{and_experts} converted: "
            f"{self.flop_share:.1%} of their FLOPs a token, "
            f"{self.parameter_share:.1%} of the parameters"
        )
        yield f"recipe: {self.recipe or 'none; layers use low precision only inside an autocast'}"
        if self.recipe is not None:
            low = self._low()
            if all_experts:
                num_low = sum(entry.num_experts for entry in low)
                and_experts = f" and {num_low} of {all_experts} experts"
            yield (
                f"in low precision by the recipe: {_num_linears(low)} of {linears + rest} linear "
                f"layers{and_experts}, {self.low_precision_flop_share:.1%} of their FLOPs a token"
            )
        for title, entries in (
            ("converted", self.converted),
            ("already an fp8core layer", self.native),
            ("skipped", self.skipped),
            ("runs as chains", self.fused),
            ("stays apart", self.apart),
            ("attends to one query by a kernel, where there is one", self.decoding),
        ):
            listed = ((entry.name, entry.layer, entry.reason) for entry in entries)
            yield from (f"{title}: {line}" for line in grouped(listed))
        yield from (f"note: {note}" for note in self.notes)


def _num_linears(entries: Iterable[LayerEntry]) -> int:
    """Return how many of ``entries`` are linear layers, without those of experts."""
    return sum(entry.flops > 0 and not entry.num_experts for entry in entries)


def text_of(recipe: Recipe) -> str:
    """Return ``recipe`` as the call that constructs it, without arguments of default value."""
    fields: Mapping[str, dataclasses.Field[Any]] = getattr(recipe, "__dataclass_fields__", {})
    values = {name: getattr(recipe, name) for name, field in fields.items() if field.init}
    arguments = [
        f"{name}={text_of(value) if isinstance(value, Recipe) else repr(value)}"
        for name, value in values.items()
        if value != fields[name].default
    ]
    return f"{type(recipe).__name__}({', '.join(arguments)})"


_WITHOUT_GEMM = (
    torch.nn.Embedding,
    torch.nn.EmbeddingBag,
    torch.nn.LayerNorm,
    torch.nn.RMSNorm,
    torch.jit.ScriptModule,
)


def convert(
    model: torch.nn.Module,
    recipe: Recipe | str | None = None,
    *,
    filter: Filter = None,
    skip: Sequence[str] | str = (),
    rms_norms: bool | None = None,
    fuse: bool = True,
) -> ConversionReport:
    """Have the ``Linear``, ``LayerNorm`` and ``RMSNorm`` of ``model`` compute as ``recipe`` says.

    So do ``Conv1D`` and the experts of transformers, whose 3-D weights multiply as grouped linears.

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
        rms_norms: whether classes of the model that compute an RMSNorm, such as ``LlamaRMSNorm``,
            are converted too; None: as ``fuse``. Each is compared with RMSNorm on a few rows first.
            The result is rounded once, where such a class often rounds before it multiplies by the
            weight.
        fuse: whether decoder layers and gated blocks such as Llama's run as chains: norms, sums,
            rotation and activation as fp8core computes them, linears as alone, an input of several
            cast once. Each class is compared with that on a few numbers first. Attention of other
            layers attends to one query by the same kernel. False keeps the model's own.

    Raises:
        OperandError: ``model`` is no module, is converted already, or has no layer that can be
            converted; or a monitor watches one of its layers.
        RecipeError: the recipe is unknown, or a pattern matches nothing; names the nearest.
        UnsupportedError: a pattern of ``filter`` names a layer that cannot be converted.
    """
    check_model("convert", model)
    chosen = recipe_from(recipe, "convert(recipe=...)")
    patterns = skip_patterns(filter, skip)
    surveyed = survey(model, filter, patterns, rms_norms=fuse if rms_norms is None else rms_norms)
    refuse_watched(f"convert({type(model).__name__})", {p.module: p.path for p in surveyed.native})
    plans = _plans(surveyed, chosen)
    report = _report(model, surveyed, chosen, plans)
    conversion = Conversion(None if chosen is None else request(quantize=chosen))
    # torch.compile's wrapper runs outside its graph, where it is not known which layers ran.
    root = getattr(model, COMPILED_MODULE, model)
    vars(root)[ROOT] = conversion
    nodes = (*surveyed.chosen, *surveyed.native)
    try:
        for node in nodes:
            take = adopt if experts_of(node.module) is None else adopt_experts
            take(node.module, node.path, conversion)
            share_input(node.module, node.parent)
        if any(plan.delayed is not None for several in plans.values() for plan in several):
            for module in dict.fromkeys([root, *(node.module for node in nodes)]):
                delimit(module)
        announce(root, warns=True)
        return _fused(report, root, conversion) if fuse else report
    except BaseException:
        unconvert(root)
        raise


def _fused(
    report: ConversionReport, model: torch.nn.Module, conversion: Conversion
) -> ConversionReport:
    """Return ``report`` with the modules that run as chains from now on, and those that do not."""
    groups = [
        tuple(
            LayerEntry(path, type(model.get_submodule(path)).__name__, 0, 0, reason)
            for path, reason in reasons.items()
        )
        for reasons in fuse_blocks(model, conversion)
    ]
    return dataclasses.replace(report, fused=groups[0], apart=groups[1], decoding=groups[2])


def unconvert(model: torch.nn.Module) -> torch.nn.Module:
    """Undo :func:`convert` or :func:`fp8core.quantize_` for all of ``model``, and return it.

    The layers have their former classes, the parameters stay the same objects with their present
    values, and the buffers of delayed scaling are gone. Weights that ``quantize_`` stored become
    parameters of their rounded values; those that it froze require gradients again.

    Raises:
        OperandError: no layer is converted, a monitor watches one of them, or a converted layer was
            parametrized, sharded or patched since, which has to be undone first. Nothing is
            changed then.
    """
    check_model("unconvert", model)
    modules = list(model.modules())
    layers = [
        module
        for module in modules
        if RECORD in vars(module) and isinstance(module, LowPrecisionModule)
    ]
    roots = [module for module in modules if ROOT in vars(module)]
    if not layers and not roots:
        raise OperandError(f"unconvert({type(model).__name__}): nothing in it is converted.")
    names: dict[torch.nn.Module, str] = {
        layer: layer.name or type(layer).__name__ for layer in layers
    }
    refuse_watched(f"unconvert({type(model).__name__})", names)
    experts = [module for module in modules if isinstance(module, ConvertedExperts)]
    blocks = [module for module in modules if isinstance(module, ConvertedBlock)]
    for layer in (*layers, *experts, *blocks):
        _refuse_changed(layer)
    for block in blocks:
        release(block)
    for root in roots:
        del vars(root)[ROOT]
        silence(root)
        undelimit(root)
    for group in experts:
        undelimit(group)
        release_experts(group)
    for layer in layers:
        undelimit(layer)
        release(layer)
    for module in modules:
        thaw(module)
    return model


def check_model(owner: str, model: object) -> None:
    """Raise OperandError unless ``model`` is a module."""
    if isinstance(model, ConversionReport):
        raise OperandError(f"{owner}(model) got a ConversionReport: {_IN_PLACE}")
    if not isinstance(model, torch.nn.Module):
        raise OperandError(f"{owner}({model!r}): expected a torch.nn.Module.")


def _refuse_changed(layer: torch.nn.Module) -> None:
    """Refuse to undo the conversion of a layer that was changed in another way since."""
    record: Record = vars(layer)[RECORD]
    if record.original is None:
        return
    # A converted class derives from the former one; a parametrization derives from the converted.
    is_another = record.original not in type(layer).__bases__
    is_patched = "forward" in vars(layer)
    if is_another or is_patched:
        label = layer.label if isinstance(layer, LowPrecisionModule) else type(layer).__name__
        change = "has its forward replaced" if is_patched else f"is a {type(layer).__name__}"
        raise OperandError(f"unconvert: {label} {change} since it was converted; undo that first.")


def _plans(surveyed: Survey, recipe: Recipe | None) -> dict[ModuleNode, list[LinearPlan]]:
    """Return the plan of every linear layer, two of experts; a recipe that cannot plan one raises
    here."""
    if recipe is None:
        return {}
    plans = {}
    for node in (*surveyed.chosen, *surveyed.native):
        if flops_of(node.module):
            dtype = next(node.module.parameters()).dtype
            plans[node] = [plan_of(LinearPlan, recipe, role, dtype) for role in _roles(node)]
    return plans


def _report(
    model: torch.nn.Module,
    surveyed: Survey,
    recipe: Recipe | None,
    plans: dict[ModuleNode, list[LinearPlan]],
) -> ConversionReport:
    taking = {p for node in (*surveyed.chosen, *surveyed.native) for p in node.module.parameters()}
    return ConversionReport(
        recipe=None if recipe is None else text_of(recipe),
        converted=tuple(_entry(node, plans.get(node, [])) for node in surveyed.chosen),
        native=tuple(_entry(node, plans.get(node, [])) for node in surveyed.native),
        skipped=tuple(
            _entry(r.node, [], r.reason, is_repeat=r.is_repeat) for r in surveyed.refused
        ),
        notes=tuple(_notes(model, surveyed, recipe, plans)),
        num_parameters=_count(set(model.parameters())),
        num_converted_parameters=_count(taking),
    )


def _entry(
    node: ModuleNode, plans: list[LinearPlan], reason: str = "", *, is_repeat: bool = False
) -> LayerEntry:
    is_native = isinstance(node.module, LowPrecisionModule)
    counted = set(node.module.parameters(recurse=is_native))
    sizes = _count(counted), flops_of(node.module)
    if is_repeat:  # counted at the layer's first path
        sizes = 0, 0
    is_low = bool(plans) and all(map(_is_forward_low, plans))
    experts = experts_of(node.module)
    count = 0 if experts is None or is_repeat else experts.num_experts
    return LayerEntry(node.path, type(node.module).__name__, *sizes, reason, is_low, count)


def _count(parameters: set[torch.nn.Parameter]) -> int:
    # The sizes of a lazy layer's parameters are not known yet.
    return sum(p.numel() for p in parameters if not is_lazy(p))


def _notes(
    model: torch.nn.Module,
    surveyed: Survey,
    recipe: Recipe | None,
    plans: Mapping[ModuleNode, Sequence[LinearPlan]],
) -> Iterator[str]:
    """Yield the notes on converting the ``surveyed`` layers of ``model`` to ``recipe``."""
    yield from _on_recipe(surveyed, recipe, plans)
    small = [node.path for node, (plan, *_) in plans.items() if _is_small(node.module, plan)]
    if small:
        yield (
            f"too small to gain from low precision, quantizing costs more than the GEMM saves: "
            f"{some(small)}; leave them out with skip"
        )
    shared = _shared([node for node in surveyed.chosen if flops_of(node.module)], model)
    if shared:
        yield f"the weight is another layer's too, and each quantizes it by itself: {some(shared)}"
    if any(isinstance(layer, torch.nn.TransformerEncoderLayer) for layer in model.modules()):
        yield (
            "in evaluation torch.nn.TransformerEncoderLayer reads the weights and does not call "
            "its layers; torch.backends.mha.set_fastpath_enabled(False) makes it call them"
        )
    uncounted = [r.node.path for r in surveyed.refused if _has_uncounted_gemm(r.node.module)]
    if uncounted:
        yield f"the shares of FLOPs do not count the weights of {some(uncounted)}"


def _on_recipe(
    surveyed: Survey, recipe: Recipe | None, plans: Mapping[ModuleNode, Sequence[LinearPlan]]
) -> Iterator[str]:
    high = [node.path for node, linears in plans.items() if not all(map(_is_forward_low, linears))]
    if high:
        yield f"by the recipe these compute in high precision: {some(high)}"
    if isinstance(recipe, PerLayer):
        layer_roles = [
            role for node in (*surveyed.chosen, *surveyed.native) for role in _roles(node)
        ]
        for pattern in recipe.unmatched(layer_roles):
            yield f"the recipe's rule {pattern!r} matches no converted layer"
    if any(
        plan.delayed is not None and plan.delayed.amax_algorithm == "most_recent"
        for several in plans.values()
        for plan in several
    ):
        yield (
            "amax_compute_algo='most_recent' follows the last forward: put the microbatches of a "
            "step into one autocast, which takes the largest amax of them all"
        )


def _roles(node: ModuleNode) -> list[LayerRole]:
    """Return the roles by which a recipe plans the layer: one, but two for experts."""
    experts = experts_of(node.module)
    if experts is not None:
        return [LayerRole("grouped_linear", name) for name in layer_names(experts, node.path)]
    return [LayerRole(getattr(node.module, "kind", "linear"), node.path or None)]


def _is_forward_low(plan: LinearPlan) -> bool:
    """Return whether ``plan`` has an operand of the forward GEMM in low precision."""
    return plan.fprop.a is not None or plan.fprop.b is not None


def _is_small(module: torch.nn.Module, plan: LinearPlan) -> bool:
    """Whether torchao would leave the layer in high precision, for the scalings it has measured.

    Source: torchao 0.18, float8, _auto_filter_for_recipe.
    """
    spec = plan.fprop.a
    if spec is None or not isinstance(module, torch.nn.Linear):
        return False
    k, n = module.in_features, module.out_features
    if spec.block == (1, 0):
        return n <= 2048 or k <= 1024 or (n <= 4096 and k <= 2048)
    return spec.block == (0, 0) and k <= 4096 and n <= 1024


def _shared(chosen: Sequence[ModuleNode], model: torch.nn.Module) -> list[str]:
    holders: dict[torch.nn.Parameter, set[torch.nn.Module]] = {}
    for node in module_nodes(model):
        for parameter in node.module.parameters(recurse=False):
            holders.setdefault(parameter, set()).add(node.module)
    return [
        node.path
        for node in chosen
        if any(len(holders[weight]) > 1 for weight in node.module.parameters(recurse=False))
    ]


def _has_uncounted_gemm(module: torch.nn.Module) -> bool:
    """Whether the module may multiply by direct parameters, though it is no known linear layer."""
    if flops_of(module) or isinstance(module, _WITHOUT_GEMM):
        return False
    return any(
        not is_lazy(parameter) and parameter.dim() > 1
        for parameter in module.parameters(recurse=False)
    )
