"""``GroupedLinear`` writes its results into memory that the caller gives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core import GroupedLinear, OperandError, UnsupportedError, autocast
from fp8core.torch_ops.private import PASSES_DATACLASSES
from tests.pairs import pairs, turns

SPLITS = [[7, 0, 33], [0, 0, 40]]


def run(
    layer: GroupedLinear, x: torch.Tensor, splits: Any, chosen: Any, **buffers: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x, splits, **buffers)
    assert isinstance(y, torch.Tensor)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
    assert x.grad is not None
    return y, x.grad


@pytest.mark.parametrize(
    ("chosen", "splits", "sizes"),
    pairs([None, "current", "mxfp8", "nvfp4"], SPLITS, [(64, 32), (50, 31)]),
    ids=str,
)
def test_results_are_written_there(chosen: Any, splits: Any, sizes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer, x = GroupedLinear(3, *sizes), torch.randn(40, sizes[0])
    torch.manual_seed(1)
    want = run(layer, x, splits, chosen)
    weight_grad = layer.weight2.grad.clone()  # type: ignore[union-attr, operator]  # a Parameter
    out, dgrad_out = torch.full((40, sizes[1]), 9.0), torch.full((40, sizes[0]), 9.0)
    torch.manual_seed(1)
    got = run(layer, x, splits, chosen, out=out, dgrad_out=dgrad_out)
    for result, expected, buffer in zip(got, want, (out, dgrad_out), strict=True):
        assert torch.equal(result, expected)
        assert torch.equal(buffer, expected)
    assert got[0].data_ptr() == out.data_ptr()
    assert torch.equal(layer.weight2.grad, weight_grad)  # type: ignore[arg-type]


def test_a_buffer_stays_without_history_and_can_be_given_again() -> None:
    layer, x = GroupedLinear(2, 32, 32), torch.randn(8, 4, 32)
    out = torch.empty(8, 4, 32)
    for _ in range(2):
        y = layer(x, [16, 16], out=out)
        assert isinstance(y, torch.Tensor)
        assert y.shape == out.shape
        assert y.requires_grad
        assert not out.requires_grad


BAD = {
    "shape": torch.empty(8, 31),
    "dtype": torch.empty(8, 32, dtype=torch.bfloat16),
    "strides": torch.empty(32, 8).t(),
    "a gradient": torch.empty(8, 32, requires_grad=True),
    "device": torch.empty(8, 32, device="meta"),
}


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    for bad, name in turns(BAD, ["out", "dgrad_out"]):
        layer = GroupedLinear(2, 32, 32)
        with pytest.raises(
            OperandError, match=rf"{name} is torch\..*expected torch.float32 \[8, 32\]"
        ):
            layer(torch.randn(8, 32), [4, 4], **{name: BAD[bad]})


@pytest.mark.skipif(not PASSES_DATACLASSES, reason="an older torch raises before it is asked")
def test_a_graph_refuses_it() -> None:
    layer, out = GroupedLinear(2, 32, 32), torch.empty(8, 32)
    compiled = torch.compile(lambda x: layer(x, [4, 4], out=out), backend="eager")
    with pytest.raises(UnsupportedError, match=r"not offered under torch\.compile"):
        compiled(torch.randn(8, 32))
