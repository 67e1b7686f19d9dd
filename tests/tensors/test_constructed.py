"""Tensors of codes and scales by Transformer Engine's constructors, and their parts."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, UnsupportedError
from fp8core.quantizers import (
    DType,
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from fp8core.tensors import layouts
from tests.device import DEVICE

E4M3 = DType.kFloat8E4M3


def value(*shape: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(*shape or (64, 96))


def current() -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(E4M3, None)


@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 96)])
def test_float8_tensor_holds_codes_and_a_scale(shape: tuple[int, ...]) -> None:
    quantized = current()(value(*shape))
    codes, scale = quantized.get_data_tensors(columnwise_data=False), quantized._rowwise_scale_inv
    tensor = fp8core.Float8Tensor(
        shape=shape, dtype=torch.bfloat16, data=codes, fp8_scale_inv=scale, fp8_dtype=E4M3
    )
    assert isinstance(tensor, fp8core.Float8Tensor)
    assert (tensor.shape, tensor.dtype) == (shape, torch.bfloat16)
    assert tensor.get_data_tensors()[0].data_ptr() == codes.data_ptr()
    assert torch.equal(tensor.float(), quantized.float())
    assert torch.equal(tensor.float(), codes.view(torch.float8_e4m3fn).float() * scale)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": True}


def test_float8_tensor_of_a_transpose_alone() -> None:
    codes = torch.arange(96, dtype=torch.uint8).reshape(12, 2, 4)
    scale = torch.full((), 0.5)
    tensor = fp8core.Float8Tensor(
        data=None, data_transpose=codes, fp8_scale_inv=scale, fp8_dtype=torch.float8_e5m2
    )
    assert (tensor.shape, tensor.dtype) == ((2, 4, 12), torch.float32)
    assert tensor.get_usages() == {"rowwise": False, "columnwise": True}
    expected = codes.view(torch.float8_e5m2).float().movedim(0, -1) / 2
    assert torch.equal(tensor.dequantize(), expected)


def test_a_quantizer_writes_the_tensor_by_its_scale() -> None:
    scale, amax = torch.full((1,), 4.0), torch.zeros(1)
    quantizer = Float8Quantizer(scale, amax, E4M3)
    tensor = fp8core.Float8Tensor(
        shape=(4, 8),
        dtype=torch.float32,
        data=torch.zeros(4, 8, dtype=torch.uint8),
        fp8_scale_inv=1 / scale,
        fp8_dtype=E4M3,
        quantizer=quantizer,
    )
    tensor.quantize_(torch.full((4, 8), 3.0))
    codes = tensor.get_data_tensors(columnwise_data=False)
    assert torch.equal(codes.view(torch.float8_e4m3fn).float(), torch.full_like(tensor.float(), 12))
    assert amax.item() == 3


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("ways", ["rowwise", "columnwise", "both"])
def test_mxfp8_tensor_is_one_of_transformer_engines_layout(is_padded: bool, ways: str) -> None:
    quantizer = MXFP8Quantizer(E4M3)
    quantized = quantizer(value())
    row, column = quantized.get_data_tensors()
    scales = [quantized._rowwise_scale_inv, quantized._columnwise_scale_inv.t()]
    if is_padded:
        for i, scale in enumerate(scales):
            padded = scale.new_full(quantizer.get_scale_shape((64, 96), bool(i)), 9)
            padded[: scale.shape[0], : scale.shape[1]] = scale
            scales[i] = padded
    uses = [ways != "columnwise", ways != "rowwise"]
    tensor = fp8core.MXFP8Tensor(
        shape=(64, 96),
        dtype=torch.float32,
        rowwise_data=row if uses[0] else None,
        rowwise_scale_inv=scales[0] if uses[0] else None,
        columnwise_data=column if uses[1] else None,
        columnwise_scale_inv=scales[1] if uses[1] else None,
        fp8_dtype=E4M3,
        quantizer=quantizer,
        with_gemm_swizzled_scales=False,
        requires_grad=True,
    )
    assert tensor.requires_grad
    assert isinstance(tensor, fp8core.MXFP8Tensor)
    assert [*tensor.get_usages().values()] == uses
    own = MXFP8Quantizer(E4M3, rowwise=uses[0], columnwise=uses[1])(value())
    assert tensor.plan == own.plan
    assert all(torch.equal(*pair) for pair in zip(tensor.tensors(), own.tensors(), strict=True))


def test_constructed_tensors_are_multiplied_saved_and_copied() -> None:
    quantized = MXFP8Quantizer(E4M3)(value())
    row, column = quantized.get_data_tensors()
    tensor = fp8core.MXFP8Tensor(
        rowwise_data=row,
        rowwise_scale_inv=quantized._rowwise_scale_inv,
        columnwise_data=column,
        columnwise_scale_inv=quantized._columnwise_scale_inv.t(),
    )
    x = MXFP8Quantizer(E4M3)(value(32, 96))
    product = fp8core.functional.gemm(x, quantized)
    for same in (tensor, copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert torch.equal(fp8core.functional.gemm(x, same), product)


def _codes(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def _float8(**arguments: Any) -> Any:
    return fp8core.Float8Tensor(
        **{"data": _codes(4, 8), "fp8_scale_inv": torch.ones(1), **arguments}
    )


def _mxfp8(**arguments: Any) -> Any:
    rowwise = {"rowwise_data": _codes(4, 64), "rowwise_scale_inv": _codes(4, 2)}
    return fp8core.MXFP8Tensor(**{**rowwise, **arguments})


@pytest.mark.parametrize(
    ("construct", "text"),
    [
        (lambda: _float8(shape=(8, 4)), "its codes are those of [4, 8]"),
        (lambda: fp8core.MXFP8Tensor(torch.zeros(32, 32)), "found None for codes"),
        (lambda: _float8(fp8_scale_inv=None), "fp8_scale_inv is None"),
        (lambda: _float8(data=None), "Float8Tensor: found None"),
        (lambda: _float8(data=torch.zeros(4, 8)), "Float8Tensor: "),
        (lambda: _float8(data=_codes(4, 8).view(torch.float8_e5m2)), "no codes in torch.float8"),
        (lambda: _float8(fp8_scale_inv=torch.ones(2)), "no scales"),
        (lambda: _float8(fp8_scale_inv=torch.zeros(1)), "zero or negative"),
        (lambda: _float8(dtype=torch.int32), "its dtype is torch.int32"),
        (
            lambda: _float8(quantizer=MXFP8Quantizer(E4M3)),
            "expected one that stores e4m3 block=(0,0)",
        ),
        (lambda: _float8(quantizer=7), "Float8Tensor(quantizer=7)"),
        (lambda: _float8(data_transpose=_codes(4, 8)), "expected [8, 4]"),
        (lambda: _float8(data_transpose=[8]), "found [8] for codes"),
        (lambda: _mxfp8(columnwise_data=[8]), "MXFP8Tensor: found [8]"),
        (lambda: _float8(shape=32), "Float8Tensor(shape=[32])"),
        (lambda: _float8(device="meta"), "Move them."),
        (
            lambda: _mxfp8(rowwise_scale_inv=None),
            "scales None; expected [4, 2], or padded [128, 4]",
        ),
        (lambda: _mxfp8(rowwise_scale_inv=_codes(4, 3)), "scales [4, 3]"),
        (lambda: _mxfp8(rowwise_scale_inv=_codes(4, 2) + 255), "NaN"),
        (lambda: _mxfp8(rowwise_data=None), "expected a tensor [..., k]"),
        (lambda: _mxfp8(columnwise_data=_codes(64, 4)), "expected one shape"),
        (lambda: _mxfp8(quantizer=Float8CurrentScalingQuantizer(E4M3, None)), "stores e4m3"),
    ],
)
def test_what_does_not_fit_is_named(construct: Any, text: str) -> None:
    with pytest.raises(OperandError) as error:
        construct()
    assert text in str(error.value)


def test_what_is_not_offered_is_named() -> None:
    with pytest.raises(UnsupportedError, match="with_gemm_swizzled_scales=True"):
        _mxfp8(with_gemm_swizzled_scales=True)
    with pytest.raises(UnsupportedError, match="its columns of 32"):
        _mxfp8(rowwise_data=_codes(4, 40))
    with pytest.raises(UnsupportedError, match="with_gemm_swizzled_scales=True"):
        fp8core.NVFP4Tensor(rowwise_data=_codes(16, 8), with_gemm_swizzled_scales=True)
    with pytest.raises(fp8core.RecipeError, match=r"expected DType\.kFloat4E2M1"):
        fp8core.NVFP4Tensor(rowwise_data=_codes(16, 8), fp4_dtype=E4M3)
    with pytest.raises(fp8core.RecipeError, match="'e4m4' is no format"):
        _float8(fp8_dtype="e4m4")


def test_hybrid_tensors_have_parts_and_are_of_parts() -> None:
    x = value(64, 128)
    quantized = HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=NVFP4Quantizer()
    )(x)
    row, column = quantized.rowwise_sub_storage, quantized.columnwise_sub_storage
    assert isinstance(row, fp8core.MXFP8Tensor)
    assert isinstance(column, fp8core.NVFP4Tensor)
    assert torch.equal(row.dequantize(), MXFP8Quantizer(E4M3)(x).dequantize())
    assert torch.equal(column.dequantize(), NVFP4Quantizer(rowwise=False)(x).dequantize())
    assert row.get_data_tensors()[0].data_ptr() == quantized.get_data_tensors()[0].data_ptr()
    assert row.columnwise_sub_storage is None
    again = fp8core.HybridQuantizedTensor(rowwise_storage=row, columnwise_storage=column)
    assert isinstance(again, fp8core.HybridQuantizedTensor)
    assert again.plan == quantized.plan
    assert all(torch.equal(*p) for p in zip(again.tensors(), quantized.tensors(), strict=True))
    row.quantize_(torch.zeros_like(x))
    assert not again.dequantize().any()


def test_a_tensor_of_parts_with_a_delayed_scale_is_for_reading() -> None:
    """A write to it would take a scale from the amax, also for the part."""
    slot = torch.tensor([2.0]), torch.zeros(1)
    row = fp8core.Float8Quantizer(*slot, E4M3, columnwise=False)(value(64, 128))
    others = {"a value": value(64, 128), "codes": MXFP8Quantizer(E4M3)(value(64, 128))}
    for name, column in others.items():
        whole = fp8core.HybridQuantizedTensor(rowwise_storage=row, columnwise_storage=column)
        assert torch.equal(whole.dequantize(), row.dequantize())
        copies = (copy.copy(whole), copy.deepcopy(whole), pickle.loads(pickle.dumps(whole)))
        for tensor in (whole, whole.clone(), whole.to_dtype(torch.bfloat16), *copies):
            with pytest.raises(UnsupportedError, match="or to the parts"):
                tensor.copy_(value(64, 128))
            with pytest.raises(OperandError, match="in its parts"):
                tensor.get_metadata()
        row.copy_(8 * value(64, 128))
        assert row._scale_inv.item() == 0.5, name
    moved = whole.to("meta")
    with pytest.raises(UnsupportedError, match="or to the parts"):
        moved.copy_(moved.dequantize())


def test_parts_that_do_not_fit_are_named() -> None:
    row = MXFP8Quantizer(E4M3, columnwise=False)(value())
    arguments: list[dict[str, Any]] = [
        {"rowwise_storage": None, "columnwise_storage": row},
        {"rowwise_storage": None, "columnwise_storage": None},
        {"rowwise_storage": row, "columnwise_storage": MXFP8Quantizer(E4M3)(value(32, 96))},
        {"rowwise_storage": value(), "columnwise_storage": None},
        {"rowwise_storage": row, "columnwise_storage": None, "shape": (96, 64)},
    ]
    for each in arguments:
        with pytest.raises(OperandError, match="HybridQuantizedTensor"):
            fp8core.HybridQuantizedTensor(**each)


@pytest.mark.parametrize(
    ("quantizer", "sizes"),
    [
        (current(), [(2, 64, 96), (96, 128)]),
        (MXFP8Quantizer(E4M3), [(2, 64, 96), (128, 96)]),
        (Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True), [(2, 64, 96), (96, 128)]),
        (NVFP4Quantizer(), [(2, 64, 48), (96, 64)]),
    ],
    ids=["current", "mxfp8", "block", "nvfp4"],
)
def test_data_tensors_are_the_codes(quantizer: Any, sizes: list[tuple[int, ...]]) -> None:
    quantized = quantizer(value(2, 64, 96))
    row, column = quantized.get_data_tensors()
    assert [row.shape, column.shape] == sizes
    assert torch.equal(quantized.get_data_tensors(columnwise_data=False), row)
    assert torch.equal(quantized.get_data_tensors(rowwise_data=False), column)
    with pytest.raises(OperandError, match="neither"):
        quantized.get_data_tensors(False, False)
    quantized.update_usage(columnwise_usage=False)
    assert quantized.get_data_tensors(rowwise_data=False) is None


# --- blocks of 128, and two levels


def padded(scales: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    """Return ``scales`` with numbers behind its ends that nobody may read."""
    whole = scales.new_full(size, 9)
    whole[: scales.shape[0], : scales.shape[1]] = scales
    return whole


def their_arguments(quantizer: Any, quantized: Any, *, is_padded: bool) -> dict[str, Any]:
    """Return codes and scales of ``quantized`` in Transformer Engine's layout, made by hand."""
    row, column = quantized.get_data_tensors()
    spec = quantized.plan.rowwise
    scales = [quantized._rowwise_scale_inv, quantized._columnwise_scale_inv]
    if spec.block == (128, 128):
        column, scales[1] = column.contiguous(), scales[0].t()
    elif spec.block == (1, 128):
        scales = [each.t() for each in scales]
    elif spec.block == (16, 16):
        scales = [each.repeat_interleave(16, 0) for each in scales]
    if is_padded:
        shape = tuple(quantized.shape)
        sizes = [quantizer.get_scale_shape(shape, way) for way in (False, True)]
        scales = [padded(*pair) for pair in zip(scales, sizes, strict=True)]
    arguments = {
        "rowwise_data": row,
        "rowwise_scale_inv": scales[0],
        "columnwise_data": column,
        "columnwise_scale_inv": scales[1],
    }
    if spec.scale_format == "float32":
        return {**arguments, "is_2D_scaled": spec.block[0] > 1}
    return arguments


