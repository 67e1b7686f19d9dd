"""``save_pretrained``: the quantized weights of a model's forward, in files for other libraries."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.backend_api import Operand, OperandSpec
from fp8core.conversion.survey import Filter
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.interchange.checkpoints.files import ShardWriter
from fp8core.interchange.checkpoints.layouts import (
    Layout,
    Naming,
    file_tensors,
    holds_experts,
    layout_of,
)
from fp8core.interchange.checkpoints.selection import Weight, operand_of, weights_of
from fp8core.modules.delayed import DelayedModule
from fp8core.modules.inventory import keyed_modules
from fp8core.recipe import Recipe
from fp8core.recipe.choice import recipe_from
from fp8core.reporting import logger, some
from fp8core.tensors.delayed_state import BUFFERS
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.torch_ops.private import COMPILED_MODULE

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMG]?)B", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}


@dataclass(frozen=True, slots=True)
class Saved:
    """The report of :func:`save_pretrained`.

    Attributes:
        layout: how the quantized weights are stored.
        quantized: the names of these weights.
        high_precision: the modules that are listed as left in high precision.
        uneven: quantized weights whose sizes blocks do not divide. fp8core and torch read them;
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

    The codes and scales are those that a forward under the recipe multiplies, bit for bit; under
    delayed scaling by the weight's present scale, or by its amax where there is none yet. The files
    are safetensors with an index, and ``config.json`` has the ``quantization_config``. Weights are
    quantized one after the other, and held until their file is full.

    Embeddings, norms, output heads, routers of experts and biases stay in high precision and are
    listed. In a model with fp8core's layers, converted or not, the weights of these layers are
    quantized; in another model, the weights of the linears that :func:`fp8core.convert` would
    convert. Tied weights are written once. Delayed scales and amax histories are not written.

    Args:
        model: any module. Of a model of transformers the config is written, too.
        directory: is created if needed; files of an older checkpoint in it are replaced.
        recipe: a recipe or its name; None takes that of :func:`fp8core.convert`.
        method: the ``quant_method`` of the files, ``"fp8"`` (DeepSeek's names, which transformers,
            vLLM and SGLang read) or ``"compressed-tensors"``; None: the first that has the format.
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
    layout, spec = _common_layout(weights, method)
    left = _left(model, weights)
    uneven = [name for weight in weights for name in _uneven(weight, layout, spec)]
    with ShardWriter(directory, limit) as writer:
        for tensors in _tensors(model, weights, layout):
            writer.add(tensors)
        config = {**_config(model), "quantization_config": layout.config(spec, left)}
        writer.finish(config)
    _save_generation_config(model, directory)
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
    return Saved(layout.name, names, tuple(left), tuple(uneven))


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
    is_power_of_two = all(weight.spec.power_of_two for weight in weights)
    spec = first.spec if is_power_of_two else _as_float32(weights)
    return layout, spec


def _as_float32(weights: Sequence[Weight]) -> OperandSpec:
    """Return the spec of a weight whose scales are not rounded to powers of two."""
    return next(weight.spec for weight in weights if not weight.spec.power_of_two)


def _left(model: torch.nn.Module, weights: Sequence[Weight]) -> list[str]:
    """Return the paths of the modules with parameters of which none is quantized."""
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


def _uneven(weight: Weight, layout: Layout, spec: OperandSpec) -> Iterator[str]:
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
    internal = {
        f"{path}.{name}" if path else name
        for path, module in keyed_modules(model)
        if isinstance(module, DelayedModule)
        for name in (*BUFFERS, "_extra_state")
    }
    experts = {
        f"{path}.{name}" if path else name
        for path, module in keyed_modules(model)
        if holds_experts(module)
        for name in module._parameters
    }
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
                yield _quantized(weight, layout)
        elif naming.of(name) not in parts:
            plain = value.dequantize() if isinstance(value, QuantizedTensor) else value
            yield _plain(naming, name, plain, is_of_experts=name in experts)
        written.add(identity)


def _plain(
    naming: Naming, name: str, value: torch.Tensor, *, is_of_experts: bool
) -> dict[str, torch.Tensor]:
    """Return the tensors of ``value`` in high precision, a tensor for each expert."""
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


def _quantized(weight: Weight, layout: Layout) -> dict[str, torch.Tensor]:
    """Return the tensors of ``weight``, those of its parts apart."""
    operand = operand_of(weight)
    tensors: dict[str, torch.Tensor] = {}
    start = 0
    for name, parameter in zip(weight.names, weight.parts, strict=True):
        rows, columns = parameter.shape
        if layout.element == "e2m1" and columns % 2:
            raise UnsupportedError(
                f"save_pretrained: {name!r} has {columns} columns, and a byte holds two codes of "
                f"{layout.name}. Leave it out by skip=."
            )
        part = _rows(operand, weight, start, rows)
        tensors.update(file_tensors(layout, name, part, weight.spec, (rows, columns)))
        start += rows
    return tensors


def _rows(operand: Operand, weight: Weight, start: int, rows: int) -> Operand:
    """Return the operand of ``rows`` rows from ``start`` on, a part of a weight."""
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
    """Return the config of a model of transformers; empty for another one."""
    config = getattr(model, "config", None)
    as_text = getattr(config, "to_json_string", None)
    if not callable(as_text):
        return {}
    content: Mapping[str, Any] = json.loads(as_text())
    return {**content, "architectures": [type(model).__name__]}


def _save_generation_config(model: torch.nn.Module, directory: str | os.PathLike[str]) -> None:
    save = getattr(getattr(model, "generation_config", None), "save_pretrained", None)
    if callable(save):
        save(directory)
