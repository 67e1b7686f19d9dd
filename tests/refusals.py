"""Tables of calls that have to be refused: all that are not, in one message."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tests import device

Refusal = tuple[Callable[[], object], type[Exception], str]
"""A call, the error that it has to raise, and a pattern that is found in its message."""


def unrefused(table: Mapping[str, Refusal]) -> dict[str, str]:
    """By name, what each call of ``table`` does instead of raising its error::

    REFUSED = {"a float": (lambda: Linear(1.5, 2), OperandError, "in_features=1.5")}
    assert unrefused(REFUSED) == {}
    """
    found = {}
    for name, (call, error, pattern) in table.items():
        try:
            result = call()
        except Exception as raised:  # noqa: BLE001  another error is what the test shows
            text = f"{type(raised).__name__}: {raised}"
            is_refused = isinstance(raised, error) and re.search(pattern, str(raised))
            if not is_refused and device.absent(text) is None:  # else a GPU lacks what it needs
                found[name] = f"raised {text}"
        else:
            found[name] = f"returned {type(result).__name__}"
    return found
