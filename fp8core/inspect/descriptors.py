"""What layers and recipes ask of a backend: descriptors by step, derived from the recipe's plan.

The one source of ``explain``, of the matrix and self-test of ``fp8core doctor``, and of the support
matrix in the documentation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from fp8core.backend_api import (
    ACTIVATIONS,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    AmaxDesc,
    DequantizeDesc,
    FusedDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    QuantizeDesc,
    ScaleUpdateDesc,
    has_amax,
)
from fp8core.chain.activation import ActivationShape, activation_shape
from fp8core.chain.bind import LinkShape, gemm_desc, handover
from fp8core.chain.linear import LinearShape
from fp8core.chain.norm import NormShape
from fp8core.modules.base import LowPrecisionModule
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, LinearPlan

__all__ = ["Need", "layer_needs", "op_needs"]

_NORMS = ("layernorm", "rmsnorm")
_EPS = 1e-5
_GROUPS = 2


class Need(NamedTuple):
    """One operation that is asked for, and the step that asks: ``fprop``, ``weight``, ``gelu``."""

    step: str
    desc: OpDesc


def layer_needs(layer: LowPrecisionModule, recipe: Recipe, dtype: torch.dtype) -> list[Need]:
    """Return what ``layer`` asks for under ``recipe`` on activations of ``dtype``, in order.

    Fused operations are among it, and the pairs that run where nobody offers them.
    """
    plan = plan_of(LinearPlan, recipe, LayerRole(layer.kind, layer.name), dtype)
    shapes = layer.link_shapes()
    needs: list[Need] = []
    for at, shape in enumerate(shapes):
        made = [*_link_needs(shapes, at, plan, dtype), *_fused_at(shapes, at, plan, dtype)]
        is_one_of_many = sum(isinstance(own, type(shape)) for own in shapes) > 1
        needs += [Need(f"{step}[{at}]" if is_one_of_many else step, desc) for step, desc in made]
    if plan.delayed is not None and layer.count_gemms():
        needs += _update(plan)
    return needs


def op_needs(op: str, recipe: Recipe, dtype: torch.dtype) -> list[Need]:
    """Return every use of ``op`` that ``recipe`` can lead to on activations of ``dtype``.

    Dense and grouped linears, each norm and each activation; empty where the recipe has no use for
    the operation. An optional operation has a need for each pair that it could replace.
    """
    dense = _plan_of(recipe, 0, dtype)
    grouped = _plan_of(recipe, _GROUPS, dtype)
    needs = [
        *_linear_needs([_linear(dtype)], 0, dense, dtype),
        *_grouped_needs(grouped, dtype),
        *_dequantizations(dense, dtype),
        *_amax_needs(dense, dtype),
        *_update(dense),
        *_norm_and_activation_needs(dense, dtype),
        *_fused_needs(dense, dtype),
    ]
    return [need for need in needs if need.desc.op == op]


def _plan_of(recipe: Recipe, groups: int, dtype: torch.dtype) -> LinearPlan:
    role = LayerRole("grouped_linear" if groups else "linear")
    return plan_of(LinearPlan, recipe, role, dtype)


def _linear(dtype: torch.dtype, groups: int = 0) -> LinearShape:
    return LinearShape(1, 1, dtype, None, groups)


def _link_needs(
    shapes: Sequence[LinkShape], at: int, plan: LinearPlan, dtype: torch.dtype
) -> list[Need]:
    """Return what one link of a chain asks for; nothing for links without a backend operation."""
    shape = shapes[at]
    if isinstance(shape, LinearShape):
        return _linear_needs(shapes, at, plan, dtype)
    out_dtype = grad_dtype = dtype
    if at + 1 < len(shapes) and isinstance(shapes[at + 1], LinearShape):
        out_dtype = handover(shapes, at + 1, plan, dtype, step=-1)
    if at and isinstance(shapes[at - 1], LinearShape):
        grad_dtype = handover(shapes, at - 1, plan, dtype, step=1)
    if isinstance(shape, NormShape):
        norm = NormDesc(shape.kind, dtype, out_dtype, shape.eps, shape.zero_centered)
        return [Need("norm", norm), Need("norm backward", NormBackwardDesc(norm))]
    if isinstance(shape, ActivationShape):
        forward = ActivationDesc(shape.name, dtype, out_dtype, shape.params)
        backward = ActivationBackwardDesc(shape.name, dtype, grad_dtype, shape.params)
        return [Need(shape.name, forward), Need(f"{shape.name} backward", backward)]
    return []


def _linear_needs(
    shapes: Sequence[LinkShape], at: int, plan: LinearPlan, dtype: torch.dtype
) -> list[Need]:
    """Return the GEMMs and casts of the linear at ``at``, and what each is for."""
    shape = shapes[at]
    assert isinstance(shape, LinearShape)
    needs = [
        Need(name, gemm_desc(name, plan, shape, dtype)) for name in ("fprop", "dgrad", "wgrad")
    ]
    input_dtype, grad_dtype = (handover(shapes, at, plan, dtype, step=s) for s in (-1, 1))
    tensors = (
        ("input", plan.input, input_dtype, bool(shape.groups)),
        ("weight", plan.weight, shape.weight_dtype, False),
        ("grad_output", plan.grad_output, grad_dtype, bool(shape.groups)),
    )
    for name, tensor, own_dtype, grouped in tensors:
        if any(tensor):
            needs.append(Need(name, QuantizeDesc(own_dtype, *tensor, grouped=grouped)))
    return needs


def _grouped_needs(plan: LinearPlan, dtype: torch.dtype) -> Iterator[Need]:
    """Yield what a grouped linear asks for and a dense one does not."""
    for step, desc in _linear_needs([_linear(dtype, _GROUPS)], 0, plan, dtype):
        if not isinstance(desc, QuantizeDesc):
            yield Need(step, desc)
        elif desc.grouped:
            yield Need(f"{step} of groups", desc)


def _amax_needs(plan: LinearPlan, dtype: torch.dtype) -> Iterator[Need]:
    """Yield what is asked for where amaxes are recorded without a cast, or reduced before one."""
    tensors = (("input", plan.input), ("weight", plan.weight), ("grad_output", plan.grad_output))
    for name, tensor in tensors:
        desc = QuantizeDesc(dtype, *tensor)
        if has_amax(desc):
            yield Need(name, AmaxDesc(desc))


def _dequantizations(plan: LinearPlan, dtype: torch.dtype) -> Iterator[Need]:
    tensors = (("input", plan.input), ("weight", plan.weight), ("grad_output", plan.grad_output))
    for name, tensor in tensors:
        for spec in dict.fromkeys(tensor):
            if spec is not None:
                yield Need(name, DequantizeDesc(spec, dtype))


def _norm_and_activation_needs(plan: LinearPlan, dtype: torch.dtype) -> Iterator[Need]:
    """Yield what norms and activations that stand alone ask for."""
    for kind in _NORMS:
        norm = NormDesc(kind, dtype, dtype, _EPS)
        yield Need(kind, norm)
        yield Need(kind, NormBackwardDesc(norm))
        yield Need(kind, AddNormDesc(norm))
    for name in ACTIVATIONS:
        alone: list[LinkShape] = [activation_shape(name)]
        yield from (Need(name, desc) for _, desc in _link_needs(alone, 0, plan, dtype))


def _fused_needs(plan: LinearPlan, dtype: torch.dtype) -> Iterator[Need]:
    """Yield the producers of a linear's input and gradient, each with the quantization."""
    linear = _linear(dtype)
    producers: list[LinkShape] = [NormShape(kind, 1, _EPS, False, dtype) for kind in _NORMS]
    producers += map(activation_shape, ACTIVATIONS)
    for producer in producers:
        yield from _fused_at([linear, producer, linear], 1, plan, dtype)


