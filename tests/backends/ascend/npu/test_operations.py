"""Single operations on the device where the kit's laws see no difference, and CANN's kernels."""

from __future__ import annotations

import math

import pytest
import torch

from fp8core.backend_api import NormBackwardDesc, NormDesc, OperandSpec, QuantizeDesc
from fp8core.dispatch.table import resolve
from fp8core_backends.ascend.operators import casts
from tests.backends.ascend.softcann.device import Call
from tests.pairs import pairs

CPU, NPU = torch.device("cpu"), torch.device("npu:0")
BF16, FLOAT = torch.bfloat16, torch.float32
E4M3 = OperandSpec("e4m3", (0, 0), 448.0)
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
