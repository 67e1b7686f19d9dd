"""A sample of the conformance kit, of which ``../test_npu.py`` runs all."""

from __future__ import annotations

from fp8core.conformance.catalogue import catalogue
from fp8core.conformance.subject import find
from tests.conformance.test_reference import failure, sample


def test_backend_keeps_the_laws() -> None:
    subject = find("ascend")
    entries = [entry for entry in catalogue() if subject.refuses(entry.desc) is None]
    made = sample(subject, entries, 3)
    assert len(made) > 400
    assert [text for check in made for text in failure(check)] == []
