"""Tiers by compute capability: what is declared on a GPU that this machine has not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fp8core import recipe
from fp8core.backend_api import (
    ActivationDesc,
    AttentionDesc,
    GemmDesc,
    GroupedGemmDesc,
    NormDesc,
    QuantizeDesc,
)
from fp8core.conformance.catalogue import catalogue
from fp8core.recipe.plan import LayerRole
from fp8core_backends.cuda import native, scaled_mm, tiers
from fp8core_backends.cuda.backend import CudaBackend
from fp8core_backends.cuda.build import ARCHITECTURES
from fp8core_backends.cuda.operations import OPERATIONS

CUDA = torch.device("cuda", 0)
PAGE = Path(__file__).resolve().parents[3] / "docs" / "cuda.md"
RECIPES = {
    "current": {(8, 9), (9, 0), (10, 0), (10, 3), (12, 0)},
    "delayed": {(8, 9), (9, 0), (10, 0), (10, 3), (12, 0)},
    "rowwise": {(9, 0)},
    "block": {(9, 0)},
    "mxfp8": {(10, 0), (10, 3)},
    "nvfp4": {(10, 0), (10, 3)},
}
"""The capabilities whose products a recipe has."""


@pytest.fixture(params=[*tiers.TIERS, (7, 5), (12, 1)], ids=tiers.text)
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: request.param)
    if request.param in ARCHITECTURES:
        monkeypatch.setattr(native, "missing", lambda device: None)
    return request.param


@pytest.mark.parametrize("name", RECIPES)
def test_products_are_declared_where_the_table_has_them(
    name: str, capability: tuple[int, int]
) -> None:
    plan = recipe.by_name(name).plan(LayerRole("linear"), torch.bfloat16)
    said = {
        CudaBackend().unsupported(GemmDesc(gemm.a, gemm.b, torch.bfloat16), CUDA)
        for gemm in (plan.fprop, plan.dgrad, plan.wgrad)
    }
    is_unlisted = capability == (12, 1) and name in ("current", "delayed")
    if capability in RECIPES[name] or is_unlisted:
        assert said == {None}
    else:
        assert None not in said
        assert all("capability" in str(reason) for reason in said)


def test_every_kernel_is_declared_where_there_is_code_for_it(
    capability: tuple[int, int],
) -> None:
    kernels = [desc for _, desc in catalogue() if type(desc) in OPERATIONS]
    assert {type(desc) for desc in kernels} >= {QuantizeDesc, NormDesc, ActivationDesc}
    refused = 0
    for desc in kernels:
        said = CudaBackend().unsupported(desc, CUDA)
        if tiers.tier_of(capability).architecture:  # what no GPU has, is refused on all alike
            assert said == OPERATIONS[type(desc)].refuses(desc)
        else:
            assert said is not None
        refused += said is not None
    if tiers.tier_of(capability).architecture:
        assert refused < len(kernels) / 2
    else:
        said = CudaBackend().unsupported(NormDesc("rmsnorm", *[torch.bfloat16] * 2, 1e-5), CUDA)
        assert f"this is {tiers.text(capability)}" in str(said)


def test_kernels_of_hopper_are_declared_there_alone(capability: tuple[int, int]) -> None:
    plan = recipe.by_name("current").plan(LayerRole("grouped_linear"), torch.bfloat16).fprop
    groups = GroupedGemmDesc(plan.a, plan.b, torch.bfloat16, offsets_on_device=True)
    attention = AttentionDesc(torch.bfloat16, "bshd", 8, 8, 128, 128, 0.1)
    said = [CudaBackend().unsupported(desc, CUDA) for desc in (groups, attention)]
    is_denied = ["compute capability" in (reason or "") for reason in said]
    assert is_denied == [capability != (9, 0)] * 2


def test_high_precision_is_multiplied_everywhere(capability: tuple[int, int]) -> None:
    assert CudaBackend().unsupported(GemmDesc(None, None, torch.bfloat16), CUDA) is None


def test_what_is_compiled_is_one_of_the_architectures_of_the_table() -> None:
    assert {
        capability: tier.architecture
        for capability, tier in tiers.TIERS.items()
        if tier.architecture
    } == ARCHITECTURES
    for tier in tiers.TIERS.values():
        assert tier.modes <= tiers.PRODUCTS.keys()
        assert not tier.is_hopper or tier.architecture


def test_page_has_the_table() -> None:
    assert "\n".join(tiers.table()) in PAGE.read_text("utf-8"), (
        "paste what `python -c 'from fp8core_backends.cuda import tiers; "
        'print(*tiers.table(), sep="\\n")\'` prints into docs/cuda.md'
    )


def test_doctor_names_the_tier_of_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: ((9, 0), (8, 6))[index])
    first, second = tiers.status().split("; cuda:1 ")
    assert first.startswith("cuda:0 9.0: fp8core's kernels; products with one scale a tensor")
    assert first.endswith("; run")
    assert second.startswith("8.6: fp8core's kernels; products with none")


def test_torch_takes_what_the_table_says_without_the_library(capability: tuple[int, int]) -> None:
    plan = recipe.by_name("current").plan(LayerRole("linear"), torch.bfloat16).fprop
    said = scaled_mm.unsupported(GemmDesc(plan.a, plan.b, torch.bfloat16), CUDA)
    assert (said is None) == ("tensor" in tiers.tier_of(capability).modes)


@pytest.mark.parametrize("name", ["rowwise", "block", "current"])
def test_products_that_cublas_lt_has_since_cuda_12_9_are_refused_before(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    monkeypatch.setattr(native, "missing", lambda device: None)
    gemm = recipe.by_name(name).plan(LayerRole("linear"), torch.bfloat16).fprop
    desc = GemmDesc(gemm.a, gemm.b, torch.bfloat16)
    for cuda in ("12.8", "12.9", "13.0"):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        said = CudaBackend().unsupported(desc, CUDA)
        if cuda == "12.8" and name != "current":
            assert str(said).endswith("products need CUDA 12.9, torch uses 12.8")
        else:
            assert said is None
