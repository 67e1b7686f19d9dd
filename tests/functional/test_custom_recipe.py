"""CustomRecipe takes the quantizers that a factory returns, and objects with the same verbs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, QuantizedTensor, RecipeError, UnsupportedError, recipe
from fp8core.quantizers import (
    DType,
    Float8BlockQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fp8core.recipe import CustomRecipe
from tests.device import DEVICE

E4M3 = DType.kFloat8E4M3


def results(layer: torch.nn.Module, chosen: recipe.Recipe) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x = torch.randn(64, 128, dtype=torch.bfloat16, requires_grad=True)
    layer.zero_grad()
    with fp8core.autocast(recipe=chosen):
        y = layer(x)
    y.backward(torch.randn_like(y))
    grads = [parameter.grad for parameter in layer.parameters()]
    return [y.detach(), x.grad, *grads]


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def linear() -> fp8core.Linear:
    torch.manual_seed(1)
    return fp8core.Linear(128, 256, params_dtype=torch.bfloat16, device=DEVICE)


def blocks(role: recipe.QuantizerRole) -> Quantizer:
    dim = 2 if role.tensor_type == "weight" else 1
    return Float8BlockQuantizer(E4M3, rowwise=True, columnwise=False, block_scaling_dim=dim)


def nvfp4(role: recipe.QuantizerRole) -> Quantizer:
    if role.tensor_type == "weight":
        return NVFP4Quantizer(with_2d_quantization=True)
    return NVFP4Quantizer(with_rht=True, stochastic_rounding=role.tensor_type == "grad_output")


class Wrapped:
    """An object of the user that has nothing but the verbs."""

    def __init__(self, inner: Quantizer) -> None:
        self.inner = inner
        self.calls = 0

    def __call__(self, tensor: torch.Tensor) -> QuantizedTensor:
        self.calls += 1
        return self.inner(tensor)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.inner.set_usage(rowwise=rowwise, columnwise=columnwise)

    def make_empty(self, shape: Any) -> QuantizedTensor:
        return self.inner.make_empty(shape, device=DEVICE)


class Doubled(MXFP8Quantizer):
    """Code of its own: quantizes twice the value."""

    def quantize_impl(self, tensor: torch.Tensor) -> QuantizedTensor:
        return super().quantize_impl(2 * tensor)


class Delegating(Quantizer):
    """A class as Transformer Engine's custom recipes define it: no plan, and its own methods."""

    def __init__(self, *, rowwise: bool = True, columnwise: bool = True) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self.calls = 0

    def _quantizer(self) -> MXFP8Quantizer:
        return MXFP8Quantizer(E4M3, rowwise=self.rowwise_usage, columnwise=self.columnwise_usage)

    def quantize_impl(self, tensor: torch.Tensor) -> QuantizedTensor:
        self.calls += 1
        return self._quantizer()(tensor)

    def make_empty(self, shape: Any, **arguments: Any) -> QuantizedTensor:
        return self._quantizer().make_empty(shape, device=DEVICE, **arguments)

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        return self._quantizer().update_quantized(src, dst, noop_flag=noop_flag)


def test_a_subclass_without_a_plan_quantizes_every_tensor() -> None:
    layer, quantizers = linear(), {}

    def factory(role: recipe.QuantizerRole) -> Quantizer:
        return quantizers.setdefault(role.tensor_type, Delegating(columnwise=False))

    assert equal(results(layer, CustomRecipe(factory)), results(layer, recipe.MXFP8BlockScaling()))
    assert {name: each.calls for name, each in quantizers.items()} == {
        "input": 1,
        "weight": 1,
        "grad_output": 1,
    }


def test_a_subclass_without_a_plan_has_the_verbs_of_the_library() -> None:
    quantizer, x = Delegating(columnwise=False), torch.randn(64, 64, requires_grad=True)
    quantizer(x).dequantize().sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    out = quantizer.update_quantized(2 * x.detach(), quantizer.make_empty(x.shape))
    assert torch.equal(out.dequantize(), 2 * quantizer.copy()(x.detach()).dequantize())
    assert quantizer.plan == MXFP8Quantizer(E4M3).plan
    assert quantizer.get_usages() == {"rowwise": True, "columnwise": False}
    assert quantizer.is_quantizable(x)
    assert not quantizer.is_quantizable(x[:, :40])
    assert "Delegating" in repr(quantizer)
    with pytest.raises(NotImplementedError, match="override the property, or make_empty"):
        _ = Quantizer().plan


class Looping(Quantizer):
    """Its make_empty asks for what the plan says, and its plan is what make_empty makes."""

    def make_empty(self, shape: Any, **arguments: Any) -> QuantizedTensor:
        return super().make_empty(shape, **arguments)


class LoopingByCopies(Looping):
    def make_empty(self, shape: Any, **arguments: Any) -> QuantizedTensor:
        return Quantizer.make_empty(self.copy(), shape, **arguments)


@pytest.mark.parametrize("kind", [Looping, LoopingByCopies])
def test_a_plan_that_asks_make_empty_which_asks_the_plan_is_named(kind: type[Quantizer]) -> None:
    quantizer = kind()
    for call in (
        lambda: quantizer.plan,
        lambda: quantizer.make_empty((4, 4)),
        lambda: results(linear(), CustomRecipe(lambda role: kind())),
    ):
        with pytest.raises(NotImplementedError, match=f"{kind.__name__} has no plan"):
            call()
    assert "no plan" in repr(quantizer)

    class Planned(kind):  # type: ignore[valid-type, misc]  # a class of the parameters
        plan = MXFP8Quantizer(E4M3).plan

    assert Planned().make_empty((32, 32)).plan == MXFP8Quantizer(E4M3).plan


