"""quantize, dequantize and linear as functions, and tensors of torch and torchao."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._library import opaque_object
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.package import sys_importer
from torch.utils._python_dispatch import TorchDispatchMode

import fp8core
from fp8core import OperandError, QuantizedTensor, RecipeError, UnsupportedError, functional, recipe
from fp8core.backend_api import Operand
from fp8core.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from fp8core.recipe.plan import LayerRole
from fp8core.torch_ops.private import PASSES_DATACLASSES
from tests.device import DEVICE
from tests.hopper_gemm import cut_off

RECIPES = {
    "current": recipe.Float8CurrentScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_how_a_tensor_is_quantized(name: str) -> None:
    for tensor in ("input", "weight", "grad_output"):
        plan = RECIPES[name].plan(LayerRole(), torch.bfloat16).tensors[tensor]
        made = functional.quantize(rand(64, 128), RECIPES[name], tensor=tensor)
        assert made.plan == plan
        rowwise = functional.quantize(rand(64, 128), name, tensor=tensor, columnwise=False)
        assert rowwise.get_usages() == {"rowwise": True, "columnwise": False}


def test_quantize_takes_quantizers_specs_and_plans() -> None:
    x, quantizer = rand(32, 64), MXFP8Quantizer("e4m3")
    expected = quantizer(x)
    for by in (quantizer, quantizer.plan, quantizer.plan.rowwise, lambda x: quantizer(x)):
        made = functional.quantize(x, by)
        assert made.plan == expected.plan
        assert torch.equal(made.dequantize(), expected.dequantize())
    for by in (3, None, "mxfp9", MXFP8Quantizer):
        with pytest.raises(RecipeError):
            functional.quantize(x, by)
    with pytest.raises(RecipeError, match="grad_output"):
        functional.quantize(x, "mxfp8", tensor="gradient")


def test_dequantize_takes_plain_tensors() -> None:
    x = rand(4, 4)
    assert functional.dequantize(x) is x
    assert functional.dequantize(x, torch.float32).dtype == torch.float32
    with pytest.raises(OperandError, match="int"):
        functional.dequantize(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", RECIPES)
def test_linear_computes_as_a_layer(name: str) -> None:
    torch.manual_seed(0)
    layer = fp8core.Linear(128, 256, params_dtype=torch.bfloat16, device=DEVICE)
    x, grad, results = rand(2, 32, 128), rand(2, 32, 256), []
    for call in (layer, lambda x: functional.linear(x, layer.weight, layer.bias)):
        given = x.clone().requires_grad_()
        layer.zero_grad()
        torch.manual_seed(5)
        with fp8core.autocast(recipe=RECIPES[name]):
            y = call(given)
        y.backward(grad)
        results.append([y, given.grad, layer.weight.grad, layer.bias.grad])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_linear_uses_tensors_that_are_stored_as_the_recipe_casts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w = rand(64, 128), rand(256, 128)
    chosen = RECIPES["mxfp8"]
    with fp8core.autocast(recipe=chosen):
        expected = functional.linear(x, w)
    quantized = functional.quantize(x, chosen), functional.quantize(w, chosen, tensor="weight")
    monkeypatch.setattr(QuantizedTensor, "dequantize", None)
    with fp8core.autocast(recipe=chosen):
        assert torch.equal(functional.linear(*quantized), expected)
    assert torch.equal(functional.linear(*quantized), expected)


def test_linear_in_high_precision_is_that_of_torch() -> None:
    x, w, b = rand(4, 8), rand(16, 8), rand(16)
    assert torch.equal(functional.linear(x, w, b), torch.nn.functional.linear(x, w, b))


def test_linear_refuses_what_has_no_layer() -> None:
    x, w = rand(4, 8), rand(16, 8)
    with (
        fp8core.autocast(recipe=recipe.DelayedScaling()),
        pytest.raises(UnsupportedError, match=r"fp8core\.Linear"),
    ):
        functional.linear(x, w)
    for bad in ((x, rand(16, 8, 2)), (x, w, rand(8)), (x, None), (rand(4, 9), w)):
        with pytest.raises(OperandError):
            functional.linear(*bad)  # type: ignore[arg-type]


QUANTIZERS: dict[str, Quantizer] = {
    "current": Float8CurrentScalingQuantizer("e5m2", DEVICE),
    "block1d": Float8BlockQuantizer("e4m3", rowwise=True, columnwise=False, block_scaling_dim=1),
    "block2d": Float8BlockQuantizer("e4m3", rowwise=True, columnwise=False),
    "mxfp8": MXFP8Quantizer("e4m3", columnwise=False),
    "mxfp8_2d": MXFP8Quantizer("e4m3", with_2d_quantization=True),
    "nvfp4": NVFP4Quantizer(columnwise=False),
    "nvfp4_2d": NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4_row": NVFP4Quantizer(columnwise=False, row_scaled_nvfp4=True),
}


@pytest.mark.parametrize("name", QUANTIZERS)
def test_torch_tensors_are_given_and_taken_without_a_copy(name: str) -> None:
    made = QUANTIZERS[name](rand(2, 128, 256))
    data, scale_inv, outer = functional.to_torch(made)
    assert data.dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2)
    assert data.shape[:2] == (2, 128)
    taken = functional.from_torch(data, scale_inv, global_scale_inv=outer)
    assert taken.shape == made.shape
    assert taken._rowwise_data.data_ptr() == made._rowwise_data.data_ptr()
    assert torch.equal(taken.dequantize(), made.dequantize())


def test_a_scaled_product_of_torch_takes_what_to_torch_gives() -> None:
    quantizer = Float8CurrentScalingQuantizer("e4m3", DEVICE)
    a, b = (functional.to_torch(quantizer(rand(*size))) for size in ((32, 64), (48, 64)))
    values = [(one.data.float() * one.scale_inv) for one in (a, b)]
    quantized = [functional.from_torch(one.data, one.scale_inv) for one in (a, b)]
    made = functional.gemm(*quantized, torch.float32)
    lost = cut_off(*values)
    assert ((made - values[0] @ values[1].t()).abs() - lost).max() < 1e-4


def test_from_codes_takes_a_recipe() -> None:
    for name, tensor in (("mxfp8", "input"), ("block", "weight"), ("current", "grad_output")):
        chosen = RECIPES[name]
        made = functional.quantize(rand(256, 128), chosen, tensor=tensor)
        codes, scale_inv, _ = functional.to_torch(made)
        for given in (chosen, name, made.plan, made.plan.rowwise):
            taken = QuantizedTensor.from_codes(codes, scale_inv, given, dtype=torch.float32)
            assert (taken.dtype, taken.plan.rowwise) == (torch.float32, made.plan.rowwise)
            assert torch.equal(taken.dequantize(), made.dequantize(torch.float32))
    taken = QuantizedTensor.from_codes(
        codes.view(torch.uint8), scale_inv, "current", tensor="weight"
    )
    assert taken.plan.rowwise.format == "e4m3"


def test_codes_and_scales_that_do_not_fit_are_refused() -> None:
    codes = torch.zeros(64, 64).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    bad: list[tuple[object, ...]] = [
        (codes, torch.ones(3), "current"),
        (codes, one.double(), "current"),
        (codes, torch.full((1,), float("nan")), "current"),
        (codes, -one, "current"),
        (codes, torch.ones(64, 2), "mxfp8"),
        (codes.float(), one, "current"),
        (codes.view(torch.uint8)[:, ::2], one, recipe.NVFP4BlockScaling()),
        (codes.tolist(), one, "current"),
    ]
    for given in bad:
        with pytest.raises(OperandError):
            QuantizedTensor.from_codes(*given)  # type: ignore[arg-type]
    with pytest.raises(RecipeError):
        QuantizedTensor.from_codes(codes, one, 3)
    with pytest.raises(OperandError, match="one scale"):
        functional.from_torch(codes, torch.ones(64, 3))
    with pytest.raises(OperandError, match="torchao"):
        functional.from_torch(codes)
    with pytest.raises(OperandError, match="uint8"):
        functional.from_torch(codes.view(torch.uint8), one)
    with pytest.raises(OperandError, match="no rowwise"):
        functional.to_torch(MXFP8Quantizer("e4m3", rowwise=False)(rand(32, 32)))


def test_tensors_of_torchao_are_taken_by_their_attributes() -> None:
    x = rand(64, 128)
    made = QUANTIZERS["mxfp8"](x)
    data, scale_inv, _ = functional.to_torch(made)
    theirs = SimpleNamespace(qdata=data, scale=scale_inv, dtype=torch.float16)
    taken = functional.from_torch(theirs)
    assert (taken.dtype, isinstance(taken, fp8core.MXFP8Tensor)) == (torch.float16, True)
    made = QUANTIZERS["current"](x)
    data, scale_inv, _ = functional.to_torch(made)
    trained = SimpleNamespace(_data=data, _scale=1 / scale_inv.view(()), _orig_dtype=torch.float32)
    taken = functional.from_torch(trained)
    torch.testing.assert_close(taken.dequantize(), made.dequantize(torch.float32))


CAPTURED = {
    "current": Float8CurrentScalingQuantizer("e4m3", DEVICE),
    "nvfp4": NVFP4Quantizer(with_rht=True),
}


# One scale a tensor, and two levels of scales behind a transform.
@pytest.fixture(params=["current", "nvfp4"])
def quantizer(request: pytest.FixtureRequest) -> Any:
    return CAPTURED[request.param]


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def test_quantize_and_dequantize_in_a_graph(quantizer: Any) -> None:
    x = rand(64, 128)

    def call(x: torch.Tensor) -> torch.Tensor:
        return quantizer(x).dequantize() * 2

    assert torch.equal(compiled(call)(x), call(x))


def test_a_graph_returns_a_quantized_tensor(quantizer: Any) -> None:
    x = rand(2, 32, 128)
    made = compiled(lambda x: quantizer(x + 1))(x)
    expected = quantizer(x + 1)
    assert isinstance(made, QuantizedTensor)
    assert made.plan == expected.plan
    pairs = zip(made.tensors(), expected.tensors(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_gradients_pass_in_a_graph(quantizer: Any) -> None:
    def call(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.gemm(quantizer(x), quantizer(w)).float().square().sum()

    grads = []
    for run in (call, compiled(call)):
        torch.manual_seed(0)
        x, w = rand(64, 128).requires_grad_(), rand(96, 128).requires_grad_()
        run(x, w).backward()
        grads.append((x.grad, w.grad))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))


def test_usages_that_change_are_seen_by_a_graph() -> None:
    quantizer, x = MXFP8Quantizer("e4m3"), rand(32, 64)
    run = compiled(lambda x: quantizer(x))
    assert run(x).get_usages() == {"rowwise": True, "columnwise": True}
    quantizer.set_usage(columnwise=False)
    assert run(x).get_usages() == {"rowwise": True, "columnwise": False}


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda q: q.view(2, 32, 128),
    "slice": lambda q: q[:32],
    "chunk": lambda q: q.chunk(2)[1],
    "select": lambda q: q.view(2, 32, 128)[1],
    "cat": lambda q: torch.cat([q, q]),
    "arithmetic": lambda q: q + 1,
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_an_input_in_a_graph(view: str) -> None:
    tensor = MXFP8Quantizer("e4m3")(rand(64, 128))

    def call(q: torch.Tensor) -> torch.Tensor:
        return functional.dequantize(VIEWS[view](q))

    assert torch.equal(compiled(call)(tensor), call(tensor))


def test_products_of_inputs_in_a_graph(quantizer: Any) -> None:
    a, b = quantizer(rand(64, 128)), quantizer(rand(96, 128))
    expected = functional.gemm(a, b)
    assert torch.equal(compiled(functional.gemm)(a, b), expected)
    plain = rand(64, 128)
    assert torch.equal(compiled(functional.gemm)(plain, b), functional.gemm(plain, b))


def test_a_graph_writes_a_quantized_tensor(quantizer: Any) -> None:
    x, out = rand(64, 128), quantizer(rand(64, 128))
    compiled(quantizer.update_quantized)(x, out)
    expected = quantizer(x)
    assert all(torch.equal(*pair) for pair in zip(out.tensors(), expected.tensors(), strict=True))


def test_a_graph_writes_a_scale_that_both_orientations_share() -> None:
    quantizer = CAPTURED["current"]
    rowwise, columnwise = quantizer(rand(64, 128)).operands
    columnwise = Operand(columnwise.data.contiguous(), rowwise.scale_inv)
    out = QuantizedTensor(rowwise, columnwise, quantizer.plan, torch.bfloat16)

    def call(x: torch.Tensor) -> torch.Tensor:
        return quantizer.update_quantized(x, out).dequantize() * 2

    x = rand(64, 128)
    expected = quantizer(x)
    assert torch.equal(compiled(call)(x), expected.dequantize() * 2)
    for held, operand in zip(out.operands, expected.operands, strict=True):
        assert torch.equal(held.data, operand.data)
        assert torch.equal(held.scale_inv, operand.scale_inv)


def test_a_graph_makes_a_tensor_to_be_written(quantizer: Any) -> None:
    made = compiled(lambda: quantizer.make_empty((64, 128), dtype=torch.bfloat16))()
    assert made.plan == quantizer.make_empty((64, 128)).plan
    assert not made.dequantize().any()


def test_a_recipe_quantizes_in_a_graph() -> None:
    x, mxfp8 = rand(64, 128), recipe.MXFP8BlockScaling()

    def by_name(x: torch.Tensor) -> torch.Tensor:
        return functional.quantize(x, "MXFP8BlockScaling", columnwise=False).dequantize()

    def by_object(x: torch.Tensor) -> torch.Tensor:
        return functional.quantize(x, mxfp8).dequantize()

    assert torch.equal(compiled(by_name)(x), by_name(x))
    around = torch.compile(by_object, fullgraph=PASSES_DATACLASSES, backend="aot_eager")
    assert torch.equal(around(x), by_object(x))


def test_a_transpose_is_read_in_a_graph(quantizer: Any) -> None:
    tensor = quantizer(rand(64, 128))
    assert torch.equal(compiled(lambda t: t @ t.t())(tensor), tensor @ tensor.t())


def test_a_write_to_a_transpose_is_refused_in_a_graph(quantizer: Any) -> None:
    with pytest.raises(Exception, match="writes to a view of a QuantizedTensor"):
        compiled(lambda t: t.t().zero_())(quantizer(rand(64, 128)))


def test_parts_are_joined_in_a_graph(quantizer: Any) -> None:
    tensor = quantizer(rand(64, 128))
    made, expected = compiled(lambda t: torch.cat([t, t]))(tensor), torch.cat([tensor, tensor])
    assert isinstance(made, QuantizedTensor)
    assert torch.equal(made.dequantize(), expected.dequantize())


def test_a_graph_refuses_a_write_by_a_scale_that_it_lacks() -> None:
    quantizer = Float8Quantizer(torch.tensor([4.0]), torch.zeros(1), "e4m3")
    tensor = quantizer(rand(64, 128))
    before = tensor.dequantize()
    with pytest.raises(Exception, match="whose scale a Float8Quantizer holds"):
        compiled(lambda t, x: t.copy_(x))(tensor, rand(64, 128))
    assert torch.equal(tensor.dequantize(), before)


def test_a_graph_refuses_a_write_to_a_part_of_a_scale() -> None:
    tensor = CAPTURED["current"](rand(64, 128))
    before = tensor.dequantize()
    with pytest.raises(Exception, match="whose scale covers more than the view"):
        compiled(lambda t: t.zero_())(tensor[:32])
    assert torch.equal(tensor.dequantize(), before)


def test_a_fake_tensor_is_decoded_and_multiplied_by_operators(quantizer: Any) -> None:
    """A kernel would read its address; torch dispatches to it with is_compiling() off."""
    tensor, called = quantizer(rand(64, 128)), []

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            called.append(func)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(tensor)
        with Operators():
            made, product = fake.dequantize(), functional.gemm(fake, fake)
    assert (made.shape, product.shape) == ((64, 128), (64, 64))
    assert {torch.ops.fp8core.dequantize.default, torch.ops.fp8core.gemm.default} <= {*called}


class Registered(MXFP8Quantizer):
    """A class that torch knows as one of values."""


class RegisteredRecipe(recipe.MXFP8BlockScaling):
    """A class that torch knows as one of values."""


@pytest.fixture(scope="module")
def by_values() -> Any:
    """An operator of a library that takes a quantizer and a recipe as values."""
    names = []
    for kind in (Registered, RegisteredRecipe):
        opaque_object.register_opaque_type(kind, typ="value")
        names.append(opaque_object.get_opaque_type_name(kind))
    schema = f"(Tensor x, {names[0]} quantizer, {names[1]} by) -> Tensor"

    @torch.library.custom_op("fp8core_tests::cast_by", mutates_args=(), schema=schema)
    def cast_by(x: torch.Tensor, quantizer: Any, by: Any) -> torch.Tensor:
        return quantizer(x).dequantize() + functional.quantize(x, by).dequantize()

    @cast_by.register_fake
    def _(x: torch.Tensor, quantizer: Any, by: Any) -> torch.Tensor:
        return torch.empty_like(x)

    return torch.ops.fp8core_tests.cast_by


@pytest.mark.skipif(not PASSES_DATACLASSES, reason="an older torch wants a metaclass of its own")
def test_quantizers_and_recipes_are_values_of_a_graph(by_values: Any) -> None:
    counter = CompileCounterWithBackend("aot_eager")

    @torch.compile(fullgraph=True, backend=counter)
    def compute(x: torch.Tensor, quantizer: Any, by: Any) -> torch.Tensor:
        return by_values(x, quantizer, by)

    x = torch.randn(64, 64, device=DEVICE)
    for name in ("e4m3", "e5m2", "e4m3"):
        arguments = Registered(name), RegisteredRecipe(fp8_format="hybrid")
        expected = by_values(x, *arguments)
        assert torch.equal(compute(x, *arguments), expected)
    assert counter.frame_count == 2  # one for each value


@pytest.mark.skipif(not PASSES_DATACLASSES, reason="an older torch wants a metaclass of its own")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("is_cached", [True, False])
def test_inductor_keeps_and_reads_a_graph_with_values(by_values: Any, is_cached: bool) -> None:
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor  # here, as it takes long to import
    from torch._inductor.utils import fresh_cache

    x = torch.randn(64, 64, device=DEVICE)
    compute = torch.compile(lambda x, quantizer, by: by_values(x, quantizer, by), fullgraph=True)
    counters.clear()
    with (
        fresh_cache(),
        inductor.patch(fx_graph_cache=is_cached),
        functorch.patch(enable_autograd_cache=is_cached),
    ):
        for _ in range(2):
            torch.compiler.reset()  # type: ignore[no-untyped-call]
            arguments = Registered("e5m2"), RegisteredRecipe(fp8_format="hybrid")
            assert torch.equal(compute(x, *arguments), by_values(x, *arguments))
    assert counters["inductor"]["fxgraph_cache_hit"] == int(is_cached)


def test_the_expression_of_a_value_makes_an_equal_value() -> None:
    hybrid = HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer("e4m3"), columnwise_quantizer=NVFP4Quantizer()
    )
    values = [MXFP8Quantizer("e5m2", columnwise=False), hybrid, recipe.DelayedScaling(margin=1)]
    values += [recipe.PerLayer({"head": None}, default="block"), recipe.WeightOnly("mxfp8")]
    for value in values:
        expression, names = value.__fx_repr__()
        assert eval(expression, dict(names)) == value  # as torch does
        assert copy.deepcopy(value).__fx_repr__()[0] == expression
        for name, kept in names.items():  # as the code of a graph is written
            module, importer = sys_importer.get_name(kept)
            assert name == f"{module}.{importer}".replace(".", "__")


def test_what_is_no_value_is_refused() -> None:
    entry = torch.ones(1, device=DEVICE)
    with pytest.raises(UnsupportedError, match="a state"):
        Float8Quantizer(entry, entry.clone(), "e4m3").__fx_repr__()
    custom = recipe.CustomRecipe(qfactory=lambda role: recipe.OperandSpec("e4m3", (0, 0), 448.0))
    with pytest.raises(UnsupportedError, match="at the top of a module"):
        custom.__fx_repr__()
