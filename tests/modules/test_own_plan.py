"""A layer that is no linear, with a plan and delayed slots of its own, as attention has them.

The layer quantizes q, k and v forward and the gradient of its output backward, each with a delayed
scale, and computes with what it quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import fp8core
from fp8core import RecipeError, autocast, recipe
from fp8core.backend_api import DequantizeDesc, OperandSpec
from fp8core.context.autocast import active
from fp8core.context.scopes import touch
from fp8core.dispatch import table
from fp8core.modules.state.delayed import DelayedModule
from fp8core.plan import DelayedPlan, LayerRole, Plan, SlotNames, TensorPlan
from fp8core.recipe.base import plan_of
from fp8core.tensors.delayed_state import LayerStates
from fp8core.tensors.quantizer import TensorQuantizer
from fp8core.tensors.quantizer_binding import Binding, bind_quantizer
from fp8core.tensors.scaling import update_after_backward

NONE = TensorPlan(None, None)
E4M3 = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
E5M2 = OperandSpec("e5m2", (0, 0), 57344.0, delayed=True)


@dataclass(frozen=True, slots=True)
class AttentionPlan(Plan):
    """Three tensors forward, and a gradient: none of the cells of a linear layer's table."""

    slots: ClassVar[SlotNames] = SlotNames(forward=("q", "k", "v"), backward=("grad_output",))

    qkv: TensorPlan = NONE
    grad_output: TensorPlan = NONE
    delayed: DelayedPlan | None = None
    nonfinite: str = "saturate"

    @property
    def tensors(self) -> Mapping[str, TensorPlan]:
        return {**dict.fromkeys("qkv", self.qkv), "grad_output": self.grad_output}


@dataclass(frozen=True, slots=True)
class DelayedEverywhere(recipe.Recipe):
    """Delayed scaling of linears as the named recipe has it, and of attention."""

    def plan(self, role: LayerRole, dtype: torch.dtype) -> Plan:
        if role.kind != "attention":
            return recipe.DelayedScaling(amax_history_len=4).plan(role, dtype)
        delayed = DelayedPlan(4, 0, "max", None, True)
        return AttentionPlan(TensorPlan(E4M3, E4M3), TensorPlan(E5M2, E5M2), delayed)


class Attention(DelayedModule):
    """``softmax(q k^T) v`` of the quantized tensors; straight through in backward."""

    plan_type = AttentionPlan
    name: str | None = None

    def count_slot_sets(self) -> int:
        return 1

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        asked, role = active(), LayerRole("attention", self.name)
        plan = plan_of(AttentionPlan, asked.quantize, role, q.dtype)
        if plan.delayed is None:
            return torch.softmax(q @ k.t(), -1) @ v
        records = torch.is_grad_enabled()
        states = self.delayed_states(asked.quantize, plan, records=records, device=q.device)
        if records:
            touch(states.forward, states.backward, asked.group)
        bound = {
            name: bind_quantizer(
                tensor, q.dtype, Binding(q.device, q.dtype), slot=states.slot(name)
            )
            for name, tensor in plan.tensors.items()
        }
        q, k, v = (_Quantize.apply(x, bound[n]) for n, x in zip("qkv", (q, k, v), strict=True))
        y = torch.softmax(q @ k.t(), -1) @ v
        return _QuantizeGrad.apply(y, bound["grad_output"], states)