def test_a_make_empty_of_something_else_is_named() -> None:
    class Wrong(Quantizer):
        def make_empty(self, shape: Any, **arguments: Any) -> Any:
            return None

    with pytest.raises(OperandError, match=r"Wrong\.make_empty returned NoneType"):
        _ = Wrong().plan


def test_new_objects_for_each_product_of_a_mlp_are_answers_alike() -> None:
    layer = fp8core.LayerNormMLP(64, 64, device=DEVICE)
    with fp8core.autocast(recipe=recipe.CustomRecipe(lambda role: Doubled(E4M3))):
        assert layer(torch.ones(32, 64, device=DEVICE)).isfinite().all()


@pytest.mark.parametrize(
    ("factory", "named"),
    [
        (blocks, recipe.Float8BlockScaling()),
        (lambda role: MXFP8Quantizer(E4M3), recipe.MXFP8BlockScaling()),
        (nvfp4, recipe.NVFP4BlockScaling()),
    ],
    ids=["block", "mxfp8", "nvfp4"],
)
def test_quantizers_compute_as_the_named_recipe(factory: Any, named: recipe.Recipe) -> None:
    layer = linear()
    assert equal(results(layer, CustomRecipe(factory)), results(layer, named))


def test_quantizers_of_a_plan_are_fused_and_compiled_like_the_named_recipe() -> None:
    layer = fp8core.LayerNormLinear(128, 256, params_dtype=torch.bfloat16, device=DEVICE)
    custom = CustomRecipe(lambda role: MXFP8Quantizer(E4M3))
    assert equal(results(layer, custom), results(layer, recipe.MXFP8BlockScaling()))
    x = torch.randn(32, 128, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with fp8core.autocast(recipe=custom):
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.parametrize("has_plan", [True, False])
def test_an_object_of_the_user_quantizes_every_tensor(has_plan: bool) -> None:
    layer, made = linear(), {}

    def factory(role: recipe.QuantizerRole) -> Wrapped:
        one = Wrapped(MXFP8Quantizer(E4M3))
        if has_plan:
            one.plan = one.inner.plan  # type: ignore[attr-defined]
        return made.setdefault(role.tensor_type, one)

    assert equal(results(layer, CustomRecipe(factory)), results(layer, recipe.MXFP8BlockScaling()))
    assert {name: one.calls for name, one in made.items()} == {
        "input": 1,
        "weight": 1,
        "grad_output": 1,
    }


def test_code_of_its_own_is_called() -> None:
    layer = linear()

    def factory(role: recipe.QuantizerRole) -> Quantizer:
        return Doubled(E4M3) if role.tensor_type == "input" else MXFP8Quantizer(E4M3)

    doubled = results(layer, CustomRecipe(factory))
    plain = results(layer, recipe.MXFP8BlockScaling())
    bias = layer.bias.detach()
    torch.testing.assert_close(doubled[0] - bias, 2 * (plain[0] - bias), rtol=0.02, atol=0.02)
    assert torch.equal(doubled[2], 2 * plain[2])  # the gradient of the weight


def test_a_constant_scale_is_taken_and_its_amax_recorded() -> None:
    layer, amax = linear(), torch.zeros(1)

    def factory(role: recipe.QuantizerRole) -> Any:
        if role.tensor_type == "input":
            return Float8Quantizer(torch.tensor([4.0]), amax, E4M3)
        return recipe.Float8CurrentScaling().plan(recipe.LayerRole(), torch.bfloat16).weight

    results(layer, CustomRecipe(factory))
    torch.manual_seed(0)
    assert amax == torch.randn(64, 128, dtype=torch.bfloat16).abs().max()


class Wrong(Wrapped):
    def __call__(self, tensor: torch.Tensor) -> Any:
        return tensor


class Changing(Wrapped):
    def __call__(self, tensor: torch.Tensor) -> QuantizedTensor:
        return MXFP8Quantizer("e5m2")(tensor)


@pytest.mark.parametrize(
    ("kind", "text"), [(Wrong, "no QuantizedTensor"), (Changing, "planned rowwise as")]
)
def test_an_object_that_makes_something_else_is_named(kind: type[Wrapped], text: str) -> None:
    layer = linear()
    with pytest.raises(OperandError, match=text):
        results(layer, CustomRecipe(lambda role: kind(MXFP8Quantizer(E4M3))))


def test_what_is_no_quantizer_is_named() -> None:
    for answer in (None, 3, MXFP8Quantizer, object()):
        with pytest.raises(RecipeError, match="set_usage"):
            results(linear(), CustomRecipe(lambda role, answer=answer: answer))


@pytest.mark.parametrize(
    "fields",
    [
        {"nonfinite": "propagate"},
        {"requantize_weights": True},
        {"holding": "least"},
        {"backward_override": "high_precision"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_that_an_object_does_not_know_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="quantize by themselves"):
        results(linear(), CustomRecipe(lambda role: Wrapped(MXFP8Quantizer(E4M3)), **fields))


def test_an_object_is_refused_for_groups_and_in_a_graph() -> None:
    custom = CustomRecipe(lambda role: Wrapped(MXFP8Quantizer(E4M3)))
    grouped = fp8core.GroupedLinear(2, 64, 64, device=DEVICE)
    with (
        pytest.raises(UnsupportedError, match="of groups"),
        fp8core.autocast(recipe=custom),
    ):
        grouped(torch.randn(64, 64), [32, 32])
    layer = fp8core.Linear(64, 64, device=DEVICE)
    compiled = torch.compile(layer, backend="aot_eager")
    with (
        pytest.raises(UnsupportedError, match="code of its own"),
        fp8core.autocast(recipe=custom),
    ):
        compiled(torch.randn(32, 64))
