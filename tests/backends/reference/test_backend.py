"""What the reference backend says it supports, its alignment, and that all of it runs on meta."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core.backend_api import (
    Alignment,
    AmaxDesc,
    DequantizeDesc,
    GemmDesc,
    GroupedGemmDesc,
    OpDesc,
    Operand,
    OperandSpec,
    QuantizeDesc,
    ScaleUpdateDesc,
)
from fp8core.conformance.laws.declaration import of_a_later_version
from fp8core_backends.reference.backend import ReferenceBackend

CPU, META = torch.device("cpu"), torch.device("meta")
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

TENSORWISE = OperandSpec("e4m3", (0, 0), 448.0)
E5M2 = OperandSpec("e5m2", (0, 0), 57344.0, power_of_two=True, amax_epsilon=1e-6)
DELAYED = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
ROWWISE = OperandSpec("e4m3", (1, 0), 448.0)
BLOCK_1D = OperandSpec("e4m3", (1, 128), 448.0)
BLOCK_2D = OperandSpec("e4m3", (128, 128), 448.0, power_of_two=True)
FP4 = OperandSpec("e2m1", (1, 10), 6.0)
MXFP8 = OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0")
NVFP4 = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3")
NVFP4_2D = replace(NVFP4, block=(16, 16))
NVFP4_RHT = replace(NVFP4, transform="hadamard16")
NVFP4_SR = replace(NVFP4_RHT, stochastic=True)
SUPPORTED = (
    *(TENSORWISE, E5M2, DELAYED, ROWWISE, BLOCK_1D, BLOCK_2D, FP4),
    *(MXFP8, NVFP4, NVFP4_2D, NVFP4_RHT, NVFP4_SR),
)

# Each with a word of the reason that is expected.
UNKNOWN = {
    "format": (replace(TENSORWISE, format="e3m4"), "e3m4"),
    "scale format": (of_a_later_version(MXFP8, scale_format="e5m3"), "e5m3"),
    "transform": (replace(NVFP4, transform="hadamard32"), "hadamard32"),
    "stochastic e4m3": (replace(TENSORWISE, stochastic=True), "stochastic"),
}


class NoTensors(TorchDispatchMode):
    """Fails when a tensor operation runs."""

    def __torch_dispatch__(self, func: Any, *rest: Any) -> None:
        raise AssertionError(f"{func} was called")


def unsupported(desc: OpDesc, device: torch.device = CPU) -> str | None:
    with NoTensors():
        return ReferenceBackend().unsupported(desc, device)


def run(desc: OpDesc, *args: Any, device: torch.device = META, **given: Any) -> Any:
    assert unsupported(desc, device) is None
    return ReferenceBackend().bind(desc, device)(*args, **given)


def descriptors(spec: OperandSpec | None, other: OperandSpec | None) -> list[OpDesc]:
    """Everything that may be asked about a spec, ``other`` being a supported one."""
    made: list[OpDesc] = [QuantizeDesc(BF16, spec, None), QuantizeDesc(F32, None, spec, True)]
    made += [GemmDesc(spec, other, F32), GemmDesc(other, spec, BF16), GemmDesc(spec, spec, F16)]
    made += [GroupedGemmDesc(spec, other, F32, contract_groups=one) for one in (False, True)]
    return made if spec is None else [*made, DequantizeDesc(spec), QuantizeDesc(F16, spec, spec)]


def test_every_spec_of_a_recipe_and_high_precision_are_supported() -> None:
    descs = descriptors(None, None)
    for spec in SUPPORTED:
        descs += descriptors(spec, spec if spec.transform else TENSORWISE)
    assert len(descs) == 7 + 9 * len(SUPPORTED)
    assert {desc: reason for desc in descs if (reason := unsupported(desc)) is not None} == {}
    assert unsupported(GemmDesc(None, None, F64)) is None


@pytest.mark.parametrize("case", UNKNOWN)
def test_unknown_spec_is_refused_with_a_reason(case: str) -> None:
    spec, word = UNKNOWN[case]
    other = spec if spec.transform else TENSORWISE
    reasons = [unsupported(desc) for desc in descriptors(spec, other)]
    assert [reason for reason in reasons if not reason or word not in reason] == []


@pytest.mark.parametrize("dtype", [F64, torch.int32, torch.uint8, torch.complex64], ids=str)
def test_dtype_that_is_no_activation_is_refused(dtype: torch.dtype) -> None:
    descs = (
        QuantizeDesc(dtype, TENSORWISE, None),
        DequantizeDesc(TENSORWISE, dtype),
        GemmDesc(TENSORWISE, None, dtype),
        GroupedGemmDesc(None, TENSORWISE, dtype),
        AmaxDesc(QuantizeDesc(dtype, TENSORWISE, None)),
    )
    assert [desc for desc in descs if str(dtype) not in (unsupported(desc) or "")] == []


def test_unknown_algorithm_is_refused() -> None:
    assert "mean" in (unsupported(ScaleUpdateDesc("mean")) or "")


def test_one_delayed_orientation_of_two_is_refused() -> None:
    assert "delayed" in (unsupported(QuantizeDesc(F32, DELAYED, TENSORWISE)) or "")


@pytest.mark.parametrize("other", [NVFP4, MXFP8, None], ids=str)
def test_product_with_one_transformed_operand_is_refused(other: OperandSpec | None) -> None:
    # The transform is undone only by the other operand's: with one of them the product is wrong.
    for pair in ((NVFP4_RHT, other), (other, NVFP4_RHT)):
        assert "transform" in (unsupported(GemmDesc(*pair, F32)) or "")


def test_whoever_supports_a_descriptor_supports_its_halves() -> None:
    both = [QuantizeDesc(BF16, *specs) for specs in itertools.product(SUPPORTED, repeat=2)]
    supported = [desc for desc in both if unsupported(desc) is None]
    assert len(supported) > len(SUPPORTED)
    halves = [half for desc in supported for half in desc.halves()]
    assert [half for half in halves if unsupported(half) is not None] == []


def test_support_does_not_depend_on_the_device_nor_touch_it() -> None:
    for device in ("cpu", "meta", "cuda:3", "xpu"):
        assert unsupported(GemmDesc(MXFP8, MXFP8, BF16), torch.device(device)) is None, device


def test_k_is_a_multiple_of_whole_blocks_and_bytes() -> None:
    for a, b, k in (
        *((None, None, 1), (TENSORWISE, ROWWISE, 1), (BLOCK_1D, BLOCK_2D, 1), (TENSORWISE, FP4, 2)),
        *((NVFP4, None, 16), (NVFP4, NVFP4_2D, 16), (None, MXFP8, 32), (MXFP8, NVFP4, 32)),
        (MXFP8, replace(MXFP8, block=(1, 48)), 96),
        (replace(NVFP4, block=(1, 5)), None, 10),
    ):
        assert ReferenceBackend().alignment(GemmDesc(a, b, F32)) == Alignment(1, 1, k)
        assert ReferenceBackend().alignment(GroupedGemmDesc(b, a, F32)) == Alignment(1, 1, k)


# --- meta: shapes and dtypes without values ---

M, N, K = 64, 32, 160


def signature(result: Any) -> Any:
    """Shapes and dtypes of the tensors of a result."""
    if isinstance(result, torch.Tensor):
        return tuple(result.shape), result.dtype
    return None if result is None else [signature(part) for part in result]


def extras(spec: OperandSpec, device: torch.device, groups: int = 1) -> dict[str, torch.Tensor]:
    if spec.delayed:
        made = (torch.ones(groups, device=device) for _ in range(2))
        return dict(zip(("scale", "amax_out"), made, strict=True))
    return {"rng": torch.tensor([1, 2])} if spec.stochastic else {}


def quantize(spec: OperandSpec, x: torch.Tensor, *groups: torch.Tensor) -> Any:
    desc = QuantizeDesc(x.dtype, spec, spec, grouped=bool(groups))
    given = extras(spec, x.device, len(groups[0]) - 1 if groups else 1)
    return run(desc, x, *groups, device=x.device, **given)


@pytest.mark.parametrize("spec", SUPPORTED, ids=str)
def test_meta_quantize_and_dequantize_have_the_shapes_of_the_cpu(spec: OperandSpec) -> None:
    for groups in ((), (torch.tensor([0, 16, 16, M]),)):
        on_meta, on_cpu = (
            quantize(spec, torch.zeros(M, K, device=one), *groups) for one in (META, CPU)
        )
        assert {part.device for half in on_meta for part in half if part is not None} == {META}
        assert signature(on_meta) == signature(on_cpu)
    dense = quantize(spec, torch.zeros(M, K, device=META))
    assert signature(run(DequantizeDesc(spec, BF16), dense.columnwise)) == ((K, M), BF16)


@pytest.mark.parametrize("spec", [*SUPPORTED, None], ids=str)
def test_meta_products_have_their_shapes(spec: OperandSpec | None) -> None:
    x, y = torch.empty(M, K, device=META), torch.empty(N, K, device=META)
    a, b = (Operand(one) if spec is None else quantize(spec, one).rowwise for one in (x, y))
    for out in (None, torch.empty(M, N, dtype=BF16, device=META)):
        bias = torch.empty(N, device=META)
        made = run(GemmDesc(spec, spec, BF16), a, b, bias=bias, out=out)
        assert made.device == META
        assert signature(made) == ((M, N), BF16)
    offsets = torch.tensor([0, 32, 32, M])
    x, y = torch.empty(M, K, device=META), torch.empty(M, N, device=META)
    weights = torch.empty(3, N, K, device=META)
    if spec is None:
        a, b = Operand(x), [Operand(weight) for weight in weights]
        tokens = Operand(x.t()), Operand(y.t())
    else:
        a = quantize(spec, x, offsets).rowwise
        b = [quantize(spec, weight).rowwise for weight in weights]
        tokens = [quantize(spec, one, offsets).columnwise for one in (x, y)]
    made = run(GroupedGemmDesc(spec, spec, BF16), a, b, offsets)
    assert signature(made) == ((M, N), BF16)
    contracted = run(GroupedGemmDesc(spec, spec, F32, contract_groups=True), *tokens, offsets)
    assert signature(contracted) == [((K, N), F32)] * 3


def test_meta_amax_and_scale_update_run() -> None:
    x = torch.empty(3, 4, dtype=BF16, device=META)
    assert signature(run(AmaxDesc(QuantizeDesc(BF16, TENSORWISE, None)), x)) == ((1,), F32)
    shapes = itertools.product((2, 5), (1, 3))
    histories = [torch.zeros(shape, device=META) for shape in shapes]
    scales = [torch.ones(history.shape[1], device=META) for history in histories]
    assert run(ScaleUpdateDesc("max"), histories, scales, scales) is None
