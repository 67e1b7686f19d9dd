"""The linear op against an oracle: quantize, dequantize, multiply in float32, round once.

The oracle knows the plan's 3 x 2 table and nothing of the op: no chain, no padding, no groups.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from fp8core import GroupedLinear, Linear, autocast, recipe
from fp8core.backend_api import DequantizeDesc, GemmDesc, Operand, OperandSpec, QuantizeDesc
from fp8core.recipe.plan import GemmPlan, LayerRole, LinearPlan
from fp8core_backends.reference.backend import ReferenceBackend
from tests.device import DEVICE
from tests.pairs import turns

REFERENCE = ReferenceBackend()

NEAREST = recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)
CURRENT = {
    "current": recipe.Float8CurrentScaling(),
    "current e4m3 pow2": recipe.Float8CurrentScaling(
        use_power_2_scales=True, fp8_format=recipe.Format.E4M3
    ),
    "rowwise": recipe.Float8RowwiseScaling(),
    "rowwise hybrid": recipe.Float8RowwiseScaling(fp8_format=recipe.Format.HYBRID),
    "block": recipe.Float8BlockScaling(),
    "block f32 2d": recipe.Float8BlockScaling(
        use_f32_scales=True, x_block_scaling_dim=2, w_block_scaling_dim=1
    ),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "mxfp8 2d": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4 nearest": NEAREST,
    "nvfp4 plain": recipe.NVFP4BlockScaling(
        disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True
    ),
    "forward only": recipe.Float8CurrentScaling(backward_override="high_precision"),
}
DELAYED = {
    "delayed": recipe.DelayedScaling(amax_history_len=3),
    "delayed e4m3 margin": recipe.DelayedScaling(
        margin=1, fp8_format=recipe.Format.E4M3, amax_history_len=2, amax_compute_algo="most_recent"
    ),
}
SHAPES = [(16, 64, 32), (5, 33, 7), (1, 1, 1), (70, 130, 258)]


class Scales(NamedTuple):
    """Delayed scales ``[1]`` by tensor, as they were when the step began."""

    input: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    grad_output: torch.Tensor | None = None


UNSCALED = Scales()


class Step(NamedTuple):
    """What a layer computes from one input and one grad_output."""

    y: torch.Tensor
    grad_input: torch.Tensor
    grad_weight: torch.Tensor
    grad_bias: torch.Tensor | None


class Oracle:
    """The three GEMMs of a plan on tensors ``x [m, k]``, ``w [n, k]``, ``dy [m, n]``."""

    def __init__(
        self, plan: LinearPlan, scales: Scales = UNSCALED, rng: torch.Tensor | None = None
    ) -> None:
        self.plan, self.scales, self.rng = plan, scales, rng

    def step(
        self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, dy: torch.Tensor
    ) -> Step:
        plan, scales = self.plan, self.scales
        (m, n), k = dy.shape, x.shape[1]
        px, pw, pdy = self._pad(x), self._pad(w), self._pad(dy)
        x_row = self._values(plan.fprop.a, px, scales.input)
        x_col = self._values(plan.wgrad.b, px, scales.input, columnwise=True)
        w_row = self._values(plan.fprop.b, pw, scales.weight)
        w_col = self._values(plan.dgrad.b, pw, scales.weight, columnwise=True)
        dy_row = self._values(plan.dgrad.a, pdy, scales.grad_output)
        dy_col = self._values(plan.wgrad.a, pdy, scales.grad_output, columnwise=True)
        pbias = None if bias is None else torch.nn.functional.pad(bias, (0, pw.shape[0] - n))
        return Step(
            self._gemm(plan.fprop, x_row, w_row, x.dtype, pbias)[:m, :n],
            self._gemm(plan.dgrad, dy_row, w_col, x.dtype)[:m, :k],
            self._gemm(plan.wgrad, dy_col, x_col, w.dtype)[:n, :k],
            None if bias is None else dy.float().sum(0).to(bias.dtype),
        )

    def _pad(self, x: torch.Tensor) -> torch.Tensor:
        """Zero-pad both dimensions to the block of a format that has no partial ones."""
        spec = self.plan.fprop.a
        if spec is None or spec.scale_format == "float32":
            return x
        rows, cols = (-size % spec.block[1] for size in x.shape)
        return torch.nn.functional.pad(x, (0, cols, 0, rows))

    def _values(
        self,
        spec: OperandSpec | None,
        x: torch.Tensor,
        scale: torch.Tensor | None,
        *,
        columnwise: bool = False,
    ) -> torch.Tensor:
        if spec is None:
            return x.t() if columnwise else x
        row, column = (None, spec) if columnwise else (spec, None)
        rng = self.rng if spec.stochastic else None
        made = REFERENCE.quantize(QuantizeDesc(x.dtype, row, column), x, scale=scale, rng=rng)
        operand = made.columnwise if columnwise else made.rowwise
        return REFERENCE.dequantize(DequantizeDesc(spec), operand)

    def _gemm(
        self,
        plan: GemmPlan,
        a: torch.Tensor,
        b: torch.Tensor,
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if plan.a is None and plan.b is None:
            return REFERENCE.gemm(GemmDesc(None, None, dtype), Operand(a), Operand(b), bias=bias)
        d = (a.double() @ b.double().t()).float()
        return (d if bias is None else d + bias.float()).to(dtype)


def tensors(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``x [m, k]`` and ``dy [m, n]``, rows spanning decades, with a zero and a large one."""
    m, k, n = shape
    x = torch.randn(m, k) * 10.0 ** torch.linspace(-3, 1, m)[:, None]
    x[m // 2, k // 3 :] = 0.0
    x[0, 0] = 300.0
    return x.to(dtype), (torch.randn(m, n) * 0.1).to(dtype)


def run(layer: Linear, x: torch.Tensor, dy: torch.Tensor, recipe: recipe.Recipe) -> Step:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    bias = None if layer.bias is None else layer.bias.grad
    return Step(y.detach(), x.grad, layer.weight.grad, bias)


def assert_same_bits(got: Step, want: Step) -> None:
    for name, mine, theirs in zip(Step._fields, got, want, strict=True):
        if theirs is not None:
            assert mine.dtype == theirs.dtype, name
            assert torch.equal(mine, theirs), f"{name} differs by {(mine - theirs).abs().max()}"


def make_layer(shape: tuple[int, int, int], dtype: torch.dtype) -> Linear:
    layer = Linear(shape[1], shape[2], params_dtype=dtype)
    torch.nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", CURRENT)
def test_a_step_has_the_oracle_s_bits(name: str, shape: tuple[int, int, int]) -> None:
    layer = make_layer(shape, torch.bfloat16)
    x, dy = tensors(shape, torch.bfloat16)
    plan = CURRENT[name].plan(LayerRole(), torch.bfloat16)
    want = Oracle(plan).step(x, layer.weight.detach(), layer.bias.detach(), dy)
    assert_same_bits(run(layer, x, dy, CURRENT[name]), want)


@pytest.mark.parametrize(("name", "dtype"), turns(CURRENT, [torch.float16, torch.float32]))
def test_a_step_has_the_oracle_s_bits_in_other_dtypes(name: str, dtype: torch.dtype) -> None:
    shape = (37, 48, 20)
    layer = make_layer(shape, dtype)
    x, dy = tensors(shape, dtype)
    plan = CURRENT[name].plan(LayerRole(), dtype)
    want = Oracle(plan).step(x, layer.weight.detach(), layer.bias.detach(), dy)
    assert_same_bits(run(layer, x, dy, CURRENT[name]), want)


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4 nearest"])
def test_float32_parameters_under_torch_autocast_have_the_oracle_s_bits(name: str) -> None:
    shape = (12, 48, 20)
    layer = make_layer(shape, torch.float32)
    x, dy = tensors(shape, torch.bfloat16)
    plan = CURRENT[name].plan(LayerRole(), torch.bfloat16)
    want = Oracle(plan).step(x, layer.weight.detach(), layer.bias.detach(), dy)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert_same_bits(run(layer, x, dy, CURRENT[name]), want)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DELAYED)
