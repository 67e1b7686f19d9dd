"""The law about memory catches a front end that hands over a tensor without any."""

from __future__ import annotations

from typing import Any

import pytest

from fp8core.chain import request
from fp8core.chain import run as chain
from fp8core.conformance import subject
from fp8core.conformance.compare import Broken
from fp8core.conformance.laws.memory import no_operand_without_memory_reaches_it


def test_the_law_holds() -> None:
    no_operand_without_memory_reaches_it(subject.find("reference"))


def test_an_unmade_negation_is_a_breach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "made_readable", lambda x, *_: x)
    with pytest.raises(Broken, match="without memory"):
        no_operand_without_memory_reaches_it(subject.find("reference"))


@pytest.mark.parametrize("door", ["_unwrap", "unwrap"])
def test_doors_left_open_are_a_breach(door: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quantized tensor is decoded where a chain begins, and again before it would be cast."""

    def open_door(*arguments: Any) -> Any:
        return arguments[1:3] if door == "_unwrap" else arguments[0]

    monkeypatch.setattr(chain, door, open_door)
    no_operand_without_memory_reaches_it(subject.find("reference"))
    monkeypatch.setattr(request, "QuantizedTensor", type("NoTensor", (), {}))
    with pytest.raises(Broken, match="without memory"):
        no_operand_without_memory_reaches_it(subject.find("reference"))
