"""``save_pretrained``: the quantized weights of a model's forward, in files for other libraries."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.nn.utils import parametrize

from fp8core.backend_api import Operand, OperandSpec
from fp8core.backend_api.operand_spec import codes_per_byte
from fp8core.conversion.experts import ExpertsLinear
from fp8core.conversion.layers import RECORD
from fp8core.conversion.survey import Filter, check_patterns, survey, unwanted
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.interchange.checkpoints.files import ShardWriter
from fp8core.interchange.checkpoints.layouts import (
    Layout,
    Naming,
    Piece,
    file_tensors,
    holds_experts,
    layout_of,
)
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bound import recipe_in
from fp8core.modules.layers.parallel import ParallelModule
from fp8core.modules.models.inventory import ModuleNode, experts_of, keyed_modules
from fp8core.modules.state.delayed import DelayedModule
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.named import recipe_from
from fp8core.recipe.plan import LayerRole, LinearPlan, TensorPlan
from fp8core.reporting import logger, some
from fp8core.tensors.checks import is_sharded
from fp8core.tensors.delayed_state import BUFFERS
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Slot
from fp8core.tensors.storage import Casting, make_operands, storage_plan
from fp8core.torch_ops.private import COMPILED_MODULE, FSDP_FLATTENED


class Weight(NamedTuple):
    """The weight of one GEMM.

    ``names`` are the names of the weight's parts in files, several where the parts are quantized as
    one tensor, and ``parts`` the values. The first part is the parameter ``target`` of the
    state_dict, or a slice of this parameter; ``module`` holds the parameter. ``scale`` is the
    delayed scale, None if the scale follows from the weight's amax. ``is_alone``: the forward
    multiplies it by activations in high precision.
    """

    module: torch.nn.Module
    target: str
    names: tuple[str, ...]
    parts: tuple[torch.Tensor, ...]
    spec: OperandSpec
    scale: torch.Tensor | None
    is_alone: bool


def weights_of(
    model: torch.nn.Module, recipe: Recipe | None, filter: Filter, skip: Sequence[str]
) -> list[Weight]:
    """Return the weights that ``model`` multiplies in low precision, in the order of its modules.

    The weights are those of fp8core's layers, or, in a model without any, of the layers that
    :func:`fp8core.convert` would convert. With ``recipe`` None a layer's own recipe is taken, which
    :func:`fp8core.convert` gave to the layer.

    Raises:
        RecipeError: there is no recipe, a pattern matches nothing, or no weight is left.
        UnsupportedError: a weight is parametrized, sharded or on meta, or no spec describes it.
    """
    weights: list[Weight] = []
    naming = Naming(model)
    for node in _layers(model, filter, skip):
        layer = node.module
        recipe_of_layer = recipe
        if recipe_of_layer is None and isinstance(layer, LowPrecisionModule):
            request = layer.outside_autocast
            recipe_of_layer = None if request is None else request.quantize
        if recipe_of_layer is None:
            raise RecipeError(
                f"save_pretrained: {node.path!r} has no recipe. Pass the one of training, as "
                f"recipe='block'."
            )
        weights += _weights_of_layer(node, recipe_of_layer, naming)
    if not weights:
        raise RecipeError(
            f"save_pretrained({type(model).__name__}): the recipe quantizes no weight of it. Use "
            f"torch.save or safetensors for a model in high precision. The transposed weights of "
            f"Conv1D are not stored quantized."
        )
    return weights


def _layers(model: torch.nn.Module, filter: Filter, skip: Sequence[str]) -> list[ModuleNode]:
    """Return the layers whose weights are stored quantized, each once."""
    parents: dict[str, torch.nn.Module] = dict(keyed_modules(model))
    nodes = [  # the modules inside fp8core's layers too
        ModuleNode(path, module, parents[path.rpartition(".")[0]] if path else None)
        for path, module in parents.items()
    ]
    if any(isinstance(module, LowPrecisionModule) for module in model.modules()):
        nodes = [node for node in nodes if _is_native(node.module)]
        check_patterns(filter, skip, [node.path for node in nodes], {})
        reason = unwanted(model, filter, skip, kinds=(torch.nn.Linear, LowPrecisionModule))
        # convert() has chosen the layers that it converted; the caller's filter or skip overrides.
        is_filtered = filter is not None or bool(skip)
        is_chosen = [(RECORD in vars(n.module) and not is_filtered) or not reason(n) for n in nodes]
    else:
        chosen = {node.module for node in survey(model, filter, skip).chosen}
        chosen = {m for m in chosen if isinstance(m, torch.nn.Linear) or holds_experts(m)}
        is_chosen = [node.module in chosen for node in nodes]
    firsts: dict[torch.nn.Module, ModuleNode] = {}
    for node in itertools.compress(nodes, is_chosen):
        firsts.setdefault(node.module, node)
    return list(firsts.values())


def _is_native(module: torch.nn.Module) -> bool:
    """Say whether ``module`` is a layer of fp8core with weights that can be stored quantized."""
    if isinstance(module, ExpertsLinear):
        return holds_experts(module.owner)
    return isinstance(module, LowPrecisionModule) and bool(module.weight_names())


# Module, target, names and parts of a Weight, and the number of its GEMM in the layer.
_Gemm: TypeAlias = tuple[torch.nn.Module, str, tuple[str, ...], tuple[torch.Tensor, ...], int]


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
        yield layer, prefix + parts[0], full, values, index


def _expert_gemms(owner: torch.nn.Module, path: str, name: str, naming: Naming) -> Iterator[_Gemm]:
    """Yield the weight of each expert, in pieces as files name them."""
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
        yield owner, prefix + name, tuple(part.name for part in parts), values, expert


def _weights_of_layer(node: ModuleNode, recipe: Recipe, naming: Naming) -> Iterator[Weight]:
    path, layer, _ = node
    kind = "linear" if isinstance(layer, torch.nn.Linear) else "grouped_linear"
    role = LayerRole(kind, path or None)
    scales: torch.Tensor | None = None
    if isinstance(layer, LowPrecisionModule):
        role = LayerRole(layer.kind, layer.name or path or None)
        scales = layer._buffers.get("scale_fwd")
    inner_recipe = recipe_in(recipe, role)
    for module, target, names, parts, number in _gemms(node, naming):
        first = parts[0]
        plan = plan_of(LinearPlan, inner_recipe, role, first.dtype)
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
            at = number * len(plan.slots.forward) + plan.slots.forward.index("weight")
            scale = scales[at : at + 1]
        is_alone = plan.fprop.a is None
        yield Weight(module, target, names, parts, spec, scale, is_alone)


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

    Where scales are stored as bytes, the operand is padded with zeros to whole blocks.

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
    operand = make_operands(value, plan, Casting(slot)).rowwise
    assert isinstance(operand, Operand)
    return operand


_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]?)B", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, slots=True)
class Saved:
    """The report of :func:`save_pretrained`.

    Attributes:
        layout: how the quantized weights are stored.
        quantized: the names of the quantized weights.
        high_precision: the modules that ``quantization_config`` lists as left in high precision.
        uneven: the quantized weights with partial blocks. fp8core and torch read partial blocks;
            compressed-tensors 0.20 refuses them, transformers 5.23 refuses or misreads them.
    """

    layout: str
    quantized: tuple[str, ...]
    high_precision: tuple[str, ...]
    uneven: tuple[str, ...]


def save_pretrained(
    model: torch.nn.Module,
    directory: str | os.PathLike[str],
    recipe: Recipe | str | None = None,
    *,
    method: str | None = None,
    filter: Filter = None,
    skip: Sequence[str] | str = (),
    max_shard_size: int | str = "5GB",
) -> Saved:
    """Write ``model`` to ``directory`` with the weights of its linears quantized by ``recipe``.

    The codes and scales are those that a forward under the recipe multiplies, bit for bit. Under
    delayed scaling a weight is cast by its present scale, or by its amax before the first scale.
    The files are safetensors with an index, and ``config.json`` has the ``quantization_config``.
    Weights are quantized one after the other, and stay in memory until their file is full.

    Embeddings, norms, output heads, routers of experts and biases stay in high precision, and the
    ``quantization_config`` lists their modules. In a model with fp8core's layers, converted or not,
    the weights of these layers are quantized; in any other model, the weights of the linears that
    :func:`fp8core.convert` would convert. Tied weights are written once. Delayed scales and amax
    histories are not written.

    Args:
        model: any module. For a model of transformers the config is written, too.
        directory: a folder, created if needed; files of an older checkpoint there are replaced.
        recipe: a recipe or its name; None takes the recipe of :func:`fp8core.convert`.
        method: the ``quant_method`` of the files, ``"fp8"`` (DeepSeek's names, which transformers,
            vLLM and SGLang read) or ``"compressed-tensors"``; None takes the first of these that
            has the format, for :class:`~fp8core.recipe.WeightOnly` the second.
        filter, skip: which layers, as in :func:`fp8core.convert`.
        max_shard_size: bytes of a file, as a number or as ``"5GB"``.

    Raises:
        RecipeError: no recipe, an unknown method or size, a pattern that matches nothing, or a
            recipe that quantizes nothing.
        OperandError: a weight holds NaN or inf.
        UnsupportedError: no layout of other libraries holds the recipe's codes, or layers have
            recipes of different layouts; a weight is sharded, parametrized or on meta.
    """
    if not isinstance(model, torch.nn.Module):
        raise OperandError(f"save_pretrained({model!r}): expected a torch.nn.Module.")
    model = unwrapped(model)
    limit = _bytes_of(max_shard_size)
    chosen = recipe_from(recipe, "save_pretrained(recipe=...)")
    weights = weights_of(model, chosen, filter, [skip] if isinstance(skip, str) else skip)
    weights_alone = all(weight.is_alone for weight in weights)
    if weights_alone:
        method = method or "compressed-tensors"
    layout, spec = _common_layout(weights, method)
    high_precision = _high_precision_modules(model, weights)
    uneven = [name for weight in weights for name in _uneven_parts(weight, layout, spec)]
    with ShardWriter(directory, limit) as writer:
        for tensors in _tensors(model, weights, layout):
            writer.add(tensors)
        quantization = layout.config(spec, high_precision, weights_alone=weights_alone)
        config = {**_config(model), "quantization_config": quantization}
        writer.finish(config)
    save = getattr(getattr(model, "generation_config", None), "save_pretrained", None)
    if callable(save):
        save(directory)
    if uneven:
        logger.warning(
            "save_pretrained: blocks of %s do not divide %s. fp8core and torch's distributed "
            "checkpoint reader take partial blocks; compressed-tensors 0.20 refuses them, and "
            "transformers 5.23 refuses them or takes equal blocks instead, which gives other "
            "values. Leave these layers out by skip= for such readers.",
            layout.name,
            some(uneven),
        )
    names = tuple(name for weight in weights for name in weight.names)
    return Saved(layout.name, names, tuple(high_precision), tuple(uneven))


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside torch.compile's and DistributedDataParallel's wrappers."""
    while True:
        inner = getattr(model, COMPILED_MODULE, None)
        if inner is None and isinstance(model, torch.nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _bytes_of(size: int | str) -> int:
    if isinstance(size, int) and not isinstance(size, bool) and size > 0:
        return size
    match = _SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    if match is None:
        raise RecipeError(f"max_shard_size={size!r}: expected bytes, as 5000000000 or '5GB'.")
    return max(1, int(float(match[1]) * _UNITS[match[2].upper()]))


def _common_layout(weights: Sequence[Weight], method: str | None) -> tuple[Layout, OperandSpec]:
    """Return the layout and the spec that all of ``weights`` have in common."""
    first = weights[0]
    layout = layout_of(first.spec, method)
    for weight in weights:
        layout_of_weight = layout_of(weight.spec, method)
        if layout_of_weight is not layout or weight.spec.block != first.spec.block:
            raise UnsupportedError(
                f"save_pretrained: {first.names[0]!r} is quantized as {first.spec}, "
                f"{weight.names[0]!r} as {weight.spec}. A file has one layout; leave the others "
                f"out by skip= or by PerLayer."
            )
    # The config says whether scales are powers of two: so only if the scales of all weights are.
    specs = (weight.spec for weight in weights)
    return layout, next((spec for spec in specs if not spec.power_of_two), first.spec)


def _high_precision_modules(model: torch.nn.Module, weights: Sequence[Weight]) -> list[str]:
    """Return the paths of the modules that have parameters, and no quantized one among them."""
    quantized = {weight.module for weight in weights}
    naming = Naming(model)
    paths: dict[torch.nn.Module, str] = {}
    for path, module in keyed_modules(model):
        paths.setdefault(module, path)
    return [
        naming.of(path)
        for module, path in paths.items()
        if path
        and module not in quantized
        and any(parameter is not None for parameter in module._parameters.values())
    ]


def _uneven_parts(weight: Weight, layout: Layout, spec: OperandSpec) -> Iterator[str]:
    """Yield the names of the parts of ``weight`` with partial blocks."""
    block = layout.blocks or spec.block
    for name, parameter in zip(weight.names, weight.parts, strict=True):
        sizes = zip(parameter.shape, block, strict=True)
        if any(step and size % step for size, step in sizes):
            yield name


def _tensors(
    model: torch.nn.Module, weights: Sequence[Weight], layout: Layout
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the tensors of the files, those of one weight together, in the model's order."""
    by_target: dict[str, list[Weight]] = {}
    for weight in weights:
        by_target.setdefault(weight.target, []).append(weight)
    parts = {name for weight in weights for name in weight.names}
    naming = Naming(model)
    internal: set[str] = set()
    experts: set[str] = set()
    for path, module in keyed_modules(model):
        prefix = f"{path}." if path else ""
        if isinstance(module, DelayedModule):
            internal |= {prefix + name for name in (*BUFFERS, "_extra_state")}
        if holds_experts(module):
            experts |= {prefix + name for name in module._parameters}
    written: set[Any] = set()
    for name, value in model.state_dict(keep_vars=True).items():
        if name in internal or not isinstance(value, torch.Tensor):
            continue
        if value.is_meta or hasattr(value, "device_mesh"):
            raise UnsupportedError(
                f"save_pretrained: {name!r} is {'on meta' if value.is_meta else 'sharded'}."
            )
        identity = _identity(value)
        if identity in written:
            continue
        if name in by_target:
            for weight in by_target[name]:
                yield _quantized_tensors(weight, layout)
        elif naming.of(name) not in parts:
            plain = value.dequantize() if isinstance(value, QuantizedTensor) else value
            yield _plain_tensors(naming, name, plain, is_of_experts=name in experts)
        written.add(identity)


def _plain_tensors(
    naming: Naming, name: str, value: torch.Tensor, *, is_of_experts: bool
) -> dict[str, torch.Tensor]:
    """Return ``value`` in high precision under its name in files; of experts a tensor for each."""
    pieces = naming.pieces(name, value.shape) if is_of_experts else []
    if not pieces:
        return {naming.of(name): value}
    places = {piece.name: piece.place for piece in pieces if piece.place is not None}
    return {
        piece_name: value[at].narrow(0, start, rows)
        for piece_name, (at, start, rows) in places.items()
    }


def _identity(value: torch.Tensor) -> Any:
    """Return a key that is equal for tensors that share all of their memory."""
    if isinstance(value, QuantizedTensor) or not value.numel():
        return id(value)
    place = value.untyped_storage().data_ptr(), value.storage_offset()
    return (*place, value.dtype, tuple(value.shape), value.stride())


def _quantized_tensors(weight: Weight, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the codes and scales of ``weight`` by their names in files, split into its parts."""
    operand = operand_of(weight)
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for name, parameter in zip(weight.names, weight.parts, strict=True):
        rows, columns = parameter.shape
        if columns % codes_per_byte(weight.spec):
            raise UnsupportedError(
                f"save_pretrained: {name!r} has {columns} columns, and a byte holds two codes of "
                f"{layout.name}. Leave it out by skip=."
            )
        part = _rows(operand, weight, start, rows)
        tensors.update(file_tensors(layout, name, part, weight.spec, (rows, columns)))
        start += rows
    return tensors


def _rows(operand: Operand, weight: Weight, start: int, rows: int) -> Operand:
    """Return the rows ``start`` to ``start + rows`` of the operand: one part of ``weight``."""
    if len(weight.names) == 1:
        return operand
    step = weight.spec.block[0]
    if step and start % step:
        raise UnsupportedError(
            f"save_pretrained: {', '.join(weight.names)} are quantized as one weight, and a block "
            f"of {step} rows spans two of them. Save a model whose parameters are not split, or "
            f"leave them out by skip=."
        )
    assert operand.scale_inv is not None
    scale = operand.scale_inv
    if step:
        scale = scale[start // step : -(-(start + rows) // step)]
    return operand._replace(data=operand.data[start : start + rows], scale_inv=scale)


def _config(model: torch.nn.Module) -> dict[str, Any]:
    """Return the config of a model of transformers; of any other model an empty dict."""
    config = getattr(model, "config", None)
    as_text = getattr(config, "to_json_string", None)
    if not callable(as_text):
        return {}
    content: Mapping[str, Any] = json.loads(as_text())
    return {**content, "architectures": [type(model).__name__]}
