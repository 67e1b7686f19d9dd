"""The prepared update's own Python: which addresses the native library gets, and when copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core.backend_api import ScaleUpdateDesc
from fp8core_backends.cuda import scale_update
from tests.backends.cuda.cuda_cases import put_on_the_host


class Native:
    """Takes down the rows it is made with, and adds 1 to nothing."""

    def __init__(self) -> None:
        self.rows: list[Any] = []
        self.runs = 0

    def ScaleUpdate(self, rows: Any, is_max: bool, index: int) -> Any:
        self.rows.append(rows)

        def run(stream: int) -> None:
            self.runs += 1

        return run


@pytest.fixture
def native(monkeypatch: pytest.MonkeyPatch) -> Native:
    put_on_the_host(monkeypatch, scale_update)
    return Native()


def prepared(native: Native) -> tuple[list[torch.Tensor], Any]:
    tensors = [torch.zeros(4, 2), torch.ones(2), torch.ones(2), torch.zeros(1, dtype=torch.int64)]
    desc = ScaleUpdateDesc("max", prepared=True)
    prepare = scale_update.bind_update(desc, torch.device("cuda", 0), native)
    return tensors, prepare(*([one] for one in tensors))


def test_states_are_described_once(native: Native) -> None:
    tensors, update = prepared(native)
    version = tensors[1]._version
    update()
    update()
    addresses = [one.data_ptr() for one in tensors]
    assert native.rows == [[(*addresses, 4, 2)]]
    assert native.runs == 2
    assert tensors[1]._version == version + 2


def test_a_state_that_moved_is_described_anew(native: Native) -> None:
    tensors, update = prepared(native)
    tensors[0].data = torch.zeros(4, 2)
    update()
    assert native.rows[-1][0][0] == tensors[0].data_ptr()


def test_a_state_that_moved_into_a_larger_tensor_is_updated_by_a_copy(native: Native) -> None:
    tensors, update = prepared(native)
    tensors[0].data = torch.arange(24.0).reshape(4, 6)[:, :2]
    update()
    (row,) = native.rows[-1]
    assert row[0] != tensors[0].data_ptr()
    assert row[4:] == (4, 2)
    assert tensors[0].tolist() == [[0, 1], [6, 7], [12, 13], [18, 19]]  # the copy came back
