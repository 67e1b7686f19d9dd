"""Which weights of a model are stored quantized, and the operands that its forward multiplies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn.utils import parametrize

from fp8core.backend_api import Operand, OperandSpec
from fp8core.conversion.experts import ExpertsLinear
from fp8core.conversion.layers import RECORD
from fp8core.conversion.survey import Filter, check_patterns, survey, unwanted
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.interchange.checkpoints.layouts import Naming, Piece, holds_experts
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.bound import recipe_in
from fp8core.modules.inventory import ModuleNode, keyed_modules
from fp8core.modules.parallel import ParallelModule
from fp8core.modules.refusals import experts_of
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, LinearPlan, TensorPlan
from fp8core.tensors.checks import is_sharded
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Slot
from fp8core.tensors.storage import make_operands, storage_plan
from fp8core.torch_ops.private import FSDP_FLATTENED


class Weight(NamedTuple):
    """The weight of one GEMM.

    ``names`` are the names of the weight's parts in files, several where the parts are quantized as
    one tensor, and ``parts`` the values. The first part is the parameter ``target`` of the
    state_dict, or a slice of this parameter; ``module`` holds the parameter. ``scale`` is the
    delayed scale, None for a scale of the weight's amax.
    """

    module: torch.nn.Module
    target: str
    names: tuple[str, ...]
    parts: tuple[torch.Tensor, ...]
    spec: OperandSpec
    scale: torch.Tensor | None


def weights_of(
    model: torch.nn.Module, recipe: Recipe | None, filter: Filter, skip: Sequence[str]
) -> list[Weight]:
    """Return the weights that ``model`` multiplies in low precision, in the order of its modules.

    The weights are those of fp8core's layers, or, in a model without any, of the layers that
    :func:`fp8core.convert` would convert. ``recipe`` None takes that of a converted model.

    Raises:
        RecipeError: there is no recipe, a pattern matches nothing, or no weight is left.
        UnsupportedError: a weight is parametrized, sharded or on meta, or no spec describes it.
    """
    weights: list[Weight] = []
    naming = Naming(model)
    for node in _layers(model, filter, skip):
        layer = node.module
        used = recipe
        if used is None and isinstance(layer, LowPrecisionModule):
            outside = layer.outside_autocast
            used = None if outside is None else outside.quantize
        if used is None:
            raise RecipeError(
                f"save_pretrained: {node.path!r} has no recipe. Pass the one of training, as "
                f"recipe='block'."
            )
        weights += _weights(node, used, naming)
    if not weights:
        raise RecipeError(
            f"save_pretrained({type(model).__name__}): the recipe quantizes no weight of it. Use "
            f"torch.save or safetensors for a model in high precision. The transposed weights of "
            f"Conv1D are not stored quantized."
        )
    return weights


def _layers(model: torch.nn.Module, filter: Filter, skip: Sequence[str]) -> list[ModuleNode]:
    """Return the layers whose weights are stored quantized, each once."""
    nodes = list(_nodes(model))
    if not any(isinstance(module, LowPrecisionModule) for module in model.modules()):
        chosen = {node.module for node in survey(model, filter, skip).chosen}
        return _each_once(
            [node for node in nodes if node.module in chosen and _is_foreign(node.module)]
        )
    native = [node for node in nodes if _is_native(node.module)]
    check_patterns(filter, skip, [node.path for node in native], {})
    reason = unwanted(model, filter, skip, kinds=(torch.nn.Linear, LowPrecisionModule))
    # Layers that convert() converted were chosen there, unless the caller chooses here.
    is_filtered = filter is not None or bool(skip)
    return _each_once(
        [
            node
            for node in native
            if (RECORD in vars(node.module) and not is_filtered) or not reason(node)
        ]
    )


def _each_once(nodes: Sequence[ModuleNode]) -> list[ModuleNode]:
    """Return the first node of each module."""
    firsts = {node.module: node for node in reversed(nodes)}
    return [node for node in nodes if firsts[node.module] is node]


def _nodes(model: torch.nn.Module) -> Iterator[ModuleNode]:
    """Yield every module by its path in the state_dict, also those inside fp8core's layers."""
    parents: dict[str, torch.nn.Module] = dict(keyed_modules(model))
    for path, module in parents.items():
        yield ModuleNode(path, module, parents[path.rpartition(".")[0]] if path else None)


def _is_native(module: torch.nn.Module) -> bool:
    """Say whether ``module`` is a layer of fp8core with weights that can be stored quantized."""
    if isinstance(module, ExpertsLinear):
        return holds_experts(module.owner)
    return isinstance(module, LowPrecisionModule) and bool(module.weight_names())


def _is_foreign(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.Linear) or holds_experts(module)


class _Gemm(NamedTuple):
    """The weight of a GEMM before its spec is chosen; ``number`` is the GEMM's in its layer."""

    module: torch.nn.Module
    target: str
    names: tuple[str, ...]
    parts: tuple[torch.Tensor, ...]
    number: int


