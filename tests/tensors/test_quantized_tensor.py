"""QuantizedTensor as torch sees it: operands move bit for bit, the rest sees values."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe, reporting
from fp8core.recipe import Recipe
from fp8core.recipe.plan import LayerRole
from fp8core.tensors import operators
from tests.device import DEVICE
from tests.pairs import turns

RECIPES: dict[str, Recipe] = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "block_1d": recipe.Float8BlockScaling(w_block_scaling_dim=1),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
NAMES = {
    "delayed": fp8core.Float8Tensor,
    "current": fp8core.Float8Tensor,
    "block": fp8core.Float8BlockwiseQTensor,
    "block_1d": fp8core.Float8BlockwiseQTensor,
    "mxfp8": fp8core.MXFP8Tensor,
    "nvfp4": fp8core.NVFP4Tensor,
}
N, K = 96, 160


def value(n: int = N, k: int = K, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(n, k) * torch.logspace(-2, 2, n)[:, None]).to(dtype)


def quantized(name: str, x: torch.Tensor | None = None) -> fp8core.QuantizedTensor:
    x = value() if x is None else x
    plan = RECIPES[name].plan(LayerRole(), x.dtype).weight
    return fp8core.QuantizedTensor.quantize(x, plan)


def parameter(name: str) -> torch.nn.Parameter:
    return torch.nn.Parameter(quantized(name))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    assert isinstance(a, fp8core.QuantizedTensor)
    assert isinstance(b, fp8core.QuantizedTensor)
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return a.plan == b.plan and a.dtype == b.dtype and all(torch.equal(*pair) for pair in pairs)


# A stored tensor with delayed scaling is one with current scaling.
@pytest.fixture(params=["current", "rowwise", "block_1d", "mxfp8", "nvfp4"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("name", RECIPES)
def test_goes_by_the_names_of_its_format_and_no_other(name: str) -> None:
    found = {cls for cls in NAMES.values() if isinstance(quantized(name), cls)}
    assert found == ({NAMES[name]} if name in NAMES else set())


@pytest.mark.parametrize(
    ("name", "expected"),
    {
        "current": N * K + 4,
        "block": N * K + 1 * 2 * 4,
        "rowwise": 2 * N * K + (N + K) * 4,
        "mxfp8": 2 * (N * K + N * K // 32),
        "nvfp4": 2 * (N * K // 2 + N * K // 256 + 4),
    }.items(),
)
def test_nbytes_counts_codes_and_scales(name: str, expected: int) -> None:
    assert quantized(name).nbytes == expected


@pytest.mark.parametrize("name", ["block", "block_1d", "mxfp8"])
def test_writing_its_own_values_changes_none_with_power_of_two_scales(name: str) -> None:
    tensor = quantized(name, value(dtype=torch.float32))
    before = tensor.dequantize()
    tensor.copy_(before)
    assert torch.equal(tensor.dequantize(), before)


@pytest.mark.parametrize("name", ["current", "rowwise", "nvfp4"])
def test_writing_its_own_values_changes_no_code(name: str) -> None:
    # target / amax of the values may be an ulp from the scale that gave them: codes stay
    tensor = quantized(name, value(dtype=torch.float32))
    before, codes = tensor.dequantize(), tensor.operands.rowwise.data.clone()
    tensor.copy_(before)
    assert torch.equal(tensor.operands.rowwise.data, codes)
    torch.testing.assert_close(tensor.dequantize(), before, rtol=2**-22, atol=0)


def test_save_and_weights_only_load_is_bit_exact(name: str) -> None:
    own, file = parameter(name), io.BytesIO()
    torch.save({"weight": own, "detached": own.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert same(loaded["weight"], own)
    assert same(loaded["detached"], own)
    kinds = [isinstance(loaded[key], torch.nn.Parameter) for key in ("weight", "detached")]
    assert kinds == [True, False]


def test_clone_and_deepcopy_share_nothing(name: str) -> None:
    own = parameter(name)
    cloned, copied = own.detach().clone(), copy.deepcopy(own)
    assert isinstance(copied, torch.nn.Parameter)
    for other in (cloned, copied):
        assert same(other, own)
    with torch.no_grad():
        own.zero_()
    for other in (cloned, copied):
        assert not same(other, own)


@pytest.mark.parametrize("alias", ["detach", "data"])
def test_detach_and_data_share_the_operands(alias: str) -> None:
    own = parameter("current")
    (own.data if alias == "data" else own.detach()).zero_()
    assert not own.dequantize().any()


def test_assigning_data_writes_the_value() -> None:
    own, other = parameter("mxfp8"), parameter("mxfp8")
    own.data = other.data
    assert same(own, other)


def test_copies_from_the_same_plan_and_from_float32(name: str) -> None:
    source, target = quantized(name), quantized(name, torch.zeros(N, K, dtype=torch.bfloat16))
    target.copy_(source)
    assert same(target, source)
    x = value(dtype=torch.float32)
    target.copy_(x)  # rounds once
    expected = quantized(name, x)
    pairs = zip(target.tensors(), expected.tensors(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@torch.no_grad()
def test_in_place_arithmetic_on_a_parameter_quantizes_the_result(name: str) -> None:
    own = parameter(name)
    expected = quantized(name, own.dequantize() + 1)
    assert own.add_(1) is own
    assert same(own, expected)


ARITHMETIC: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "add_": lambda tensor: tensor.add_(0.25),
    "add_ of a tensor": lambda tensor: tensor.add_(torch.ones(N, K), alpha=0.5),
    "sub_": lambda tensor: tensor.sub_(1),
    "mul_": lambda tensor: tensor.mul_(0.75),
    "+=": lambda tensor: tensor.__iadd__(1),
    "lerp_": lambda tensor: tensor.lerp_(torch.zeros(N, K, dtype=torch.bfloat16), 0.5),
}


@pytest.mark.parametrize(("update", "name"), turns(ARITHMETIC, RECIPES))
def test_in_place_arithmetic_quantizes_the_result_and_warns(
    update: str, name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_logged", set())
    tensor = quantized(name)
    expected = quantized(name, ARITHMETIC[update](tensor.dequantize()))
    with caplog.at_level("WARNING", logger="fp8core"):
        assert ARITHMETIC[update](tensor) is tensor
    assert same(tensor, expected)
    assert "less than half a unit is lost" in caplog.text


UPDATES: dict[str, Callable[[torch.Tensor], object]] = {
    "clamp_": lambda tensor: tensor.clamp_(0, 1),
    "masked_fill_": lambda tensor: tensor.masked_fill_(torch.ones(N, K, dtype=torch.bool), 0),
    "index_put_": lambda tensor: tensor.__setitem__(torch.tensor([0, 2]), 0.0),
    "out=": lambda tensor: torch.add(value(), value(), out=tensor),
}


@pytest.mark.parametrize(("update", "name"), turns(UPDATES, RECIPES))
def test_in_place_arithmetic_that_would_lose_precision_is_refused(update: str, name: str) -> None:
    tensor = quantized(name)
    before = tensor.clone()
    with pytest.raises(fp8core.UnsupportedError, match=r"copy_\(x\)"):
        UPDATES[update](tensor)
    assert same(tensor, before)


def test_values_can_be_set(name: str) -> None:
    tensor = quantized(name)
    for write in (torch.nn.init.normal_, torch.nn.init.ones_, torch.Tensor.zero_):
        before = tensor.clone()
        write(tensor)
        assert not same(tensor, before)


def test_a_write_bumps_the_version() -> None:
    tensor = quantized("current")
    before = tensor._version
    tensor.copy_(value())
    assert tensor._version > before


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "select": lambda tensor: tensor[0].zero_(),
    "transpose": lambda tensor: tensor.t().copy_(torch.zeros(K, N)),
    "chunk": lambda tensor: tensor.chunk(2)[1].fill_(0),
    "view_of_view": lambda tensor: tensor[:4][0].zero_(),
    "setitem": lambda tensor: tensor.__setitem__(0, 1.0),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_a_view_is_refused(write: str) -> None:
    tensor = quantized("current")
    with pytest.raises(fp8core.UnsupportedError, match="view of a QuantizedTensor"):
        WRITES[write](tensor)


def test_a_view_reads_the_values() -> None:
    tensor = quantized("current")
    assert torch.equal(tensor.t() @ tensor, tensor.dequantize().t() @ tensor.dequantize())


def test_the_gradient_passes_dequantize_unchanged() -> None:
    for dtype in (None, torch.float32):
        own, grad = parameter("mxfp8"), torch.randn(N, K, dtype=torch.bfloat16)
        out = own.dequantize(dtype)  # type: ignore[attr-defined]
        out.backward(grad.to(out.dtype))
        assert type(own.grad) is torch.Tensor
        assert torch.equal(own.grad, grad)


def test_torch_functions_differentiate_through_it() -> None:
    own, x = parameter("current"), torch.randn(4, K, dtype=torch.bfloat16)
    torch.nn.functional.linear(x, own).sum().backward()
    plain = own.dequantize().detach().requires_grad_()  # type: ignore[attr-defined]
    torch.nn.functional.linear(x, plain).sum().backward()
    assert torch.equal(own.grad, plain.grad)


@pytest.mark.parametrize("make", [torch.zeros_like, torch.empty_like, torch.randn_like])
def test_like_functions_give_plain_tensors(make: object) -> None:
    made = make(quantized("current"))  # type: ignore[operator]
    assert (type(made), made.dtype, made.shape) == (torch.Tensor, torch.bfloat16, (N, K))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_float_is_a_plain_float32_copy(dtype: torch.dtype) -> None:
    tensor = quantized("current", value(dtype=dtype))
    assert type(tensor.float()) is torch.Tensor
    assert tensor.float().dtype == torch.float32


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int32]


@pytest.mark.parametrize(
    ("name", "nominal", "dtype"),
    [*turns(["current", "block"], DTYPES[:3], DTYPES), *turns(RECIPES, DTYPES[1:3], DTYPES[:4])],
)
def test_a_conversion_rounds_the_stored_values_once(
    name: str, nominal: torch.dtype, dtype: torch.dtype
) -> None:
    tensor = quantized(name, value(dtype=nominal))
    wanted = tensor.dequantize(torch.float32).to(dtype)
    for made in (
        tensor.to(dtype),
        tensor.to(dtype=dtype),
        tensor.to(DEVICE, dtype),
        tensor.to(DEVICE, dtype, False, copy=True),
        tensor.to(wanted),
        tensor.to(tensor=wanted),
        tensor.type(dtype),
        tensor.type_as(wanted),
    ):
        assert type(made) is torch.Tensor
        assert (made.dtype, torch.equal(made, wanted)) == (dtype, True)


@pytest.mark.parametrize(
    ("method", "nominal"), turns(["float", "bfloat16", "half", "double"], DTYPES[:3])
)
def test_a_method_called_like_a_dtype_rounds_once(nominal: torch.dtype, method: str) -> None:
    tensor = quantized("current", value(dtype=nominal))
    made = getattr(tensor, method)()
    assert type(made) is torch.Tensor
    assert torch.equal(made, getattr(tensor.dequantize(torch.float32), method)())


def test_a_move_stays_quantized(name: str) -> None:
    tensor = quantized(name)
    assert tensor.to(DEVICE) is tensor
    assert tensor.to(device=DEVICE, dtype=None) is tensor
    assert same(tensor.to(DEVICE, copy=True), tensor)
    assert isinstance(tensor.to("meta"), fp8core.QuantizedTensor)
    assert tensor.type() == torch.empty(0, dtype=torch.bfloat16).type()


def test_a_gradient_passes_a_conversion_to_the_nominal_dtype() -> None:
    weight = torch.nn.Parameter(quantized("current"))
    weight.to(torch.bfloat16).sum().backward()
    assert torch.equal(weight.grad, torch.ones(N, K, dtype=torch.bfloat16))


def test_dequantize_to_float32_is_not_rounded_to_the_nominal_dtype() -> None:
    tensor = quantized("current")
    exact = tensor._rowwise_data.view(torch.float8_e4m3fn).float() * tensor._rowwise_scale_inv
    assert torch.equal(tensor.dequantize(torch.float32), exact)


def test_padding_equals_quantizing_the_padded_value(name: str) -> None:
    x, amount = value(), (0, 64, 0, 32)
    padded = torch.nn.functional.pad(quantized(name, x), amount)
    expected = quantized(name, torch.nn.functional.pad(x, amount))
    assert torch.equal(padded.dequantize(), expected.dequantize())
    codes = [
        (one.operands.columnwise.data, one.operands.rowwise.data) for one in (padded, expected)
    ]
    assert all(torch.equal(a, b) for a, b in zip(*codes, strict=True))


@pytest.mark.parametrize(("name", "size"), [("mxfp8", (96, 80)), ("nvfp4", (24, 64))])
def test_sizes_that_blocks_do_not_divide_are_refused(name: str, size: tuple[int, int]) -> None:
    with pytest.raises(fp8core.UnsupportedError, match="multiples of"):
        quantized(name, value(*size))


def test_a_vector_is_refused() -> None:
    plan = RECIPES["current"].plan(LayerRole(), torch.float32).weight
    with pytest.raises(fp8core.OperandError, match="expected a matrix"):
        fp8core.QuantizedTensor.quantize(torch.zeros(8), plan)


def test_flatten_and_unflatten_is_the_same_tensor(name: str) -> None:
    tensor = quantized(name)
    names, context = tensor.__tensor_flatten__()
    inner = {part: getattr(tensor, part) for part in names}
    made = fp8core.QuantizedTensor.__tensor_unflatten__(inner, context, None, None)
    assert same(made, tensor)


def test_a_file_holds_nothing_but_tensors_and_plain_values(tmp_path: Path) -> None:
    torch.save(quantized("nvfp4"), tmp_path / "file")
    found = torch.serialization.get_unsafe_globals_in_checkpoint(tmp_path / "file")
    assert found == []


def test_assigning_data_of_another_shape_is_refused() -> None:
    with pytest.raises(fp8core.OperandError, match="cannot become"):
        parameter("current").data = torch.zeros(())


def test_its_values_are_listed_copied_and_multiplied(name: str) -> None:
    tensor, x, plain = quantized(name), torch.randn(N, K), torch.empty(N, K)
    plain.copy_(tensor)
    assert torch.equal(plain, tensor.float())
    assert tensor.tolist() == tensor.dequantize().tolist()
    assert torch.equal(tensor * x, tensor.dequantize() * x)
    assert torch.equal(x * tensor, x * tensor.dequantize())
    assert torch.equal(tensor * tensor, tensor.dequantize() * tensor.dequantize())


def test_a_change_of_shape_in_place_is_refused(name: str) -> None:
    tensor = quantized(name, value(128, 128))
    before = tensor.clone()
    for change in ("t_", "squeeze_"):
        with pytest.raises(fp8core.UnsupportedError, match="changes the shape"):
            getattr(tensor, change)()
        assert same(tensor, before)


def test_arrays_of_other_libraries_are_refused(name: str) -> None:
    for tensor in (quantized(name), quantized(name).t()):
        with pytest.raises(fp8core.UnsupportedError, match="DLPack"):
            torch.from_dlpack(tensor)


def test_shared_memory_is_seen(name: str) -> None:
    tensor = quantized(name)
    assert tensor.is_shared() == torch.empty(0).is_shared()  # as all memory of a GPU is
    assert tensor.share_memory_().is_shared()


def test_a_saved_view_stays_a_view_for_reading(tmp_path: Path) -> None:
    tensor = fp8core.Float8CurrentScalingQuantizer("e4m3", DEVICE)(torch.randn(64, 64))
    torch.save({"part": tensor[:32], "whole": tensor}, tmp_path / "file")
    loaded = torch.load(tmp_path / "file", weights_only=True)
    assert isinstance(loaded["part"], fp8core.QuantizedTensor)
    with pytest.raises(fp8core.UnsupportedError, match="would change the rest"):
        loaded["part"].zero_()
    assert torch.equal(loaded["part"].dequantize(), tensor[:32].dequantize())
    assert torch.equal(loaded["whole"].dequantize(), tensor.dequantize())


def test_a_stream_is_recorded_for_every_operand(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, recorded = quantized(name), []

    def record(func: object, part: torch.Tensor, stream: object) -> None:
        recorded.append(part.data_ptr())

    operator = torch.ops.aten.record_stream.default
    monkeypatch.setattr(type(operator), "__call__", record)
    tensor.__torch_dispatch__(operator, (), (tensor, object()))
    assert recorded == [part.data_ptr() for part in tensor.tensors()]


@pytest.mark.parametrize("name", ["current", "block", "rowwise", "mxfp8"])
def test_values_of_views_reach_a_cast_with_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As DistributedDataParallel hands them over, where a flat tensor of the weights was sent."""
    target, source = quantized(name), quantized(name, value() * 2)
    cast = operators.make_operands

    def checked(value: torch.Tensor, *given: Any, **named: Any) -> Any:
        assert type(value) is torch.Tensor
        return cast(value, *given, **named)

    monkeypatch.setattr(operators, "make_operands", checked)
    for view in (source.t().t(), source.view(-1)[: source.numel()].view(source.shape), source[:]):
        target.copy_(view)
        assert torch.equal(target.dequantize(), quantized(name, source.dequantize()).dequantize())