def test_three_delayed_steps_have_the_oracle_s_bits(name: str, shape: tuple[int, int, int]) -> None:
    layer = make_layer(shape, torch.bfloat16)
    plan = DELAYED[name].plan(LayerRole(), torch.bfloat16)
    scales = Scales(*torch.ones(3, 1))
    for size in (1.0, 5.0, 0.5):
        x, dy = tensors(shape, torch.bfloat16)
        x, dy = x * size, dy * size
        want = Oracle(plan, scales).step(x, layer.weight.detach(), layer.bias.detach(), dy)
        assert_same_bits(run(layer, x, dy, DELAYED[name]), want)
        now = (layer.scale_fwd[0:1], layer.scale_fwd[1:2], layer.scale_bwd[0:1])
        scales = Scales(*(scale.clone() for scale in now))


def test_stochastic_rounding_is_a_function_of_torch_s_seed() -> None:
    shape = (32, 48, 64)
    layer = make_layer(shape, torch.bfloat16)
    x, dy = tensors(shape, torch.bfloat16)
    stochastic = recipe.NVFP4BlockScaling()
    torch.manual_seed(7)
    rng = torch.randint(0, 2**62, (2,))
    plan = stochastic.plan(LayerRole(), torch.bfloat16)
    want = Oracle(plan, rng=rng).step(x, layer.weight.detach(), layer.bias.detach(), dy)
    torch.manual_seed(7)
    assert_same_bits(run(layer, x, dy, stochastic), want)


