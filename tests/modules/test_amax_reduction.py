"""Amax reduction over a process group: two gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8core import Linear, autocast, recipe
from tests.ranks import run_ranks

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
AMAX = (2.0, 7.0)  # of each rank's input; that of its grad_output is half of it


def step(
    layers: list[Linear], value: float, group: Any, **fields: Any
) -> dict[str, list[list[float]]]:
    """Run the layers in the given order, forward and back; return each one's scales."""
    chosen = recipe.DelayedScaling(amax_history_len=4, **fields)
    with autocast(recipe=chosen, amax_reduction_group=group):
        outputs = [layer(torch.full((4, 8), value)) for layer in layers]
    sum(y.sum() * value / 2 for y in outputs).backward()
    return {
        "forward": [layer.scale_fwd.tolist() for layer in layers],
        "backward": [layer.scale_bwd.tolist() for layer in layers],
    }


def reversed_order(rank: int, group: Any) -> dict[str, Any]:
    """Two layers, which rank 1 uses the other way round; the second sees larger values."""
    first, second = Linear(8, 8), Linear(8, 8)
    order = [(first, 1.0), (second, 8.0)]
    with autocast(recipe=recipe.DelayedScaling(amax_history_len=4), amax_reduction_group=group):
        outputs = [layer(torch.full((4, 8), size)) for layer, size in order[:: -1 if rank else 1]]
    sum(y.sum() for y in outputs).backward()
    return {"forward": [first.scale_fwd[0].item(), second.scale_fwd[0].item()]}


def two_groups(rank: int, world: Any) -> dict[str, Any]:
    """One autocast in the group of both ranks, one in the group of this rank alone."""
    alone = [dist.new_group([member]) for member in range(2)][rank]
    return {
        "world": step([Linear(8, 8)], AMAX[rank], world),
        "alone": step([Linear(8, 8)], AMAX[rank], alone),
    }


def work(rank: int) -> dict[str, Any]:
    """Run every scenario as ``rank`` of two."""
    torch.manual_seed(0)
    group, value = dist.new_group([0, 1]), AMAX[rank]
    infinite = float("inf") if rank else 2.0
    return {
        "group": step([Linear(8, 8)], value, group),
        "no group": step([Linear(8, 8)], value, None),
        "not reducing": step([Linear(8, 8)], value, group, reduce_amax=False),
        "most recent": step([Linear(8, 8)], value, group, amax_compute_algo="most_recent"),
        "function": step([Linear(8, 8)], value, group, amax_compute_algo=newest),
        "infinite on rank 1": step([Linear(8, 8)], infinite, group),
        "reversed": reversed_order(rank, group),
        "two groups": two_groups(rank, group),
    }


def newest(history: torch.Tensor) -> torch.Tensor:
    return history[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    return run_ranks(work, tmp_path_factory.mktemp("gloo"))


def input_scales(ranks: list[dict[str, Any]], scenario: str) -> list[float]:
    return [rank[scenario]["forward"][0][0] for rank in ranks]


def gradient_scales(ranks: list[dict[str, Any]], scenario: str) -> list[float]:
    return [rank[scenario]["backward"][0][0] for rank in ranks]


def test_forward_amaxes_are_the_maximum_over_the_group(ranks: list[dict[str, Any]]) -> None:
    for scenario in ["group", "most recent", "function"]:
        assert input_scales(ranks, scenario) == [E4M3_MAX / max(AMAX)] * 2, scenario


def test_backward_amaxes_are_the_maximum_over_the_group(ranks: list[dict[str, Any]]) -> None:
    for scenario in ["group", "most recent", "function"]:
        assert gradient_scales(ranks, scenario) == [E5M2_MAX / (max(AMAX) / 2)] * 2, scenario


def test_nothing_is_reduced_unless_asked(ranks: list[dict[str, Any]]) -> None:
    for scenario in ["no group", "not reducing"]:
        assert input_scales(ranks, scenario) == [E4M3_MAX / amax for amax in AMAX], scenario
        assert gradient_scales(ranks, scenario) == [E5M2_MAX / (amax / 2) for amax in AMAX], (
            scenario
        )


def test_an_infinite_amax_of_one_rank_is_recorded_by_none(ranks: list[dict[str, Any]]) -> None:
    assert input_scales(ranks, "infinite on rank 1") == [1.0, 1.0]


def test_layers_are_matched_however_each_rank_orders_them(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["reversed"]["forward"] == [E4M3_MAX, E4M3_MAX / 8]


def test_each_autocast_reduces_over_its_own_group(ranks: list[dict[str, Any]]) -> None:
    together = [rank["two groups"]["world"]["forward"][0][0] for rank in ranks]
    alone = [rank["two groups"]["alone"]["forward"][0][0] for rank in ranks]
    assert together == [E4M3_MAX / max(AMAX)] * 2
    assert alone == [E4M3_MAX / amax for amax in AMAX]
