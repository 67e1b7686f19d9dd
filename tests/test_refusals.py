"""A call that is not refused, or with other words, is named."""

from __future__ import annotations

from functools import partial

from tests.refusals import unrefused


def test_what_is_not_refused_is_named() -> None:
    call = partial(int, "x")
    table = {
        "refused": (call, ValueError, "invalid literal"),
        "with other words": (call, ValueError, "something else"),
        "with another error": (call, TypeError, "invalid literal"),
        "taken": (dict, ValueError, ""),
    }
    said = "raised ValueError: invalid literal for int() with base 10: 'x'"
    assert unrefused(table) == {
        "with other words": said,
        "with another error": said,
        "taken": "returned dict",
    }
