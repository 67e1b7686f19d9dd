"""Column sums of the reference: torch's sum over the rows, in float32 or float64."""

from __future__ import annotations

import pytest
import torch

from fp8core.backend_api import ColumnSumsDesc
from fp8core_backends.reference.backend import ReferenceBackend

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def sums(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = ReferenceBackend().bind(ColumnSumsDesc(x.dtype), CPU)(x)
    return made


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_torchs_in_float32(dtype: torch.dtype) -> None:
    x = torch.randn(300, 70).to(dtype)
    assert torch.equal(sums(x), x.sum(0, dtype=torch.float32))
    assert sums(x).dtype == torch.float32


def test_sums_of_float64_stay_float64() -> None:
    x = torch.full((3, 2), 1e-17, dtype=torch.float64) + 1
    assert torch.equal(sums(x), x.sum(0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    assert "no column sums" in (ReferenceBackend().unsupported(ColumnSumsDesc(dtype), CPU) or "")
