"""The laws of the conformance kit, for few of the descriptors that the backend runs."""

from __future__ import annotations

from fp8core.conformance.catalogue import catalogue
from fp8core.conformance.checks import checks
from fp8core.conformance.laws import LAWS
from fp8core.conformance.subject import find
from tests.conformance.test_reference import failure, with_each_value


def test_backend_keeps_the_laws() -> None:
    subject = find("ascend")
    entries = [entry for entry in catalogue() if subject.refuses(entry.desc) is None]
    made = list(checks(subject, LAWS.values(), with_each_value(entries)))
    assert len(made) > 1000
    assert [text for check in made for text in failure(check)] == []
