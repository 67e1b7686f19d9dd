"""The descriptors that layers and recipes need, by step, recorded while chains are bound.

``explain``, the matrix and self-test of ``fp8core doctor``, and the support matrix of the
documentation all take them from here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import torch

from fp8core.backend_api import (
    ACTIVATIONS,
    ATTENTION_LAYOUTS,
    AmaxDesc,
    ColumnSumsDesc,
    DequantizeDesc,
    FusedDesc,
    OpDesc,
    QuantizeDesc,
    has_amax,
)
from fp8core.chain.activation import activation_shape
from fp8core.chain.attention.shape import AttentionShape
from fp8core.chain.linear.shape import LinearShape
from fp8core.chain.norm import NormShape
from fp8core.chain.pointwise import AddShape
from fp8core.chain.rotary import RotaryShape
from fp8core.chain.shape import LinkShape
from fp8core.inspection.record import record
from fp8core.inspection.training import training_descs
from fp8core.modules.base import LowPrecisionModule
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import HIGH_PRECISION, AttentionPlan, LayerRole, LinearPlan, Plan
from fp8core.tensors.scaling import update_desc

__all__ = ["NORMS", "Need", "layer_needs", "recipe_needs"]

NORMS = ("layernorm", "rmsnorm")
_EPS = 1e-5
_GROUPS = 2
_HEADS = 32
_HEAD_DIM = 128


class Need(NamedTuple):
    """An operation that a backend has to run, and its step: ``fprop``, ``weight``, ``gelu``."""

    step: str
    desc: OpDesc


def layer_needs(layer: LowPrecisionModule, recipe: Recipe, dtype: torch.dtype) -> list[Need]:
    """Return the operations of ``layer`` under ``recipe`` on activations of ``dtype``, in order.

    They include fused operations, and the pairs that run if no backend offers the fused one.
    """
    plan = plan_of(layer.plan_type, recipe, LayerRole(layer.kind, layer.name), dtype)
    shapes = layer.link_shapes()
    kinds = [type(shape) for shape in shapes]
    needs: list[Need] = []
    for (position, step), desc in record(shapes, plan, dtype):
        is_one_of_many = kinds.count(kinds[position]) > 1
        needs.append(Need(f"{step}[{position}]" if is_one_of_many else step, desc))
    if plan.delayed is not None and layer.count_slot_sets():
        needs += _update(plan)
    return needs


def recipe_needs(recipe: Recipe, dtype: torch.dtype) -> list[Need]:
    """Return every use of every operation under ``recipe`` on activations of ``dtype``.

    They are those of dense and grouped linears, norms, activations, causal attention, rotary
    embedding, and of what training needs around the layers. An optional operation has a need for
    each pair that it can replace.
    """
    dense = plan_of(LinearPlan, recipe, LayerRole("linear"), dtype)
    grouped = plan_of(LinearPlan, recipe, LayerRole("grouped_linear"), dtype)
    needs = [
        *_linear_needs(dense, grouped, dtype),
        *_update(dense),
        *_producer_needs(dense, dtype),
        *_sum_needs(dense, dtype),
        *_rotary_needs(dtype),
        *_attention_needs(recipe, dtype),
        *(Need(variant, desc) for variant, desc in training_descs(dtype)),
    ]
    return list(dict.fromkeys(needs))


def _linear(dtype: torch.dtype, groups: int = 0) -> LinearShape:
    return LinearShape(1, 1, dtype, None, groups)


def _linear_needs(dense: LinearPlan, grouped: LinearPlan, dtype: torch.dtype) -> Iterator[Need]:
    """Yield the operations of a dense linear, and those of a grouped one that differ.

    For each cast of the dense one, also its amax, which calibration records and groups of ranks
    reduce, and its dequantization.
    """
    requests = [(purpose.step, desc) for purpose, desc in record([_linear(dtype)], dense, dtype)]
    for step, desc in requests:
        yield Need(step, desc)
    for purpose, desc in record([_linear(dtype, _GROUPS)], grouped, dtype):
        if not isinstance(desc, QuantizeDesc):
            yield Need(purpose.step, desc)
        elif desc.grouped:
            yield Need(f"{purpose.step} of groups", desc)
    for step, desc in requests:
        if isinstance(desc, QuantizeDesc):
            if has_amax(desc):
                yield Need(step, AmaxDesc(desc))
            for spec in filter(None, (desc.rowwise, desc.columnwise)):
                yield Need(step, DequantizeDesc(spec, dtype))


def _producer_needs(plan: LinearPlan, dtype: torch.dtype) -> Iterator[Need]:
    """Yield the operations of norms and activations, alone and next to linears, and of those
    linears."""
    producers: dict[str, LinkShape] = {
        kind: NormShape(kind, 1, _EPS, False, dtype) for kind in NORMS
    }
    producers.update({name: activation_shape(name) for name in ACTIVATIONS})
    add, linear = AddShape(), _linear(dtype)
    for name, producer in producers.items():
        for shapes in ([add, producer], [linear, producer, linear], [add, producer, linear]):
            for (position, step), desc in record(shapes, plan, dtype):
                is_named = position == 1 and not isinstance(desc, FusedDesc)
                yield Need(name if is_named else step, desc)


def _sum_needs(plan: LinearPlan, dtype: torch.dtype) -> Iterator[Need]:
    """Yield the gradients of biases: of a linear alone, and of one behind which an activation hands
    back its gradient as the cast wants it."""
    biased = dataclasses.replace(_linear(dtype), bias_dtype=dtype)
    chains: list[list[LinkShape]] = [[biased]]
    chains += ([biased, activation_shape(name), biased] for name in ACTIVATIONS)
    for shapes in chains:
        for (_, step), desc in record(shapes, plan, dtype):
            if isinstance(desc, ColumnSumsDesc):
                yield Need(step, desc)


def _rotary_needs(dtype: torch.dtype) -> Iterator[Need]:
    """Yield the rotation of queries and keys in each layout, and its gradient."""
    for layout in ATTENTION_LAYOUTS:
        for (_, step), desc in record([RotaryShape(layout)], HIGH_PRECISION, dtype):
            yield Need(f"{layout} {step}", desc)


def _attention_needs(recipe: Recipe, dtype: torch.dtype) -> Iterator[Need]:
    """Yield the operations of causal attention, of as many heads of queries as of keys, and of
    fewer of keys."""
    plan = plan_of(AttentionPlan, recipe, LayerRole("attention"), dtype)
    for groups, words in ((_HEADS, ""), (_HEADS // 4, " of groups")):
        shape = AttentionShape("sbhd", _HEADS, groups, *(_HEAD_DIM,) * 2, _HEAD_DIM**-0.5, (-1, 0))
        for (_, step), desc in record([shape], plan, dtype):
            yield Need(step + words, desc)


def _update(plan: Plan) -> list[Need]:
    """Return the update of delayed scales; empty if the user's functions update them."""
    desc = update_desc(plan.delayed)
    return [] if desc is None else [Need("", desc)]
