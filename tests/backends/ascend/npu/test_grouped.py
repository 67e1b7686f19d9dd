"""Products of groups and single operations: which of them are one call, and what reaches CANN.

Source: aclnnGroupedMatmulV4, V5 and aclnnQuantGroupedMatmulInplaceAdd in CANN's ops-transformer.
"""

from __future__ import annotations

import math

import pytest
import torch

import fp8core as te
from fp8core.backend_api import (
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OperandSpec,
    QuantizeDesc,
)
from fp8core.dispatch.table import resolve
from fp8core_backends.ascend.operators import casts
from tests.backends.ascend.npu.layers import RECIPES
from tests.backends.ascend.softcann.device import Call
from tests.pairs import pairs

NPU = torch.device("npu:0")
BF16, FLOAT = torch.bfloat16, torch.float32
IN, OUT, SPLITS = 128, 64, [64, 0, 128]
ROWS = sum(SPLITS)
QUANTIZED = [name for name in RECIPES if name != "none"]


def products(calls: list[Call]) -> list[str]:
    names = {"aclnnGroupedMatmulV4", "aclnnQuantMatmulV5", "aclnnQuantGroupedMatmulInplaceAdd"}
    return [call.name.removeprefix("aclnn") for call in calls if call.name in names]


def step(
    name: str, *, bias: bool = False, main_grads: torch.Tensor | None = None
) -> te.GroupedLinear:
    """Run forward and backward of a layer of three groups, the second of them empty."""
    torch.manual_seed(0)
    layer = te.GroupedLinear(
        len(SPLITS),
        IN,
        OUT,
        bias=bias,
        params_dtype=BF16,
        device="npu",
        fuse_wgrad_accumulation=main_grads is not None,
    )
    if main_grads is not None:
        for group, main_grad in enumerate(main_grads.unbind(0)):
            getattr(layer, f"weight{group}").main_grad = main_grad
    x = torch.randn(ROWS, IN).bfloat16().npu().requires_grad_()
    with te.autocast(recipe=RECIPES[name]):
        layer(x, SPLITS).sum().backward()
    torch.npu.synchronize()  # type: ignore[attr-defined]  # of torch_npu
    return layer


@pytest.mark.parametrize("name", QUANTIZED)
def test_each_product_of_a_layer_is_one_call(name: str, calls: list[Call]) -> None:
    layer = step(name)
    wgrad = ["QuantMatmulV5"] * 2 if name == "block" else ["GroupedMatmulV4"]
    assert products(calls) == ["GroupedMatmulV4", "GroupedMatmulV4", *wgrad]
    assert layer.weight1.grad is not None
    assert not layer.weight1.grad.any()


