"""The operators have the schemas that the backend was written for."""

from __future__ import annotations

import json

import torch_npu

from tests.backends.ascend.npu.schemas import FILE, schemas
from tests.backends.ascend.softcann.environment import VERSION


def test_operators_have_the_recorded_schemas() -> None:
    assert schemas() == json.loads(FILE.read_text(encoding="utf-8"))


def test_torch_npu_is_the_version_of_the_record() -> None:
    assert torch_npu.__version__ == VERSION
