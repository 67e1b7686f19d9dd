"""A call that is not refused, or with other words, is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import pytest

from tests.refusals import unrefused

CALLS: dict[str, Callable[[], object]] = {"returns": dict, "raises": partial(int, "x")}


@pytest.mark.parametrize(
    ("error", "match", "named"),
    [
        (ValueError, "invalid literal", {"returns"}),
        (ValueError, {"returns": "", "raises": "invalid literal"}, {"returns"}),
        (ValueError, "something else", {"returns", "raises"}),
        (TypeError, "invalid literal", {"returns", "raises"}),
    ],
)
def test_what_is_not_refused_is_named(
    error: type[Exception], match: str | Mapping[str, str], named: set[str]
) -> None:
    found = unrefused(CALLS, error, match)
    assert set(found) == named
    assert found["returns"] == "returned dict"