def test_stochastic_rounding_differs_from_step_to_step() -> None:
    layer = make_layer((32, 48, 64), torch.bfloat16)
    x, dy = tensors((32, 48, 64), torch.bfloat16)
    first, second = (run(layer, x, dy, recipe.NVFP4BlockScaling()).grad_input for _ in range(2))
    assert not torch.equal(first, second)


def grouped_step(
    layer: GroupedLinear,
    x: torch.Tensor,
    dy: torch.Tensor,
    splits: list[int],
    recipe: recipe.Recipe,
) -> list[Step]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with autocast(recipe=recipe):
        y = layer(x, splits)
    y.backward(dy)
    parts = zip(y.detach().split(splits), x.grad.split(splits), strict=True)
    return [
        Step(y_g, dx_g, getattr(layer, f"weight{g}").grad, getattr(layer, f"bias{g}").grad)
        for g, (y_g, dx_g) in enumerate(parts)
    ]


def oracle_groups(
    plan: LinearPlan,
    layer: GroupedLinear,
    x: torch.Tensor,
    dy: torch.Tensor,
    splits: list[int],
    rng: torch.Tensor | None = None,
) -> list[Step]:
    steps = []
    for group, parts in enumerate(zip(x.split(splits), dy.split(splits), strict=True)):
        weight = getattr(layer, f"weight{group}").detach()
        bias = getattr(layer, f"bias{group}").detach()
        own = None if rng is None else rng + torch.tensor([0, group])
        slots = Scales(*torch.ones(3, 1)) if plan.delayed else UNSCALED
        steps.append(Oracle(plan, slots, own).step(parts[0], weight, bias, parts[1]))
    return steps


@pytest.mark.parametrize(
    ("name", "splits"), turns([*CURRENT, *DELAYED], [[16, 0, 32, 16], [5, 1, 0, 7]]), ids=str
)
def test_each_group_has_the_bits_of_a_tensor_of_its_own(name: str, splits: list[int]) -> None:
    chosen = {**CURRENT, **DELAYED}[name]
    layer = GroupedLinear(4, 48, 20, params_dtype=torch.bfloat16)
    x, dy = tensors((sum(splits), 48, 20), torch.bfloat16)
    plan = chosen.plan(LayerRole("grouped_linear"), torch.bfloat16)
    want = oracle_groups(plan, layer, x, dy, splits)
    for got, expected in zip(grouped_step(layer, x, dy, splits, chosen), want, strict=True):
        assert_same_bits(got, expected)


def test_each_group_rounds_by_a_stream_of_its_own() -> None:
    layer = GroupedLinear(3, 32, 16, params_dtype=torch.bfloat16)
    splits = [16, 32, 16]
    x, dy = tensors((64, 32, 16), torch.bfloat16)
    stochastic = recipe.NVFP4BlockScaling()
    torch.manual_seed(3)
    rng = torch.randint(0, 2**62, (2,))
    plan = stochastic.plan(LayerRole("grouped_linear"), torch.bfloat16)
    want = oracle_groups(plan, layer, x, dy, splits, rng)
    torch.manual_seed(3)
    for got, expected in zip(grouped_step(layer, x, dy, splits, stochastic), want, strict=True):
        assert_same_bits(got, expected)
