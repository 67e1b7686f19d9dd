from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core.backend_api import Operand, OperandSpec
from fp8core.errors import RecipeError, UnsupportedError
from fp8core.interchange.checkpoints.layouts import LAYOUTS, file_tensors, layout_of
from fp8core.plan import LayerRole
from tests.interchange.models import RECIPES


def spec_of(recipe: Any) -> OperandSpec:
    spec = recipe.plan(LayerRole(), torch.bfloat16).weight.rowwise
    assert isinstance(spec, OperandSpec)
    return spec


def test_each_recipe_has_its_layout() -> None:
    reached = {
        name: layout_of(spec_of(recipe), way).name for name, (recipe, way) in RECIPES.items()
    }
    assert reached == {
        name: name.partition(",")[0].replace("square ", "").replace("rows of 128", "block")
        for name in RECIPES
    }
    assert set(reached.values()) == {layout.name for layout in LAYOUTS}


def test_codes_that_no_reader_takes_are_refused() -> None:
    for spec in (
        OperandSpec("e5m2", (128, 128), 57344.0),
        OperandSpec("e2m1", (1, 32), 6.0, "e8m0"),
        OperandSpec("e4m3", (1, 64), 448.0, "e8m0"),
    ):
        with pytest.raises(UnsupportedError, match="none of its layouts"):
            layout_of(spec)


def test_the_other_method_is_named() -> None:
    with pytest.raises(UnsupportedError, match="method='compressed-tensors' stores them"):
        layout_of(OperandSpec("e4m3", (1, 0), 448.0), "fp8")


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(RecipeError, match="method='awq'"):
        layout_of(OperandSpec("e4m3", (0, 0), 448.0), "awq")


def test_block_scales_of_powers_of_two_are_announced() -> None:
    spec = OperandSpec("e4m3", (128, 128), 448.0, power_of_two=True)
    config = layout_of(spec).config(spec, ["head"])
    assert config == {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        **{"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        **{"modules_to_not_convert": ["head"], "ignored_layers": ["head"]},
    }


@pytest.mark.parametrize("name", ["layer.weight", "mlp.fc1_weight", "experts.weight0"])
def test_the_global_scale_of_nvfp4_divides(name: str) -> None:
    spec = OperandSpec("e2m1", (1, 16), 6.0, "e4m3")
    inverse = torch.rand(1000) * 1e-3 + 1e-6
    layout = layout_of(spec)
    reciprocals = []
    for value in inverse:
        operand = Operand(
            torch.zeros(2, 8, dtype=torch.uint8),
            torch.ones(2, 1, dtype=torch.uint8),
            value.reshape(1, 1),
        )
        tensors = file_tensors(layout, name, operand, spec, (2, 16))
        reciprocals.append(torch.ones(1) / list(tensors.values())[2])
    found = torch.cat(reciprocals)
    assert torch.allclose(found, inverse, rtol=2**-23, atol=0)