def _fused_at(
    shapes: Sequence[LinkShape], at: int, plan: LinearPlan, dtype: torch.dtype
) -> Iterator[Need]:
    """Yield what may replace a norm or activation and the cast of its result for a linear."""
    if not isinstance(shapes[at], NormShape | ActivationShape):
        return
    forward, backward = _link_needs(shapes, at, plan, dtype)
    sides = ((forward, at + 1, plan.input, -1), (backward, at - 1, plan.grad_output, 1))
    for (step, producer), neighbour, tensor, direction in sides:
        linear = shapes[neighbour] if neighbour in range(len(shapes)) else None
        if isinstance(linear, LinearShape) and any(tensor):
            assert isinstance(
                producer, NormDesc | NormBackwardDesc | ActivationDesc | ActivationBackwardDesc
            )
            handed = handover(shapes, neighbour, plan, dtype, step=direction)
            cast = QuantizeDesc(handed, *tensor)
            has_sums = direction > 0 and linear.bias_dtype is not None
            yield Need(f"{step} with cast", FusedDesc(producer, cast, has_sums))


def _update(plan: LinearPlan) -> list[Need]:
    """Return the update of delayed scales; nothing where the user's own functions do it."""
    algorithm = "max" if plan.delayed is None else plan.delayed.amax_algorithm
    is_users = plan.delayed is not None and plan.delayed.scaling_algorithm is not None
    return (
        [Need("", ScaleUpdateDesc(algorithm))]
        if isinstance(algorithm, str) and not is_users
        else []
    )
