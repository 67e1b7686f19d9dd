"""Tables of calls that have to be refused: all that are not, in one message."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping


def unrefused(
    calls: Mapping[str, Callable[[], object]],
    error: type[Exception],
    match: str | Mapping[str, str] = "",
) -> dict[str, str]:
    """By name, what each call does that does not raise ``error`` with a message like ``match``.

    ``match`` is a pattern for all of them, or one a call::

        calls = {"a float": lambda: Linear(1.5, 2), "a name": lambda: Linear("4", 2)}
        assert unrefused(calls, OperandError, "in_features") == {}
    """
    found = {}
    for name, call in calls.items():
        pattern = match if isinstance(match, str) else match[name]
        try:
            result = call()
        except Exception as raised:  # noqa: BLE001  another error is what the test shows
            if not isinstance(raised, error) or not re.search(pattern, str(raised)):
                found[name] = f"raised {type(raised).__name__}: {raised}"
        else:
            found[name] = f"returned {type(result).__name__}"
    return found
