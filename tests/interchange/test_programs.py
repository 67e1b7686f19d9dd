"""Programs that leave fp8core: an ONNX file's codes and scales, and a package of AOTInductor."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import fp8core as te
from fp8core import formats, recipe
from fp8core.backend_api import OperandSpec, Quantized, QuantizeDesc
from fp8core.export import operands
from fp8core.torch_ops.definition import bound
from fp8core.torch_ops.encoding import Operation, encode

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")
# torch's own, about the containers that it copies.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]
SPECS = {
    "tensorwise": OperandSpec("e4m3", (0, 0), 448.0),
    "e5m2": OperandSpec("e5m2", (0, 0), 57344.0),
    "power_of_two": OperandSpec("e4m3", (0, 0), 448.0, power_of_two=True, amax_epsilon=1e-4),
    "rowwise": OperandSpec("e4m3", (1, 0), 448.0),
    "rowwise_power_of_two": OperandSpec("e5m2", (1, 0), 57344.0, power_of_two=True),
    "block": OperandSpec("e4m3", (1, 128), 448.0, power_of_two=True),
    "block_of_any_scale": OperandSpec("e4m3", (1, 16), 448.0),
    "square": OperandSpec("e4m3", (16, 16), 448.0, power_of_two=True),
    "square_of_any_scale": OperandSpec("e5m2", (16, 16), 57344.0),
    "mxfp8": OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0"),
    "mxfp8_e5m2": OperandSpec("e5m2", (1, 32), 57344.0, scale_format="e8m0"),
    "nvfp4": OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3"),
    "nvfp4_square": OperandSpec("e2m1", (16, 16), 6.0, scale_format="e4m3"),
    "nvfp4_row": OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3", row_scaled=True),
}
ROWS, K = 40, 72  # neither is a multiple of 16 or more


def normal() -> torch.Tensor:
    return torch.randn(ROWS, K, generator=torch.Generator().manual_seed(0))


def decades() -> torch.Tensor:
    """Rows from 2^-144 to 2^123, subnormal numbers among them, and a row of zeros."""
    x = normal() * 2.0 ** torch.linspace(-144, 123, ROWS)[:, None].round()
    x[7] = 0
    return x


def ties() -> torch.Tensor:
    """Multiples of 2^-6 up to the largest value: many lie between two codes."""
    x = torch.arange(ROWS * K).reshape(ROWS, K).remainder(449) / 64
    x[:, ::32] = 448
    return torch.where(torch.arange(K) % 2 == 0, x, -x)


def special() -> torch.Tensor:
    x = normal()
    x[3, 5], x[4, 40], x[20, 70], x[30, 0] = torch.nan, torch.inf, -torch.inf, -0.0
    x[9] = torch.nan
    return x


INPUTS = {one.__name__: one for one in (normal, decades, ties, special)}


class Casts(torch.nn.Module):
    """Every cast of one input: its values, its scales and the values that they stand for."""

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for spec in SPECS.values():
            values, *scales = operands.cast(spec, x)
            results += [values.to(torch.float32), *scales]
            results.append(operands.dequantized(spec, [values, *scales]))
        return results


@functools.cache
def session() -> Any:
    program = torch.export.export(Casts(), (normal(),))
    made = torch.onnx.export(program, dynamo=True, opset_version=21, verbose=False)
    assert made is not None
    return onnxruntime.InferenceSession(made.model_proto.SerializeToString())


@functools.cache
def ran(name: str) -> list[torch.Tensor]:
    one = session()
    arguments = {one.get_inputs()[0].name: INPUTS[name]().numpy()}
    return [torch.from_numpy(result) for result in one.run(None, arguments)]


class Result(NamedTuple):
    """One operand: values without their scale, the scales, and the values that they stand for."""

    values: torch.Tensor
    scales: list[torch.Tensor]
    dequantized: torch.Tensor


def result_of(kind: str, results: Sequence[torch.Tensor]) -> Result:
    at = 0
    for name, spec in SPECS.items():
        count = 4 if spec.scale_format == "e4m3" else 3
        if name == kind:
            values, *scales, dequantized = results[at : at + count]
            return Result(values, scales, dequantized)
        at += count
    raise KeyError(kind)


def expected(spec: OperandSpec, x: torch.Tensor) -> Result:
    desc = QuantizeDesc(x.dtype, spec, None)
    run = bound(encode(Operation("reference", desc)), x.device)
    quantized: Quantized = run(x)
    assert quantized.rowwise is not None
    parts = [one for one in quantized.rowwise if one is not None]
    values, *scales = operands.stored(spec, parts)
    wanted = te.backend_api.DequantizeDesc(spec, torch.float32)
    decode = bound(encode(Operation("reference", wanted)), x.device)
    return Result(values.to(torch.float32), scales, decode(quantized.rowwise))


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", SPECS)
def test_codes_and_scales_equal_the_reference_backends(kind: str) -> None:
    for given, make in INPUTS.items():
        want, result = expected(SPECS[kind], make()), result_of(kind, ran(given))
        pairs = zip(result.scales, want.scales, strict=True)
        assert all(same(one, other) for one, other in pairs), given
        assert same(result.values, want.values), given
        assert same(result.dequantized, want.dequantized), given
        assert want.values.shape == (ROWS, K)
        codes = 2 ** formats.by_name(SPECS[kind].format).bits
        assert want.values.nan_to_num().unique().numel() <= codes, given


@pytest.mark.skipif(
    not os.environ.get("FP8CORE_TEST_AOT_INDUCTOR"), reason="set FP8CORE_TEST_AOT_INDUCTOR=1"
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_package_of_a_transformer_layer_equals_forward(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = te.TransformerLayer(64, 128, 4).eval().to(dtype), torch.randn(8, 4, 64).to(dtype)
    with torch.no_grad(), te.autocast(recipe=recipe.Float8CurrentScaling()):
        want, program = model(x), torch.export.export(model, (x,))
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs={
            "aot_inductor.compile_wrapper_opt_level": "O0",
            "emulate_precision_casts": True,
        },
    )
    assert torch.equal(torch._inductor.aoti_load_package(path)(x), want)
