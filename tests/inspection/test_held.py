"""What ``explain`` says that a layer holds is what autograd saves when the layer runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import autocast, ops, recipe
from fp8core.backend_api import (
    GROUP_STEP,
    OPTIONAL_OPS,
    AddNormDesc,
    DequantizeDesc,
    FusedDesc,
    OpDesc,
    QuantizeDesc,
    variant_of,
)
from fp8core.chain.shape import BindContext, bind_chain
from fp8core.collectives import Communicator
from fp8core.dispatch.table import DISPATCH, Purpose, Resolved
from fp8core.inspection.descriptors import layer_needs, record
from fp8core.inspection.explain import explain
from fp8core.inspection.on_meta import SavedBytes
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.recipe import Recipe
from fp8core.recipe.plan import LayerRole
from fp8core.tensors.quantizer_binding import Binding
from tests.device import DEVICE
from tests.dispatch import toys
from tests.in_process import communicators, run_in_threads
from tests.pairs import pairs, turns

BF16 = torch.bfloat16
K, N, GROUPS, ROWS = 128, 384, 2, 1024
RECIPES = ("delayed", "current", "block", "rowwise", "mxfp8", "nvfp4")
LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "Linear": lambda: fp8core.Linear(K, N, params_dtype=BF16),
    "LayerNormLinear": lambda: fp8core.LayerNormLinear(K, N, params_dtype=BF16),
    "LayerNormLinear, two outputs": lambda: fp8core.LayerNormLinear(
        K, N, params_dtype=BF16, return_layernorm_output=True
    ),
    "LayerNormMLP": lambda: fp8core.LayerNormMLP(K, N, params_dtype=BF16),
    "LayerNormMLP, gated": lambda: fp8core.LayerNormMLP(
        K, N, bias=False, normalization="RMSNorm", activation="swiglu", params_dtype=BF16
    ),
    "GroupedLinear": lambda: fp8core.GroupedLinear(GROUPS, K, N, params_dtype=BF16),
    "Sequential": lambda: ops.Sequential(
        ops.Linear(K, K, dtype=BF16), ops.AddExtraInput(), fp8core.RMSNorm(K, dtype=BF16)
    ),
    "Sequential, gated": lambda: ops.Sequential(
        ops.SwiGLU(), ops.Linear(K // 2, K, dtype=BF16), ops.GELU(), ops.Linear(K, N, dtype=BF16)
    ),
}


def saved_bytes(layer: torch.nn.Module, name: str, chosen: recipe.Recipe, rows: int = ROWS) -> int:
    """Return the bytes of the storages that autograd saves, but for parameters."""
    not_counted = {param.untyped_storage().data_ptr() for param in layer.parameters()}
    counted: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_counted:
            counted[storage.data_ptr()] = storage
        return tensor

    x = torch.randn(rows, K, dtype=BF16, requires_grad=True)
    more: tuple[object, ...] = ()
    if name == "GroupedLinear":
        more = ([ROWS // GROUPS] * GROUPS,)
    elif name == "Sequential":
        more = (torch.randn(ROWS, K, dtype=BF16, requires_grad=True),)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, fp8core.autocast(recipe=chosen):
        layer(x, *more)
    return sum(storage.nbytes() for storage in counted.values())


@pytest.mark.parametrize(
    ("name", "recipe_name", "requantizes"), pairs(LAYERS, RECIPES, [False, True])
)
def test_explain_says_what_autograd_saves(name: str, recipe_name: str, requantizes: bool) -> None:
    layer = LAYERS[name]()
    fastest = dataclasses.replace(recipe.by_name(recipe_name), holding="fastest")
    chosen = dataclasses.replace(fastest, requantize_weights=requantizes)
    saved = saved_bytes(layer, name, chosen)
    ((_, held), *inner) = fp8core.explain(layer, chosen).held
    assert inner == [] or name.startswith("Sequential")
    # A graph's results have room for the most blocks that groups of any sizes have.
    room = 0.01 if name == "GroupedLinear" else 0.0
    if requantizes:
        assert held.fixed < K * K // 2  # scales of inputs; the least weight's codes take that
        if recipe_name == "delayed":
            # The delayed scale of each weight; explain knows of no delayed state.
            saved -= 4 * sum(one.dim() == 2 for one in layer.parameters())
    ends = 0 if DEVICE.type == "cpu" else 64  # CUDA's rows of scales end at a multiple of 16 bytes
    if ends and name == "GroupedLinear":  # and its codes have room for the zeros of any sizes
        ends += GROUP_STEP * GROUPS * K
    assert saved - ends <= held.a_row * ROWS + held.fixed <= saved * (1 + room)


@pytest.mark.parametrize(
    ("chosen", "padded"),
    [
        (recipe.MXFP8BlockScaling(), 32),
        (recipe.NVFP4BlockScaling(), 16),
        (recipe.Float8CurrentScaling(), 5),
    ],
)
def test_rows_of_padding_count_as_rows(chosen: recipe.Recipe, padded: int) -> None:
    layer = fp8core.Linear(K, N, params_dtype=BF16)
    saved = saved_bytes(layer, "Linear", chosen, 5)
    ((_, held),) = fp8core.explain(layer, chosen).held
    # CUDA's rows of columnwise codes begin at multiples of 16 bytes, whatever their length.
    most = padded if DEVICE.type == "cpu" else max(padded, 16)
    assert held.a_row * padded <= saved - held.fixed <= held.a_row * most


@pytest.mark.parametrize("chosen", [recipe.PerLayer({}), recipe.Float8CurrentScaling()])
def test_operations_of_any_width_are_not_counted_alone(chosen: recipe.Recipe) -> None:
    """How much they hold depends on the width that the operations around them give them."""
    chain = ops.Sequential(ops.Linear(K, N, dtype=BF16), ops.SwiGLU(), ops.GELU(), ops.Dropout(0.1))
    assert [name for name, _ in fp8core.explain(chain, chosen).held] == [
        "Sequential(128, 384)",
        "0",
    ]
    assert fp8core.explain(ops.SwiGLU(), chosen).held == ()


@pytest.mark.parametrize("requantizes", [False, True])
@pytest.mark.parametrize("override", [None, "high_precision"])
def test_views_of_a_parameter_are_held_as_the_layer_holds_them(
    requantizes: bool, override: str | None
) -> None:
    """As FSDP computes weights from one flat parameter."""
    layer = fp8core.Linear(K, N, bias=False, params_dtype=BF16)
    flat = torch.nn.Parameter(layer.weight.detach().reshape(-1))
    del layer._parameters["weight"]
    layer.register_parameter("flat", flat)
    layer.weight = flat.view(N, K)
    chosen = recipe.Float8CurrentScaling(requantize_weights=requantizes, backward_override=override)
    ((_, held),) = fp8core.explain(layer, chosen).held
    assert held.a_row * ROWS + held.fixed == saved_bytes(layer, "Linear", chosen)


@pytest.mark.parametrize(
    "chosen",
    [recipe.PerLayer({}), recipe.Float8CurrentScaling(backward_override="high_precision")],
)
def test_a_weight_that_forward_computes_is_counted_in_high_precision(
    chosen: recipe.Recipe,
) -> None:
    layer = fp8core.Linear(K, N, params_dtype=BF16, parameters_split=("query", "key"))
    ((_, held),) = fp8core.explain(layer, chosen).held
    assert held.a_row * ROWS + held.fixed == saved_bytes(layer, "Linear", chosen)
    assert held.fixed == K * N * BF16.itemsize


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_it_is_the_same_where_nothing_is_recorded(guard: Callable[[], Any]) -> None:
    layer = fp8core.Linear(K, N, params_dtype=BF16)
    expected = fp8core.explain(layer, recipe.Float8CurrentScaling()).held
    with guard():
        assert fp8core.explain(layer, recipe.Float8CurrentScaling()).held == expected


def test_more_groups_than_rows_are_counted() -> None:
    layer = fp8core.GroupedLinear(8200, 1, 1, bias=False, params_dtype=BF16)
    ((_, held),) = fp8core.explain(layer, recipe.PerLayer({})).held
    assert held == (BF16.itemsize, 0)


def test_a_frozen_weight_needs_no_input_in_backward() -> None:
    layer = fp8core.Linear(K, N, params_dtype=BF16)
    layer.weight.requires_grad_(False)
    ((_, held),) = fp8core.explain(layer, recipe.Float8CurrentScaling(holding="fastest")).held
    assert (held.a_row, held.fixed) == (0, K * N + 4)


def test_a_weight_that_forward_computes_is_held_as_codes_in_any_case() -> None:
    layer = fp8core.Linear(K, N, params_dtype=BF16, parameters_split=("query", "key"))
    for requantizes in (False, True):
        chosen = recipe.Float8CurrentScaling(requantize_weights=requantizes)
        ((_, held),) = fp8core.explain(layer, chosen).held
        assert held.fixed == K * N + 4 + 4  # with the scale of the input


@pytest.mark.parametrize("requantizes", [False, True])
def test_a_weight_stored_quantized_has_no_copy(requantizes: bool) -> None:
    chosen = recipe.Float8CurrentScaling(requantize_weights=requantizes)
    with fp8core.quantized_model_init(recipe=chosen):
        layer = fp8core.Linear(K, N, params_dtype=BF16)
    ((_, held),) = fp8core.explain(layer, chosen).held
    assert (held.a_row, held.fixed) == (K, 4)


def test_explain_prints_it() -> None:
    layer = fp8core.Linear(K, N, params_dtype=BF16)
    text = str(fp8core.explain(layer, recipe.Float8CurrentScaling()))
    assert "Linear(128, 384): holds 128 bytes a row from forward to backward, and 0.0 MiB" in text


def test_a_layer_that_cannot_run_has_no_such_line() -> None:
    layer = fp8core.Linear(K, N, params_dtype=BF16)
    with toys.isolation():
        explanation = fp8core.explain(layer, recipe.MXFP8BlockScaling(), device="cuda:0")
    assert explanation.refused
    assert explanation.held == ()


def test_units_are_bytes_and_mebibytes() -> None:
    text = str(SavedBytes(1536.0, 3 * 2**20))
    assert text == (
        "holds 1,536 bytes a row from forward to backward, and 3.0 MiB of weights' copies"
    )


RECORDED = {
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

    def resolve_optional(self, desc: OpDesc, *where: Any, **named: Any) -> None:
        if variant_of(desc) is None:
            self.asked.add(desc)


def plan_of(layer: LowPrecisionModule, chosen: Recipe) -> Any:
    return chosen.plan(LayerRole(layer.kind), torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "kind"), [*turns(recipe.names(), RECORDED), *turns(["nvfp4"], list(RECORDED)[:4])]
)
def test_a_record_holds_what_dispatch_is_asked_for(name: str, kind: str) -> None:
    layer, spy = RECORDED[kind](), Spy()
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
    layer = RECORDED["layernorm_mlp"]()
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


SENT_ROWS = 256
SENT_BY = {name: recipe.by_name(name) for name in ("current", "rowwise", "block", "mxfp8", "nvfp4")}
TWO = communicators(2)  # named by the layers, and found as long as they live


def new_mlp(communicator: Communicator) -> Any:
    return fp8core.LayerNormMLP(
        256,
        512,
        bias=False,
        tp_group=communicator,
        sequence_parallel=True,
        set_parallel_mode=True,
        params_dtype=torch.bfloat16,
        device=DEVICE,
    )


def counted(communicator: Communicator, name: str) -> dict[tuple[str, str], tuple[int, int]]:
    mlp = new_mlp(communicator)
    x = torch.ones(SENT_ROWS, 256, dtype=torch.bfloat16, requires_grad=True)
    with communicator.counting() as traffic:
        with autocast(recipe=SENT_BY[name]):
            y = mlp(x)
        y.sum().backward()
    return {key: tuple(count) for key, count in traffic}


@pytest.mark.parametrize("name", SENT_BY)
def test_explain_says_what_a_step_sends(name: str) -> None:
    sent = [one for _, one in explain(new_mlp(TWO[0]), SENT_BY[name]).sent]
    said = {
        (one.collective, one.tensor): (one.calls, round(one.a_row * SENT_ROWS) + one.fixed)
        for one in sent
    }
    assert run_in_threads(lambda one: counted(one, name), 2) == [said, said]


def test_a_line_names_group_format_and_bytes() -> None:
    mlp = new_mlp(TWO[0])
    lines = str(explain(mlp, recipe.Float8BlockScaling())).splitlines()
    line = next(one for one in lines if "gather of input over" in one)
    assert "over 2 ranks of group 'threads" in line
    assert line.endswith(": e4m3 block=(1,128) power_of_two, sends 256.00 bytes a row, plain")


def test_a_layer_of_one_rank_sends_nothing() -> None:
    layer = fp8core.Linear(32, 32, device=DEVICE)
    assert explain(layer, recipe.Float8CurrentScaling()).sent == ()
