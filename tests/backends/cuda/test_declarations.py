"""What the CUDA backend says it runs, without a device: a chip and a library are pretended."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import pytest
import torch

from fp8core import recipe
from fp8core.backend_api import (
    ATTENTION_LAYOUTS,
    ActivationBackwardDesc,
    ActivationDesc,
    AddNormDesc,
    AmaxDesc,
    ColumnSumsDesc,
    DequantizeDesc,
    FusedDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormBackwardDesc,
    NormDesc,
    OpDesc,
    OperandSpec,
    QuantizeByAmaxDesc,
    QuantizeDesc,
    RotaryDesc,
    ScaleUpdateDesc,
)
from fp8core.chain.fusion import variants
from fp8core.conformance.catalogue import catalogue
from fp8core.recipe.plan import LayerRole
from fp8core_backends.cuda import native
from fp8core_backends.cuda.backend import CudaBackend
from fp8core_backends.cuda.gemm import LowPrecisionGemm, _Problem
from fp8core_backends.cuda.layout import DTYPES, scale_strides, scales
from fp8core_backends.cuda.tiers import TIERS
from tests.backends.cuda.cuda_cases import KERNELS

CUDA = torch.device("cuda", 0)
TENSOR = OperandSpec("e4m3", (0, 0), 448.0)
VECTOR = OperandSpec("e4m3", (1, 128), 448.0)
SQUARE = OperandSpec("e4m3", (128, 128), 448.0)
ROW = OperandSpec("e4m3", (1, 0), 448.0)
MX = OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0")
FP4 = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(native, "missing", lambda device: None)


def gemm(a: OperandSpec | None, b: OperandSpec | None, **changed: object) -> GemmDesc:
    return dataclasses.replace(GemmDesc(a, b, torch.bfloat16), **changed)


def e5m2(spec: OperandSpec) -> OperandSpec:
    return dataclasses.replace(spec, format="e5m2", target=57344.0)


def refusals(*descs: OpDesc) -> dict[str, str]:
    """Return what the backend says of those that it does not support."""
    assert descs
    said = {str(desc): CudaBackend().unsupported(desc, CUDA) for desc in descs}
    return {desc: reason for desc, reason in said.items() if reason is not None}


@pytest.mark.usefixtures("hopper")
def test_scales_of_bytes_take_no_groups_on_the_device() -> None:
    descs = [QuantizeDesc(torch.bfloat16, spec, spec, grouped=True) for spec in (MX, FP4)]
    assert refusals(*descs) == {}
    asked = [dataclasses.replace(desc, offsets_on_device=True) for desc in descs]
    assert ["as a list" in reason for reason in refusals(*asked).values()] == [True, True]


def steps_of(name: str) -> tuple[list[OpDesc], list[OpDesc]]:
    """Return the casts of a recipe, and its products, dense and of groups."""
    plan = recipe.by_name(name).plan(LayerRole("linear"), torch.bfloat16)
    products = [
        product(one.a, one.b, torch.bfloat16, False, one.fast_accumulation)
        for one in (plan.fprop, plan.dgrad, plan.wgrad)
        for product in (GemmDesc, GroupedGemmDesc)
    ]
    tensors = (plan.input, plan.weight, plan.grad_output)
    return [QuantizeDesc(torch.bfloat16, *tensor) for tensor in tensors], products


@pytest.mark.usefixtures("hopper")
def test_hopper_runs_its_recipes_and_casts_for_blackwell_s() -> None:
    for name in ("delayed", "current", "block", "rowwise"):
        casts, products = steps_of(name)
        assert refusals(*casts, *products) == {}, name
    for name in ("mxfp8", "nvfp4"):
        casts, products = steps_of(name)
        assert refusals(*casts) == {}, name
        dense = [one for one in products if isinstance(one, GemmDesc)]
        said = refusals(*dense)
        assert len(said) == len(set(map(str, dense)))
        assert all(reason.endswith("compute capability 10.0 or 10.3") for reason in said.values())


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_blackwell_s_recipes_are_declared_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(native, "missing", lambda device: None)
    plan = recipe.by_name(name).plan(LayerRole("linear"), torch.bfloat16)
    for one in (plan.fprop, plan.dgrad, plan.wgrad):
        desc = GemmDesc(one.a, one.b, torch.bfloat16)
        assert CudaBackend().unsupported(desc, CUDA) is None
        assert CudaBackend().alignment(desc).k == 32
    for a, b, reason in (
        (MX, FP4, "does not multiply mx32 by nv16"),
        (MX, TENSOR, "does not multiply mx32 by tensor"),
        (FP4, dataclasses.replace(FP4, transform="hadamard16"), "a has the transform None"),
    ):
        said = CudaBackend().unsupported(gemm(a, b), CUDA)
        assert said is not None
        assert reason in said
    said = CudaBackend().unsupported(gemm(FP4, FP4, out_dtype=torch.float16), CUDA)
    assert said == "no float16 result from NVFP4"


class _Named:
    """Stands in for the native library's descriptors, and keeps what they were made of."""

    def __init__(self, *fields: object) -> None:
        self.fields = fields

    class ElementType:
        __members__: ClassVar = {name: name for name in ("e4m3", "e2m1", "bfloat16")}

    class ScaleMode:
        __members__: ClassVar = {name: name for name in ("mx32", "nv16")}


