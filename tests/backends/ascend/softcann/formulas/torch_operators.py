"""What torch's own operators are on the device: elementwise, in place, and reductions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.backends.ascend.softcann.device import Described, formula
from tests.backends.ascend.softcann.formulas.values import (
    T,
    decode,
    store,
)


def _plain(x: T) -> torch.Tensor:
    return decode(x) if x.dtype in ("hifloat8", "float8_e8m0") else x.values


def _elementwise(name: str, compute: Callable[..., torch.Tensor]) -> None:
    """Register ``name`` as ``compute`` of its inputs; the result comes last."""

    @formula(name)
    def run(*arguments: Any) -> None:
        *inputs, out = arguments
        given = [_plain(one) if isinstance(one, Described) else one for one in inputs]
        store(out, compute(*given))


for _name, _compute in {
    "Abs": torch.abs,
    "BitwiseOrScalar": lambda x, s: x | s,
    "LeftShifts": lambda x, s: x << s,
    "BitwiseAndTensor": torch.bitwise_and,
    "BitwiseOrTensor": torch.bitwise_or,
    "Max": torch.max,
    "NeTensor": torch.ne,
    "NeScalar": lambda x, s: x != s,
    "BitwiseNot": torch.bitwise_not,
    "BitwiseAndScalar": lambda x, s: x & s,
    "Clamp": lambda x, low, high: x.clamp(low, high),
    "ClampMin": lambda x, low: x.clamp(low),
    "Div": torch.div,
    "Divs": lambda x, s: x / s,
    "EqScalar": lambda x, s: x == s,
    "EqTensor": torch.eq,
    "Exp2": torch.exp2,
    "GtScalar": lambda x, s: x > s,
    "GtTensor": torch.gt,
    "IsFinite": torch.isfinite,
    "IsInf": torch.isinf,
    "LogicalAnd": torch.logical_and,
    "LogicalNot": torch.logical_not,
    "LogicalOr": torch.logical_or,
    "Maximum": torch.maximum,
    "Mul": torch.mul,
    "Muls": lambda x, s: x * s,
    "Cos": torch.cos,
    "Sin": torch.sin,
    "Log": torch.log,
    "LtScalar": lambda x, s: x < s,
    "GeScalar": lambda x, s: x >= s,
    "Neg": torch.neg,
    "PowTensorScalar": lambda x, s: x**s,
    "Reciprocal": torch.reciprocal,
    "RemainderTensorScalar": torch.remainder,
    "Rsqrt": torch.rsqrt,
    "SWhere": lambda condition, x, y: torch.where(condition, x, y),
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Add": lambda x, y, alpha: x + alpha * y,
    "Sub": lambda x, y, alpha: x - alpha * y,
    "Adds": lambda x, s, alpha: x + alpha * s,
    "Subs": lambda x, s, alpha: x - alpha * s,
    "Rsubs": lambda x, s, alpha: s - alpha * x,
    "ConstantPadNd": lambda x, sizes, value: torch.nn.functional.pad(x, sizes, value=value),
}.items():
    _elementwise(f"aclnn{_name}", _compute)


def _in_place(name: str, write: Callable[..., Any]) -> None:
    """Register ``name`` as ``write`` to its first argument, by the others."""

    @formula(name)
    def run(*arguments: Any) -> None:
        write(*[one.values if isinstance(one, Described) else one for one in arguments])


for _name, _write in {
    "Add": lambda to, x, alpha: to.add_(x, alpha=alpha),
    "Adds": lambda to, x, alpha: to.add_(x, alpha=alpha),
    "BitwiseAndScalar": torch.Tensor.bitwise_and_,
    "BitwiseOrTensor": torch.Tensor.bitwise_or_,
    "Div": torch.Tensor.div_,
    "FillScalar": torch.Tensor.fill_,
    "MaskedFillScalar": torch.Tensor.masked_fill_,
    "Mul": torch.Tensor.mul_,
    "Muls": torch.Tensor.mul_,
    "One": lambda to: to.fill_(1),
    "Zero": torch.Tensor.zero_,
}.items():
    _in_place(f"aclnnInplace{_name}", _write)


@formula("aclnnArange")
def arange(start: Any, end: Any, step: Any, out: T) -> None:
    store(out, torch.arange(start, end, step))


@formula("aclnnCast")
def cast(x: T, dtype: int, y: T) -> None:
    store(y, _plain(x))


@formula("aclnnInplaceCopy")
def inplace_copy(to: T, x: T) -> None:
    if to.values.dtype.itemsize == 1 and to.values.dtype == x.values.dtype:
        to.values.view(torch.uint8).copy_(x.values.view(torch.uint8))
    else:
        store(to, _plain(x))


@formula("aclnnCat")
def cat(parts: list[T], dim: int, out: T) -> None:
    present = [part.values for part in parts if part.values.numel()]
    if present:
        out.values.copy_(torch.cat(present, dim))


@formula("aclnnStack")
def stack(parts: list[T], dim: int, out: T) -> None:
    out.values.copy_(torch.stack([part.values for part in parts], dim))


@formula("aclnnMatmul", "aclnnMm")
def matmul(a: T, b: T, out: T, cube_math: int) -> None:
    store(out, decode(a) @ decode(b))


@formula("aclnnAddmm")
def addmm(*arguments: Any) -> None:
    x, a, b, beta, alpha, out, _cube_math = arguments
    store(out, beta * decode(x) + alpha * (decode(a) @ decode(b)))


@formula("aclnnInplaceNormal")
def inplace_normal(to: T, mean: float, deviation: float, seed: int, offset: int) -> None:
    generator = torch.Generator().manual_seed(seed + offset)
    to.values.copy_(torch.randn(to.shape, generator=generator) * deviation + mean)


@formula("aclnnAmax")
def reduce_amax(x: T, dims: list[int], keep: int, out: T) -> None:
    store(out, x.values.amax(dims, keepdim=bool(keep)))


@formula("aclnnAminmax")
def aminmax(x: T, dims: list[int], keep: int, low: T, high: T) -> None:
    store(low, x.values.amin(dims, keepdim=bool(keep)))
    store(high, x.values.amax(dims, keepdim=bool(keep)))


@formula("aclnnForeachCopy")
def foreach_copy(sources: list[T], to: list[T]) -> None:
    for source, one in zip(sources, to, strict=True):
        store(one, _plain(source))


@formula("aclnnIndexSelect")
def index_select(x: T, dim: int, index: T, out: T) -> None:
    store(out, x.values.index_select(dim, index.values))


@formula("aclnnInplaceIndexCopy")
def index_copy(to: T, dim: int, index: T, source: T) -> None:
    to.values.index_copy_(dim, index.values, source.values)


@formula("aclnnIndexPutImpl")
def index_put(to: T, indices: list[T], values: T, accumulates: int, is_unsafe: int) -> None:
    assert not accumulates
    to.values[tuple(index.values for index in indices)] = values.values


@formula("aclnnAll")
def reduce_all(x: T, dims: list[int], keep: int, out: T) -> None:
    store(out, torch.all(x.values, dims or None, keepdim=bool(keep)))


@formula("aclnnAny")
def reduce_any(x: T, dims: list[int], keep: int, out: T) -> None:
    store(out, torch.any(x.values, dims or None, keepdim=bool(keep)))


@formula("aclnnReduceSum")
def reduce_sum(x: T, dims: list[int], keep: int, dtype: int, out: T) -> None:
    wide = _plain(x).to(out.values.dtype)
    wide = wide.float() if wide.is_floating_point() and wide.dtype != torch.float64 else wide
    store(out, wide.sum(dims, keepdim=bool(keep)) if dims else wide.sum())


@formula("aclnnMean", "aclnnMeanV2")
def mean(x: T, dims: list[int], keep: int, dtype: int, out: T) -> None:
    store(out, decode(x).mean(dims or None, keepdim=bool(keep)))


@formula("aclnnRepeatInterleaveIntWithDim")
def repeat_interleave(x: T, count: int, dim: int, size: int, out: T) -> None:
    store(out, x.values.repeat_interleave(count, dim))
