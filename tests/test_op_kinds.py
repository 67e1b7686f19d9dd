"""Operations that scale, reshape, normalize or activate: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, autocast, ops, recipe
from fp8core.modules.sequences.head_split import make_qk_norms
from tests.device import assert_same_sums
from tests.pairs import turns

BF16 = torch.bfloat16


def situ(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return 4 * torch.tanh(a / 4) * torch.sigmoid(a) * 25 * torch.tanh(b / 25)


def clamped(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)
    return a * torch.sigmoid(1.702 * a) * (b + 1)


def gated(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(x: torch.Tensor, *scales: torch.Tensor) -> torch.Tensor:
        y = function(*x.chunk(2, -1))
        return y * scales[0][..., None] if scales else y

    return run


def scaled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, scales: function(x) * scales[..., None]


def swiglu(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(a) * b


# Each operation with the same in torch, and whether it takes scales.
KINDS: dict[str, tuple[Callable[[], Any], Callable[..., torch.Tensor], bool]] = {
    "Identity": (ops.Identity, lambda x: x, False),
    "ConstantScale": (lambda: ops.ConstantScale(0.3), lambda x: x * 0.3, False),
    "L2Normalization": (
        ops.L2Normalization,
        lambda x: x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt(),
        False,
    ),
    "Reshape": (lambda: ops.Reshape((6, -1)), lambda x: x.reshape(6, -1), False),
    "SiTUGLU": (ops.SiTUGLU, gated(situ), False),
    "ScaledSiTUGLU": (ops.ScaledSiTUGLU, gated(situ), True),
    "ScaledSwiGLU": (ops.ScaledSwiGLU, gated(swiglu), True),
    "ScaledClampedQGeGLU": (ops.ScaledClampedQGeGLU, gated(clamped), True),
    "ScaledSReLU": (ops.ScaledSReLU, scaled(lambda x: torch.relu(x).square()), True),
    "ScaledTanhSReLU": (
        lambda: ops.ScaledTanhSReLU(tanh_clamp_scale=2.0),
        scaled(lambda x: (2 * torch.tanh(torch.relu(x) / 2)).square()),
        True,
    ),
}


def inputs(has_scales: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = 4 * torch.randn(2, 3, 16, dtype=torch.float64)
    tensors = [x, torch.rand(2, 3, dtype=torch.float64)] if has_scales else [x]
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


NO_OPTIONS: dict[str, Any] = {
    **{"device": None, "dtype": None, "name": None},
    "splits_heads": False,
}


def both(function: Callable[..., Any], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    y = function(*tensors)
    grads = torch.autograd.grad((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum(), tensors)
    return [y.detach(), *grads]


@pytest.mark.parametrize(
    ("name", "dtype"), [*turns(KINDS, [torch.float32, BF16]), *turns(KINDS, [torch.float16])]
)
def test_values_and_gradients_are_torchs_rounded_once(name: str, dtype: torch.dtype) -> None:
    make, function, has_scales = KINDS[name]
    tensors = inputs(has_scales, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    got, want = both(make(), tensors), both(function, exact)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.dtype == dtype
        unit = torch.finfo(dtype).eps * (1 + 16 * (dtype == torch.float32))
        torch.testing.assert_close(mine.double(), theirs, rtol=unit, atol=4 * unit)


def test_a_scale_takes_a_tensor_of_no_dimension() -> None:
    scale = ops.Sequential(ops.ConstantScale(2.0), ops.ConstantScale(0.25))
    x = torch.tensor(3.0, requires_grad=True)
    y, grad = both(scale, [x])
    assert (y.shape, y.item(), grad.item()) == ((), 1.5, -0.5)


@pytest.mark.parametrize("size", [1e-38, 1e-25, 1e19, 3e37])
def test_a_length_whose_square_has_no_float32(size: float) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)) * size
    exact = both(lambda x: x / x.norm(dim=-1, keepdim=True), [x.double().requires_grad_()])
    found = both(ops.L2Normalization(eps=0.0), [x.clone().requires_grad_()])
    torch.testing.assert_close(found[0].double(), exact[0], rtol=0, atol=2.0**-22)
    torch.testing.assert_close(found[1].double() * size, exact[1] * size, rtol=0, atol=2.0**-18)


def test_ordinary_rows_are_normalized_as_without_a_scale() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(512, 16, generator=generator)
    x *= 2.0 ** torch.randint(-48, 60, (512, 1), generator=generator)
    for eps in (0.0, 1e-6):
        y = ops.L2Normalization(eps=eps)(x)
        assert torch.equal(y, x * (x.square().sum(-1, keepdim=True) + eps).rsqrt())


@pytest.mark.parametrize("size", [1e-14, 1e15])
def test_gradient_of_a_length_whose_cube_has_no_float32(size: float) -> None:
    norms = ops.L2Normalization(eps=0.0), make_qk_norms("L2Normalization", 16, 0.0, **NO_OPTIONS)[0]
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(1)) * size
    exact = both(lambda x: x / x.norm(dim=-1, keepdim=True), [x.double().requires_grad_()])[1]
    for norm in norms:
        grad = both(norm, [x.clone().requires_grad_()])[1]
        torch.testing.assert_close(grad.double() * size, exact * size, rtol=0, atol=2.0**-18)


@pytest.mark.parametrize("name", KINDS)
def test_derivatives_of_both_orders(name: str) -> None:
    make, _, has_scales = KINDS[name]
    operation = make()
    tensors = inputs(has_scales, torch.float64)
    assert torch.autograd.gradcheck(operation, tensors)
    assert torch.autograd.gradgradcheck(operation, tensors)


@pytest.mark.parametrize(
    ("name", "chosen"),
    turns([name for name in KINDS if name != "Reshape"], ["current", None, "mxfp8", "current"]),
)
def test_in_a_chain_the_result_is_the_same(name: str, chosen: Any) -> None:
    make, _, has_scales = KINDS[name]
    operation = make()
    tensors = inputs(has_scales, torch.float32)
    width = operation(*tensors).shape[-1]
    torch.manual_seed(0)
    before, after = ops.Linear(16, 16), ops.Linear(width, 8)
    chain = ops.Sequential(before, operation, after)
    assert chain.is_link
    with autocast(enabled=chosen is not None, recipe=chosen):
        got = both(chain, tensors)
        want = both(lambda x, *scales: after(operation(before(x), *scales)), tensors)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [ops.SwiGLU, ops.ClampedSwiGLU, ops.SiTUGLU])
def test_interleaved_halves_are_put_together(make: Any) -> None:
    x = torch.randn(4, 24, requires_grad=True)
    a, b = x.view(4, 3, 2, 4).unbind(2)
    joined = torch.cat((a.reshape(4, 12), b.reshape(4, 12)), -1)
    for mine, theirs in zip(
        both(make(glu_interleave_size=4), [x]), both(lambda _: make()(joined), [x]), strict=True
    ):
        assert torch.equal(mine, theirs)


def test_interleaved_halves_are_scaled_too() -> None:
    x, scales = torch.randn(4, 24), torch.rand(4)
    want = ops.SwiGLU(glu_interleave_size=4)(x) * scales[:, None]
    torch.testing.assert_close(ops.ScaledSwiGLU(4)(x, scales), want)


def test_scales_reach_only_those_that_ask_for_them() -> None:
    made = ops.Sequential(ops.Linear(16, 16), ops.ScaledSwiGLU(), ops.Linear(8, 8))
    x, scales = torch.randn(4, 16), torch.zeros(4)
    assert torch.equal(made(x, scales), made[2](torch.zeros(4, 8)))


def test_an_add_in_place_writes_to_the_extra_input() -> None:
    add = ops.AddExtraInput(in_place=True)
    x, leaf = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    extra = leaf * 2
    kept = extra.detach().clone()
    y = ops.Sequential(ops.Bias(8), add)(x, extra)
    assert y.data_ptr() == extra.data_ptr()
    assert torch.equal(y, kept + x)
    y.sum().backward()
    assert torch.equal(leaf.grad, torch.full((4, 8), 2.0))
    assert torch.equal(x.grad, torch.ones(4, 8))


def test_a_basic_linear_is_a_linear_without_bias() -> None:
    torch.manual_seed(0)
    made = ops.BasicLinear(8, 4)
    torch.manual_seed(0)
    assert torch.equal(made.weight, ops.Linear(8, 4, bias=False).weight)
    assert list(made.state_dict()) == ["weight"]


def test_a_grouped_linear_has_the_names_and_values_of_theirs() -> None:
    torch.manual_seed(0)
    made = ops.GroupedLinear(2, 8, 4)
    torch.manual_seed(0)
    assert torch.equal(made.weight0, ops.Linear(8, 4).weight)
    assert list(made.state_dict()) == ["weight0", "bias0", "weight1", "bias1"]
    x = torch.randn(6, 8, dtype=BF16)
    assert made(x, [2, 4]).dtype == torch.float32


# --- norms over several dimensions ---


@pytest.mark.parametrize("kind", [ops.LayerNorm, ops.RMSNorm])
def test_a_norm_over_several_dimensions_is_torchs(kind: Any) -> None:
    made = kind((3, 8), eps=1e-5)
    names = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
    theirs = names[kind.__name__]((3, 8), eps=1e-5)
    assert made.weight.shape == (3, 8)
    torch.nn.init.normal_(made.weight)
    theirs.load_state_dict(made.state_dict())
    x = torch.randn(2, 5, 3, 8, requires_grad=True)
    got, want = both(made, [x]), both(theirs, [x])
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other)
    made(x).square().sum().backward()
    theirs(x).square().sum().backward()
    torch.testing.assert_close(made.weight.grad, theirs.weight.grad)


def test_a_norm_over_several_dimensions_takes_a_residual_and_a_place_in_a_sequential() -> None:
    made = ops.LayerNorm([3, 8])
    x, residual = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    torch.testing.assert_close(made(x, residual=residual), made(x + residual))
    chain = ops.Sequential(ops.Bias(8), made, ops.Linear(8, 4))
    assert torch.equal(chain(x), chain[2](made(chain[0](x))))


@pytest.mark.parametrize("asked", [None, recipe.Float8CurrentScaling()], ids=["none", "current"])
def test_a_grouped_linear_scales_its_biases_by_rows(asked: recipe.Recipe | None) -> None:
    """Of sizes in a list, and in a tensor."""
    layer = ops.GroupedLinear(3, 64, 32, scale_bias=True)
    plain = ops.GroupedLinear(3, 64, 32, bias=False)
    plain.load_state_dict(layer.state_dict(), strict=False)
    with torch.no_grad():
        for number in range(3):
            getattr(layer, f"bias{number}").normal_()
    x, scales = torch.randn(48, 64).requires_grad_(), torch.rand(48).requires_grad_()
    biases = torch.stack([getattr(layer, f"bias{number}") for number in range(3)])
    groups = torch.tensor([0] * 16 + [2] * 32)
    with fp8core.autocast(enabled=asked is not None, recipe=asked or "current"):
        y = ops.Sequential(layer)(x, [16, 0, 32], scales)
        want = plain(x, [16, 0, 32]) + biases[groups] * scales[:, None]
        torch.testing.assert_close(y, want)
        again = layer(x, torch.tensor([16, 0, 32]), scales)
        assert_same_sums([again], [y], in_fp8=asked is not None)
    dy = torch.randn_like(y)
    grads = torch.autograd.grad(y, (scales, layer.bias0, layer.bias1, layer.bias2), dy)
    torch.testing.assert_close(grads[0], (dy * biases[groups]).sum(-1))
    for number, grad in enumerate(grads[1:]):
        rows = groups == number
        torch.testing.assert_close(grad, (dy[rows] * scales[rows, None]).sum(0))


def test_scales_of_biases_that_do_not_fit_are_refused() -> None:
    layer, x = ops.GroupedLinear(2, 32, 32, scale_bias=True), torch.randn(8, 32)
    for scales in (None, torch.ones(7), torch.ones(8, 1), torch.ones(8).int(), [1.0] * 8):
        with pytest.raises(OperandError, match="scales"):
            layer(x, [4, 4], scales)
    with pytest.raises(OperandError, match="no output"):
        layer(x, [4, 4], torch.ones(8), output=torch.empty(8, 32))
    without = ops.GroupedLinear(2, 32, 32, bias=False, scale_bias=True)
    assert (without.num_extra_inputs, layer.num_extra_inputs) == (1, 2)
    with pytest.raises(OperandError, match="expected no scales"):
        without(x, [4, 4], torch.ones(8))


@pytest.mark.parametrize("kind", [ops.GELU, ops.SwiGLU, ops.ClampedSwiGLU, ops.SReLU])
@pytest.mark.parametrize("asked", [None, recipe.Float8CurrentScaling()], ids=["none", "current"])
def test_a_cached_quantized_input_is_what_backward_reads(
    kind: type[torch.nn.Module], asked: recipe.Recipe | None
) -> None:
    """The gradient is that of the same activation at the values of the codes; forward stays, and
    backward holds a byte for each element."""
    x = torch.randn(48, 64, dtype=torch.bfloat16).requires_grad_()
    caching, plain = kind(cache_quantized_input=True), kind()
    quantizer = fp8core.Float8CurrentScalingQuantizer(fp8core.DType.kFloat8E4M3, device=x.device)
    at_codes = quantizer(x.detach()).dequantize().requires_grad_()
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with autocast(enabled=asked is not None, recipe=asked or "current"):
        with hooks:
            y = caching(x)
        assert torch.equal(y, plain(x))
        dy = torch.randn_like(y)
        assert torch.equal(
            torch.autograd.grad(y, x, dy)[0], torch.autograd.grad(plain(at_codes), at_codes, dy)[0]
        )
    assert sum(tensor.nbytes for tensor in saved) == x.numel() + 4


def test_a_chain_around_a_cached_quantized_input_keeps_its_forward() -> None:
    """Whatever the recipe holds, what follows the activation keeps its own operand."""
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    layers = [
        ops.Sequential(
            ops.Linear(64, 256, dtype=torch.bfloat16),
            ops.SwiGLU(cache_quantized_input=caches),
            ops.Linear(128, 64, dtype=torch.bfloat16),
        )
        for caches in (True, False)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    for holding in ("fastest", "least"):
        grads = []
        with autocast(recipe=recipe.Float8CurrentScaling(holding=holding)):
            outputs = [layer(x) for layer in layers]
        assert torch.equal(*outputs)
        for layer, y in zip(layers, outputs, strict=True):
            layer.zero_grad()
            y.float().square().sum().backward()
            grads.append([parameter.grad for parameter in layer.parameters()])
        assert torch.equal(grads[0][2], grads[1][2])  # of the last linear
        assert not torch.equal(grads[0][0], grads[1][0])
