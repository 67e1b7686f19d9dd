"""An illegal OperandSpec cannot be constructed; what a legal one means is not asked here."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fp8core.backend_api import OperandSpec
from fp8core.errors import RecipeError
from fp8core.torch_ops.encoding import decode

TENSORWISE = OperandSpec("e4m3", (0, 0), 448.0)
DELAYED = OperandSpec("e4m3", (0, 0), 448.0, delayed=True)
BLOCKS = OperandSpec("e4m3", (1, 128), 448.0)
MXFP8 = OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0")
NVFP4 = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3")
TRANSFORMED = replace(NVFP4, transform="hadamard16")

# A legal spec, the change that makes it illegal, the field that is named, words of what is legal.
ILLEGAL: dict[str, tuple[OperandSpec, dict[str, Any], str, str]] = {
    "format of no name": (TENSORWISE, {"format": 4}, "format", "the name of a format"),
    "scale format as elements": (TENSORWISE, {"format": "e8m0"}, "format", "for scales"),
    "block of three": (BLOCKS, {"block": (1, 1, 128)}, "block", "two whole numbers"),
    "block as a list": (BLOCKS, {"block": [1, 128]}, "block", "two whole numbers"),
    "block of floats": (BLOCKS, {"block": (1, 128.0)}, "block", "two whole numbers"),
    "negative block": (BLOCKS, {"block": (1, -128)}, "block", "two whole numbers"),
    "whole columns": (BLOCKS, {"block": (0, 128)}, "block", "two whole numbers"),
    "several whole rows": (BLOCKS, {"block": (128, 0)}, "block", "(1, 0)"),
    "zero target": (TENSORWISE, {"target": 0.0}, "target", "positive"),
    "negative target": (TENSORWISE, {"target": -448.0}, "target", "positive"),
    "NaN target": (TENSORWISE, {"target": math.nan}, "target", "positive"),
    "infinite target": (TENSORWISE, {"target": math.inf}, "target", "range of float32"),
    "target beyond float32": (TENSORWISE, {"target": 1e39}, "target", "range of float32"),
    "target in words": (TENSORWISE, {"target": "448"}, "target", "number"),
    "unknown scale format": (MXFP8, {"scale_format": "e5m3"}, "scale_format", "'e8m0'"),
    "scale format of many": (
        TENSORWISE,
        {"scale_format": np.array(["e8m0"] * 2)},
        "scale_format",
        "'e8m0'",
    ),
    "element format as scale": (MXFP8, {"scale_format": "e5m2"}, "scale_format", "'e8m0'"),
    "negative epsilon": (TENSORWISE, {"amax_epsilon": -1e-3}, "amax_epsilon", "positive"),
    "NaN epsilon": (TENSORWISE, {"amax_epsilon": math.nan}, "amax_epsilon", "positive"),
    "infinite epsilon": (TENSORWISE, {"amax_epsilon": math.inf}, "amax_epsilon", "float32"),
    "flag in words": (TENSORWISE, {"power_of_two": "no"}, "power_of_two", "True or False"),
    "transform of no name": (NVFP4, {"transform": 16}, "transform", "name of a transform"),
    "tensorwise bytes": (MXFP8, {"block": (0, 0)}, "block", "scales of blocks"),
    "rowwise bytes": (NVFP4, {"block": (1, 0)}, "block", "scales of blocks"),
    "rounded bytes": (MXFP8, {"power_of_two": True}, "power_of_two", "False"),
    "bounded bytes": (NVFP4, {"amax_epsilon": 1e-3}, "amax_epsilon", "expected 0"),
    "delayed bytes": (MXFP8, {"delayed": True}, "delayed", "False"),
    "delayed blocks": (DELAYED, {"block": (1, 128)}, "block", "(0, 0)"),
    "delayed and rounded": (DELAYED, {"power_of_two": True}, "power_of_two", "False"),
    "delayed and bounded": (DELAYED, {"amax_epsilon": 1e-3}, "amax_epsilon", "expected 0"),
    "transform of one level": (MXFP8, {"transform": "hadamard16"}, "transform", "two-level"),
    "transform across blocks": (TRANSFORMED, {"block": (1, 8)}, "block", "multiple of 16"),
}


@pytest.mark.parametrize("make", [OperandSpec, replace], ids=["constructed", "replaced"])
def test_an_illegal_spec_is_refused_by_its_field_and_what_is_legal(make: Any) -> None:
    texts = {}
    for case, (legal, change, field, expected) in ILLEGAL.items():
        fields = {name: getattr(legal, name) for name in OperandSpec.__slots__} | change
        found = f"OperandSpec({field}={fields[field]!r}): expected "
        with pytest.raises(RecipeError) as raised:
            OperandSpec(**fields) if make is OperandSpec else replace(legal, **change)
        if not (str(raised.value).startswith(found) and expected in str(raised.value)):
            texts[case] = str(raised.value)
    assert texts == {}


def test_illegal_spec_of_a_stored_graph_is_an_error_that_says_so() -> None:
    text = '["reference",{"DequantizeDesc":{"operand":{"OperandSpec":%s}}},false]'
    with pytest.raises(RecipeError, match=r"OperandSpec\(block=\(3, 0\)\): expected"):
        decode(text % '{"format":"e4m3","block":[3,0],"target":448.0}')


def test_legal_spec_is_equal_to_its_copy() -> None:
    for legal in (
        OperandSpec("not_registered_yet", (1, 0), 15),
        OperandSpec("e2m1", (3, 5), 6.0),
        OperandSpec("e4m3", (0, 0), 2.0**-149),
        OperandSpec("e4m3", (1, 8), 448.0, power_of_two=True, amax_epsilon=1e-3),
        OperandSpec("e4m3", (0, 0), 448.0, stochastic=True),
        OperandSpec("e4m3", (2, 4), 448.0, scale_format="e4m3"),
        OperandSpec("e4m3", (16, 16), 448.0, scale_format="e4m3", transform="hadamard16"),
        OperandSpec("e4m3", (0, 0), 448.0, transform="known_to_a_plug_in"),
        replace(DELAYED, cast_first=False),
    ):
        assert replace(legal) == legal


def test_copies_and_pickles_are_equal() -> None:
    for spec in (TENSORWISE, DELAYED, BLOCKS, MXFP8, NVFP4, TRANSFORMED):
        assert pickle.loads(pickle.dumps(spec)) == copy.deepcopy(spec) == copy.copy(spec) == spec


def test_an_illegal_spec_cannot_be_unpickled() -> None:
    written = pickle.dumps(TENSORWISE)
    with pytest.raises(RecipeError, match=r"format='e8m0'.*for scales"):
        pickle.loads(written.replace(b"e4m3", b"e8m0"))
