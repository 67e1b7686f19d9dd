"""Transformer Engine's queries, orders of gated weights, saved tensors and composed quantizers."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, RecipeError, UnsupportedError, autocast, ops, recipe
from fp8core.backend_api import GemmDesc
from fp8core.inspection import explain
from fp8core.inspection.explain import Explanation, Line
from fp8core.tensors.quantized_tensor import _rebuild
from tests.refusals import unrefused

QUERIES: dict[str, Callable[..., Any]] = {
    "fp8": fp8core.is_fp8_available,
    "block": fp8core.is_fp8_block_scaling_available,
    "mxfp8": fp8core.is_mxfp8_available,
    "nvfp4": fp8core.is_nvfp4_available,
    "bf16": fp8core.is_bf16_available,
}


@pytest.mark.parametrize("name", QUERIES)
def test_the_reference_has_every_format(name: str) -> None:
    with fp8core.use_backend("reference"):
        assert QUERIES[name]() is True
        assert QUERIES[name](return_reason=True) == (True, "")


@pytest.mark.parametrize("name", ["fp8", "block", "mxfp8", "nvfp4"])
def test_a_backend_that_lacks_a_format_says_why(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    asked: list[Any] = []

    def refuses(op: str, chosen: Any) -> Explanation:
        asked.append(chosen)
        desc = GemmDesc(None, None, torch.bfloat16)
        return Explanation((Line("", "fprop", desc, None, None, "no such products here"),))

    monkeypatch.setattr(explain, "explain", refuses)
    assert QUERIES[name]() is False
    assert QUERIES[name](True) == (False, "no such products here")
    kinds = {"fp8": "current", "block": "block", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
    assert asked == [recipe.by_name(kinds[name])] * 2


def test_devices_are_described_without_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    assert fp8core.get_device_compute_capability() == (0, 0)
    assert all(isinstance(part, int) for part in fp8core.get_cudnn_version())


@pytest.mark.parametrize(("shape", "size"), [((24,), 1), ((24, 5), 4), ((8, 3, 2), 2)])
def test_orders_of_a_gated_weight_are_inverse(shape: tuple[int, ...], size: int) -> None:
    weight = torch.randn(shape)
    blocks = fp8core.interleave_glu_tensor(weight, size)
    assert torch.equal(fp8core.deinterleave_glu_tensor(blocks, size), weight)
    assert torch.equal(blocks[:size], weight[:size])
    assert torch.equal(blocks[size : 2 * size], weight[shape[0] // 2 :][:size])


def test_an_interleaved_weight_goes_with_an_interleaved_activation() -> None:
    torch.manual_seed(0)
    plain, blocks = ops.Linear(8, 32), ops.Linear(8, 32)
    with torch.no_grad():
        for mine, theirs in zip(blocks.parameters(), plain.parameters(), strict=True):
            mine.copy_(fp8core.interleave_glu_tensor(theirs, 4))
    x = torch.randn(3, 8)
    want = ops.Sequential(plain, ops.SwiGLU())(x)
    got = ops.Sequential(blocks, ops.SwiGLU(glu_interleave_size=4))(x)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("size", [0, -1, 3, 2.0, True])
def test_blocks_that_do_not_fit_are_refused(size: Any) -> None:
    for function in (fp8core.interleave_glu_tensor, fp8core.deinterleave_glu_tensor):
        with pytest.raises(OperandError, match="interleave_size="):
            function(torch.zeros(5 if size is True else 8), size)


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stored: torch.Tensor) -> torch.Tensor:
        tensors, ctx.tensor_objects = fp8core.prepare_for_saving(x, None, stored)
        ctx.save_for_backward(*tensors)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, none, stored = fp8core.restore_from_func_ctx(ctx)
        assert none is None
        assert isinstance(stored, fp8core.QuantizedTensorStorage)
        return grad * x * stored.dequantize(), None


def test_tensors_are_saved_and_restored_for_backward() -> None:
    x = torch.randn(32, 32, requires_grad=True)
    stored = fp8core.MXFP8Quantizer("e4m3")(torch.ones(32, 32))
    _Doubled.apply(x, stored).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(x.grad, x)


def test_saved_tensors_that_are_left_are_returned() -> None:
    tensors, objects = fp8core.prepare_for_saving(torch.zeros(1), None)
    more = torch.ones(1)
    restored, left = fp8core.restore_from_saved(objects, [*tensors, more], True)
    assert restored[1] is None
    assert left[0] is more


def test_what_cannot_be_saved_or_restored_is_refused() -> None:
    bad: Any = "a word"
    with pytest.raises(OperandError, match="prepare_for_saving: str"):
        fp8core.prepare_for_saving(bad)
    with pytest.raises(OperandError, match="0 saved tensors for 1"):
        fp8core.restore_from_saved([None], [])
    with pytest.raises(OperandError, match="tensor_objects is not set"):
        fp8core.restore_from_func_ctx(object())


# --- composed quantizers ---


def hybrid() -> fp8core.HybridQuantizer:
    return fp8core.HybridQuantizer(
        rowwise_quantizer=fp8core.MXFP8Quantizer("e4m3"),
        columnwise_quantizer=fp8core.NVFP4Quantizer(),
    )


def test_a_hybrid_tensor_has_two_formats() -> None:
    x = torch.randn(64, 64)
    made = hybrid()(x)
    assert isinstance(made, fp8core.HybridQuantizedTensor)
    assert isinstance(made, fp8core.MXFP8TensorStorage)
    assert not isinstance(fp8core.MXFP8Quantizer("e4m3")(x), fp8core.HybridQuantizedTensor)
    assert torch.equal(made.dequantize(), fp8core.MXFP8Quantizer("e4m3")(x).dequantize())


@pytest.mark.parametrize("weight", ["hybrid", "identity", "both"])
def test_a_factory_answers_with_them(weight: str) -> None:
    torch.manual_seed(0)

    def factory(role: recipe.QuantizerRole) -> Any:
        if role.tensor_type != "weight":
            return fp8core.MXFP8Quantizer("e4m3")
        if weight == "identity":
            return fp8core.IdentityQuantizer()
        if weight == "hybrid":
            return hybrid()
        return fp8core.HybridQuantizer(
            rowwise_quantizer=fp8core.MXFP8Quantizer("e4m3"),
            columnwise_quantizer=fp8core.IdentityQuantizer(),
        )

    layer, x = fp8core.Linear(64, 64), torch.randn(64, 64, requires_grad=True)
    chosen = recipe.CustomRecipe(qfactory=factory)
    plan = chosen.plan(recipe.LayerRole(), torch.float32)
    row, column = plan.weight
    assert (row is None, column is None) == (weight == "identity", weight != "hybrid")
    with autocast(recipe=chosen):
        y = layer(x)
    y.sum().backward()
    assert (y - layer(x)).norm() < 0.1 * y.norm()


def test_an_identity_quantizer_returns_the_tensor() -> None:
    x = torch.randn(4)
    assert fp8core.IdentityQuantizer()(x) is x
    assert fp8core.IdentityQuantizer(dtype=torch.bfloat16)(x).dtype == torch.bfloat16
    with pytest.raises(RecipeError, match="expected a floating dtype"):
        fp8core.IdentityQuantizer(dtype=torch.int8)


def test_halves_without_a_plan_of_their_own_are_refused() -> None:
    scale, amax = torch.ones(1), torch.zeros(1)
    state = fp8core.Float8Quantizer(scale, amax, "e4m3")
    for bad in (state, None, "mxfp8"):
        with pytest.raises(OperandError, match="rowwise_quantizer="):
            fp8core.HybridQuantizer(
                rowwise_quantizer=bad,  # type: ignore[arg-type]
                columnwise_quantizer=fp8core.IdentityQuantizer(),
            )
    with pytest.raises(RecipeError, match="columnwise_source="):
        dequantizing("other")
    with pytest.raises(OperandError, match="columnwise_quantizer="):  # which has two values
        fp8core.HybridQuantizer(
            rowwise_quantizer=fp8core.MXFP8Quantizer("e4m3"), columnwise_quantizer=dequantizing()
        )
    with pytest.raises(RecipeError, match="expected one dtype"):
        fp8core.HybridQuantizer(
            rowwise_quantizer=fp8core.IdentityQuantizer(),
            columnwise_quantizer=fp8core.IdentityQuantizer(dtype=torch.bfloat16),
        )


def of_rows() -> fp8core.HybridQuantizer:
    return fp8core.HybridQuantizer(
        rowwise_quantizer=fp8core.NVFP4Quantizer(),
        columnwise_quantizer=fp8core.MXFP8Quantizer("e4m3"),
        columnwise_source="rowwise_dequantized",
    )


def test_columns_of_dequantized_rows() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    rows = fp8core.NVFP4Quantizer(columnwise=False)(x)
    columns = fp8core.MXFP8Quantizer("e4m3", rowwise=False)(rows.dequantize())
    both = of_rows()(x)
    alone = of_rows()
    alone.set_usage(rowwise=False)
    empty = of_rows().make_empty(x.shape)
    written = of_rows().update_quantized(x, empty)
    left = of_rows().update_quantized(2 * x, both.clone(), noop_flag=torch.ones(1))
    for tensor in (both, written, left, pickle.loads(pickle.dumps(of_rows()))(x)):
        assert isinstance(tensor, fp8core.HybridQuantizedTensor)
        assert [*tensor.tensors()] != []
        expected = [*rows.tensors(), *columns.tensors()]
        assert all(torch.equal(*pair) for pair in zip(tensor.tensors(), expected, strict=True))
    pairs = zip(alone(x).tensors(), columns.tensors(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


WRITES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "quantize_": lambda tensor, x: tensor.quantize_(x),
    "copy_": lambda tensor, x: tensor.copy_(x),
    "a copy of another format": lambda tensor, x: tensor.copy_(
        fp8core.Float8CurrentScalingQuantizer("e4m3", None)(x)
    ),
    "data": lambda tensor, x: setattr(tensor, "data", x),
    "add_": lambda tensor, x: tensor.zero_().add_(x),
    "mul_": lambda tensor, x: tensor.fill_(1).mul_(x),
    "normal_": lambda tensor, x: tensor.normal_(),
    "a view": lambda tensor, x: tensor.view(2, 32, 64).view(64, 64).copy_(x),
    "its own quantizer": lambda tensor, x: tensor._get_quantizer().update_quantized(x, tensor),
    "out=": lambda tensor, x: of_rows().quantize(x, out=tensor),
    "quantize_ again": lambda tensor, x: tensor.quantize_(-x).quantize_(
        2 * x, noop_flag=torch.zeros(1)
    ),
}


def saved(tensor: Any) -> Any:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


MADE: dict[str, Callable[[Any], Any]] = {
    "made": lambda tensor: tensor,
    "clone": torch.clone,
    "detach": torch.detach,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "torch.save": saved,
    "parameter": torch.nn.Parameter,
    "dtype": lambda tensor: tensor.to_dtype(torch.bfloat16),
    "make_empty": lambda tensor: of_rows().make_empty(tensor.shape),
    "constructed": lambda tensor: fp8core.HybridQuantizedTensor(**tensor.get_metadata()),
    "padded": lambda tensor: torch.nn.functional.pad(tensor, (0, 0, 0, 0)),
    "quantizer": lambda tensor: tensor._get_quantizer()(torch.zeros(64, 64)),
    "columns alone": lambda tensor: tensor.columnwise_sub_storage,
}


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("write", WRITES)
def test_every_write_makes_columns_of_dequantized_rows(write: str, made: str) -> None:
    """Which no plan says; so the tensor knows it, and what is made of it."""
    torch.manual_seed(0)
    x = torch.randn(64, 64)
    tensor = MADE[made](of_rows()(torch.randn(64, 64)))
    with torch.no_grad():
        WRITES[write](tensor, x)
    assert tensor.get_usages()["columnwise"]
    rows = tensor.rowwise_sub_storage
    if rows is None:
        x = tensor.dequantize()
        tensor.quantize_(x)
        rows = fp8core.NVFP4Quantizer(columnwise=False)(x)
    columns = fp8core.MXFP8Quantizer("e4m3", rowwise=False)(rows.dequantize())
    found = tensor.columnwise_sub_storage
    assert all(torch.equal(*pair) for pair in zip(found.tensors(), columns.tensors(), strict=True))


def dequantizing(source: str = "rowwise_dequantized") -> fp8core.HybridQuantizer:
    return fp8core.HybridQuantizer(
        rowwise_quantizer=fp8core.MXFP8Quantizer("e4m3"),
        columnwise_quantizer=fp8core.IdentityQuantizer(),
        columnwise_source=source,
    )


BESIDE: dict[str, Callable[[], fp8core.HybridQuantizer]] = {
    "rows": lambda: fp8core.HybridQuantizer(
        rowwise_quantizer=fp8core.IdentityQuantizer(),
        columnwise_quantizer=fp8core.NVFP4Quantizer(),
    ),
    "columns": lambda: dequantizing("original"),
    "columns of rows": dequantizing,
}


def expected_beside(way: str, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
    """Return the value and the quantized part of ``x``."""
    if way == "rows":
        return x, fp8core.NVFP4Quantizer(rowwise=False)(x)
    rows = fp8core.MXFP8Quantizer("e4m3", columnwise=False)(x)
    return (x if way == "columns" else rows.dequantize()), rows


def is_beside(way: str, tensor: Any, x: torch.Tensor) -> bool:
    value, part = expected_beside(way, x)
    parts = tensor.rowwise_sub_storage, tensor.columnwise_sub_storage
    held, stored = parts if way == "rows" else parts[::-1]
    pairs = [(held, value), (tensor.dequantize(), value if way == "rows" else part.dequantize())]
    pairs += zip(stored.tensors(), part.tensors(), strict=True)
    kinds = isinstance(tensor, fp8core.HybridQuantizedTensor), type(held) is torch.Tensor
    usages = tensor.get_usages() == {"rowwise": True, "columnwise": True}
    return all(kinds) and usages and all(torch.equal(*pair) for pair in pairs)


OF_A_PLAN = ("a view", "out=", "make_empty", "dtype", "padded", "columns alone", "normal_")


@pytest.mark.parametrize("way", BESIDE)
@pytest.mark.parametrize("made", [name for name in MADE if name not in OF_A_PLAN])
def test_a_tensor_holds_a_value_beside_an_operand_through_every_write(made: str, way: str) -> None:
    quantizer = BESIDE[way]()
    for write in (name for name in WRITES if name not in OF_A_PLAN):
        x = torch.randn(64, 64)
        tensor = MADE[made](quantizer(torch.randn(64, 64)))
        with torch.no_grad():
            WRITES[write](tensor, x)
        if write in ("a copy of another format", "quantize_ again"):
            x = (
                fp8core.Float8CurrentScalingQuantizer("e4m3", None)(x).dequantize()
                if "copy" in write
                else 2 * x
            )
        assert is_beside(way, tensor, x), write
    written = quantizer.update_quantized(2 * x, quantizer.make_empty((64, 64)))
    assert is_beside(way, quantizer.quantize(2 * x, out=quantizer(x)), 2 * x)
    assert is_beside(way, written, 2 * x)
    written.quantize_(x, noop_flag=torch.ones(1))
    assert is_beside(way, written, 2 * x)


@pytest.mark.parametrize("way", BESIDE)
def test_a_value_beside_an_operand_is_a_copy_of_any_shape_and_dtype(way: str) -> None:
    x = torch.randn(2, 32, 64)
    quantizer = BESIDE[way]()
    identity = quantizer.rowwise_quantizer if way == "rows" else quantizer.columnwise_quantizer
    identity.dtype = torch.bfloat16  # type: ignore[attr-defined]  # of an IdentityQuantizer
    tensor = quantizer(x)
    value = tensor.rowwise_sub_storage if way == "rows" else tensor.columnwise_sub_storage
    want = expected_beside(way, x)[0].bfloat16()
    x.zero_()
    tensor.dequantize().zero_()
    assert torch.equal(value, want)
    assert saved(tensor).get_data_tensors()[way != "rows"].equal(value)
    assert {part.device.type for part in tensor.to("meta").tensors()} == {"meta"}
    again = tensor._get_quantizer()(torch.randn(2, 32, 64))
    assert [part.dtype for part in again.tensors()] == [part.dtype for part in tensor.tensors()]
    compiled = torch.compile(lambda y: quantizer(y).dequantize(), backend="aot_eager")
    y = torch.randn(2, 32, 64)
    assert torch.equal(compiled(y), quantizer(y).dequantize())


@pytest.mark.parametrize("way", BESIDE)
def test_a_value_beside_an_operand_is_made_by_to_empty(way: str) -> None:
    """Else a module made on meta would have lost both parts for a plain parameter."""
    x, module = torch.randn(64, 64), torch.nn.Module()
    module.weight = torch.nn.Parameter(BESIDE[way]()(torch.randn(64, 64)))
    empty = copy.deepcopy(module).to("meta").to_empty(device=x.device)
    state = {"weight": BESIDE[way]()(x)}
    empty.load_state_dict(state)
    assert is_beside(way, empty.weight, x)


def test_one_number_beside_its_value() -> None:
    quantizer = fp8core.HybridQuantizer(
        rowwise_quantizer=fp8core.Float8CurrentScalingQuantizer("e4m3", None),
        columnwise_quantizer=fp8core.IdentityQuantizer(),
    )
    tensor = quantizer(torch.tensor(1.5))
    for like in (tensor.make_like(tensor), tensor.to_dtype(torch.bfloat16)):
        assert (like.shape, like.columnwise_sub_storage.item()) == ((), 1.5)


@pytest.mark.parametrize("way", BESIDE)
def test_parts_of_a_tensor_beside_its_value_are_plain(way: str) -> None:
    """Of its value where that is the rows, else of its rows."""
    tensor = BESIDE[way]()(torch.randn(64, 64))
    plain = tensor.dequantize()
    for part in (lambda t: t[:32], torch.t, lambda t: torch.cat([t, t]), lambda t: t.view(-1)):
        assert torch.equal(part(tensor), part(plain))
    tensor.update_usage(**{f"{way[:3] if way == 'rows' else 'column'}wise_usage": False})
    assert sum(tensor.get_usages().values()) == 1
    assert not isinstance(tensor, fp8core.HybridQuantizedTensor)
    assert len(tensor.tensors()) == len(expected_beside(way, plain)[1].tensors())


def test_what_holds_a_value_is_refused_where_it_would_be_lost() -> None:
    tensor = BESIDE["rows"]()(torch.randn(64, 64))
    value, part = tensor.rowwise_sub_storage, tensor.columnwise_sub_storage
    layer = fp8core.Linear(64, 64)
    layer.weight = torch.nn.Parameter(tensor)
    _, (parts, *rest) = tensor.__reduce_ex__(2)
    _, (others, *more) = fp8core.MXFP8Quantizer("e4m3")(value).__reduce_ex__(2)

    def multiply() -> None:
        with autocast(recipe=recipe.MXFP8BlockScaling()):
            layer(value)

    table: dict[str, tuple[Any, type[Exception], str]] = {
        "the value alone": (
            lambda: tensor.update_usage(columnwise_usage=False),
            OperandError,
            "what is left would be its value",
        ),
        "a weight": (multiply, OperandError, "holds a value in high precision beside an operand"),
        "a product": (
            lambda: fp8core.functional.gemm(tensor, value),
            OperandError,
            "holds no rowwise operand.*dequantize",
        ),
        "sizes of inner tensors": (
            lambda: BESIDE["rows"]().inner_tensor_specs((64, 64)),
            UnsupportedError,
            "its value has any dtype",
        ),
        "two values": (
            lambda: fp8core.HybridQuantizedTensor(rowwise_storage=value, columnwise_storage=value),
            OperandError,
            "rowwise_storage=",
        ),
        **{
            f"a value {name}": (
                lambda bad=bad: fp8core.HybridQuantizedTensor(
                    rowwise_storage=bad, columnwise_storage=part
                ),
                OperandError,
                "of one shape and device|has the value",
            )
            for name, bad in {
                "of another size": value[:3],
                "of integers": value.int(),
                "elsewhere": value.to("meta"),
                "turned": value.t(),
            }.items()
        },
        **{
            f"a file's {name}": (
                lambda stored=stored, rest=rest: _rebuild(stored, *rest),
                OperandError,
                "has the value",
            )
            for name, stored, rest in (
                ("number", [*parts[:6], 1.0], rest),
                ("other size", [*parts[:6], value[:3]], rest),
                ("memory of one element", [*parts[:6], value[:1, :1].expand(64, 64)], rest),
                ("value beside both operands", [*others, value], more),
            )
        },
    }
    assert unrefused(table) == {}


@pytest.mark.parametrize("way", BESIDE)
def test_one_orientation_of_a_quantizer_is_the_value_alone(way: str) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    value, part = expected_beside(way, x.detach())
    alone, stored = BESIDE[way](), BESIDE[way]()
    alone.set_usage(rowwise=way == "rows", columnwise=way != "rows")
    stored.set_usage(rowwise=way != "rows", columnwise=way == "rows")
    plain = alone(x)
    assert torch.equal(plain, value)
    assert plain is x or way == "columns of rows"
    plain.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(64, 64))
    assert torch.equal(alone.update_quantized(x, alone.make_empty(x.shape)), value)
    pairs = zip(stored(x).tensors(), part.tensors(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert BESIDE[way]() == BESIDE[way]()
    assert dequantizing() != dequantizing("original")


def answers(grad_output: fp8core.Quantizer, **others: fp8core.Quantizer) -> recipe.CustomRecipe:
    """A recipe of columns in high precision, which are dequantized rows but for ``others``."""

    def factory(role: recipe.QuantizerRole) -> Any:
        if role.tensor_type == "grad_output":
            return grad_output
        return others.get(role.tensor_type, dequantizing())

    return recipe.CustomRecipe(qfactory=factory)


LAYERS: dict[str, Callable[[], Any]] = {
    "linear": lambda: fp8core.Linear(64, 96),
    "mlp": lambda: fp8core.LayerNormMLP(64, 96),
    "groups": lambda: fp8core.GroupedLinear(2, 64, 96),
}


def step_of(chosen: recipe.Recipe, kind: str, *, is_stored: bool) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    with fp8core.quantized_model_init(enabled=is_stored, recipe=chosen):
        layer = LAYERS[kind]()
    x = torch.randn(64, 64, requires_grad=True)
    with autocast(recipe=chosen):
        y = layer(x, *([[32, 32]] if kind == "groups" else []))
    y.backward(torch.randn_like(y))
    return [y, x.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("is_stored", [False, True], ids=["cast", "stored"])
@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_whose_columns_are_dequantized_rows_is_that_of_the_override(
    kind: str, is_stored: bool
) -> None:
    mine = step_of(answers(fp8core.IdentityQuantizer()), kind, is_stored=is_stored)
    named = recipe.MXFP8BlockScaling(backward_override="dequantized")
    theirs = step_of(named, kind, is_stored=is_stored)
    for found, expected in zip(mine, theirs, strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


def test_a_quantized_gradient_is_multiplied_by_dequantized_rows() -> None:
    layer, x = fp8core.Linear(64, 96, bias=False), torch.randn(64, 64, requires_grad=True)
    with autocast(recipe=answers(fp8core.MXFP8Quantizer("e4m3"))):
        y = layer(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    rows = {name: dequantizing()(t.detach()) for name, t in (("x", x), ("w", layer.weight))}
    gradient = fp8core.MXFP8Quantizer("e4m3")(dy)
    turned = fp8core.MXFP8Quantizer("e4m3", rowwise=False)(dy).dequantize()
    torch.testing.assert_close(x.grad, gradient.dequantize() @ rows["w"].dequantize())
    torch.testing.assert_close(layer.weight.grad, turned.t() @ rows["x"].dequantize())


class Overriding(fp8core.HybridQuantizer):
    """One with code of its own, so that a layer calls it."""

    def quantize(self, tensor: torch.Tensor, **options: Any) -> Any:
        return super().quantize(tensor, **options)


@pytest.mark.parametrize("kind", ["linear", "mlp"])
@pytest.mark.parametrize(
    ("tensors", "way"),
    [(tensors, way) for tensors in ("input", "weight", "input weight") for way in BESIDE]
    + [("grad_output", "rows"), ("grad_output", "columns")],
)
def test_an_object_of_one_orientation_leaves_the_other_in_high_precision(
    tensors: str, way: str, kind: str
) -> None:
    """As its plan does where the layer casts by that."""
    high, low = fp8core.IdentityQuantizer(), fp8core.MXFP8Quantizer("e4m3")
    row, column = (high, low) if way == "rows" else (low, high)
    source = "rowwise_dequantized" if way == "columns of rows" else "original"
    steps = []
    for cls in (Overriding, fp8core.HybridQuantizer):
        quantizer = cls(
            rowwise_quantizer=row, columnwise_quantizer=column, columnwise_source=source
        )
        given: dict[str, Any] = {
            **dict.fromkeys(("input", "weight", "grad_output"), low),
            **dict.fromkeys(tensors.split(), quantizer),
        }
        chosen = recipe.CustomRecipe(qfactory=lambda role, given=given: given[role.tensor_type])
        steps.append(step_of(chosen, kind, is_stored=False))
    for found, expected in zip(*steps, strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    "sources", [("original", "rowwise_dequantized"), ("rowwise_dequantized", "original")]
)
def test_columns_of_other_values_than_the_recipe_s_are_not_taken(sources: tuple[str, str]) -> None:
    """Their plans are the same; gradients would be those of the other recipe."""
    quantizers = [
        fp8core.HybridQuantizer(
            rowwise_quantizer=fp8core.Float8CurrentScalingQuantizer("e4m3", None),
            columnwise_quantizer=fp8core.MXFP8Quantizer("e4m3"),
            columnwise_source=source,
        )
        for source in sources
    ]
    stored, chosen = (
        recipe.CustomRecipe(
            qfactory=lambda role, given=each: (
                fp8core.MXFP8Quantizer("e4m3") if role.tensor_type == "grad_output" else given
            )
        )
        for each in quantizers
    )
    with fp8core.quantized_model_init(recipe=stored):
        layer = fp8core.Linear(64, 96)
    x = torch.randn(64, 64, requires_grad=True)
    with (
        autocast(recipe=chosen),
        pytest.raises(OperandError, match=r"the weight is stored as .*of the dequantized rows"),
    ):
        layer(x)
    with torch.no_grad(), autocast(recipe=chosen):
        rows = layer(x)
    with torch.no_grad(), autocast(recipe=stored):
        assert torch.equal(rows, layer(x))
    plain, gradients = fp8core.Linear(64, 96), []
    quantized = quantizers[0](x.detach())
    for given in (quantized, quantized.dequantize()):
        with autocast(recipe=chosen):
            y = plain(given)
        gradients.append(torch.autograd.grad(y.square().sum(), plain.weight)[0])
    assert torch.equal(*gradients)


def test_a_stored_weight_is_dequantized_where_backward_takes_high_precision() -> None:
    """There is no other value of it; with rows alone, as where a recipe has backward_override."""
    named, results = recipe.MXFP8BlockScaling(backward_override="high_precision"), []
    mine = recipe.CustomRecipe(
        qfactory=lambda role: (
            fp8core.IdentityQuantizer()
            if role.tensor_type == "grad_output"
            else dequantizing("original")
        )
    )
    for chosen in (named, mine):
        results.append(step_of(chosen, "linear", is_stored=True))
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


def test_columns_of_one_tensor_alone_or_of_the_gradient_are_refused() -> None:
    high = fp8core.IdentityQuantizer()
    layer, x = fp8core.Linear(64, 96), torch.randn(64, 64)
    for chosen in (answers(high, input=dequantizing("original")), answers(dequantizing())):
        with (
            autocast(recipe=chosen),
            pytest.raises(RecipeError, match="expected it of input and weight alike"),
        ):
            layer(x)
    with autocast(recipe=answers(high, input=high)):  # which has no rows to take
        layer(x).sum().backward()


def test_identities_make_and_write_plain_tensors() -> None:
    x = torch.randn(4, 8)
    both = fp8core.HybridQuantizer(
        rowwise_quantizer=fp8core.IdentityQuantizer(),
        columnwise_quantizer=fp8core.IdentityQuantizer(),
    )
    for quantizer in (fp8core.IdentityQuantizer(dtype=torch.bfloat16), both):
        empty = quantizer.make_empty(x.shape, dtype=torch.bfloat16, requires_grad=True)
        assert (type(empty), empty.dtype, empty.requires_grad) == (
            torch.Tensor,
            torch.bfloat16,
            True,
        )
        assert not empty.any()
        assert quantizer.update_quantized(x, empty) is empty
        quantizer.update_quantized(2 * x, empty, noop_flag=torch.ones(1))
        assert torch.equal(empty, x.bfloat16())
        with pytest.raises(OperandError, match=r"\[4, 8\] into \[8, 4\]; expected"):
            quantizer.update_quantized(x, empty.t())


def rows_of_the_weight(role: recipe.QuantizerRole) -> Any:
    return of_rows() if role.tensor_type == "weight" else fp8core.MXFP8Quantizer("e4m3")


def has_columns_of_rows(weight: Any) -> bool:
    columns = fp8core.MXFP8Quantizer("e4m3", rowwise=False)(weight.rowwise_sub_storage.dequantize())
    mine = weight.columnwise_sub_storage.tensors()
    return all(torch.equal(*pair) for pair in zip(mine, columns.tensors(), strict=True))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_weight_stored_with_columns_of_its_rows_is_that_which_a_layer_casts(kind: str) -> None:
    chosen = recipe.CustomRecipe(qfactory=rows_of_the_weight)
    pairs = zip(
        step_of(chosen, kind, is_stored=True), step_of(chosen, kind, is_stored=False), strict=True
    )
    for mine, theirs in pairs:
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_weight_that_forward_reads_in_high_precision_stays_a_plain_parameter(kind: str) -> None:
    def factory(role: recipe.QuantizerRole) -> Any:
        if role.tensor_type == "grad_output":
            return fp8core.MXFP8Quantizer("e4m3")
        return BESIDE["rows"]()

    chosen = recipe.CustomRecipe(qfactory=factory)
    pairs = zip(
        step_of(chosen, kind, is_stored=True), step_of(chosen, kind, is_stored=False), strict=True
    )
    for mine, theirs in pairs:
        assert mine is not None
        assert theirs is not None
        assert torch.equal(mine, theirs)


def test_a_stored_weight_keeps_columns_of_its_rows() -> None:
    chosen = recipe.CustomRecipe(qfactory=rows_of_the_weight)
    with fp8core.quantized_model_init(recipe=chosen):
        layer, loaded = fp8core.Linear(64, 96), fp8core.Linear(64, 96, device="meta")
    with autocast(recipe=chosen):
        layer(torch.randn(32, 64)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1, foreach=False).step()
    assert has_columns_of_rows(layer.weight)
    loaded.reset_parameters()
    loaded.load_state_dict(saved(layer.state_dict()))
    masters = fp8core.MasterWeights(loaded)
    optimizer = torch.optim.AdamW(masters.parameters(), lr=0.1)
    masters.attach(optimizer)
    for stepped in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), loaded):
        assert has_columns_of_rows(stepped.weight)
        with autocast(recipe=chosen):
            stepped(torch.randn(32, 64)).sum().backward()
        if stepped is loaded:
            optimizer.step()
        else:
            torch.optim.SGD(stepped.parameters(), lr=0.1, foreach=False).step()
        assert has_columns_of_rows(stepped.weight)
        assert not torch.equal(stepped.weight, layer.weight)


def test_columns_of_dequantized_rows_of_the_weights_of_groups() -> None:
    """Each is cast by itself, as that of a layer."""
    chosen = recipe.CustomRecipe(qfactory=rows_of_the_weight)
    groups = fp8core.GroupedLinear(2, 64, 96, bias=False)
    x, dy = torch.randn(64, 64, requires_grad=True), torch.randn(64, 96)
    with autocast(recipe=chosen):
        y = groups(x, [32, 32])
    y.backward(dy)
    for at, rows in enumerate((slice(0, 32), slice(32, 64))):
        weight = getattr(groups, f"weight{at}")
        layer, part = fp8core.Linear(64, 96, bias=False), x.detach()[rows].requires_grad_()
        layer.load_state_dict({"weight": weight})
        with autocast(recipe=chosen):
            mine = layer(part)
        mine.backward(dy[rows])
        assert x.grad is not None
        torch.testing.assert_close(y[rows], mine)
        torch.testing.assert_close(x.grad[rows], part.grad)
        torch.testing.assert_close(weight.grad, layer.weight.grad)
    whole = recipe.CustomRecipe(qfactory=lambda role: of_rows())
    with (
        autocast(recipe=whole),
        pytest.raises(UnsupportedError, match="object for input, grad_output of groups"),
    ):
        groups(x, [32, 32])


def test_a_layer_trains_by_columns_of_dequantized_rows() -> None:
    torch.manual_seed(0)
    layer = fp8core.Linear(64, 96, bias=False)
    x = torch.randn(32, 64, requires_grad=True)
    dy = torch.randn(32, 96)

    def factory(role: recipe.QuantizerRole) -> Any:
        if role.tensor_type == "grad_output":
            return fp8core.MXFP8Quantizer("e4m3")
        return of_rows()

    with autocast(recipe=recipe.CustomRecipe(qfactory=factory)):
        y = layer(x)
    y.backward(dy)
    quantized = {name: of_rows()(t.detach()) for name, t in (("x", x), ("w", layer.weight))}
    rows = {name: t.rowwise_sub_storage.dequantize() for name, t in quantized.items()}
    columns = {name: t.columnwise_sub_storage.dequantize() for name, t in quantized.items()}
    gradient = fp8core.MXFP8Quantizer("e4m3")(dy)
    turned = fp8core.MXFP8Quantizer("e4m3", rowwise=False)(dy).dequantize()
    assert x.grad is not None
    assert layer.weight.grad is not None
    torch.testing.assert_close(y, rows["x"] @ rows["w"].t())
    torch.testing.assert_close(x.grad, gradient.dequantize() @ columns["w"])
    torch.testing.assert_close(layer.weight.grad, turned.t() @ columns["x"])


def test_two_identities_are_high_precision() -> None:
    def identities() -> fp8core.HybridQuantizer:
        return fp8core.HybridQuantizer(
            rowwise_quantizer=fp8core.IdentityQuantizer(),
            columnwise_quantizer=fp8core.IdentityQuantizer(),
        )

    x, layer = torch.randn(64, 64), fp8core.Linear(64, 64)
    assert identities()(x) is x
    assert identities().quantize(x) is x
    with autocast(recipe=recipe.CustomRecipe(qfactory=lambda role: identities())):
        y = layer(x)
    assert torch.equal(y, layer(x))


def test_a_request_is_of_the_class_of_requests() -> None:
    assert isinstance(fp8core.DelayedScalingRequest(), fp8core.QuantizerRequest)
    assert fp8core.QuantizerRole is recipe.QuantizerRole
