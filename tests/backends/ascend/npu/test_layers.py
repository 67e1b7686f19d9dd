"""Layers end to end through torch_npu's C++ code on the software device."""

from __future__ import annotations

import pytest

from tests.backends.ascend.npu.layers import EACH, RECIPES, error, run


@pytest.mark.parametrize(("layer", "name"), EACH)
def test_layer_is_as_near_to_high_precision_as_the_reference(layer: str, name: str) -> None:
    exact = run(layer, None, "cpu").results
    reference = run(layer, RECIPES[name], "cpu").results
    found = run(layer, RECIPES[name], "npu").results
    assert found.keys() == reference.keys()
    for tensor, value in found.items():
        allowed = 1.1 * error(reference[tensor], exact[tensor]) + 2.0**-8  # an ulp of bfloat16
        assert error(value, exact[tensor]) <= allowed, tensor
