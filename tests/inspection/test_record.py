"""What a chain is said to ask for is what binding it resolves."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8core
from fp8core import ops, recipe
from fp8core.backend_api import (
    OPTIONAL_OPS,
    AddNormDesc,
    DequantizeDesc,
    FusedDesc,
    OpDesc,
    QuantizeDesc,
)
from fp8core.chain.bind import bind_chain
from fp8core.chain.shape import BindContext
from fp8core.dispatch.table import DISPATCH, Purpose, Resolved
from fp8core.inspection.descriptors import layer_needs, record
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.recipe import Recipe
from fp8core.recipe.plan import LayerRole
from fp8core.tensors.quantizer_binding import Binding
from tests.device import DEVICE
from tests.pairs import turns

LAYERS = {
    "linear": lambda: fp8core.Linear(32, 32),
    "grouped": lambda: fp8core.GroupedLinear(2, 32, 32),
    "layernorm_linear": lambda: fp8core.LayerNormLinear(32, 32),
    "layernorm_mlp": lambda: fp8core.LayerNormMLP(32, 32, activation="swiglu"),
    "sequential": lambda: ops.Sequential(
        ops.AddExtraInput(), ops.RMSNorm(32), ops.Linear(32, 32), ops.GELU(), ops.Quantize()
    ),
}


class Spy:
    """Dispatch, which offers no optional operation, and what it was asked for."""

    def __init__(self) -> None:
        self.asked: set[OpDesc] = set()

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        self.asked.add(desc)
        return DISPATCH.resolve(desc, device, purpose)

    def resolve_optional(self, desc: OpDesc, *where: Any) -> None:
        self.asked.add(desc)


def plan_of(layer: LowPrecisionModule, chosen: Recipe) -> Any:
    return chosen.plan(LayerRole(layer.kind), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "kind"), [*turns(recipe.names(), LAYERS), *turns(["nvfp4"], list(LAYERS)[:4])]
)
def test_a_record_holds_what_dispatch_is_asked_for(name: str, kind: str) -> None:
    layer, spy = LAYERS[kind](), Spy()
    plan = plan_of(layer, recipe.by_name(name))
    binding = Binding(DEVICE, torch.bfloat16, resolver=spy)
    bind_chain(layer.link_shapes(), BindContext(plan, binding, "a layer"))
    recorded = {desc for _, desc in record(layer.link_shapes(), plan, torch.bfloat16)}
    casts = [desc for desc in spy.asked if isinstance(desc, QuantizeDesc)]
    halves = {
        half for desc in casts if all((desc.rowwise, desc.columnwise)) for half in desc.halves()
    }
    assert recorded == spy.asked - halves


def test_a_record_is_in_the_order_of_the_chain() -> None:
    layer = LAYERS["layernorm_mlp"]()
    requests = record(
        layer.link_shapes(), plan_of(layer, recipe.MXFP8BlockScaling()), torch.bfloat16
    )
    positions = [purpose.position for purpose, _ in requests]
    assert positions == sorted(positions)
    assert set(positions) == {0, 1, 2, 3}


def descs(layer: LowPrecisionModule, chosen: Recipe) -> list[OpDesc]:
    return [need.desc for need in layer_needs(layer, chosen, torch.bfloat16)]


def test_a_layer_with_backward_in_high_precision_is_said_to_cast_as_it_does() -> None:
    chosen = recipe.Float8CurrentScaling(backward_override="high_precision")
    asked = descs(fp8core.LayerNormLinear(32, 32), chosen)
    casts = [desc for desc in asked if isinstance(desc, QuantizeDesc)]
    assert casts  # the backend is asked for both orientations, and one of them is used
    assert all(cast.rowwise == cast.columnwise is not None for cast in casts)
    assert not any(desc.op in OPTIONAL_OPS for desc in asked)


def test_a_cast_that_counts_for_itself_is_in_no_fusion() -> None:
    layer = fp8core.LayerNormLinear(32, 32)
    assert any(isinstance(d, FusedDesc) for d in descs(layer, recipe.MXFP8BlockScaling()))
    propagating = recipe.MXFP8BlockScaling(nonfinite="propagate")
    assert not any(isinstance(d, FusedDesc) for d in descs(layer, propagating))


def test_an_operation_that_rounds_asks_for_the_cast_and_for_what_decodes_it() -> None:
    asked = descs(ops.Quantize(), recipe.MXFP8BlockScaling())
    assert {type(desc) for desc in asked} == {QuantizeDesc, DequantizeDesc}


def test_a_norm_behind_a_residual_add_asks_for_both_in_one() -> None:
    layer = ops.Sequential(ops.AddExtraInput(), ops.RMSNorm(32))
    assert any(isinstance(desc, AddNormDesc) for desc in descs(layer, recipe.MXFP8BlockScaling()))
