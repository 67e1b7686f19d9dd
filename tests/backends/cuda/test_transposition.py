"""Codes laid out for cuBLASLt: byte for byte those of torch's copy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fp8core_backends.cuda import native
from fp8core_backends.cuda.transposition import RowsAdjacent
from tests.backends.cuda.cuda_cases import DEVICE
from tests.pairs import turns

pytestmark = pytest.mark.needs_accelerator("cuda")
# One tile and several, whole and ragged; sizes of operands.
SIZES = ((16, 16), (128, 128), (144, 272), (16, 4096), (4096, 16), (2000, 1040), (8192, 4096))
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "at an odd address": lambda x: torch.cat((x[:1], x)).flatten()[1:][: x.numel()].view(x.shape),
    "columns of a wider tensor": lambda x: torch.cat((x, x), 1)[:, : x.shape[1]],
    "transposed columns of a wider tensor": lambda x: (
        torch.cat((x, x)).t().contiguous().t()[: x.shape[0]]
    ),
}


def codes(rows: int, k: int) -> torch.Tensor:
    source = torch.Generator(DEVICE).manual_seed(rows + k)
    return torch.randint(0, 256, (rows, k), generator=source, dtype=torch.uint8, device=DEVICE)


@pytest.mark.parametrize(
    ("size", "dtype"), turns(SIZES, [torch.uint8, torch.float8_e4m3fn]), ids=str
)
def test_transposed_codes_are_copied_byte_for_byte(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    x = codes(*size)
    result = RowsAdjacent(DEVICE, native.load())(x.t().contiguous().t().view(dtype))
    assert result.is_contiguous()
    assert result.dtype == dtype
    assert torch.equal(result.view(torch.uint8), x)


@pytest.mark.parametrize("size", [(32, 48), (24, 40), (0, 16)], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_layout_has_the_same_codes(layout: str, size: tuple[int, int]) -> None:
    x = LAYOUTS[layout](codes(*size))
    result = RowsAdjacent(DEVICE, native.load())(x)
    assert result.is_contiguous()
    assert result.data_ptr() % 16 == 0
    assert torch.equal(result, x)


def test_rows_that_are_adjacent_are_not_copied() -> None:
    x = codes(32, 48)
    assert RowsAdjacent(DEVICE, native.load())(x) is x


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((16, 24, 16, 16), "24 x 16 codes; expected multiples of 16"),
        ((8, 16, 16, 16), "addresses that are multiples of 16"),
        ((0, 16, 16, 16), "codes is not empty and has the address 0"),
    ],
)
def test_what_the_kernel_does_not_take_is_said(given: tuple[int, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        native.load().Transpose(0)(given, 0)
