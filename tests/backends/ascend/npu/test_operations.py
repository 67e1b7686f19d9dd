"""Single operations on the device against the reference: sizes, layouts, groups, edge values."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from fp8core import formats
from fp8core.backend_api import (
    GATED,
    ActivationBackwardDesc,
    ActivationDesc,
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OperandSpec,
    Quantized,
    QuantizeDesc,
)
from fp8core.dispatch.table import resolve
from fp8core_backends.ascend.layers import ACTIVATIONS
from fp8core_backends.ascend.operators import casts
from tests.backends.ascend.softcann.device import Call
from tests.pairs import pairs

CPU, NPU = torch.device("cpu"), torch.device("npu:0")
BF16, FLOAT = torch.bfloat16, torch.float32
E4M3 = OperandSpec("e4m3", (0, 0), 448.0)
SPECS: Mapping[str, tuple[OperandSpec, OperandSpec]] = {
    "tensor": (E4M3, E4M3),
    "mixed": (OperandSpec("e5m2", (0, 0), 57344.0), E4M3),
    "hif8": (OperandSpec("hif8", (0, 0), 224.0), OperandSpec("hif8", (0, 0), 15.0)),
    "row": (OperandSpec("e4m3", (1, 0), 448.0), OperandSpec("e4m3", (1, 0), 448.0)),
    "block": (OperandSpec("e4m3", (1, 128), 448.0), OperandSpec("e4m3", (128, 128), 448.0)),
    "mx": (
        OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0"),
        OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0"),
    ),
}
SIZES = [(1, 1, 64), (1, 128, 64), (64, 64, 64), (5, 7, 192), (130, 260, 320), (256, 64, 128)]


def values(rows: int, cols: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randint(-6, 6, (rows, 1), generator=generator).float())
    return (torch.randn(rows, cols, generator=generator) * spread).bfloat16()


def quantized(spec: OperandSpec, x: torch.Tensor, *, columnwise: bool = False) -> Quantized:
    desc = QuantizeDesc(x.dtype, None if columnwise else spec, spec if columnwise else None)
    result: Quantized = resolve(desc, x.device).run(x)
    return result


@pytest.mark.parametrize(
    ("name", "sizes", "out_dtype", "columnwise"),
    pairs(SPECS, SIZES, [BF16, FLOAT], [False, True]),
    ids=str,
)
def test_product_is_that_of_the_dequantized_operands(
    name: str, sizes: tuple[int, int, int], out_dtype: torch.dtype, columnwise: bool
) -> None:
    (m, n, k), specs = sizes, SPECS[name]
    operands = []
    for seed, (rows, spec) in enumerate(zip((m, n), specs, strict=True)):
        x = values(rows, k, seed)
        given = x.t().contiguous() if columnwise else x
        both = quantized(spec, given.to(NPU), columnwise=columnwise)
        operand = both.columnwise if columnwise else both.rowwise
        assert operand is not None
        operands.append(operand)
    bias = torch.randn(n, generator=torch.Generator().manual_seed(2)).to(NPU)
    run = resolve(GemmDesc(*specs, out_dtype), NPU).run
    found = run(*operands, bias=bias).cpu().double()
    exact = [
        resolve(DequantizeDesc(spec, FLOAT), NPU).run(operand).cpu().double()
        for spec, operand in zip(specs, operands, strict=True)
    ]
    expected = exact[0] @ exact[1].t() + bias.cpu().double()
    bound = (k * 2.0**-24 + 2.0**-22) * (exact[0].abs() @ exact[1].abs().t() + 1)
    allowed = bound + torch.finfo(out_dtype).eps * expected.abs()
    assert ((found - expected).abs() <= allowed).all()


@pytest.mark.parametrize(
    ("name", "shape", "columnwise"),
    pairs(SPECS, [(1, 32), (64, 96), (130, 288), (32, 320)], [False, True]),
    ids=str,
)
def test_cast_is_within_a_step_of_the_reference(
    name: str, shape: tuple[int, int], columnwise: bool
) -> None:
    spec, x = SPECS[name][1], values(*shape)
    found = quantized(spec, x.to(NPU), columnwise=columnwise)
    expected = quantized(spec, x, columnwise=columnwise)
    one, other = (pair.columnwise if columnwise else pair.rowwise for pair in (found, expected))
    assert one is not None
    assert other is not None
    assert one.scale_inv is not None
    assert other.scale_inv is not None
    assert one.data.shape == other.data.shape
    if spec.scale_format == "e8m0":
        assert torch.equal(one.data.cpu(), other.data)
        assert torch.equal(one.scale_inv.cpu(), other.scale_inv)
        return
    torch.testing.assert_close(one.scale_inv.cpu(), other.scale_inv, rtol=2.0**-22, atol=0.0)
    steps = (place(spec, one.data.cpu()) - place(spec, other.data)).abs()
    assert steps.max() <= 1
    assert steps.float().mean() < 0.1  # midpoints, which the rounding of the scale moves


def place(spec: OperandSpec, codes: torch.Tensor) -> torch.Tensor:
    """The place of each code among the values of the format, in ascending order."""
    known = formats.by_name(spec.format)
    ordered = torch.tensor(sorted({v for v in known.values if math.isfinite(v)}))
    return torch.searchsorted(ordered, known.decode(codes).contiguous())


EDGES = {
    "zeros": [0.0, -0.0],
    "inf": [1.0, math.inf, -3.0],
    "NaN": [math.nan, 2.0, -1.5],
    "tiny": [1e-41, -3e-42],
    "one": [0.37],
}


@pytest.mark.parametrize(
    ("name", "edge", "columnwise"),
    pairs(["tensor", "mixed", "hif8"], [None, *EDGES], [False, True]),
    ids=str,
)
def test_float32_is_cast_as_by_the_reference(
    name: str, edge: str | None, columnwise: bool, calls: list[Call]
) -> None:
    spec = SPECS[name][0]
    x = values(33, 96).float() if edge is None else torch.tensor(EDGES[edge]).repeat(4, 16)
    found = quantized(spec, x.to(NPU), columnwise=columnwise)
    expected = quantized(spec, x, columnwise=columnwise)
    one, other = (pair.columnwise if columnwise else pair.rowwise for pair in (found, expected))
    assert torch.equal(one.data.cpu(), other.data)
    assert torch.equal(one.scale_inv.cpu(), other.scale_inv)
    assert "aclnnQuantMax" in {call.name for call in calls}


@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("target", [15.0, 448.0])
def test_delayed_cast_saturates_and_records_the_amax(dtype: torch.dtype, target: float) -> None:
    name = "hif8" if target == 15.0 else "e4m3"
    spec = OperandSpec(name, (0, 0), target, delayed=True, cast_first=False)
    x = values(64, 96).to(dtype)
    desc = QuantizeDesc(dtype, spec, spec)
    results = []
    for device in (CPU, NPU):
        amax, scale = torch.full((1,), 2.0), torch.full((1,), 100.0)
        to = amax.to(device)
        both = resolve(desc, device).run(x.to(device), scale=scale.to(device), amax_out=to)
        results.append((both, to.cpu()))
    (expected, expected_amax), (found, found_amax) = results
    assert torch.equal(found.rowwise.data.cpu(), expected.rowwise.data)
    assert torch.equal(found.columnwise.data.cpu(), expected.columnwise.data)
    assert torch.equal(found_amax, expected_amax)


def test_nonfinite_elements_are_counted() -> None:
    x = values(8, 64)
    x[0, 0], x[1, 1], x[2, 2] = math.nan, math.inf, -math.inf
    count = torch.zeros(1, dtype=torch.int64, device=NPU)
    resolve(QuantizeDesc(BF16, E4M3, E4M3), NPU).run(x.to(NPU), nonfinite_out=count)
    assert count.item() == 3


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


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_empty_tensor_has_the_operands_of_the_reference(name: str, shape: tuple[int, int]) -> None:
    spec, x = SPECS[name][1], torch.empty(shape, dtype=BF16)
    for columnwise in (False, True):
        found = quantized(spec, x.to(NPU), columnwise=columnwise)
        expected = quantized(spec, x, columnwise=columnwise)
        one, other = (both.columnwise if columnwise else both.rowwise for both in (found, expected))
        assert one is not None
        assert other is not None
        assert (one.data.shape, one.scale_inv.shape) == (other.data.shape, other.scale_inv.shape)


@pytest.mark.parametrize("name", ["tensor", "hif8", "mx"])
def test_groups_are_tensors_of_their_own(name: str) -> None:
    a_spec, b_spec = SPECS[name]
    offsets = torch.tensor([0, 64, 64, 192])
    x, grad = values(192, 128), values(192, 64, 1)
    quantize_a = QuantizeDesc(BF16, None, a_spec, grouped=True)
    quantize_b = QuantizeDesc(BF16, None, b_spec, grouped=True)
    a = resolve(quantize_a, NPU).run(grad.to(NPU), offsets).columnwise
    b = resolve(quantize_b, NPU).run(x.to(NPU), offsets).columnwise
    desc = GroupedGemmDesc(a_spec, b_spec, FLOAT, contract_groups=True)
    products = resolve(desc, NPU).run(a, b, offsets)
    bounds = offsets.tolist()
    for found, start, end in zip(products, bounds, bounds[1:], strict=False):
        exact = grad[start:end].float().t() @ x[start:end].float()
        assert (found.cpu() - exact).norm() <= 0.06 * exact.norm()


@pytest.mark.parametrize(
    ("kind", "zero_centered", "weight_dtype", "out_dtype"),
    pairs(["layernorm", "rmsnorm"], [False, True], [BF16, FLOAT], [BF16, FLOAT]),
    ids=str,
)
def test_norm_is_the_reference_s(
    kind: str,
    zero_centered: bool,
    weight_dtype: torch.dtype,
    out_dtype: torch.dtype,
    calls: list[Call],
) -> None:
    desc = NormDesc(kind, BF16, out_dtype, 1e-5, zero_centered)
    x, grad = values(33, 96), values(33, 96, 2)
    weight, bias = (values(1, 96, seed)[0].to(weight_dtype) for seed in (1, 3))
    given = [weight, bias] if kind == "layernorm" else [weight]
    results = []
    for device in (CPU, NPU):
        inputs = [one.to(device) for one in (x, *given)]
        y, mean, rstd = resolve(desc, device).run(*inputs)
        back = resolve(NormBackwardDesc(desc), device)
        grads = back.run(grad.to(device), *inputs[:2], mean, rstd)
        found = [y, mean, rstd, *grads]
        results.append([None if one is None else one.cpu().float() for one in found])
        assert grads[1].dtype == FLOAT
    for expected, found in zip(*results, strict=True):
        if expected is None:
            assert found is None
            continue
        torch.testing.assert_close(found, expected, rtol=2.0**-8, atol=1e-3)
    names = {call.name for call in calls}
    expected = {"layernorm": {"aclnnLayerNorm", "aclnnLayerNormBackward"}}
    assert names >= expected.get(kind, {"aclnnRmsNorm", "aclnnRmsNormGrad"})


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norm_of_nothing_is_the_reference_s(kind: str, rows: int) -> None:
    desc = NormDesc(kind, BF16, BF16, 1e-5)
    x, weight = torch.empty(rows, 0 if rows else 8, dtype=BF16), torch.ones(0 if rows else 8)
    expected, found = (
        resolve(desc, device).run(x.to(device), weight.to(device)) for device in (CPU, NPU)
    )
    for one, other in zip(expected, found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.shape, one.dtype) == (other.shape, other.dtype)


@pytest.mark.parametrize("out_dtype", [BF16, FLOAT], ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation_is_the_reference_s(name: str, out_dtype: torch.dtype) -> None:
    x = values(33, 96)
    grad = values(33, 48 if name in GATED else 96, 1)
    forward = ActivationDesc(name, BF16, out_dtype)
    backward = ActivationBackwardDesc(name, BF16, BF16)
    for desc, arguments in ((forward, (x,)), (backward, (grad, x))):
        expected = resolve(desc, CPU).run(*arguments)
        found = resolve(desc, NPU).run(*(one.to(NPU) for one in arguments))
        torch.testing.assert_close(found.cpu(), expected, rtol=2.0**-7, atol=1e-4)
