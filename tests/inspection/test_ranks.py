"""Rows over all ranks: two gloo processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import fp8core as te
from fp8core import recipe
from fp8core.monitoring import Row
from tests.ranks import run_ranks

ROWS = 24


def rows_of(parts: list[torch.Tensor], *, is_distributed: bool, layers: int = 1) -> list[Row]:
    """Run ``parts`` as microbatches of one step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(te.Linear(32, 32) for _ in range(layers)))
    with te.monitor(model) as watch:
        for part in parts:
            with te.autocast(recipe=recipe.MXFP8BlockScaling()):
                y = model(part.clone().requires_grad_())
            y.backward(part)
        watch.step()
    return watch.rows_over_ranks() if is_distributed else watch.rows


def batch() -> list[torch.Tensor]:
    x = torch.randn(2 * ROWS, 32, generator=torch.Generator().manual_seed(5))
    x[0], x[ROWS + 1] = 0.0, 1e-4
    x[ROWS + 2, 3] = float("nan")
    return list(x.split(ROWS))


def work(rank: int) -> dict[str, Any]:
    """Run as ``rank`` of two."""
    rows = rows_of([batch()[rank]], is_distributed=True)
    try:
        rows_of([batch()[rank]], is_distributed=True, layers=1 + rank)
        refused = ""
    except te.OperandError as error:
        refused = str(error)
    return {"rows": [dataclasses.asdict(row) for row in rows], "refused": refused}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(work, tmp_path_factory.mktemp("gloo"))


def test_rows_over_ranks_are_those_of_one_process(ranks: list[dict[str, Any]]) -> None:
    want = {tuple(row.key): row for row in rows_of(batch(), is_distributed=False)}
    for rank in ranks:
        got = {(row["layer"], row["role"], row["orientation"]): row for row in rank["rows"]}
        assert set(got) == set(want)
        for key, row in got.items():
            # Each rank casts the weight; one process casts it once for both microbatches.
            one = {name: str(value) for name, value in dataclasses.asdict(want[key]).items()}
            own = {name: str(value) for name, value in row.items()}
            left_out = (
                {"casts", "elements", "blocks", "sqnr_db"} if key[1] == "weight" else {"sqnr_db"}
            )
            assert {n: v for n, v in own.items() if n not in left_out} == {
                n: v for n, v in one.items() if n not in left_out
            }
            assert row["sqnr_db"] == pytest.approx(want[key].sqnr_db, rel=1e-12)
    assert ranks[0] == ranks[1]


def test_ranks_that_ran_other_layers_are_refused_together(ranks: list[dict[str, Any]]) -> None:
    assert all("different operands, [6, 12]" in rank["refused"] for rank in ranks)


def test_without_a_process_group_it_is_refused() -> None:
    with pytest.raises(te.OperandError, match="init_process_group"):
        rows_of(batch(), is_distributed=True)