_Named.OperandDesc = _Named.GemmDesc = _Named.Transpose = _Named


@pytest.mark.parametrize(("spec", "k"), [(MX, 64), (FP4, 128)], ids=["mxfp8", "nvfp4"])
def test_a_product_of_64_bytes_a_row_counts_elements(spec: OperandSpec, k: int) -> None:
    product = LowPrecisionGemm(gemm(spec, spec), CUDA, _Named)
    problem = _Problem(16, 32, 64, 64, 64, 32, is_unbiased=True, alignment=256)
    m, n, own_k, a, b, *_ = product._describe(problem).fields
    assert (m, n, own_k) == (16, 32, k)
    assert a.fields == b.fields == (spec.format, "mx32" if k == 64 else "nv16", True, k)


REFUSED: dict[str, tuple[OpDesc, str]] = {
    "mx": (gemm(MX, MX), "MX block scales: products need compute capability 10.0"),
    "nvfp4": (gemm(FP4, FP4), "NVFP4: products need compute capability 10.0"),
    "grouped nvfp4": (
        GroupedGemmDesc(FP4, FP4, torch.bfloat16),
        "NVFP4: products need compute capability 10.0",
    ),
    "mx of another block": (
        QuantizeDesc(torch.bfloat16, dataclasses.replace(MX, block=(1, 64)), None),
        "no kernels for blocks of (1, 64) under e8m0 scales",
    ),
    "mx of another format": (
        QuantizeDesc(torch.bfloat16, dataclasses.replace(MX, format="e2m1", target=6.0), None),
        "no e2m1 under e8m0 scales",
    ),
    "stochastic mx": (
        QuantizeDesc(torch.bfloat16, dataclasses.replace(MX, stochastic=True), None),
        "no stochastic rounding to 8 bits",
    ),
    "transform along rows": (
        QuantizeDesc(torch.bfloat16, dataclasses.replace(FP4, transform="hadamard16"), None),
        "no kernels for the transform hadamard16 along rows",
    ),
    "bytes beside floats": (
        QuantizeDesc(torch.bfloat16, MX, VECTOR),
        "one orientation has scales of float32, the other of bytes",
    ),
    "e5m2": (gemm(e5m2(TENSOR), e5m2(TENSOR)), "does not multiply e5m2 by e5m2"),
    "squares": (gemm(SQUARE, SQUARE), "128 x 128 blocks by 128 x 128 blocks"),
    "vector by tensor": (gemm(VECTOR, TENSOR), "does not multiply vec128 by tensor"),
    "row by tensor": (gemm(ROW, TENSOR), "does not multiply row by tensor"),
    "a alone quantized": (gemm(TENSOR, None), "one operand is quantized, the other is not: a"),
    "b alone in e5m2": (gemm(None, e5m2(TENSOR)), "no product of high precision by e5m2"),
    "b alone in bytes": (gemm(None, MX), "no product of high precision by e4m3"),
    "b alone summed": (gemm(None, TENSOR, accumulate=True), "no sum of such products"),
    "float64": (gemm(TENSOR, TENSOR, out_dtype=torch.float64), "no result in torch.float64"),
    "another block": (
        QuantizeDesc(torch.bfloat16, dataclasses.replace(VECTOR, block=(1, 64)), None),
        r"no kernels for blocks of (1, 64)",
    ),
    "another format": (
        QuantizeDesc(torch.bfloat16, dataclasses.replace(TENSOR, format="hif8"), None),
        "no kernels for format hif8",
    ),
    "float64 cast": (QuantizeDesc(torch.float64, TENSOR, None), "from torch.float64"),
    "zeros in blocks that have no row": (
        QuantizeDesc(torch.bfloat16, MX, MX, padded=64),
        "no zeros up to a multiple of 64 rows",
    ),
    "nothing": (QuantizeDesc(torch.bfloat16, None, None), "neither orientation"),
    "algorithm": (ScaleUpdateDesc("median"), "no algorithm 'median'"),
    "amax": (
        AmaxDesc(QuantizeDesc(torch.float64, TENSOR, None)),
        "no amax of torch.float64",
    ),
    "amax of blocks": (
        AmaxDesc(QuantizeDesc(torch.bfloat16, VECTOR, VECTOR)),
        "scales follow from their blocks alone",
    ),
    "amax of transformed elements": (
        AmaxDesc(
            QuantizeDesc(torch.bfloat16, FP4, dataclasses.replace(FP4, transform="hadamard16"))
        ),
        "no kernels for amaxes of transformed elements",
    ),
    "two levels by a given amax": (
        QuantizeByAmaxDesc(torch.bfloat16, FP4, FP4),
        "two levels of scales take no amax from outside",
    ),
    "blocks by a given amax": (
        QuantizeByAmaxDesc(torch.bfloat16, VECTOR, VECTOR),
        "scales follow from their blocks alone",
    ),
    "groups with zeros by a given amax": (
        QuantizeByAmaxDesc(torch.bfloat16, TENSOR, TENSOR, True, padded=32),
        "no zeros behind rows that are cast by given amaxes",
    ),
    "delayed by a given amax": (
        QuantizeByAmaxDesc(torch.bfloat16, dataclasses.replace(TENSOR, delayed=True), None),
        "a delayed scale is given",
    ),
    "unknown activation": (
        ActivationDesc("mish", torch.bfloat16, torch.bfloat16),
        "no activation 'mish'",
    ),
    "activation without its parameters": (
        ActivationDesc("clamped_swiglu", torch.bfloat16, torch.bfloat16),
        "clamped_swiglu takes 3 parameters",
    ),
    "activation of float64": (
        ActivationDesc("gelu", torch.float64, torch.float64),
        "no activations from or to torch.float64",
    ),
    "dequantize to float64": (
        DequantizeDesc(TENSOR, torch.float64),
        "no low precision to torch.float64",
    ),
    "dequantize of other blocks": (
        DequantizeDesc(dataclasses.replace(TENSOR, block=(1, 64))),
        "no kernels for blocks of (1, 64)",
    ),
    "column sums of float64": (
        ColumnSumsDesc(torch.float64),
        "no column sums of torch.float64",
    ),
    "norm of another kind": (
        NormDesc("batchnorm", torch.bfloat16, torch.bfloat16, 1e-5),
        "no kernels for a norm of kind 'batchnorm'",
    ),
    "rotary embedding of float64": (
        RotaryDesc(torch.float64, "sbhd"),
        "no rotary embedding of torch.float64",
    ),
    "rotary embedding of another layout": (
        RotaryDesc(torch.bfloat16, "bhsd"),
        "no layout 'bhsd'",
    ),
    "float64 norm": (
        NormBackwardDesc(NormDesc("rmsnorm", torch.float64, torch.float64, 1e-5)),
        "no norm from torch.float64 to torch.float64",
    ),
}


