"""Every descriptor that the layers ask for: all recipes, with their variants, in every dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fp8core import recipe
from fp8core.backend_api import (
    ACTIVATIONS,
    OPTIONAL_OPS,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    AmaxDesc,
    DequantizeDesc,
    FusedDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    ScaleUpdateDesc,
    amax_extent,
    has_amax,
)
from fp8core.chain.activation import activation_shape
from fp8core.chain.bind import gemm_desc
from fp8core.chain.linear import LinearShape
from fp8core.inspect.descriptors import op_needs
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, LinearPlan, TensorPlan

__all__ = ["DTYPES", "Entry", "catalogue"]

# One activation that is gated and one that is not stand for the others.
_FUSED = ("layernorm", "rmsnorm", "gelu", "swiglu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Entry(NamedTuple):
    """A descriptor, and a unique name made of who asks for it: ``mxfp8.fprop.bfloat16``."""

    label: str
    desc: OpDesc


def _recipes() -> dict[str, Recipe]:
    """Return every named recipe, the plug-ins' included, and the options that change a plan."""
    named = {name: recipe.by_name(name) for name in recipe.names()}
    return named | {
        "current-pow2": recipe.Float8CurrentScaling(use_power_2_scales=True),
        "rowwise-hybrid": recipe.Float8RowwiseScaling(fp8_format="hybrid"),
        "block-float32": recipe.Float8BlockScaling(use_f32_scales=True),
        "block-square": recipe.Float8BlockScaling(x_block_scaling_dim=2),
        "mxfp8-hybrid": recipe.MXFP8BlockScaling(fp8_format="hybrid"),
        "mxfp8-square": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
        "nvfp4-plain": recipe.NVFP4BlockScaling(
            disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
        ),
    }


def catalogue() -> list[Entry]:
    """Return every descriptor once, under the name of the first who asks for it."""
    entries: dict[object, Entry] = {}
    for entry in _everything():
        entries.setdefault(_identity(entry.desc), entry)
    return list(entries.values())


def _identity(desc: OpDesc) -> object:
    """Return the same value for descriptors of the same computation: an amax has no format."""
    if not isinstance(desc, AmaxDesc):
        return desc
    cast = desc.quantize
    extents = [
        (amax_extent(spec), None if spec is None else spec.transform)
        for spec in (cast.rowwise, cast.columnwise)
    ]
    return ("amax", cast.dtype, cast.grouped, cast.offsets_on_device, *extents)


def _everything() -> Iterator[Entry]:
    for dtype in DTYPES:
        yield from _pointwise(dtype)
        for name, chosen in _recipes().items():
            for groups in (0, 3):
                role = LayerRole("grouped_linear" if groups else "linear", name="layer")
                prefix = f"{name}{'.grouped' if groups else ''}"
                plan = plan_of(LinearPlan, chosen, role, dtype)
                yield from _gemms(prefix, plan, dtype, groups)
                yield from _casts(prefix, plan, dtype, is_grouped=bool(groups))
                if not groups:
                    yield from _fusions(prefix, chosen, dtype)
        for groups in (0, 3):
            yield from _gemms(f"plain{'.grouped' if groups else ''}", LinearPlan(), dtype, groups)
    for algorithm in ("max", "most_recent"):
        yield Entry(f"delayed.{algorithm}", ScaleUpdateDesc(algorithm))


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _gemms(prefix: str, plan: LinearPlan, dtype: torch.dtype, groups: int) -> Iterator[Entry]:
    for weight_dtype in dict.fromkeys((dtype, torch.float32)):
        shape = LinearShape(1, 1, weight_dtype, None, groups)
        for name in ("fprop", "dgrad", "wgrad"):
            desc = gemm_desc(name, plan, shape, dtype)
            label = f"{prefix}.{name}.{_word(dtype)}.{_word(desc.out_dtype)}"
            yield Entry(label, desc)
            if name == "wgrad":
                yield Entry(f"{label}.accumulate", dataclasses.replace(desc, accumulate=True))
            is_first = weight_dtype == dtype == DTYPES[0]  # kernels are the same for the others
            if is_first and isinstance(desc, GroupedGemmDesc):
                yield Entry(f"{label}.device", dataclasses.replace(desc, offsets_on_device=True))


