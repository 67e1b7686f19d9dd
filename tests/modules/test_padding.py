"""Zero rows behind the tokens of each expert, and their removal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.errors import OperandError
from fp8core.modules.layers.padding import Fp8Padding, Fp8Unpadding


def test_each_group_is_padded_with_zeros() -> None:
    x = torch.randn(10, 3)
    padded, sizes = Fp8Padding(3, 4)(x, [3, 0, 7])
    assert sizes == [4, 0, 8]
    assert torch.equal(padded[:3], x[:3])
    assert torch.equal(padded[4:11], x[3:])
    assert not padded[[3, 11]].any()


def test_unpadding_is_the_way_back() -> None:
    x = torch.randn(10, 3)
    padded, _ = Fp8Padding(3, 4)(x, [3, 0, 7])
    assert torch.equal(Fp8Unpadding(3, 4)(padded, [3, 0, 7]), x)


def test_rows_that_need_no_padding_are_returned() -> None:
    x, splits = torch.randn(12, 3), [4, 8]
    padded, sizes = Fp8Padding(2, 4)(x, splits)
    assert padded is x
    assert sizes is splits
    assert Fp8Unpadding(2, 4)(x, splits) is x


@pytest.mark.parametrize("layer", [Fp8Padding, Fp8Unpadding])
def test_gradients(layer: Any) -> None:
    rows = 10 if layer is Fp8Padding else 12
    x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = layer(3, 4)(x, [3, 0, 7])
        return y[0] if isinstance(y, tuple) else y

    assert torch.autograd.gradcheck(run, (x,))


ALIGNMENTS = {
    "MXFP8BlockScaling": 32,
    "NVFP4BlockScaling": 128,
    "DelayedScaling": 16,
    "Float8CurrentScaling": 16,
    "Float8BlockScaling": 16,
}


def test_multiple_is_what_the_recipe_needs() -> None:
    for name in ALIGNMENTS:
        layer = Fp8Padding(1)
        with fp8core.autocast(recipe=getattr(recipe, name)()):
            layer(torch.randn(3, 5), [3])
        assert layer.align_size == ALIGNMENTS[name], name


def test_no_rows() -> None:
    padded, sizes = Fp8Padding(2, 4)(torch.empty(0, 3), [0, 0])
    assert padded.shape == (0, 3)
    assert sizes == [0, 0]


ERRORS: dict[str, Any] = {
    "expected 2 numbers": lambda: Fp8Padding(2, 4)(torch.randn(3, 5), [3]),
    "m_splits [-1, 4]": lambda: Fp8Padding(2, 4)(torch.randn(3, 5), [-1, 4]),
    "has 3 rows; expected 7": lambda: Fp8Padding(2, 4)(torch.randn(3, 5), [3, 4]),
    "expected 8, those of the groups [4, 4]": lambda: Fp8Unpadding(2, 4)(torch.randn(7, 5), [3, 4]),
    "align_size=0": lambda: Fp8Padding(2, 0),
}


def test_what_does_not_fit_is_named() -> None:
    for words in ERRORS:
        with pytest.raises(OperandError) as caught:
            ERRORS[words]()
        assert words in str(caught.value)
