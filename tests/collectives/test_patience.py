"""How a rank waits for a collective that may not end, while it looks for other ranks."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from fp8core.collectives import process_group
from fp8core.collectives.process_group import wait_patiently


class Work:
    """A collective that ends after ``waits`` waits, by ``error`` if there is one."""

    def __init__(self, waits: int, error: str = "") -> None:
        self.waits, self.error = waits, error

    def is_completed(self) -> bool:
        return self.waits <= 0

    def wait(self, timeout: timedelta | None = None) -> None:
        self.waits -= 1
        if self.waits >= 0:
            assert timeout is not None
            time.sleep(timeout.total_seconds())
            raise RuntimeError("the time of this wait is over")
        if self.error:
            raise RuntimeError(self.error)


@pytest.fixture(autouse=True)
def short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_PATIENCE", timedelta(seconds=0.01))


def test_it_looks_each_time_that_the_collective_has_not_ended() -> None:
    looks: list[int] = []
    wait_patiently(Work(3), lambda: looks.append(1))
    assert len(looks) == 2  # it has ended when the third wait is over


def test_what_a_look_raises_ends_the_wait() -> None:
    def look() -> None:
        raise ValueError("another rank compares")

    with pytest.raises(ValueError, match="another rank compares"):
        wait_patiently(Work(2), look)


def test_a_collective_that_failed_raises() -> None:
    for waits in [0, 2]:
        work = Work(waits, "connection closed")
        with pytest.raises(RuntimeError, match="connection closed"):
            wait_patiently(work, lambda: None)
