"""What reaches CANN: each product's descriptors, against the table of Ascend 950's operators.

Source: aclnnQuantMatmulV5 and aclnnQuantBatchMatmulInplaceAdd in CANN's ops-nn.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import fp8core as te
from tests.backends.ascend.npu.layers import FEATURES, RECIPES, ROWS, run
from tests.backends.ascend.softcann.device import Call

OUT = 416
QUANTIZED = [name for name in RECIPES if name != "none"]
BLOCK_GROUPS = (1 << 32) | (128 << 16) | 128
MX_GROUPS = (1 << 32) | (1 << 16) | 32


def products(calls: list[Call]) -> list[Call]:
    return [call for call in calls if call.name == "aclnnQuantMatmulV5"]


def blocks(size: int) -> int:
    return -(-size // 128)


def check(call: Call, name: str) -> tuple[int, int, int]:
    """Assert that a product obeys the row of the table for its recipe; return its m, n, k."""
    x1, x2, scale1, scale2, _, _, _, _, bias, *_, groups, out = call.arguments
    (m, k), (_, n) = x1.shape, x2.shape
    assert x2.shape[0] == k
    assert out.shape == (m, n)
    assert out.dtype in ("bfloat16", "float32")
    for scale in (scale1, scale2):
        assert scale.dtype == ("float8_e8m0" if name.startswith("mxfp8") else "float32")
    if name.startswith("hif8"):
        assert (x1.dtype, x2.dtype) == ("hifloat8", "hifloat8")
    else:
        assert {x1.dtype, x2.dtype} <= {"float8_e4m3fn", "float8_e5m2"}
    if name.startswith("mxfp8"):
        assert (scale1.shape, scale2.shape) == ((m, k // 64, 2), (k // 64, n, 2))
        assert groups == MX_GROUPS
        assert x1.is_transposed == (scale1.values.stride(1) != 2)
        assert x2.is_transposed == (scale2.values.stride(0) == 2)
    elif name == "block":
        assert (scale1.shape, scale2.shape) == ((m, blocks(k)), (blocks(k), blocks(n)))
        assert (groups, bias) == (BLOCK_GROUPS, None)
        assert not x1.is_transposed
    elif name == "rowwise":
        assert (scale1.shape, scale2.shape, groups) == ((m,), (n,), 0)
    else:
        assert (scale1.shape, scale2.shape, groups) == ((1,), (1,), 0)
    if bias is not None:
        assert (bias.shape, bias.dtype) == ((n,), "float32")
    return m, n, k


@pytest.mark.parametrize("name", QUANTIZED)
def test_the_three_products_of_a_linear_obey_the_table(name: str, calls: list[Call]) -> None:
    run("linear", RECIPES[name], "npu", steps=1)
    rows = 192 if name.startswith("mxfp8") else ROWS  # pairs of blocks of 32
    features = 320 if name.startswith("mxfp8") else FEATURES
    out = 448 if name.startswith("mxfp8") else OUT
    sizes = [check(call, name) for call in products(calls)]
    assert sizes == [(rows, out, features), (rows, features, out), (out, features, rows)]


@pytest.mark.parametrize("name", ["mxfp8", "hif8"])
def test_main_grad_is_added_to_by_the_product(name: str, calls: list[Call]) -> None:
    layer = te.Linear(
        128,
        64,
        bias=False,
        params_dtype=torch.bfloat16,
        device="npu",
        fuse_wgrad_accumulation=True,
    )
    layer.weight.main_grad = torch.ones(64, 128, dtype=torch.float32, device="npu")
    x = torch.randn(64, 128).bfloat16().npu().requires_grad_()
    with te.autocast(recipe=RECIPES[name]):
        layer(x).sum().backward()
    (added,) = [call for call in calls if call.name == "aclnnQuantBatchMatmulInplaceAdd"]
    x1, x2, _, _, to, *_ = added.arguments
    # The one way that its document has; torch_npu leaves its two flags to the strides.
    assert (x1.is_transposed, x2.is_transposed) == (True, False)
    assert (to.dtype, to.shape) == ("float32", (64, 128))
    got: Any = layer.weight.main_grad.cpu()
    expected = (1 + x.detach().cpu().float().sum(0)).expand_as(got)
    assert ((got - expected).norm() / expected.norm()) < 0.05


def targets(calls: list[Call]) -> list[float]:
    return [call.arguments[6] for call in calls if call.name == "aclnnDynamicQuantV4"]


def test_hif8_is_scaled_to_15_forward_and_to_224_backward(calls: list[Call]) -> None:
    run("linear", RECIPES["hif8"], "npu", steps=1)
    assert targets(calls) == [15.0, 15.0, 224.0, 15.0]  # the weight again, for dgrad


def test_mx_scales_are_rounded_up(calls: list[Call]) -> None:
    # Both orientations of the weight, too, are cast in forward.
    run("linear", dataclasses.replace(RECIPES["mxfp8"], holding="fastest"), "npu", steps=1)
    casts = [call for call in calls if call.name == "aclnnDynamicMxQuantWithDualAxisV2"]
    assert [call.arguments[3] for call in casts] == [1, 1, 1]


def test_delayed_casts_record_the_amax_themselves(calls: list[Call]) -> None:
    run("linear", RECIPES["delayed"], "npu", steps=1)
    casts = [call for call in calls if call.name == "aclnnQuantMax"]
    assert [call.arguments[2] for call in casts] == ["rint"] * 4
    assert "aclnnAbs" not in {call.name for call in calls}
