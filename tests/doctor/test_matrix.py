"""The matrix of recipes, backends and operations: generated from what a backend declares."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch

from fp8core import recipe
from fp8core.backend_api import OPS, BackendSpec, FusedDesc, GemmDesc, OpDesc, QuantizeDesc
from fp8core.dispatch import plugins
from fp8core.doctor import matrix
from tests.dispatch import toys

with toys.isolation():
    RECIPES = recipe.names()  # those that no plug-in brings

SCALES_NEED_NO_AMAX = {("mxfp8", "amax"), ("block", "amax")}
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    with toys.isolation():
        yield


def cells(spec: BackendSpec, device: torch.device) -> list[matrix.Cell]:
    return matrix.cells(spec, device, matrix.needs_by_recipe())


def states(name: str, device: torch.device = CPU) -> dict[tuple[str, str], str]:
    found = cells(plugins.load().backends[name], device)
    return {(cell.recipe, cell.op): cell.state for cell in found}


def test_reference_runs_every_recipe_on_the_cpu() -> None:
    found = states("reference")
    assert {cell: found[cell] for cell in itertools.product(RECIPES, OPS)} == {
        (name, op): "unused" if (name, op) in SCALES_NEED_NO_AMAX else "native"
        for name in RECIPES
        for op in OPS
    }


def test_high_precision_has_no_use_for_casts() -> None:
    assert states("reference")["none", "quantize"] == "unused"


def test_portable_backend_emulates_low_precision_elsewhere() -> None:
    found = states("reference", CUDA)
    assert found["mxfp8", "gemm"] == "emulated"
    assert found["none", "gemm"] == "native"


def test_cells_are_the_backends_answers() -> None:
    def refuse(desc: OpDesc) -> str | None:
        is_block = isinstance(desc, GemmDesc) and desc.a is not None and desc.a.block != (0, 0)
        return "no blocks here" if is_block else None

    toys.register(toys.backend("toy", refuse=refuse))
    found = states("toy")
    answers = {name: found[name, "gemm"] for name in recipe.names()}
    assert answers == {
        "delayed": "native",
        "current": "native",
        "mxfp8": "no",
        "block": "no",
        "nvfp4": "no",
        "rowwise": "no",
    }


def test_refusal_of_some_uses_names_them() -> None:
    def refuse(desc: OpDesc) -> str | None:
        is_rounded = isinstance(desc, QuantizeDesc) and desc.rowwise and desc.rowwise.stochastic
        return "rounds to the nearest alone" if is_rounded else None

    toys.register(toys.backend("toy", refuse=refuse))
    (cell,) = [
        cell
        for cell in cells(plugins.load().backends["toy"], CPU)
        if (cell.recipe, cell.op) == ("nvfp4", "quantize")
    ]
    assert cell.state == "partly"
    assert cell.reasons == ("grad_output, grad_output of groups: rounds to the nearest alone",)
    assert matrix.unanswered([cell]) == [f"quantize of nvfp4: {cell.reasons[0]}"]


def test_backend_of_another_device_runs_nothing() -> None:
    toys.register(toys.backend("toy", device_types=("cuda",)))
    assert set(states("toy").values()) == {"no", "unused"}


def test_table_has_a_row_for_each_operation_and_a_column_for_each_recipe() -> None:
    found = cells(plugins.load().backends["reference"], CPU)
    table = matrix.rows(found)
    assert table[0] == ["", "none", *recipe.names()]
    assert [row[0] for row in table[1:]] == list(OPS)  # fusions that nobody offers are left out


def test_fusions_that_are_offered_are_asked_as_layers_ask() -> None:
    def refuse(desc: OpDesc) -> str | None:
        return None if isinstance(desc, FusedDesc) else "fusions alone"

    toys.register(toys.backend("toy", refuse=refuse))
    found = cells(plugins.load().backends["toy"], CPU)
    offered = {row[0] for row in matrix.rows(found)} - {"", *OPS}
    assert offered == {
        "activation_backward_quantize",
        "activation_quantize",
        "norm_backward_quantize",
        "norm_quantize",
    }


def test_recipe_that_cannot_be_made_is_a_refusal_with_its_reason() -> None:
    def factory() -> object:
        raise OSError("no table")

    plugins.register(toys.plugin(recipes={"toy_recipe": factory}), "toy")
    assert states("reference")["toy_recipe", "gemm"] == "no"
