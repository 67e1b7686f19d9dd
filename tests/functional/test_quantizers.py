"""Quantizers: their verbs, Transformer Engine's arguments, and golden vectors through them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import fp8core
from fp8core import OperandError, QuantizedTensor, RecipeError, UnsupportedError
from fp8core.quantizers import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
    Quantizer,
)
from tests.device import DEVICE
from tests.refusals import unrefused

E4M3 = DType.kFloat8E4M3
GOLDEN = Path(__file__).parents[1] / "golden"
Make = Callable[[], Quantizer]


def delayed(scale: float = 2.0) -> Float8Quantizer:
    return Float8Quantizer(torch.tensor([scale]), torch.zeros(1), E4M3)


MAKERS: dict[str, Make] = {
    "delayed": delayed,
    "current": lambda: Float8CurrentScalingQuantizer(E4M3, DEVICE),
    "current_pow2": lambda: Float8CurrentScalingQuantizer(E4M3, DEVICE, force_pow_2_scales=True),
    "block1d": lambda: Float8BlockQuantizer(
        E4M3, rowwise=True, columnwise=True, block_scaling_dim=1
    ),
    "block2d": lambda: Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
    "mxfp8": lambda: MXFP8Quantizer(E4M3),
    "mxfp8_2d": lambda: MXFP8Quantizer(E4M3, with_2d_quantization=True),
    "nvfp4": NVFP4Quantizer,
    "nvfp4_2d": lambda: NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4_rht": lambda: NVFP4Quantizer(with_rht=True, with_post_rht_amax=True),
    "nvfp4_rht_unsigned": lambda: NVFP4Quantizer(with_rht=True, with_random_sign_mask=False),
    "nvfp4_stochastic": lambda: NVFP4Quantizer(stochastic_rounding=True),
    "nvfp4_row": lambda: NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4_4over6": lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="mse"),
    "nvfp4_256": lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
}


@pytest.fixture(params=MAKERS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def quantizer(name: str) -> Quantizer:
    return MAKERS[name]()


def value(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.bfloat16)


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return a.shape == b.shape and a.plan == b.plan and all(torch.equal(*p) for p in pairs)


def test_a_call_makes_the_orientations_that_are_used(quantizer: Quantizer) -> None:
    x = value(2, 64, 256)
    for rowwise, columnwise in ((True, False), (False, True), (True, True)):
        quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
        made = quantizer(x)
        assert isinstance(made, QuantizedTensor)
        assert made.get_usages() == quantizer.get_usages()
        assert (made.shape, made.dtype) == (x.shape, x.dtype)
        error = (made.dequantize(torch.float32) - x.float()).norm() / x.float().norm()
        assert error < 0.2
    quantizer.set_usage(rowwise=False, columnwise=False)
    for call in (lambda: quantizer(value(32, 32)), lambda: quantizer.make_empty((32, 32))):
        with pytest.raises(OperandError, match="set_usage"):
            call()


def test_update_quantized_writes_what_a_call_makes(name: str, quantizer: Quantizer) -> None:
    x, out = value(64, 256), quantizer.make_empty((64, 256), dtype=torch.bfloat16, device=DEVICE)
    assert not out.dequantize().any()
    torch.manual_seed(3)
    assert quantizer.update_quantized(x, out) is out
    torch.manual_seed(3)
    assert same(out, quantizer(x))
    assert quantizer.quantize(2 * x, out=out) is out
    assert out.dequantize().abs().sum() > 1.5 * x.abs().sum()
    before = out.clone()
    quantizer.update_quantized(x, out, noop_flag=torch.ones(1))
    assert same(out, before)


def test_no_amax_is_recorded_of_what_a_flag_leaves_out() -> None:
    quantizer = Float8Quantizer(torch.ones(1), torch.full((1,), 0.5), E4M3)
    out = quantizer.make_empty((16, 16), device=DEVICE)
    for set_ in (1.0, 0.0):
        flag = torch.tensor([set_])
        quantizer.update_quantized(torch.full((16, 16), 7.0), out, noop_flag=flag)
        out.quantize_(torch.full((16, 16), 7.0), noop_flag=flag)
        assert quantizer.amax.item() == (0.5 if set_ else 7.0)


@pytest.mark.parametrize("flag", [1, None, [1.0], torch.ones(3), torch.ones(0)], ids=str)
def test_a_flag_that_is_no_number_is_refused_before_anything_is_written(flag: Any) -> None:
    quantizer, x = MXFP8Quantizer(E4M3), torch.ones(32, 32, device=DEVICE)
    out = quantizer(x)
    for write in (
        out.quantize_,
        lambda value, **flag: quantizer.update_quantized(value, out, **flag),
    ):
        if flag is None:
            write(x, noop_flag=None)
            continue
        with pytest.raises(OperandError, match=r"noop_flag is .*; expected one number on"):
            write(2 * x, noop_flag=flag)
    assert same(out, quantizer(x))


def test_update_quantized_counts_a_write() -> None:
    quantizer = MXFP8Quantizer(E4M3)
    out = quantizer.make_empty((32, 32), device=DEVICE)
    before = out._version
    quantizer.update_quantized(torch.randn(32, 32), out)
    assert out._version > before


@pytest.mark.parametrize("shape", [(0, 256), (256,), (1, 256), (2, 3, 16, 256)])
def test_any_number_of_rows_rowwise(shape: tuple[int, ...]) -> None:
    for make in MAKERS.values():
        quantizer = make()
        quantizer.set_usage(columnwise=False)
        if quantizer.is_quantizable(torch.empty(shape)):
            assert quantizer(torch.randn(shape)).dequantize().shape == shape
            assert quantizer.make_empty(shape, device=DEVICE).shape == shape


@pytest.mark.parametrize("name", ["delayed", "current", "block2d"])
def test_a_tensor_of_no_dimension_is_a_row_of_one_element(quantizer: Quantizer) -> None:
    x = torch.tensor(3.1)
    made, row = quantizer(x), quantizer(x.view(1))
    assert made.shape == ()
    assert torch.equal(made.dequantize(), row.dequantize()[0])
    assert same(made.view(1), row)
    assert same(made.flatten(), row)
    assert same(copy.deepcopy(made), made)
    empty = quantizer.make_empty([], dtype=torch.float32)
    assert same(quantizer.update_quantized(x, empty), made)


def test_the_gradient_passes_quantize_and_dequantize_unchanged(quantizer: Quantizer) -> None:
    x = value(64, 256).requires_grad_()
    made = quantizer(x)
    assert made.requires_grad
    grad = value(64, 256)
    made.dequantize().backward(grad)
    assert torch.equal(x.grad, grad)
    with torch.no_grad():
        assert not quantizer(x).requires_grad


def test_a_quantized_tensor_is_quantized_by_its_values() -> None:
    x = value(64, 256)
    for make in MAKERS.values():
        quantizer = make()
        first = MXFP8Quantizer(E4M3)(x)
        torch.manual_seed(0)
        made = quantizer(first)
        torch.manual_seed(0)
        assert same(made, quantizer(first.dequantize()))


def test_equal_quantizers_are_equal_and_usages_are_their_own(name: str) -> None:
    one, other = MAKERS[name](), MAKERS[name]()
    if name == "delayed":
        assert one != other
        return
    assert one == other
    assert hash(one) == hash(other)
    twin = one.copy()
    twin.set_usage(columnwise=False)
    assert one.columnwise_usage
    assert one != twin
    assert pickle.loads(pickle.dumps(one)) == one
    assert copy.deepcopy(one) == one


@pytest.mark.parametrize("room", ["quantizers", "functional.quantizers"])
@pytest.mark.parametrize(
    ("module", "quantizer"),
    [
        ("float8", fp8core.MXFP8Quantizer("e4m3")),
        ("nvfp4", fp8core.NVFP4Quantizer("e2m1")),
        ("composed", fp8core.IdentityQuantizer()),
        ("dtype", fp8core.DType.kFloat8E5M2),
    ],
)
def test_a_pickle_of_an_earlier_module_is_loaded(module: str, quantizer: Any, room: str) -> None:
    stored = pickle.dumps(quantizer, protocol=0)  # which writes names without their lengths
    current, earlier = type(quantizer).__module__, f"fp8core.{room}.{module}"
    assert current != earlier
    assert pickle.loads(stored.replace(current.encode(), earlier.encode())) == quantizer


def test_a_quantizer_of_another_recipe_is_refused() -> None:
    x = value(64, 256)
    for name, make in MAKERS.items():
        out = make().make_empty((64, 256), device=DEVICE)
        for other_name, other in MAKERS.items():
            if make().plan == other().plan:
                continue
            with pytest.raises(OperandError, match="copy_"):
                other().update_quantized(x, out)
            assert not out.dequantize().any(), (name, other_name)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "integers": (lambda: MXFP8Quantizer(E4M3)(torch.zeros(32, 32).int()), OperandError, "int32"),
    "float64": (
        lambda: MXFP8Quantizer(E4M3)(torch.zeros(32, 32).double()),
        OperandError,
        "float64",
    ),
    "a number": (lambda: MXFP8Quantizer(E4M3)(3.0), OperandError, "float"),  # type: ignore[arg-type]
    "no dimension": (
        lambda: MXFP8Quantizer(E4M3)(torch.zeros(())),
        UnsupportedError,
        "columns of 32",
    ),
    "partial blocks": (
        lambda: MXFP8Quantizer(E4M3)(torch.zeros(32, 40)),
        UnsupportedError,
        "its columns of 32",
    ),
    "partial blocks of columns": (
        lambda: MXFP8Quantizer(E4M3)(torch.zeros(40, 32)),
        UnsupportedError,
        r"set_usage\(columnwise=False\)",
    ),
    "another shape": (
        lambda: MXFP8Quantizer(E4M3).update_quantized(
            torch.zeros(32, 32), MXFP8Quantizer(E4M3).make_empty((64, 32), device=DEVICE)
        ),
        OperandError,
        r"\[32, 32\] into \[64, 32\]",
    ),
    "a plain tensor to write": (
        lambda: MXFP8Quantizer(E4M3).update_quantized(
            torch.zeros(32, 32),
            torch.zeros(32, 32),  # type: ignore[arg-type]
        ),
        OperandError,
        "make_empty",
    ),
    "sparse": (
        lambda: MXFP8Quantizer(E4M3)(torch.zeros(32, 32).to_sparse()),
        OperandError,
        "to_dense",
    ),
    "a format of 4 bits": (lambda: MXFP8Quantizer(DType.kFloat4E2M1), RecipeError, "8 bits"),
    "no format": (lambda: MXFP8Quantizer(DType.kFloat32), RecipeError, "kFloat8E4M3"),
    "a misspelt format": (lambda: MXFP8Quantizer("e4m4"), RecipeError, "e4m3"),
    "8 bits in NVFP4": (lambda: NVFP4Quantizer(E4M3), RecipeError, "kFloat4E2M1"),
    "another maximum": (
        lambda: NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=300),
        RecipeError,
        "448 or 256",
    ),
    "another error": (lambda: NVFP4Quantizer(nvfp4_4over6_err_mode="L1"), RecipeError, "MAE"),
    "rows of squares": (
        lambda: NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True),
        RecipeError,
        "row_scaled",
    ),
    "stochastic choice": (
        lambda: NVFP4Quantizer(nvfp4_use_4over6=True, stochastic_rounding=True),
        RecipeError,
        "stochastic",
    ),
    "three dimensions of blocks": (
        lambda: Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=3),
        RecipeError,
        "expected 1 or 2",
    ),
    "a scale in bfloat16": (
        lambda: Float8Quantizer(torch.ones(1).bfloat16(), torch.zeros(1), E4M3),
        OperandError,
        "float32",
    ),
    "two scales": (
        lambda: Float8Quantizer(torch.ones(2), torch.zeros(1), E4M3),
        OperandError,
        "one entry",
    ),
    "a scale elsewhere": (
        lambda: delayed()(torch.zeros(4, 4, device="meta")),
        OperandError,
        "nothing is moved silently",
    ),
    "an amax of no group": (
        lambda: NVFP4Quantizer(with_amax_reduction=True)(torch.zeros(32, 32)),
        OperandError,
        "init_process_group",
    ),
}


def test_what_is_wrong_is_named() -> None:
    assert unrefused(REFUSED) == {}


def test_arguments_that_transformer_engine_ignores_are_announced() -> None:
    with pytest.warns(DeprecationWarning, match="ignores"):
        Float8CurrentScalingQuantizer(E4M3, DEVICE, use_existing_amax=True)


def test_a_format_goes_by_number_dtype_or_name() -> None:
    x = value(32, 64)
    for dtype in (DType.kFloat8E5M2, 8, torch.float8_e5m2, "e5m2"):
        assert MXFP8Quantizer(dtype)(x).plan.rowwise.format == "e5m2"


def test_a_delayed_scale_is_the_one_given_and_the_amax_is_recorded() -> None:
    scale, amax = torch.tensor(3.0), torch.tensor(0.5)
    quantizer = Float8Quantizer(scale, amax, E4M3)
    x = torch.randn(16, 32)
    made = quantizer(x)
    assert torch.equal(made._rowwise_scale_inv.view(()), 1 / scale)
    assert torch.equal(
        made._rowwise_data.view(torch.float8_e4m3fn), (x * 3).to(torch.float8_e4m3fn)
    )
    assert amax == x.abs().max()
    scale.fill_(5.0)
    made.copy_(x)
    assert torch.equal(made._rowwise_scale_inv.view(()), 1 / scale)
    quantizer.calibrate(x / 2)
    assert amax == (x / 2).abs().max()


def test_a_scale_of_another_quantizer_is_taken_by_update_quantized() -> None:
    x, out = torch.randn(16, 32), delayed(2.0).make_empty((16, 32), device=DEVICE)
    delayed(4.0).update_quantized(x, out)
    assert out._rowwise_scale_inv == 0.25
    out.quantize_(x)
    assert out._rowwise_scale_inv == 0.5


def test_stochastic_rounding_keeps_the_mean() -> None:
    quantizer = NVFP4Quantizer(stochastic_rounding=True, columnwise=False)
    x = torch.full((4096, 16), 0.3)
    x[:, 0] = 6.0
    mean = quantizer(x).dequantize(torch.float32)[:, 1:].mean()
    nearest = NVFP4Quantizer(columnwise=False)(x).dequantize(torch.float32)[:, 1:].mean()
    assert abs(mean - 0.3) < 0.004
    assert abs(nearest - 0.3) > 0.1
    torch.manual_seed(1)
    first = quantizer(x)
    assert not same(first, quantizer(x))
    torch.manual_seed(1)
    assert same(first, quantizer(x))


TRANSFORMS: dict[str, Callable[..., object]] = {
    "grad": lambda call, x: torch.func.grad(lambda z: call(z).sum())(x),
    "vmap": lambda call, x: torch.func.vmap(call)(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # of torch's jvp
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_of_torch_func_is_refused(transform: str) -> None:
    x = torch.randn(2, 32, 32)

    def quantize(z: torch.Tensor) -> torch.Tensor:
        return MXFP8Quantizer(E4M3)(z).dequantize()

    def multiply(z: torch.Tensor) -> torch.Tensor:
        return fp8core.functional.gemm(z, torch.zeros(32, 32))

    for call in (quantize, multiply):
        with pytest.raises(UnsupportedError, match=r"torch\.func"):
            TRANSFORMS[transform](call, x)


def test_threads_share_a_quantizer() -> None:
    quantizer, x = NVFP4Quantizer(with_rht=True), value(64, 64)
    expected = quantizer(x)
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: quantizer(x), range(32)))
    assert all(same(one, expected) for one in made)


def read(file: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / file) as arrays:
        return dict(arrays)


def tensor_of(stored: np.ndarray) -> torch.Tensor:
    if stored.dtype == np.uint16:
        return torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(stored)


def test_block_quantizers_equal_the_golden_vectors() -> None:
    arrays, count = read("quantize_seed0.npz"), 0
    for key in arrays:
        family, _, rest = key.partition("/")
        if family not in ("block1d", "block2d") or not rest.endswith("/rowwise_data"):
            continue
        name, fmt, pow2, _ = rest.split("/")
        dim = int(family[5])
        quantizer = Float8BlockQuantizer(
            fmt,
            rowwise=True,
            columnwise=True,
            force_pow_2_scales=pow2 == "pow2=1",
            block_scaling_dim=dim,
        )
        x = tensor_of(arrays[f"x/{name}"])
        row, column = quantizer(x).operands
        start = key.removesuffix("rowwise_data")
        for way, operand in (("rowwise", row), ("columnwise", column)):
            scale = operand.scale_inv.t() if dim == 1 else operand.scale_inv
            expected = arrays[f"{start}{way}_scale_inv"][: scale.shape[0], : scale.shape[1]]
            assert torch.equal(operand.data, torch.from_numpy(arrays[f"{start}{way}_data"])), key
            assert np.array_equal(scale.numpy(), expected), key
        count += 1
    assert count > 20


def test_current_and_delayed_quantizers_equal_the_golden_vectors() -> None:
    arrays, count = read("quantize_seed0.npz"), 0
    for key in arrays:
        words = key.split("/")
        if words[0] not in ("delayed", "current") or words[-1] != "data":
            continue
        x, amax = tensor_of(arrays[f"x/{words[1]}"]), torch.zeros(1)
        quantizer: Quantizer
        if words[0] == "delayed":
            scale = torch.tensor([float(words[3].removeprefix("scale="))])
            quantizer = Float8Quantizer(scale, amax, words[2], columnwise=False)
        else:
            quantizer = Float8CurrentScalingQuantizer(
                words[2],
                "cpu",
                columnwise=False,
                force_pow_2_scales=words[3] == "pow2=1",
                amax_epsilon=float(words[4].removeprefix("eps=")),
            )
        made, start = quantizer(x), key.removesuffix("data")
        assert np.array_equal(made._rowwise_data.numpy(), arrays[key]), key
        assert np.array_equal(made._rowwise_scale_inv.numpy()[0], arrays[f"{start}scale_inv"]), key
        if words[0] == "delayed":
            assert np.array_equal(amax.numpy(), arrays[f"{start}amax"]), key
        count += 1
    assert count > 20


def options(words: dict[str, str]) -> dict[str, object]:
    return {
        "with_rht": words["rht"] != "0",
        "with_random_sign_mask": words["rht"] != "unsigned",
        "with_2d_quantization": words["tile"] == "16x16",
        "row_scaled_nvfp4": words.get("row") == "1",
        "nvfp4_use_4over6": words.get("4over6", "no") != "no",
        "nvfp4_4over6_err_mode": words["4over6"] if words.get("4over6", "no") != "no" else "MAE",
        "nvfp4_e4m3_max": int(words.get("max", 448)),
    }


@pytest.mark.parametrize("file", ["nvfp4_seed0.npz", "nvfp4_options_seed0.npz"])
def test_nvfp4_quantizers_equal_the_reference_of_transformer_engine(file: str) -> None:
    arrays, count = read(file), 0
    for key in arrays:
        if not key.endswith("/data"):
            continue
        _, name, *case, _ = key.split("/")
        words = dict(word.split("=") for word in case)
        quantizer = NVFP4Quantizer(**options(words))  # type: ignore[arg-type]
        row, column = quantizer(tensor_of(arrays[f"x/{name}"])).operands
        start = key.removesuffix("data")
        repeats = 16 if words["tile"] == "16x16" else 1
        for operand, suffix in ((row, ""), (column, "_t")):
            scale = operand.scale_inv.repeat_interleave(repeats, 0)
            assert np.array_equal(operand.data.numpy(), arrays[f"{start}data{suffix}"]), key
            assert np.array_equal(scale.numpy(), arrays[f"{start}scale{suffix}"]), key
        count += 1
    assert count >= 12


def test_mxfp8_quantizers_equal_the_golden_vectors() -> None:
    arrays, count = read("mxfp8_seed0.npz"), 0
    for key in arrays:
        if not key.endswith("/rowwise_data") or "floor" in key:
            continue
        _, name, fmt, _ = key.split("/")
        row, column = MXFP8Quantizer(fmt)(tensor_of(arrays[f"x/{name}"])).operands
        start = key.removesuffix("rowwise_data")
        assert np.array_equal(row.data.numpy(), arrays[key])
        assert np.array_equal(row.scale_inv.numpy(), arrays[f"{start}rowwise_scale"])
        other = f"{start}columnwise_data_of_transpose"
        assert np.array_equal(column.data.numpy(), arrays[other])
        count += 1
    assert count >= 6


def test_public_names() -> None:
    for name in fp8core.quantizers.__all__:
        assert getattr(fp8core, name) is getattr(fp8core.quantizers, name)


def test_forward_mode_differentiation_is_refused() -> None:
    quantizer, x = MXFP8Quantizer(E4M3), torch.randn(32, 32)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (quantizer, lambda x: fp8core.functional.gemm(x, quantizer(torch.eye(32)))):
            with pytest.raises(UnsupportedError, match="forward-mode differentiation"):
                call(dual)
        assert quantizer(x).shape == x.shape  # one without a tangent passes


def test_a_gradient_passes_another_nominal_dtype() -> None:
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    made = MXFP8Quantizer(E4M3).quantize(x, dtype=torch.float32)
    (made.dequantize() * 3).sum().backward()
    assert made.dtype == torch.float32
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_scale_shapes_are_those_of_transformer_engine() -> None:
    """MX: numbers of OCP's blocks, padded to 128 x 4; blocks of 128: padded to 4."""
    lines = Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1)
    squares = Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True)
    sizes = {
        MXFP8Quantizer(E4M3): ((256, 4), (8, 128)),
        NVFP4Quantizer(): ((256, 8), (128, 12)),
        lines: ((1, 160), (2, 96)),
        squares: ((2, 4), (1, 4)),
    }
    for quantizer, expected in sizes.items():
        shapes = tuple(quantizer.get_scale_shape((2, 80, 96), way) for way in (False, True))
        assert shapes == expected, quantizer
    with pytest.raises(UnsupportedError, match="has no scales of blocks"):
        Float8CurrentScalingQuantizer(E4M3, DEVICE).get_scale_shape((64, 64), False)


