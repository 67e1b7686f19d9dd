"""The operators have the schemas that the backend was written for."""

from __future__ import annotations

import json

import pytest
import torch
import torch_npu
from torch._subclasses.fake_tensor import FakeTensorMode
from torch_npu.op_plugin.meta import _meta_registrations

import fp8core as te
from tests.backends.ascend.npu.layers import EACH, FEATURES, LAYERS, RECIPES, ROWS
from tests.backends.ascend.npu.schemas import FILE, schemas
from tests.backends.ascend.softcann.device import Call
from tests.backends.ascend.softcann.environment import VERSION


def test_operators_have_the_recorded_schemas() -> None:
    assert schemas() == json.loads(FILE.read_text(encoding="utf-8"))


def test_torch_npu_is_the_version_of_the_record() -> None:
    assert torch_npu.__version__ == VERSION


OF_STATE = {"aclnnInplaceZero", "aclnnInplaceOne", "aclnnInplaceFillScalar"}
# Groups are read on the host, which a fake tensor has no values for.
PLAIN = [case for case in EACH if case[0] != "grouped_linear"]


@pytest.mark.parametrize(("layer", "name"), PLAIN)
def test_layer_and_its_gradients_have_their_shapes(
    layer: str, name: str, calls: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The shape function of attention would print a warning that asks for the SoC.
    monkeypatch.setattr(_meta_registrations, "_npu_fusion_attention_warning_printed", True)
    sizes = (ROWS // 4, 4, FEATURES) if layer == "transformer_layer" else (ROWS, FEATURES)
    with FakeTensorMode(allow_non_fake_inputs=True):
        module = LAYERS[layer]("npu")
        x = torch.empty(sizes, dtype=torch.bfloat16, device="npu", requires_grad=True)
        calls.clear()
        with te.autocast(enabled=RECIPES[name] is not None, recipe=RECIPES[name]):
            output = module(x)
        output.backward(torch.empty_like(output))
        assert output.device.type == "npu"
        assert output.shape[:-1] == x.shape[:-1]
        for one in (x, *module.parameters()):
            assert one.grad is not None
            assert (one.grad.shape, one.grad.dtype) == (one.shape, one.dtype)
    assert {call.name for call in calls} <= OF_STATE
