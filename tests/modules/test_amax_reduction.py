"""Amax reduction over a process group: two gloo processes, which run this file as a program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8core import Linear, autocast, recipe

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
TIMEOUT_S = 240
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


def main(rank: int, rendezvous: str) -> None:
    """Run every scenario as ``rank`` of two and print its results as JSON."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    group, value = dist.new_group([0, 1]), AMAX[rank]
    infinite = float("inf") if rank else 2.0
    found = {
        "group": step([Linear(8, 8)], value, group),
        "no group": step([Linear(8, 8)], value, None),
        "not reducing": step([Linear(8, 8)], value, group, reduce_amax=False),
        "most recent": step([Linear(8, 8)], value, group, amax_compute_algo="most_recent"),
        "function": step([Linear(8, 8)], value, group, amax_compute_algo=newest),
        "infinite on rank 1": step([Linear(8, 8)], infinite, group),
        "reversed": reversed_order(rank, group),
        "two groups": two_groups(rank, group),
    }
    print(json.dumps(found))
    dist.destroy_process_group()


def newest(history: torch.Tensor) -> torch.Tensor:
    return history[-1]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    meeting = Path(tmp_path_factory.mktemp("gloo"), "rendezvous").as_uri()
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), meeting],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(2)
    ]
    found = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, errors
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return found


def input_scales(ranks: list[dict[str, Any]], scenario: str) -> list[float]:
    return [rank[scenario]["forward"][0][0] for rank in ranks]


def gradient_scales(ranks: list[dict[str, Any]], scenario: str) -> list[float]:
    return [rank[scenario]["backward"][0][0] for rank in ranks]


@pytest.mark.parametrize("scenario", ["group", "most recent", "function"])
def test_forward_amaxes_are_the_maximum_over_the_group(
    ranks: list[dict[str, Any]], scenario: str
) -> None:
    assert input_scales(ranks, scenario) == [E4M3_MAX / max(AMAX)] * 2


@pytest.mark.parametrize("scenario", ["group", "most recent", "function"])
def test_backward_amaxes_are_the_maximum_over_the_group(
    ranks: list[dict[str, Any]], scenario: str
) -> None:
    assert gradient_scales(ranks, scenario) == [E5M2_MAX / (max(AMAX) / 2)] * 2


@pytest.mark.parametrize("scenario", ["no group", "not reducing"])
def test_nothing_is_reduced_unless_asked(ranks: list[dict[str, Any]], scenario: str) -> None:
    assert input_scales(ranks, scenario) == [E4M3_MAX / amax for amax in AMAX]
    assert gradient_scales(ranks, scenario) == [E5M2_MAX / (amax / 2) for amax in AMAX]


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


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