@pytest.mark.parametrize("shape", [(-64, 64), (64.0, 64), (64, 0.5), (True, 64), ("64", 64)])
def test_sizes_that_are_no_counts_are_refused(shape: Any) -> None:
    quantizer = MXFP8Quantizer(E4M3)
    with pytest.raises(OperandError, match=r"get_scale_shape.*integers from 0 on"):
        quantizer.get_scale_shape(shape, False)
    with pytest.raises(OperandError, match=r"inner_tensor_specs.*integers from 0 on"):
        quantizer.inner_tensor_specs(shape)
    assert quantizer.get_scale_shape((0, 64), True) == (0, 128)
    assert quantizer.get_scale_shape(torch.Size([64]), False) == (128, 4)


@pytest.mark.parametrize("usages", [(True, True), (True, False), (False, True)])
def test_inner_tensors_are_those_of_a_quantized_tensor(usages: tuple[bool, bool]) -> None:
    x = torch.randn(2, 64, 128, device=DEVICE)
    for quantizer in (
        Float8CurrentScalingQuantizer(E4M3, DEVICE),
        Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True),
        MXFP8Quantizer(E4M3),
        NVFP4Quantizer(with_rht=True),
    ):
        quantizer.set_usage(rowwise=usages[0], columnwise=usages[1])
        tensor, specs = quantizer(x), quantizer.inner_tensor_specs(x.shape)
        names = tensor.__tensor_flatten__()[0]
        assert [*specs] == names
        parts = [getattr(tensor, name) for name in names]
        assert [*specs.values()] == [(tuple(part.shape), part.dtype) for part in parts]
    with pytest.raises(UnsupportedError, match="multiples of"):
        MXFP8Quantizer(E4M3).inner_tensor_specs((64, 40))
