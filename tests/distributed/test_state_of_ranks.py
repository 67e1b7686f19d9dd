"""Every kind of state that a rank holds, saved by one number of ranks and loaded by another."""

from __future__ import annotations

import pytest

from tests.distributed.state_work import CASES, RANKS, work
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """By case what differs after the load, as the first of four processes finds it."""
    folder = tmp_path_factory.mktemp("ranks")
    found: dict[str, list[str]] = run_ranks(
        work, folder, str(folder / "checkpoints"), world_size=RANKS
    )[0]
    return found


@pytest.mark.parametrize("name", CASES)
def test_state_is_whole_on_another_number_of_ranks(
    differences: dict[str, list[str]], name: str
) -> None:
    assert differences[name] == []
