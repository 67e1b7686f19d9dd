"""Expressions of values, without bytes of a pickle."""

from __future__ import annotations

import enum
import functools
import math
import re
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from fp8core import UnsupportedError
from fp8core.torch_ops.expression import expression_of


class Level(enum.Enum):
    LOW = 1


@dataclass(frozen=True, slots=True)
class Slotted:
    dtype: torch.dtype
    sizes: tuple[float, ...] = ()


@dataclass
class Outer:
    @dataclass
    class Inner:
        number: int

    held: Inner
    options: dict[str, Any] = field(default_factory=dict)


class Mixed(list[int]):
    """A list with attributes and slots."""

    __slots__ = ("__dict__", "slot")

    def __eq__(self, other: object) -> bool:
        return list.__eq__(self, other) is True and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


def mixed() -> Mixed:
    made = Mixed([1, 2])
    made.slot, made.attribute = "slot", "attribute"
    return made


VALUES = [
    *(
        None,
        ...,
        True,
        -1,
        1e-45,
        math.inf,
        -math.inf,
        "a'\"\n",
        b"\x80",
        1j,
        complex(0, math.inf),
        (),
        (1,),
        [[]],
        {},
    ),
    *(torch.bfloat16, int, math.sqrt, Outer.Inner, Level.LOW, frozenset({"a"}), re.compile("a+")),
    *(Slotted(torch.float8_e4m3fn, (1.5, math.inf)), Outer(Outer.Inner(3), {"a": [None]}), mixed()),
    *(OrderedDict(b=1, a=2), deque([1, 2]), torch.device("cpu"), torch.Size([1, 2])),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_value_is_made_again(value: Any) -> None:
    expression, names = expression_of(value)
    made = eval(expression, {"torch": torch, **names})
    assert type(made) is type(value)
    assert made == value
    assert getattr(made, "slot", None) == getattr(value, "slot", None)


def test_a_function_with_arguments_is_made_again() -> None:
    expression, names = expression_of(functools.partial(math.pow, 2))
    assert eval(expression, dict(names))(3) == 8


def test_what_is_not_a_number_stays_so() -> None:
    assert math.isnan(eval(expression_of(math.nan)[0]))


def test_there_is_no_pickle_in_it() -> None:
    expression, names = expression_of(mixed())
    assert not [one for one in names.values() if one.__module__.endswith("pickle")]
    assert "b'" not in expression


@pytest.mark.parametrize("kind", ["lambda", "local class", "cycle", "generator", "replaced name"])
def test_what_has_no_name_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Local:
        pass

    cycle: list[Any] = []
    cycle.append(cycle)
    values = {
        "lambda": lambda: None,
        "local class": Local(),
        "cycle": cycle,
        "generator": (one for one in ()),
        "replaced name": Slotted(torch.float32),
    }
    monkeypatch.setitem(globals(), "Slotted", Outer)
    with pytest.raises(UnsupportedError, match="cannot be a value in a graph"):
        expression_of(values[kind])