def without(arguments: dict[str, Any], way: str) -> dict[str, Any]:
    """Return ``arguments`` with None for those of the other orientation than ``way``."""
    other = {"rowwise": "columnwise", "columnwise": "rowwise"}.get(way, "no such")
    return {name: None if other in name else value for name, value in arguments.items()}


WAYS = ("rowwise", "columnwise", "both")


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("shape", [(64, 96), (2, 32, 96), (130, 200)])
def test_blockwise_tensor_is_one_of_transformer_engines_layout(
    shape: tuple[int, ...], dim: int, ways: str, is_padded: bool
) -> None:
    options: dict[str, Any] = {"block_scaling_dim": dim, "amax_epsilon": 1e-3}
    quantizer = Float8BlockQuantizer("e5m2", rowwise=True, columnwise=True, **options)
    if shape == (130, 200) and dim == 1:  # TE's kernels too take whole vectors of 16
        shape = (144, 208)
    quantized = quantizer(value(*shape))
    if quantized._columnwise_scale_inv is None:
        quantized._columnwise_scale_inv = quantized._rowwise_scale_inv.t()
    arguments = their_arguments(quantizer, quantized, is_padded=is_padded)
    tensor = fp8core.Float8BlockwiseQTensor(
        shape=shape,
        dtype=torch.float32,
        fp8_dtype=DType.kFloat8E5M2,
        quantizer=quantizer,
        **without(arguments, ways),
    )
    assert isinstance(tensor, fp8core.Float8BlockwiseQTensor)
    assert isinstance(tensor, fp8core.Float8BlockwiseQTensorStorage)
    assert tensor.shape == shape
    source = Float8BlockQuantizer("e5m2", rowwise=True, columnwise=True, **options)
    source.set_usage(rowwise=ways != "columnwise")
    assert torch.equal(tensor.float(), source(value(*shape)).float())
    assert tensor.plan.rowwise == (None if ways == "columnwise" else quantizer.plan.rowwise)
    tensor.quantize_(torch.ones(shape))
    assert torch.equal(tensor.float(), torch.ones(shape))


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"with_2d_quantization": True},
        {"with_rht": True},
        {"row_scaled_nvfp4": True},
        {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_nvfp4_tensor_is_one_of_transformer_engines_layout(
    options: dict[str, Any], ways: str, is_padded: bool
) -> None:
    quantizer, x = NVFP4Quantizer(**options), value(64, 96)
    quantized = quantizer(x)
    arguments = their_arguments(quantizer, quantized, is_padded=is_padded)
    turned = x.t()
    if "with_rht" in options:
        dequantized = NVFP4Quantizer(rowwise=False, **options)(x)
        arguments["amax_columnwise"] = dequantized.get_metadata()["amax_columnwise"]
    else:
        amax = turned.abs().amax(1) if "row_scaled_nvfp4" in options else x.abs().amax().view(1)
        arguments["amax_columnwise"] = amax
    amax = x.abs().amax(1) if "row_scaled_nvfp4" in options else x.abs().amax().view(1)
    arguments["amax_rowwise"] = amax
    tensor = fp8core.NVFP4Tensor(
        shape=x.shape,
        dtype=torch.float32,
        fp4_dtype=DType.kFloat4E2M1,
        quantizer=quantizer,
        with_gemm_swizzled_scales=False,
        **without(arguments, ways),
    )
    own = NVFP4Quantizer(rowwise=ways != "columnwise", columnwise=ways != "rowwise", **options)(x)
    assert isinstance(tensor, fp8core.NVFP4TensorStorage)
    assert (tensor.plan, tensor.shape) == (own.plan, x.shape)
    assert all(torch.equal(*pair) for pair in zip(tensor.tensors(), own.tensors(), strict=True))


def test_values_are_codes_times_scales_of_their_layout() -> None:
    codes = torch.randint(0, 120, (4, 256), dtype=torch.uint8)
    scales = torch.rand(2, 4) + 0.5
    tensor = fp8core.Float8BlockwiseQTensor(rowwise_data=codes, rowwise_scale_inv=scales)
    factors = scales.t().repeat_interleave(128, 1)
    assert torch.equal(tensor.float(), codes.view(torch.float8_e4m3fn).float() * factors)
    codes = torch.randint(0, 256, (16, 16), dtype=torch.uint8)  # [k, n / 2]
    scales = torch.randint(40, 60, (16, 2), dtype=torch.uint8)
    amax = torch.tensor([3.0])
    tensor = fp8core.NVFP4Tensor(
        shape=(2, 16, 16),
        columnwise_data=codes,
        columnwise_scale_inv=scales,
        amax_columnwise=amax,
    )
    elements = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
    values = fp8core.formats.by_name("e2m1").decode(elements.to(torch.uint8))
    factors = scales.view(torch.float8_e4m3fn).float().repeat_interleave(16, 1)
    outer = 1 / (torch.tensor([2688.0]) / amax)
    assert tensor.shape == (2, 16, 16)
    wanted = (values * (factors * outer)).t().reshape(2, 16, 16)
    assert torch.equal(tensor.float(), wanted)
    empty = fp8core.NVFP4Tensor(
        rowwise_data=torch.zeros(0, 8, dtype=torch.uint8),
        rowwise_scale_inv=torch.zeros(0, 1, dtype=torch.uint8),
        amax_rowwise=torch.zeros(1),
    )
    assert empty.float().shape == (0, 16)


def _block(**arguments: Any) -> Any:
    rowwise = {"rowwise_data": _codes(4, 256), "rowwise_scale_inv": torch.ones(2, 4)}
    return fp8core.Float8BlockwiseQTensor(**{**rowwise, **arguments})


def _nvfp4(**arguments: Any) -> Any:
    rowwise = {"rowwise_data": _codes(16, 16), "rowwise_scale_inv": _codes(16, 2)}
    return fp8core.NVFP4Tensor(**{**rowwise, "amax_rowwise": torch.ones(1), **arguments})


@pytest.mark.parametrize(
    ("construct", "text"),
    [
        (lambda: _block(rowwise_scale_inv=torch.ones(4, 2)), "expected [2, 4], or padded [2, 4]"),
        (lambda: _block(rowwise_scale_inv=torch.zeros(2, 4)), "zero or negative"),
        (lambda: _block(rowwise_scale_inv=None), "scales None"),
        (lambda: _block(is_2D_scaled=True), "expected [1, 2], or padded [1, 4]"),
        (lambda: _block(columnwise_data=_codes(4, 256)), "expected one shape, transposed"),
        (lambda: _block(quantizer=MXFP8Quantizer(E4M3)), "expected one that stores e4m3"),
        (lambda: fp8core.Float8BlockwiseQTensor(), "found None for codes"),
        (lambda: _nvfp4(amax_rowwise=None), "its amax is None"),
        (lambda: _nvfp4(amax_rowwise=torch.ones(1).half()), "expected a float32 tensor"),
        (lambda: _nvfp4(amax_rowwise=torch.ones(3)), "NVFP4Tensor: "),
        (lambda: _nvfp4(amax_rowwise=torch.full((1,), -1.0)), "infinite, zero or negative"),
        (lambda: _nvfp4(amax_rowwise=torch.full((1,), torch.nan)), "NaN"),
        (lambda: _nvfp4(rowwise_scale_inv=_codes(16, 3)), "padded [128, 4]"),
        (lambda: _nvfp4(rowwise_scale_inv=_codes(16, 2) + 127), "NaN or negative"),
        (lambda: _nvfp4(shape=(16, 16)), "its codes are those of [16, 32]"),
        (lambda: _nvfp4(columnwise_data=_codes(16, 16)), "one shape, transposed"),
        (
            lambda: _nvfp4(
                rowwise_scale_inv=torch.arange(32, dtype=torch.uint8).reshape(16, 2),
                quantizer=NVFP4Quantizer(with_2d_quantization=True),
            ),
            "scales differ within a block of 16 x 16",
        ),
        (lambda: _nvfp4(quantizer=current()), "expected one that stores e2m1"),
        # of all classes
        (lambda: _float8(date=1), "Float8Tensor has no argument 'date'; valid ones: shape, dtype"),
        (lambda: _mxfp8(data=1), "MXFP8Tensor has no argument 'data'"),
        (lambda: _block(fp8_type=1), "Float8BlockwiseQTensor has no argument 'fp8_type'"),
        (lambda: _nvfp4(fp8_dtype=1), "Did you mean 'fp4_dtype'?"),
        (
            lambda: fp8core.HybridQuantizedTensor(rowwise=1),
            "HybridQuantizedTensor has no argument 'rowwise'",
        ),
        (
            lambda: _float8(dtype=torch.bfloat16, fake_dtype=torch.float16),
            "Float8Tensor(dtype=torch.bfloat16, fake_dtype=torch.float16): both",
        ),
        (lambda: _float8(device=f"{DEVICE.type}:9"), f":9): its codes are on {DEVICE}"),
        (lambda: _mxfp8(device="meta"), "MXFP8Tensor(device=meta)"),
    ],
)
def test_what_does_not_fit_blocks_is_named(construct: Any, text: str) -> None:
    with pytest.raises(OperandError) as error:
        construct()
    assert text in str(error.value)


@pytest.mark.parametrize("shape", [(-2, -2, 8), (2.0, 2, 8), (True, 4, 8), 0.5, "ab"], ids=str)
def test_a_shape_that_has_no_counts_is_refused(shape: Any) -> None:
    with pytest.raises(OperandError, match=r"Float8Tensor\(shape=.*integers from 0 on"):
        _float8(shape=shape)
    tensor = _float8()
    with pytest.raises(OperandError, match=r"make_like\(shape=.*integers from 0 on"):
        tensor.make_like(tensor, shape=shape)


def test_one_nominal_dtype_and_a_device_without_an_index_are_taken() -> None:
    for arguments in (
        {"dtype": torch.bfloat16},
        {"fake_dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "fake_dtype": torch.bfloat16},
    ):
        for device in (None, DEVICE.type, f"{DEVICE.type}:0", torch.device(DEVICE.type)):
            assert _float8(**arguments, device=device).dtype == torch.bfloat16
    assert _float8(shape=(2, 2, 8)).shape == (2, 2, 8)


def test_a_subclass_of_a_class_of_theirs_constructs_like_it() -> None:
    class Mine(fp8core.Float8Tensor):
        pass

    tensor = Mine(data=_codes(4, 8), fp8_scale_inv=torch.ones(1))
    assert isinstance(tensor, Mine)
    assert type(tensor) is fp8core.QuantizedTensor


# --- what tensors say of themselves

QUANTIZERS: dict[str, Any] = {
    "current": Float8CurrentScalingQuantizer("e5m2", None, force_pow_2_scales=True),
    "delayed": Float8Quantizer(torch.full((1,), 4.0), torch.zeros(1), E4M3),
    "hif8": Float8CurrentScalingQuantizer("hif8", None),
    "block": Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, block_scaling_dim=1),
    "square": Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, force_pow_2_scales=False),
    "mxfp8": MXFP8Quantizer("e5m2"),
    "mxfp8-2d": MXFP8Quantizer(E4M3, with_2d_quantization=True),
    "nvfp4": NVFP4Quantizer(),
    "nvfp4-2d": NVFP4Quantizer(with_2d_quantization=True),
    "nvfp4-rht": NVFP4Quantizer(with_rht=True, with_random_sign_mask=False),
    "nvfp4-rows": NVFP4Quantizer(row_scaled_nvfp4=True),
    "nvfp4-4over6": NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_4over6_err_mode="MSE"),
    "hybrid": HybridQuantizer(
        rowwise_quantizer=MXFP8Quantizer(E4M3), columnwise_quantizer=NVFP4Quantizer()
    ),
}
USAGES = [(True, True), (True, False), (False, True)]