def quantized(quantizer: TensorQuantizer, x: torch.Tensor) -> torch.Tensor:
    spec = quantizer.plan.rowwise
    dequantize = table.resolve(DequantizeDesc(spec, x.dtype), x.device).run
    return dequantize(quantizer(x, columnwise=False).rowwise)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, quantizer: TensorQuantizer) -> torch.Tensor:
        return quantized(quantizer, x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _QuantizeGrad(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, quantizer: TensorQuantizer, states: LayerStates
    ) -> torch.Tensor:
        ctx.quantizer, ctx.states = quantizer, states
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        update_after_backward(ctx.states.backward)
        return quantized(ctx.quantizer, grad), None, None


def qkv(seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [
        (torch.randn(8, 16) * (index + 1)).requires_grad_() for index in range(3)
    ]  # three magnitudes, so that no slot is taken for another


def amaxes(*xs: torch.Tensor) -> list[float]:
    return [x.detach().abs().max().item() for x in xs]


def step(layer: Attention, seed: int = 0) -> torch.Tensor:
    xs = qkv(seed)
    with autocast(recipe=DelayedEverywhere()):
        y = layer(*xs)
    y.backward(torch.full_like(y, 3.0))
    return y


def test_state_has_the_slots_of_the_plan() -> None:
    layer = Attention()
    step(layer)
    shapes = {name: list(own.shape) for name, own in layer.named_buffers()}
    del shapes["delayed_meta"]
    assert shapes == {
        "scale_fwd": [3],
        "amax_history_fwd": [4, 3],
        "scale_bwd": [1],
        "amax_history_bwd": [4, 1],
    }


def test_forward_records_each_tensor_in_its_slot() -> None:
    layer, xs = Attention(), qkv()
    with autocast(recipe=DelayedEverywhere()):
        layer(*xs)
        assert layer.amax_history_fwd[0].tolist() == amaxes(*xs)
        assert layer.scale_fwd.tolist() == [1.0, 1.0, 1.0]


def test_scales_follow_when_autocast_ends() -> None:
    layer, xs = Attention(), qkv()
    with autocast(recipe=DelayedEverywhere()):
        layer(*xs)
    expected = torch.tensor(448.0) / torch.tensor(amaxes(*xs))
    assert torch.equal(layer.scale_fwd, expected)
    assert not layer.amax_history_fwd[0].any()


def test_backward_scale_follows_the_gradient_when_backward_ends() -> None:
    layer = Attention()
    step(layer)
    assert layer.scale_bwd.tolist() == [pytest.approx(57344.0 / 3.0)]


def test_second_step_quantizes_by_the_scales_of_the_first() -> None:
    layer = Attention()
    step(layer)
    scales, xs = layer.scale_fwd.clone(), qkv(1)
    with autocast(recipe=DelayedEverywhere()), torch.no_grad():
        y = layer(*xs)
    q, k, v = (
        (x * s).clamp(-448, 448).to(torch.float8_e4m3fn).float() * (1 / s)
        for x, s in zip(xs, scales, strict=True)
    )
    assert torch.equal(y, torch.softmax(q @ k.t(), -1) @ v)


def test_failed_step_records_nothing() -> None:
    layer = Attention()
    step(layer)
    before = {name: own.clone() for name, own in layer.named_buffers()}
    wrong = torch.randn(8, 15)
    with pytest.raises(RuntimeError), autocast(recipe=DelayedEverywhere()):
        layer(*qkv(1)[:2], wrong.t())
    assert all(torch.equal(own, before[name]) for name, own in layer.named_buffers())


def test_state_is_saved_and_loaded() -> None:
    layer, loaded = Attention(), Attention()
    step(layer)
    loaded.load_state_dict(layer.state_dict())
    assert {**loaded.state_dict()}.keys() == {**layer.state_dict()}.keys()
    assert torch.equal(step(loaded, 1), step(layer, 1))
    assert all(torch.equal(own, loaded.state_dict()[n]) for n, own in layer.state_dict().items())


def test_state_of_a_linear_is_refused() -> None:
    linear = fp8core.Linear(16, 16)
    with autocast(recipe=DelayedEverywhere()):
        linear(torch.randn(16, 16))
    state = {
        name: own for name, own in linear.state_dict().items() if name not in ("weight", "bias")
    }
    with pytest.raises(RuntimeError, match=r"scale_bwd is torch.float32 \[2\].*expected.*\[1\]"):
        Attention().load_state_dict(state)


def test_meta_of_another_plan_is_refused() -> None:
    layer, other = Attention(), Attention()
    step(layer)
    step(other)
    state = layer.state_dict()
    text = bytes(state["delayed_meta"].tolist()).replace(b"e5m2", b"e4m3")
    state["delayed_meta"] = torch.tensor(list(text), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="the checkpoint's delayed state is for"):
        other.load_state_dict(state)


def test_reset_forgets_the_scales() -> None:
    layer = Attention()
    step(layer)
    layer.reset_delayed_state()
    assert list(layer.named_buffers()) == []


def test_recipe_without_a_plan_for_the_layer_says_so() -> None:
    with (
        pytest.raises(
            RecipeError, match=r"'attention'\)\) returned LinearPlan; expected AttentionPlan"
        ),
        autocast(recipe=recipe.DelayedScaling()),
    ):
        Attention()(*qkv())


def test_layer_without_a_recipe_computes_in_high_precision() -> None:
    for chosen in [recipe.PerLayer({LayerRole("attention"): None}, default="delayed"), None]:
        layer, (q, k, v) = Attention(), qkv()
        with autocast(enabled=chosen is not None, recipe=chosen):
            y = layer(q, k, v)
        assert torch.equal(y, torch.softmax(q @ k.t(), -1) @ v), chosen
        assert list(layer.named_buffers()) == [], chosen


def test_per_layer_chooses_the_plan_by_kind() -> None:
    layer = Attention()
    chosen = recipe.PerLayer({LayerRole("attention"): DelayedEverywhere()}, default="current")
    with autocast(recipe=chosen):
        layer(*qkv())
    assert layer.scale_fwd.shape == (3,)


def test_update_is_together_with_that_of_a_linear() -> None:
    layer, linear, xs = Attention(), fp8core.Linear(16, 16), qkv()
    with autocast(recipe=DelayedEverywhere()):
        layer(*xs)
        linear(xs[0])
    assert torch.equal(linear.scale_fwd[0], layer.scale_fwd[0])
    assert linear.scale_fwd.shape == (3,)
