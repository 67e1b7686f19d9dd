"""What is found out about one backend: where it is asked and tested, and why it is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fp8core.backend_api import OPS, OPTIONAL_OPS
from fp8core.doctor.findings import absent, here, records
from tests.chain import fused_toy
from tests.dispatch import toys


@pytest.fixture(autouse=True)
def isolated() -> Iterator[None]:
    with toys.isolation():
        yield


def test_backend_is_asked_and_tested_on_its_own_device() -> None:
    found = here("reference", None)
    assert (found.device, found.untested, found.failed) == ("cpu", None, [])
    assert [own.op for own in found.checks] == list(OPS)
    for own in found.checks:
        assert own.cases > 0, own.op
        assert own.worst is not None, own.op
        assert 0 <= own.worst <= 1, own.op
    assert {cell.op for cell in found.cells} == {*OPS, *OPTIONAL_OPS}


def test_fusions_are_tested_where_they_are_offered() -> None:
    with fused_toy.installed("norm_quantize"):
        found = [one["check"] for one in records("fused_toy", None, done=OPS) if "check" in one]
    assert [own["op"] for own in found] == ["norm_quantize"]


def test_backend_that_cannot_be_used_is_not_asked() -> None:
    toys.register(toys.backend("toy", probe=lambda: "there is no driver"))
    found = here("toy", None)
    assert (found.unusable, found.cells, found.checks) == ("there is no driver", [], [])


def test_backend_of_another_device_is_asked_and_not_tested() -> None:
    toys.register(toys.backend("toy", device_types=("cuda",)))
    found = here("toy", torch.device("cpu"))
    assert found.untested == "it runs on cuda, not on cpu"
    assert found.cells
    assert found.checks == []


def test_nothing_is_tested_on_meta() -> None:
    found = here("reference", torch.device("meta"))
    assert found.untested == "meta tensors hold no values"
    assert found.checks == []


def test_accelerator_that_is_not_here_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: None)
    assert absent(torch.device("cpu")) is None
    assert absent(torch.device("cuda:1")) == "torch finds no cuda device here"


def test_accelerator_of_a_high_index_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **options: own)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert absent(torch.device("cuda:1")) is None
    reason = absent(torch.device("cuda:2"))
    assert reason == "there is no cuda:2: torch finds 2 cuda devices here"