def _tensors(plan: LinearPlan) -> dict[str, TensorPlan]:
    tensors = {"input": plan.input, "weight": plan.weight, "grad_output": plan.grad_output}
    return {name: tensor for name, tensor in tensors.items() if any(tensor)}


def _casts(
    prefix: str, plan: LinearPlan, dtype: torch.dtype, *, is_grouped: bool
) -> Iterator[Entry]:
    for name, tensor in _tensors(plan).items():
        label = f"{prefix}.{name}.{_word(dtype)}"
        desc = QuantizeDesc(dtype, *tensor, is_grouped and name != "weight")
        yield Entry(label, desc)
        yield from _apart(label, desc)
        if desc.grouped:
            on_device = dataclasses.replace(desc, offsets_on_device=True)
            yield Entry(f"{label}.device", on_device)
            yield from _apart(f"{label}.device", on_device)
        for orientation, spec in zip(tensor._fields, tensor, strict=True):
            if spec is not None and not is_grouped:
                yield Entry(f"{label}.{orientation}", DequantizeDesc(spec, dtype))


def _apart(label: str, desc: QuantizeDesc) -> Iterator[Entry]:
    """Yield the amax of a cast, and the cast by it."""
    if not has_amax(desc):
        return
    yield Entry(f"{label}.amax", AmaxDesc(desc))
    is_delayed = any(spec is not None and spec.delayed for spec in (desc.rowwise, desc.columnwise))
    is_first = desc.dtype == DTYPES[0]  # groups are the same for the others
    if not is_delayed and (is_first or not desc.grouped):
        yield Entry(f"{label}.by_amax", QuantizeByAmaxDesc.of(desc))


def _pointwise(dtype: torch.dtype) -> Iterator[Entry]:
    for out_dtype in dict.fromkeys((dtype, torch.float32)):
        words = f"{_word(dtype)}.{_word(out_dtype)}"
        for kind in ("layernorm", "rmsnorm"):
            for zero_centered in (False, True):
                norm = NormDesc(kind, dtype, out_dtype, 1e-5, zero_centered)
                label = f"{kind}{'.zero_centered' if zero_centered else ''}.{words}"
                yield Entry(label, norm)
                yield Entry(f"{label}.backward", NormBackwardDesc(norm))
                yield Entry(f"{label}.add", AddNormDesc(norm))
        for name in ACTIVATIONS:
            params = activation_shape(name).params
            yield Entry(f"{name}.{words}", ActivationDesc(name, dtype, out_dtype, params))
            backward = ActivationBackwardDesc(name, dtype, out_dtype, params)
            yield Entry(f"{name}.{words}.backward", backward)


def _fusions(prefix: str, chosen: Recipe, dtype: torch.dtype) -> Iterator[Entry]:
    """Yield the fusions of a norm or an activation with the cast of what follows it."""
    for op in OPTIONAL_OPS:
        for _, desc in op_needs(op, chosen, dtype):
            if not isinstance(desc, FusedDesc):
                continue
            word = _producer(desc)
            if word.removesuffix(".backward") not in _FUSED:
                continue
            is_gradient = isinstance(desc.producer, NormBackwardDesc | ActivationBackwardDesc)
            for sums in (False, True) if is_gradient else (False,):
                label = f"{prefix}.{word}{'.sums' if sums else ''}.{_word(dtype)}"
                yield Entry(label, dataclasses.replace(desc, sums=sums))


def _producer(desc: FusedDesc) -> str:
    """Return ``layernorm``, ``gelu``; with ``.backward`` where it is a gradient."""
    made = desc.producer
    if isinstance(made, NormDesc | NormBackwardDesc):
        name = made.kind if isinstance(made, NormDesc) else made.norm.kind
    else:
        name = made.name
    is_forward = isinstance(made, NormDesc | ActivationDesc)
    return name if is_forward else f"{name}.backward"
