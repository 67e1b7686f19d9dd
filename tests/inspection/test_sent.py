"""What explain says of the collectives of a layer, against what a step of two ranks sends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fp8core
from fp8core import autocast, recipe
from fp8core.collectives import Communicator
from fp8core.conformance.in_process import communicators, run_in_threads
from fp8core.inspection.explain import explain
from tests.device import DEVICE

ROWS = 256
RECIPES = {name: recipe.by_name(name) for name in ("current", "rowwise", "block", "mxfp8", "nvfp4")}


TWO = communicators(2)  # named by the layers, and found as long as they live


def new_mlp(communicator: Communicator) -> Any:
    return fp8core.LayerNormMLP(
        256,
        512,
        bias=False,
        tp_group=communicator,
        sequence_parallel=True,
        set_parallel_mode=True,
        params_dtype=torch.bfloat16,
        device=DEVICE,
    )


def counted(communicator: Communicator, name: str) -> dict[tuple[str, str], tuple[int, int]]:
    mlp = new_mlp(communicator)
    x = torch.ones(ROWS, 256, dtype=torch.bfloat16, requires_grad=True)
    with communicator.counting() as traffic:
        with autocast(recipe=RECIPES[name]):
            y = mlp(x)
        y.sum().backward()
    return {key: tuple(count) for key, count in traffic}


@pytest.mark.parametrize("name", RECIPES)
def test_explain_says_what_a_step_sends(name: str) -> None:
    sent = [one for _, one in explain(new_mlp(TWO[0]), RECIPES[name]).sent]
    said = {
        (one.collective, one.tensor): (one.calls, round(one.a_row * ROWS) + one.fixed)
        for one in sent
    }
    assert run_in_threads(lambda one: counted(one, name), 2) == [said, said]


def test_a_line_names_group_format_and_bytes() -> None:
    mlp = new_mlp(TWO[0])
    lines = str(explain(mlp, recipe.Float8BlockScaling())).splitlines()
    line = next(one for one in lines if "gather of input over" in one)
    assert "over 2 ranks of group 'threads" in line
    assert line.endswith(": e4m3 block=(1,128) power_of_two, sends 256.00 bytes a row, plain")


def test_a_layer_of_one_rank_sends_nothing() -> None:
    layer = fp8core.Linear(32, 32, device=DEVICE)
    assert explain(layer, recipe.Float8CurrentScaling()).sent == ()
