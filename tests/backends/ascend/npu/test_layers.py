"""Layers through torch_npu's C++ code on the software device, and which backend runs them.

Of the conformance kit there is a sample; ``../test_npu.py`` runs all.
"""

from __future__ import annotations

import pytest
import torch

import fp8core as te
from fp8core import recipe
from fp8core.conformance.catalogue import catalogue
from fp8core.conformance.subject import find
from tests.backends.ascend.npu.layers import EACH, RECIPES, error, run
from tests.backends.ascend.softcann.device import Call
from tests.conformance.test_reference import failure, sample


@pytest.mark.parametrize(("layer", "name"), EACH)
def test_layer_is_as_near_to_high_precision_as_the_reference(layer: str, name: str) -> None:
    exact = run(layer, None, "cpu").results
    reference = run(layer, RECIPES[name], "cpu").results
    found = run(layer, RECIPES[name], "npu").results
    assert found.keys() == reference.keys()
    for tensor, value in found.items():
        allowed = 1.1 * error(reference[tensor], exact[tensor]) + 2.0**-8  # an ulp of bfloat16
        assert error(value, exact[tensor]) <= allowed, tensor


def test_backend_keeps_the_laws() -> None:
    subject = find("ascend")
    entries = [entry for entry in catalogue() if subject.refuses(entry.desc) is None]
    made = sample(subject, entries, 2)
    assert len(made) > 300
    assert [text for check in made for text in failure(check)] == []


SCRIPT_RECIPES = ["current", "delayed", "hif8", "mxfp8"]


def script(device: str, name: str) -> torch.Tensor:
    """One script for every device."""
    torch.manual_seed(0)
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device="cpu").to(device)
    x = torch.randn(64, 64).bfloat16().to(device)
    with te.autocast(recipe=recipe.by_name(name)):
        return layer(x).detach().cpu().float()


@pytest.mark.parametrize("name", SCRIPT_RECIPES)
def test_one_script_runs_on_the_cpu_and_on_the_npu(name: str, calls: list[Call]) -> None:
    on_cpu = script("cpu", name)
    assert not calls
    on_npu = script("npu", name)
    assert "aclnnQuantMatmulV5" in {call.name for call in calls}
    assert (on_npu - on_cpu).norm() < 0.05 * on_cpu.norm()


def test_new_layers_are_on_the_npu() -> None:
    assert te.Linear(8, 8).weight.device.type == "npu"


@pytest.mark.parametrize("how", ["program", "environment"])
def test_backend_asked_for_by_name_makes_layers_on_the_npu(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "environment":
        monkeypatch.setenv("FP8CORE_BACKEND", "ascend")
    with te.use_backend("ascend" if how == "program" else None):
        assert te.Linear(8, 8).weight.device.type == "npu"


def test_reference_emulates_on_the_npu_if_it_is_asked_for(calls: list[Call]) -> None:
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device="npu")
    x = torch.ones(64, 64, dtype=torch.bfloat16, device="npu")
    with te.use_backend("reference"), te.autocast(recipe=recipe.Float8CurrentScaling()):
        layer(x)
    assert not [call for call in calls if "Quant" in call.name]


def test_explain_names_the_backend_of_each_operation() -> None:
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device="npu")
    lines = te.explain(layer, recipe.by_name("hif8")).lines
    products = [line.choice for line in lines if line.step in ("fprop", "dgrad", "wgrad")]
    assert [choice.backend for choice in products if choice is not None] == ["ascend"] * 3