@pytest.mark.parametrize("name", QUANTIZED)
def test_descriptors_obey_the_document(name: str, calls: list[Call]) -> None:
    step(name)
    is_mx = name.startswith("mxfp8")
    for call in calls:
        if call.name != "aclnnGroupedMatmulV4":
            continue
        (x,), (weight,), bias, (scale,), *_, (x_scale,), ends = call.arguments[:9]
        kind, (out,) = call.arguments[13], call.arguments[16]
        count = len(SPLITS)
        assert not bias
        assert (ends.dtype, ends.shape) == ("int64", (count,))
        assert scale.dtype == x_scale.dtype == ("float8_e8m0" if is_mx else "float32")
        if kind == 2:
            assert x.is_transposed
            assert not weight.is_transposed
            assert (x.shape, weight.shape) == ((OUT, ROWS), (ROWS, IN))
            assert out.shape == (count, OUT, IN)
            expected = {
                "mx": ((ROWS // 64 + count, OUT, 2), (ROWS // 64 + count, IN, 2)),
                "rowwise": ((count, OUT), (count, IN)),
            }.get("mx" if is_mx else name, ((count,), (count,)))
            assert (x_scale.shape, scale.shape) == expected
            continue
        assert kind == 0
        assert not x.is_transposed
        k, n = (IN, OUT) if x.shape[1] == IN else (OUT, IN)
        assert (x.shape, weight.shape, out.shape) == ((ROWS, k), (count, k, n), (ROWS, n))
        expected = {
            "mx": ((ROWS, k // 64, 2), (count, k // 64, n, 2)),
            "rowwise": ((ROWS,), (count, n)),
            "block": ((ROWS, -(-k // 128)), (count, -(-k // 128), -(-n // 128))),
        }.get("mx" if is_mx else name, ((count,), (count,)))
        assert (x_scale.shape, scale.shape) == expected


@pytest.mark.parametrize(
    ("name", "added"),
    [("mxfp8", True), ("hif8", True), ("current", False), ("rowwise", False)],
)
@pytest.mark.parametrize("adjacent", [True, False])
def test_main_grads_in_a_row_are_added_to_by_the_product(
    name: str, added: bool, adjacent: bool, calls: list[Call]
) -> None:
    whole = torch.ones(2 * len(SPLITS), OUT, IN, device=NPU)
    step(name, main_grads=whole[: len(SPLITS)] if adjacent else whole[::2])
    found = products(calls)[-1]
    is_in_place = added and adjacent
    assert found == ("QuantGroupedMatmulInplaceAdd" if is_in_place else "GroupedMatmulV4")
    plain = step(name)
    for group, main_grad in enumerate(whole[: len(SPLITS)] if adjacent else whole[::2]):
        expected = 1 + getattr(plain, f"weight{group}").grad.float()
        torch.testing.assert_close(main_grad.cpu(), expected.cpu(), rtol=2.0**-7, atol=2.0**-7)
    assert (whole[len(SPLITS) :] if adjacent else whole[1::2]).eq(1).all()


def test_bias_takes_a_call_a_group(calls: list[Call]) -> None:
    step("current", bias=True)
    assert products(calls)[:2] == ["QuantMatmulV5"] * 2  # the empty group has none


E4M3 = OperandSpec("e4m3", (0, 0), 448.0)


def test_scales_of_groups_are_not_taken_for_scales_of_as_many_rows(calls: list[Call]) -> None:
    x = torch.tensor([[1.0] * 32, [100.0] * 32, [3.0] * 32], dtype=BF16)
    offsets = torch.tensor([0, 2, 2, 3])
    weight = torch.eye(32, dtype=BF16)
    quantize = resolve(QuantizeDesc(BF16, E4M3, None, grouped=True), NPU)
    dense = resolve(QuantizeDesc(BF16, E4M3, None), NPU)
    a = quantize.run(x.to(NPU), offsets).rowwise
    b = [dense.run(weight.to(NPU)).rowwise for _ in range(3)]
    found = resolve(GroupedGemmDesc(E4M3, E4M3, FLOAT), NPU).run(a, b, offsets)
    torch.testing.assert_close(found.cpu(), x.float(), rtol=0.1, atol=0.0)
    assert products(calls) == ["QuantMatmulV5"] * 2


def test_weights_in_a_row_are_not_copied(calls: list[Call]) -> None:
    whole = torch.zeros(3, 64, 128, dtype=torch.uint8, device=NPU)
    one = torch.ones(1, 1, device=NPU)
    x = resolve(QuantizeDesc(BF16, E4M3, None, grouped=True), NPU)
    offsets = torch.tensor([0, 16, 16, 48])
    a = x.run(torch.ones(48, 128, dtype=BF16, device=NPU), offsets).rowwise
    run = resolve(GroupedGemmDesc(E4M3, E4M3, BF16), NPU).run
    calls.clear()
    run(a, [a._replace(data=part, scale_inv=one) for part in whole.unbind(0)], offsets)
    torch.npu.synchronize()  # type: ignore[attr-defined]  # of torch_npu
    stacked = [call for call in calls if call.name == "aclnnStack"]
    assert [call.arguments[-1].dtype for call in stacked] == ["float32"]  # the scales alone


CPU = torch.device("cpu")
SPECS = {
    "e4m3": E4M3,
    "e5m2": OperandSpec("e5m2", (0, 0), 57344.0),
    "hif8": OperandSpec("hif8", (0, 0), 224.0),
}


def values(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 6, (rows, 1), generator=generator).float())
    return (torch.randn(rows, cols, generator=generator) * spread).bfloat16()


EDGES = {
    "zeros": [0.0, -0.0],
    "inf": [1.0, math.inf, -3.0],
    "NaN": [math.nan, 2.0, -1.5],
    "tiny": [1e-41, -3e-42],
    "one": [0.37],
}


@pytest.mark.parametrize(
    ("name", "edge", "columnwise"), pairs(SPECS, [None, *EDGES], [False, True]), ids=str
)
def test_float32_is_cast_as_by_the_reference(
    name: str, edge: str | None, columnwise: bool, calls: list[Call]
) -> None:
    x = values(33, 96).float() if edge is None else torch.tensor(EDGES[edge]).repeat(4, 16)
    both = (None, SPECS[name]) if columnwise else (SPECS[name], None)
    desc = QuantizeDesc(FLOAT, *both)
    found, expected = (resolve(desc, device).run(x.to(device)) for device in (NPU, CPU))
    for one, other in zip(found[columnwise], expected[columnwise], strict=True):
        assert one is other is None or torch.equal(one.cpu(), other)
    assert "aclnnQuantMax" in {call.name for call in calls}


@pytest.mark.parametrize("kind", ["LayerNorm", "RmsNorm"])
def test_norms_of_any_strides_are_kernels_of_cann(kind: str, calls: list[Call]) -> None:
    desc, results = NormDesc(kind.lower(), BF16, BF16, 1e-5), []
    for device in (CPU, NPU):
        x, weight = values(96, 33).to(device).t(), torch.ones(96, dtype=BF16, device=device)
        y, mean, rstd = resolve(desc, device).run(x, weight, *[weight] * (kind == "LayerNorm"))
        grad_x, *_ = resolve(NormBackwardDesc(desc), device).run(x, x, weight, mean, rstd)
        results.append([one.cpu() for one in (y, rstd, grad_x)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2.0**-7, atol=1e-3)
    back = "Backward" if kind == "LayerNorm" else "Grad"
    assert {call.name for call in calls} >= {f"aclnn{kind}", f"aclnn{kind}{back}"}


@pytest.mark.parametrize("given", [[1.0, math.nan], [math.nan, math.nan]], ids=str)
def test_amax_of_nan_does_not_stay_in_the_history(
    given: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = casts.quant_max

    def spreads_nan(x: torch.Tensor, scale: torch.Tensor, format: str) -> object:
        codes, amax = original(x, scale, format)
        return codes, amax + math.nan

    monkeypatch.setattr(casts, "quant_max", spreads_nan)
    spec = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
    amax, scale = torch.full((1,), 0.5, device=NPU), torch.ones(1, device=NPU)
    x = torch.tensor([given], dtype=BF16)
    resolve(QuantizeDesc(BF16, spec, None), NPU).run(x.to(NPU), scale=scale, amax_out=amax)
    assert amax.item() == 0.5
