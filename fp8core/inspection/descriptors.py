"""The descriptors that layers and recipes need, by step, recorded while chains are bound.

``explain``, the matrix and self-test of ``fp8core doctor``, and the support matrix of the
documentation all take them from here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from fp8core.backend_api import (
    ACTIVATIONS,
    Alignment,
    AmaxDesc,
    ColumnSumsDesc,
    DequantizeDesc,
    FusedDesc,
    OpDesc,
    QuantizeDesc,
    Ranks,
    has_amax,
    variant_of,
)
from fp8core.backend_api.record import RECORDS
from fp8core.chain.activation import activation_shape
from fp8core.chain.attention.shape import AttentionShape
from fp8core.chain.linear.shape import LinearShape
from fp8core.chain.norm import NormShape
from fp8core.chain.residual import AddShape
from fp8core.chain.shape import BindContext, LinkShape, bind_chain
from fp8core.dispatch.select import Choice
from fp8core.dispatch.table import Purpose, Resolved, Resolver
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.recipe import Recipe
from fp8core.recipe.base import plan_of
from fp8core.recipe.plan import LayerRole, LinearPlan, Plan
from fp8core.tensors.delayed_state import update_desc
from fp8core.tensors.quantizer_binding import Binding


class Labelled(NamedTuple):
    """A descriptor and the words for its variant; those of one operation differ."""

    variant: str
    desc: OpDesc


def listed_descs(dtype: torch.dtype) -> Iterator[Labelled]:
    """Yield the samples of operations that are no part of a chain, for tensors of ``dtype``."""
    for operation in RECORDS.values():
        for name, desc in operation.samples(dtype).items():
            yield Labelled(name, desc)


class Request(NamedTuple):
    """A requested descriptor, and its purpose."""

    purpose: Purpose
    desc: OpDesc


def record(shapes: Sequence[LinkShape], plan: Plan, dtype: torch.dtype) -> list[Request]:
    """Return the requests of the links of ``shapes`` under ``plan`` on activations of ``dtype``.

    The descriptors are in the order of the chain, each once for each of its purposes. Optional
    operations are among them, and the operations that run if no backend offers these. Variants of
    calls are not, nor the halves of a cast, as every backend that casts in both orientations also
    casts in either one.
    """
    return list(_recorded(tuple(shapes), plan, dtype))


@functools.lru_cache(maxsize=2048)  # more than all recipes have, each chain of many operations
def _recorded(shapes: tuple[LinkShape, ...], plan: Plan, dtype: torch.dtype) -> tuple[Request, ...]:
    recorder = _Recorder()
    binding = Binding(torch.device("meta"), dtype, resolver=recorder)
    bind_chain(shapes, BindContext.of(plan, binding, "a record"))
    distinct = dict.fromkeys(recorder.requests)
    halves = {
        Request(purpose, half)
        for purpose, desc in distinct
        if isinstance(desc, QuantizeDesc) and None not in (desc.rowwise, desc.columnwise)
        for half in desc.halves()
    }
    requests = (request for request in distinct if request not in halves)
    return tuple(sorted(requests, key=lambda request: request.purpose.position))


class _Recorder(Resolver):
    """A resolver that records all requests and refuses the optional ones; no result can run."""

    __slots__ = ("requests",)

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        self.requests.append(Request(purpose, desc))
        choice = Choice(desc, device, "a record", "nothing runs", None, ())
        return Resolved(_cannot_run, None, choice, Alignment())

    def resolve_optional(
        self, desc: OpDesc, device: torch.device, backend: str, purpose: Purpose
    ) -> None:
        if variant_of(desc) is None:
            self.requests.append(Request(purpose, desc))

    def transfers(self, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> None:
        """Return None: nothing is moved."""


def _cannot_run(*arguments: Any, **keywords: Any) -> NoReturn:
    raise AssertionError("an operation of a record was called")


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

    The list includes fused operations, and the pairs that run if no backend offers the fused one.
    """
    plan = plan_of(layer.plan_type, recipe, LayerRole(layer.kind, layer.name), dtype)
    shapes = layer.link_shapes()
    kinds = [type(shape) for shape in shapes]
    needs: list[Need] = []
    for (position, step), desc in record(shapes, plan, dtype):
        is_repeated = kinds.count(kinds[position]) > 1
        needs.append(Need(f"{step}[{position}]" if is_repeated else step, desc))
    if plan.delayed is not None and layer.count_slot_sets():
        needs += _update(plan)
    return needs


def recipe_needs(recipe: Recipe, dtype: torch.dtype) -> list[Need]:
    """Return every use of every operation under ``recipe`` on activations of ``dtype``.

    The operations are those of dense and grouped linears, norms, activations, causal attention,
    rotary embedding, and of what training needs around the layers. An optional operation has a need
    for each pair that it can replace.
    """
    dense = plan_of(LinearPlan, recipe, LayerRole("linear"), dtype)
    grouped = plan_of(LinearPlan, recipe, LayerRole("grouped_linear"), dtype)
    needs = [
        *_linear_needs(dense, grouped, dtype),
        *_update(dense),
        *_producer_needs(dense, dtype),
        *_sum_needs(dense, dtype),
        *_attention_needs(recipe, dtype),
        *(Need(variant, desc) for variant, desc in listed_descs(dtype)),
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
        if type(desc) is QuantizeDesc:
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


def _attention_needs(recipe: Recipe, dtype: torch.dtype) -> Iterator[Need]:
    """Yield the operations of causal attention, of as many heads of queries as of keys, and of
    fewer of keys."""
    plan = plan_of(AttentionShape.plan_type, recipe, LayerRole("attention"), dtype)
    for groups, words in ((_HEADS, ""), (_HEADS // 4, " of groups")):
        shape = AttentionShape("sbhd", _HEADS, groups, *(_HEAD_DIM,) * 2, _HEAD_DIM**-0.5, (-1, 0))
        for (_, step), desc in record([shape], plan, dtype):
            yield Need(step + words, desc)


def _update(plan: Plan) -> list[Need]:
    """Return the update of delayed scales; empty if the user's functions update them."""
    desc = update_desc(plan.delayed)
    return [] if desc is None else [Need("", desc)]