@pytest.mark.parametrize("usages", USAGES, ids=str)
@pytest.mark.parametrize("name", QUANTIZERS)
@pytest.mark.parametrize("shape", [(64, 128), (2, 32, 128)], ids=str)
def test_a_tensor_is_made_again_of_its_metadata_and_its_quantizer(
    name: str, usages: tuple[bool, bool], shape: tuple[int, ...]
) -> None:
    quantizer = QUANTIZERS[name].copy()
    quantizer.set_usage(rowwise=usages[0], columnwise=usages[1])
    quantized = quantizer(value(*shape).bfloat16())
    mine = quantized._get_quantizer()
    assert type(mine) is type(quantizer) or (name == "hybrid" and usages != (True, True))
    assert mine.get_usages() == quantized.get_usages()
    assert quantized._quantizer.plan == mine.plan
    again = mine(value(*shape).bfloat16())
    assert all(
        torch.equal(*pair) for pair in zip(again.tensors(), quantized.tensors(), strict=True)
    )
    kind = next(
        each
        for each in (
            fp8core.HybridQuantizedTensor,
            fp8core.Float8Tensor,
            fp8core.MXFP8Tensor,
            fp8core.Float8BlockwiseQTensor,
            fp8core.NVFP4Tensor,
        )
        if isinstance(quantized, each)
    )
    arguments = quantized.get_metadata()
    rebuilt = kind(shape=shape, dtype=quantized.dtype, **arguments)
    assert (rebuilt.shape, rebuilt.dtype) == (quantized.shape, quantized.dtype)
    pairs = zip(quantized.plan, rebuilt.plan, strict=True)
    assert all(stored in (None, theirs) for stored, theirs in pairs)
    for part, theirs in zip(quantized.parts, rebuilt.parts, strict=True):
        assert part is None or torch.equal(part, theirs)
    assert torch.equal(rebuilt.float(), quantized.float())


