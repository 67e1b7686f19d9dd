"""The kit catches each of the deliberately broken backends, by the test that names its fault.

The kit runs whole, on a few of the descriptors.
"""

from __future__ import annotations

import functools

import pytest
import torch

from fp8core.testing.catalogue import Entry, catalogue
from fp8core.testing.checks import checks
from fp8core.testing.laws import LAWS
from fp8core.testing.subject import Subject
from fp8core_backends.reference.backend import ReferenceBackend
from tests.conformance import broken, sound

CPU = torch.device("cpu")
LABELS = {
    "current.input.bfloat16",
    "delayed.input.float16",
    "current.grouped.input.bfloat16",
    "current.grouped.input.bfloat16.device",
    "current.fprop.bfloat16.bfloat16",
    "current.wgrad.bfloat16.float32.accumulate",
    "current.grouped.fprop.bfloat16.bfloat16",
    "nvfp4.grouped.wgrad.bfloat16.float32",
    "mxfp8.fprop.bfloat16.bfloat16",
    "rmsnorm.bfloat16.float32.backward",
    "delayed.layernorm.bfloat16",
    "gelu.bfloat16.bfloat16",
}


@functools.cache
def entries() -> list[Entry]:
    found = [entry for entry in catalogue() if entry.label in LABELS]
    assert {entry.label for entry in found} == LABELS
    return found


def failures(backend: broken.Sound) -> set[str]:
    """Names of the kit's tests that fail, of all there are."""
    subject = Subject("broken", backend, CPU, ReferenceBackend())
    failed = set()
    for check in checks(subject, list(LAWS.values()), entries()):
        try:
            check.run()
        except Exception:  # noqa: BLE001  a broken backend may raise anything
            failed.add(check.law.full_name)
    return failed


@pytest.mark.parametrize("backend", sound.SOUND, ids=lambda backend: backend.__name__)
def test_sound_backend_passes(backend: type[broken.Sound]) -> None:
    assert failures(backend()) == set()


@pytest.mark.parametrize("fault", broken.CAUGHT_BY, ids=lambda fault: fault.__name__)
def test_broken_backend_fails_the_test_that_names_its_fault(fault: type[broken.Sound]) -> None:
    assert broken.CAUGHT_BY[fault] in failures(fault())


def test_every_fault_is_caught_by_a_test_of_the_kit() -> None:
    assert set(broken.CAUGHT_BY.values()) <= {law.full_name for law in LAWS.values()}
    faults = {cls for cls in vars(broken).values() if isinstance(cls, type)}
    leaves = {cls for cls in faults if issubclass(cls, broken.Sound) and not cls.__subclasses__()}
    assert leaves == set(broken.CAUGHT_BY)