@pytest.mark.usefixtures("hopper")
def test_a_weight_alone_is_multiplied_where_there_is_a_library(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    products = [gemm(None, spec) for spec in (TENSOR, ROW, VECTOR, SQUARE)]
    groups = [GroupedGemmDesc(None, desc.b, torch.bfloat16) for desc in products]
    assert refusals(*products, *groups) == {}
    on_device = [dataclasses.replace(desc, offsets_on_device=True) for desc in groups]
    assert refusals(*on_device) == {}
    summed = [dataclasses.replace(desc, contract_groups=True) for desc in on_device]
    assert all("no sums over groups" in reason for reason in refusals(*summed).values())
    assert len(refusals(*summed)) == len(groups)
    monkeypatch.setattr(native, "missing", lambda device: "no compiler")
    assert len(refusals(*products, *on_device)) == 2 * len(products)
    monkeypatch.setattr(native, "missing", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert all("227 KiB" in reason for reason in refusals(*on_device).values())
    assert len(refusals(*on_device)) == len(groups)


def test_groups_in_high_precision_need_no_sizes_on_the_host(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = [
        GroupedGemmDesc(None, None, dtype, contract_groups=contract, offsets_on_device=True)
        for dtype in (*DTYPES, torch.float64)
        for contract in (False, True)
    ]
    assert refusals(*products) == {}
    monkeypatch.setattr(native, "missing", lambda device: "no compiler")
    assert refusals(*products) == {}
    assert all(callable(CudaBackend().bind(desc, CUDA)) for desc in products)


@pytest.mark.usefixtures("hopper")
def test_amax_and_cast_run_apart() -> None:
    groups = ((False, False), (True, False), (True, True))
    casts = [
        QuantizeDesc(torch.bfloat16, spec, spec, *one) for spec in (TENSOR, ROW) for one in groups
    ]
    assert refusals(*map(AmaxDesc, casts), *map(QuantizeByAmaxDesc.of, casts)) == {}


@pytest.mark.usefixtures("hopper")
def test_every_activation_norm_rotation_and_sum_runs_in_every_dtype() -> None:
    descs: list[OpDesc] = [ColumnSumsDesc(dtype) for dtype in DTYPES]
    for name, dtype in itertools.product(KERNELS, DTYPES):
        params = (7.0, 1.702, 1.0) if name == "clamped_swiglu" else ()
        for kind in (ActivationDesc, ActivationBackwardDesc):
            descs.append(kind(name, torch.bfloat16, dtype, params))
    flags = (False, True)
    for kind, *dtypes, centered in itertools.product(
        ("layernorm", "rmsnorm"), DTYPES, DTYPES, flags
    ):
        norm = NormDesc(kind, *dtypes, 1e-5, centered)
        descs += [norm, AddNormDesc(norm), NormBackwardDesc(norm)]
    for one in itertools.product(DTYPES, ATTENTION_LAYOUTS, flags, flags):
        descs.append(RotaryDesc(*one))
    assert refusals(*descs) == {}


@pytest.mark.usefixtures("hopper")
def test_every_operand_that_it_casts_to_can_be_dequantized() -> None:
    casts = [one.desc for one in catalogue() if type(one.desc) is QuantizeDesc]
    casts = [desc for desc in casts if CudaBackend().unsupported(desc, CUDA) is None]
    specs = {spec for desc in casts for spec in (desc.rowwise, desc.columnwise) if spec is not None}
    assert {spec.scale_format for spec in specs} == {"float32", "e8m0", "e4m3"}
    assert refusals(*itertools.starmap(DequantizeDesc, itertools.product(specs, DTYPES))) == {}


def fusions(name: str, producers: Any, *dtypes: torch.dtype) -> list[FusedDesc]:
    """Return the fusions with such producers that layers ask for under a recipe."""
    return [
        entry.desc
        for entry in catalogue()
        if entry.label.startswith(f"{name}.")
        and isinstance(entry.desc, FusedDesc)
        and isinstance(entry.desc.producer, producers)
        and entry.desc.producer.dtype in dtypes
    ]


def fused_activations(name: str, *dtypes: torch.dtype) -> list[FusedDesc]:
    """Return the fusions of activations that layers ask for under a recipe."""
    return fusions(name, ActivationDesc | ActivationBackwardDesc, *dtypes)


@pytest.mark.usefixtures("hopper")
def test_activations_are_fused_with_the_casts_of_recipes() -> None:
    for name in ("delayed", "current", "rowwise", "block", "mxfp8", "nvfp4"):
        asked = fused_activations(name, torch.bfloat16, torch.float16)
        assert {(desc.producer.op, desc.producer.name, desc.quantize.sums) for desc in asked} >= {
            ("activation", "swiglu", False),
            ("activation_backward", "swiglu", False),
            ("activation_backward", "gelu", True),
        }, name
        assert refusals(*asked) == {}, name


@pytest.mark.usefixtures("hopper")
def test_norms_are_fused_with_the_casts_of_hopper_s_recipes() -> None:
    for name in ("delayed", "current", "rowwise", "block"):
        asked = fusions(name, NormDesc, torch.bfloat16, torch.float16)
        assert {desc.producer.kind for desc in asked} == {"layernorm", "rmsnorm"}, name
        assert refusals(*(one for desc in asked for one in variants(desc).values())) == {}, name


@pytest.mark.usefixtures("hopper")
def test_other_fusions_of_norms_are_refused_by_name() -> None:
    for desc in fusions("current", NormDesc, torch.float32):
        assert "no fusion from torch.float32" in (CudaBackend().unsupported(desc, CUDA) or "")
    for desc in fusions("mxfp8", NormDesc, torch.bfloat16):
        assert "no fusion with e8m0 scales" in (CudaBackend().unsupported(desc, CUDA) or "")
    norm = NormDesc("rmsnorm", torch.bfloat16, torch.bfloat16, 1e-5)
    float32 = dataclasses.replace(norm, out_dtype=torch.float32)
    cast = QuantizeDesc(torch.bfloat16, TENSOR, TENSOR)
    wide = dataclasses.replace(cast, dtype=torch.float32)
    for desc, reason in (
        (FusedDesc(float32, cast), "the cast takes torch.bfloat16, the norm gives torch.float32"),
        (FusedDesc(float32, wide), "a fusion rounds before the cast unless the scale is delayed"),
        (FusedDesc(norm, QuantizeDesc(torch.bfloat16, SQUARE, None)), "blocks of (128, 128)"),
        (FusedDesc(norm, dataclasses.replace(cast, sums=True)), "no column sums of a norm"),
        (
            FusedDesc(NormBackwardDesc(norm), cast),
            "norm_backward_quantize is not written for CUDA yet",
        ),
    ):
        assert reason in (CudaBackend().unsupported(desc, CUDA) or "")


@pytest.mark.usefixtures("hopper")
def test_other_fusions_are_refused_by_name() -> None:
    for desc in fused_activations("current", torch.float32):
        assert "no fusion from torch.float32" in (CudaBackend().unsupported(desc, CUDA) or "")
    square = QuantizeDesc(torch.bfloat16, SQUARE, SQUARE)
    producer = ActivationDesc("gelu", torch.bfloat16, torch.bfloat16)
    said = CudaBackend().unsupported(FusedDesc(producer, square), CUDA)
    assert said == "no fusion with float32 scales of blocks of (128, 128)"
    said = CudaBackend().unsupported(
        FusedDesc(producer, QuantizeDesc(torch.bfloat16, TENSOR, VECTOR)), CUDA
    )
    assert said == "no fusion with casts whose orientations differ"
    cast = QuantizeDesc(torch.float32, TENSOR, TENSOR)
    producer = ActivationDesc("gelu", torch.bfloat16, torch.float32)
    said = CudaBackend().unsupported(FusedDesc(producer, cast), CUDA)
    assert said == "a fusion rounds before the cast unless the scale is delayed"
    said = CudaBackend().unsupported(
        FusedDesc(producer, dataclasses.replace(cast, grouped=True)), CUDA
    )
    assert "no fusion with casts of groups" in (said or "")


@pytest.mark.usefixtures("hopper")
def test_what_cannot_run_is_refused_by_name() -> None:
    said = {name: CudaBackend().unsupported(desc, CUDA) for name, (desc, _) in REFUSED.items()}
    assert {name: one for name, one in said.items() if REFUSED[name][1] not in (one or "")} == {}


def test_float32_block_scales_are_refused_on_another_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr(native, "missing", lambda device: None)
    said = CudaBackend().unsupported(gemm(VECTOR, SQUARE), CUDA)
    assert said is not None
    assert said.endswith("need compute capability 9.0")


def test_without_the_library_torch_multiplies_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(native, "missing", lambda device: "no nvcc")
    backend = CudaBackend()
    assert backend.unsupported(gemm(TENSOR, TENSOR), CUDA) is None
    assert backend.unsupported(gemm(None, None), CUDA) is None
    for desc in (gemm(VECTOR, SQUARE), QuantizeDesc(torch.bfloat16, TENSOR, TENSOR)):
        said = backend.unsupported(desc, CUDA)
        assert said is not None
        assert "no nvcc" in said


@pytest.mark.parametrize("missing", [None, "no nvcc"])
@pytest.mark.parametrize(("capability", "runs"), [((8, 9), True), ((12, 0), True), ((8, 0), False)])
def test_on_another_chip_torch_multiplies_what_it_can(
    capability: tuple[int, int], runs: bool, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(native, "missing", lambda device: missing)
    said = CudaBackend().unsupported(gemm(TENSOR, TENSOR), CUDA)
    assert said is None if runs else "need compute capability 8.9" in (said or "")


@pytest.mark.parametrize("capability", [(8, 9), (12, 0), (8, 0), (7, 5), (12, 1)])
def test_on_another_chip_the_kernels_cast_if_they_are_compiled_for_it(
    capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    is_compiled = capability in TIERS
    if is_compiled:  # and the library is there
        monkeypatch.setattr(native, "missing", lambda device: None)
    said = CudaBackend().unsupported(QuantizeDesc(torch.bfloat16, TENSOR, TENSOR), CUDA)
    assert (said is None) == is_compiled
    assert is_compiled or f"this is {capability[0]}.{capability[1]}" in (said or "")


def test_scales_are_laid_out_for_the_library() -> None:
    for mode, shape in (
        *(("tensor", (1, 1)), ("row", (37, 1)), ("vec128", (37, 3)), ("vec128", (64, 1))),
        *(("block128", (3, 5)), ("block128", (1, 1))),
    ):
        rows, blocks = shape
        misaligned = torch.randn(rows * blocks + 1)[1:].view(shape)
        for own in (torch.randn(shape), torch.randn(shape[::-1]).t(), misaligned):
            made = scales(mode, own)
            assert torch.equal(made, own)
            assert made.data_ptr() % 16 == 0
            wanted = scale_strides(mode, rows, blocks * 128)
            for size, stride, want in zip(made.shape, made.stride(), wanted, strict=True):
                assert size == 1 or stride == want, (mode, shape)
            assert scales(mode, made) is made
