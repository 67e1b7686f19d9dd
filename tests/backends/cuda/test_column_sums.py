"""Column sums: the same bits however the tensor lies; test_sizes.py has the kit's bounds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce
from typing import Any

import pytest
import torch

import fp8core
from fp8core.backend_api import ColumnSumsDesc, OperandError
from fp8core_backends.cuda import column_sums
from tests.backends.cuda.cuda_cases import DEVICE, DTYPES, EMPTY, backend, put_on_the_host

on_device = pytest.mark.needs_accelerator("cuda")
# Vectors at aligned addresses; else elements, in the same order.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "columns of a wider tensor": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "at an odd address": lambda x: torch.cat((x[:, :1], x), 1)[:, 1:],
    "transposed": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every other column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


def sums(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = backend("cuda").bind(ColumnSumsDesc(x.dtype), DEVICE)(x)
    return made


@on_device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_do_not_depend_on_the_layout(layout: str) -> None:
    shapes = ((1, 8), (64, 512), (300, 264), (4100, 136))
    for shape, dtype in itertools.product(shapes, DTYPES):
        x = torch.randn(shape, device=DEVICE).to(dtype)
        laid = LAYOUTS[layout](x)
        assert torch.equal(laid, x)
        assert torch.equal(sums(laid), sums(x)), (shape, dtype)


def in_order(x: torch.Tensor) -> torch.Tensor:
    """Return the sums in the order that csrc/cuda/sums/column_sums.h gives, in float32."""
    rows, cols = x.shape
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, -rows % 4096))  # 32 tiles of 128 rows
    eighths = reduce(torch.add, x.view(-1, 8, 2, 8, cols).unbind(3))  # [tiles, warps, halves, cols]
    tiles = reduce(torch.add, eighths.sum(2).unbind(1))
    lanes = reduce(torch.add, tiles.view(-1, 32, cols))
    for half in (16, 8, 4, 2, 1):
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


@on_device
@pytest.mark.parametrize("shape", [(1, 8), (128, 64), (200, 264), (257, 261), (9000, 264)], ids=str)
def test_rows_are_added_in_one_order(shape: tuple[int, int]) -> None:
    for dtype in DTYPES:
        x = torch.randn(shape).to(dtype)
        assert torch.equal(sums(x.to(DEVICE)).cpu(), in_order(x)), dtype


@on_device
@pytest.mark.parametrize("name", [None, "delayed", "current"])
def test_bias_of_a_layer_is_trained_by_them(name: str | None) -> None:
    layer = fp8core.Linear(64, 96, params_dtype=torch.bfloat16, device=DEVICE)
    x = torch.randn(48, 64, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn(48, 96, device=DEVICE, dtype=torch.bfloat16)
    chosen = None if name is None else fp8core.recipe.by_name(name)
    with fp8core.autocast(enabled=name is not None, recipe=chosen):
        layer(x).backward(grad)
    assert torch.equal(layer.bias.grad, sums(grad).bfloat16())
    (line,) = [one for one in fp8core.explain(layer).lines if one.step == "bias gradient"]
    assert line.choice is not None
    assert (line.choice.backend, line.kernel) == ("cuda", "fp8core::sum_tiles")


class Native:
    """Stands for the library; takes down its arguments. It wants a workspace from 300 rows on."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, ...]] = []
        names = ("bfloat16", "float16", "float32")
        self.InputType = type("InputType", (), {"__members__": {one: one for one in names}})

    def ColumnSums(self, input_type: str, index: int) -> Native:
        return self

    def workspace_floats(self, rows: int, cols: int) -> int:
        return 5 * cols if rows >= 300 else 0

    def __call__(self, arguments: tuple[int, ...], stream: int) -> None:
        self.calls.append(arguments)


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    put_on_the_host(monkeypatch, column_sums)
    return Native()


def bound(native: Native) -> Any:
    desc = ColumnSumsDesc(torch.bfloat16)
    return column_sums.ColumnSums(desc, torch.device("cuda", 0), native)


def test_rows_of_a_wider_tensor_are_read_where_they_are(native: Native) -> None:
    x = torch.zeros(20, 64, dtype=torch.bfloat16)[:, 8:48]
    made = bound(native)(x)
    assert native.calls == [(x.data_ptr(), 20, 40, 64, made.data_ptr(), 0)]


def test_workspace_is_given_where_the_library_wants_one(native: Native) -> None:
    bound(native)(torch.zeros(300, 8, dtype=torch.bfloat16))
    assert native.calls[0][-1] != 0


@pytest.mark.parametrize("shape", EMPTY)
def test_sums_over_no_rows_are_zeros(native: Native, shape: tuple[int, int]) -> None:
    made = bound(native)(torch.zeros(shape, dtype=torch.bfloat16))
    assert torch.equal(made, torch.zeros(shape[1]))
    assert native.calls == []


def test_tensor_of_another_dtype_reaches_no_kernel(native: Native) -> None:
    with pytest.raises(OperandError, match=r"torch\.float32; bound for torch\.bfloat16"):
        bound(native)(torch.zeros(4, 8))
    assert native.calls == []
