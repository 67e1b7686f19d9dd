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
        (lambda: _mxfp8(quantizer=MXFP8Quantizer(E4M3, with_2d_quantization=True)), "stores e4m3"),
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
    with pytest.raises(UnsupportedError, match=r"has no constructor.*from_codes"):
        fp8core.NVFP4Tensor()
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