def test_the_amax_of_two_levels_gives_their_scale_again() -> None:
    torch.manual_seed(0)
    scales = torch.cat([torch.rand(20000) * 10.0**e for e in (-30, -3, 0, 3, 30)])
    for maximum in (256, 448):
        spec = NVFP4Quantizer(nvfp4_use_4over6=True, nvfp4_e4m3_max=maximum).plan.rowwise
        decode = layouts.outer_scale(spec, scales)
        assert torch.equal(layouts.outer_scale(spec, layouts.amax_of(spec, decode)), decode)


def test_quantizers_of_what_no_class_of_theirs_stores() -> None:
    rows = fp8core.functional.quantize(value(), "rowwise")
    again = rows._get_quantizer()(value())
    assert all(torch.equal(*pair) for pair in zip(again.tensors(), rows.tensors(), strict=True))
    with pytest.raises(UnsupportedError, match=r"get_metadata of .*from_codes"):
        rows.get_metadata()
    for name in ("_data", "_scale_inv", "_transpose"):
        assert not hasattr(rows, name)
    with pytest.raises(AttributeError, match="get_data_tensors"):
        _ = MXFP8Quantizer(E4M3)(value())._data


def test_a_tensor_with_one_scale_has_their_attributes() -> None:
    quantized = current()(value(2, 32, 96))
    assert quantized._fp8_dtype == DType.kFloat8E4M3
    assert quantized._data.shape == (2, 32, 96)
    assert quantized._data.data_ptr() == quantized._rowwise_data.data_ptr()
    assert (quantized._scale_inv.shape, quantized._scale_inv.dtype) == ((1,), torch.float32)
    assert torch.equal(quantized._transpose, quantized._data.movedim(-1, 0))
    value_of = quantized._data.view(torch.float8_e4m3fn).float() * quantized._scale_inv
    assert torch.equal(quantized.float(), value_of)
    quantized.update_usage(columnwise_usage=False)
    assert quantized._transpose is None
    columns = Float8CurrentScalingQuantizer(E4M3, None, rowwise=False)(value())
    assert columns._data is None
    assert columns._transpose.shape == (96, 64)
    assert MXFP8Quantizer("e5m2")(value())._fp8_dtype == DType.kFloat8E5M2
    assert not hasattr(NVFP4Quantizer()(value()), "_fp8_dtype")


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_tensor_like_another_shares_its_memory(name: str) -> None:
    quantized = QUANTIZERS[name](value(64, 128))
    quantized.requires_grad_()
    like = fp8core.Float8Tensor.make_like(quantized, dtype=torch.float16, requires_grad=True)
    assert (like.shape, like.dtype, like.is_leaf) == (quantized.shape, torch.float16, True)
    assert like.requires_grad
    view = quantized.make_like(quantized, shape=(2, 32, 128))
    assert view.shape == (2, 32, 128)
    assert not view.requires_grad
    assert quantized.to_dtype(torch.bfloat16).dtype == torch.bfloat16
    pairs = zip(view.tensors(), quantized.tensors(), strict=True)
    assert all(mine.data_ptr() == theirs.data_ptr() for mine, theirs in pairs)
    for sizes in ((128, 64), (64, 64), (64 * 128,)):
        with pytest.raises(OperandError, match="make_like"):
            quantized.make_like(quantized, shape=sizes)
    with pytest.raises(OperandError, match="make_like of Tensor"):
        fp8core.MXFP8Tensor.make_like(value())  # type: ignore[arg-type]  # no QuantizedTensor