def _gemms(node: ModuleNode, naming: Naming) -> Iterator[_Gemm]:
    """Yield the weights of a layer's GEMMs, in order."""
    path, layer, _ = node
    prefix = f"{path}." if path else ""
    if isinstance(layer, ExpertsLinear):
        above = path.rpartition(".")[0]
        yield from _expert_gemms(layer.owner, above, layer.stacked_name, naming)
        return
    experts = experts_of(layer)
    if experts is not None:
        for weight in experts.weights:
            yield from _expert_gemms(layer, path, weight.weight, naming)
        return
    names = layer.weight_names() if isinstance(layer, LowPrecisionModule) else [("weight",)]
    for index, parts in enumerate(names):
        values = tuple(_parameter(layer, prefix, name) for name in parts)
        full = tuple(naming.of(prefix + name) for name in parts)
        yield _Gemm(layer, prefix + parts[0], full, values, index)


def _expert_gemms(owner: torch.nn.Module, path: str, name: str, naming: Naming) -> Iterator[_Gemm]:
    """Yield the weight of each expert, in the pieces that files have."""
    prefix = f"{path}." if path else ""
    value = _parameter(owner, prefix, name)
    if isinstance(value, QuantizedTensor):
        value = value.dequantize()
    pieces: dict[int, list[Piece]] = {}
    for piece in naming.pieces(prefix + name, value.shape):
        assert piece.place is not None
        pieces.setdefault(piece.place[0], []).append(piece)
    for expert, parts in pieces.items():
        rows = [piece.place[1:] for piece in parts if piece.place is not None]
        values = tuple(value[expert].narrow(0, start, size) for start, size in rows)
        yield _Gemm(owner, prefix + name, tuple(part.name for part in parts), values, expert)


def _weights(node: ModuleNode, recipe: Recipe, naming: Naming) -> Iterator[Weight]:
    path, layer, _ = node
    kind = "linear" if isinstance(layer, torch.nn.Linear) else "grouped_linear"
    role = LayerRole(kind, path or None)
    scales: torch.Tensor | None = None
    if isinstance(layer, LowPrecisionModule):
        role = LayerRole(layer.kind, layer.name or path or None)
        scales = layer._buffers.get("scale_fwd")
    used = recipe_in(recipe, role)
    for gemm in _gemms(node, naming):
        first = gemm.parts[0]
        plan = plan_of(LinearPlan, used, role, first.dtype)
        spec = plan.weight.rowwise
        if isinstance(first, QuantizedTensor):
            spec = first.plan.rowwise
        if dict(plan.makers).get("weight") is not None:
            raise UnsupportedError(
                f"save_pretrained: {path!r} is quantized by an object of the user, whose codes no "
                f"layout is known for."
            )
        if spec is None:
            continue
        scale = None
        if spec.delayed and scales is not None:
            at = gemm.number * len(plan.slots.forward) + plan.slots.forward.index("weight")
            scale = scales[at : at + 1]
        yield Weight(*gemm[:4], spec, scale)


def _parameter(layer: torch.nn.Module, prefix: str, name: str) -> torch.Tensor:
    parameter = layer._parameters.get(name)
    if parameter is None or parametrize.is_parametrized(layer, name):
        raise UnsupportedError(
            f"save_pretrained: {prefix + name!r} is computed by a parametrization or a hook. "
            f"Remove it first, with its value left in place."
        )
    if is_sharded(parameter) or getattr(parameter, FSDP_FLATTENED, False):
        raise UnsupportedError(
            f"save_pretrained: {prefix + name!r} is sharded over processes. Gather the model "
            f"first, as torch's get_model_state_dict does with full_state_dict=True."
        )
    if isinstance(layer, ParallelModule) and layer.tp_size > 1 and layer.parallel_mode:
        raise UnsupportedError(
            f"save_pretrained: {prefix + name!r} is one rank's share of a {layer.parallel_mode}-"
            f"parallel weight. Load the ranks' weights into a model of one rank first."
        )
    if parameter.is_meta:
        raise UnsupportedError(
            f"save_pretrained: {prefix + name!r} is on the meta device, where it has no values."
        )
    return parameter


def operand_of(weight: Weight) -> Operand:
    """Return the rowwise operand of ``weight`` that the layer's forward multiplies.

    The operand is padded with zeros to whole blocks where the format's scales are bytes.

    Raises:
        OperandError: the weight holds NaN or inf.
    """
    first = weight.parts[0]
    if isinstance(first, QuantizedTensor):
        operand = first.stored[0]
        assert operand is not None
        return operand
    value = first.detach() if len(weight.names) == 1 else torch.cat(weight.parts).detach()
    if not bool(value.isfinite().all()):
        raise OperandError(f"save_pretrained: {weight.names[0]!r} holds NaN or inf.")
    if weight.spec.scale_format != "float32":
        steps = weight.spec.block
        rows, columns = (-size % step for size, step in zip(value.shape, steps, strict=True))
        value = torch.nn.functional.pad(value, (0, columns, 0, rows))
    plan = storage_plan(TensorPlan(weight.spec, None))
    slot = None if weight.scale is None else Slot(weight.scale, None)
    operand = make_operands(value, plan, slot=slot).rowwise
    assert isinstance(operand, Operand)
    return operand