def test_tensors_of_codes_are_made_by_quantizers() -> None:
    codes = torch.arange(96, dtype=torch.uint8).reshape(2, 6, 8)
    quantizer = QUANTIZERS["delayed"]
    tensor = quantizer.create_tensor_from_data(codes, fake_dtype=torch.bfloat16, internal=True)
    assert (tensor.dtype, tensor.requires_grad) == (torch.bfloat16, False)
    assert torch.equal(tensor.float(), codes.view(torch.float8_e4m3fn).float() / 4)
    tensor.quantize_(torch.ones(2, 6, 8))
    assert torch.equal(codes.view(torch.float8_e4m3fn).float(), torch.full((2, 6, 8), 4.0))
    tensor = current().create_tensor_from_data(codes, requires_grad=True)
    assert tensor.requires_grad
    assert torch.equal(tensor.float(), codes.view(torch.float8_e4m3fn).float())
    current().update_quantized(torch.full((2, 6, 8), 7.0), tensor)
    assert torch.equal(tensor.float(), torch.full((2, 6, 8), 7.0))
    quantized = MXFP8Quantizer(E4M3)(value())
    data, scales = quantized.get_data_tensors(columnwise_data=False), quantized._rowwise_scale_inv
    tensor = MXFP8Quantizer(E4M3).create_tensor_from_data(data, scales, torch.bfloat16)
    assert torch.equal(tensor.float(), quantized.float())
    with pytest.raises(OperandError, match="expected one that stores e5m2"):
        MXFP8Quantizer(E4M3).create_tensor_from_data(data, scales, torch.float32, "e5m2")
    with pytest.raises(OperandError, match="Float8Tensor: "):
        current().create_tensor_from_data(value())
    with pytest.raises(OperandError, match=f"the scale on {DEVICE}"):
        quantizer.create_tensor_from_data(codes.to("meta"))
