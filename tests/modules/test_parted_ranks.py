"""Ranks run the same layer until one of them changes something: all raise what differs.

Each case has a group of its own, as ranks that have parted cannot go on with theirs. Where one of
them has begun a collective by then, that waits on its device over NCCL, whose watchdog ends the
process: those cases are of gloo here, and of processes of their own in tests.on_ranks.faults.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8core
from fp8core import recipe
from fp8core.collectives import of_group
from tests.ranks import DEVICE_TYPE, device, run_ranks

CURRENT, BLOCK = recipe.Float8CurrentScaling(), recipe.Float8BlockScaling()
MOVING = (fp8core.ops.AllGather, fp8core.ops.ReduceScatter, fp8core.ops.AllReduce)
HIDDEN = 64
TIMEOUT = datetime.timedelta(seconds=30)


def new_linear(group: Any, mode: str = "column") -> fp8core.Linear:
    return fp8core.Linear(
        HIDDEN,
        HIDDEN,
        tp_group=group,
        parallel_mode=mode,
        sequence_parallel=True,
        params_dtype=torch.bfloat16,
        device=device(),
    )


def step(layer: fp8core.Linear, chosen: recipe.Recipe | None, rows: int = 32) -> None:
    x = torch.ones(rows, HIDDEN, dtype=torch.bfloat16, requires_grad=torch.is_grad_enabled())
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x)
    if y.requires_grad:
        y.sum().backward()


def changes_recipe(layer: fp8core.Linear, rank: int) -> None:
    step(layer, CURRENT)
    step(layer, [CURRENT, BLOCK][rank])


def changes_to_known_recipe(layer: fp8core.Linear, rank: int) -> None:
    for chosen in (CURRENT, None, CURRENT, None, CURRENT):
        step(layer, chosen)
    step(layer, [CURRENT, None][rank])


def turns_gradients_off(layer: fp8core.Linear, rank: int) -> None:
    step(layer, CURRENT)
    with torch.no_grad() if rank else contextlib.nullcontext():
        step(layer, CURRENT)


def evaluates(layer: fp8core.Linear, rank: int) -> None:
    step(layer, CURRENT)
    layer.train(not rank)
    step(layer, CURRENT)


def freezes(layer: fp8core.Linear, rank: int) -> None:
    step(layer, CURRENT)
    layer.weight.requires_grad_(not rank)
    step(layer, CURRENT)


def freezes_first(layer: fp8core.Linear, rank: int) -> None:
    layer.weight.requires_grad_(not rank)
    step(layer, CURRENT)


def changes_rows(layer: fp8core.Linear, rank: int) -> None:
    step(layer, CURRENT)
    step(layer, CURRENT, 32 + 32 * rank)


CASES: dict[str, Callable[[fp8core.Linear, int], None]] = {
    case.__name__: case
    for case in (
        changes_recipe,
        changes_to_known_recipe,
        turns_gradients_off,
        evaluates,
        freezes,
        freezes_first,
        changes_rows,
    )
}


BEFORE_COLLECTIVES = ("freezes_first",)
"""The cases in which both ranks compare before either begins a collective."""
of_waiting_ranks = pytest.mark.skipif(
    DEVICE_TYPE != "cpu", reason="a collective that one rank begins waits on its device"
)

INPUTS: dict[str, Callable[[int], torch.Tensor]] = {
    "columns": lambda rank: torch.ones(4, 8 + 8 * rank),
    "dtype": lambda rank: torch.ones(4, 8, dtype=[torch.float32, torch.bfloat16][rank]),
    "dimensions": lambda rank: torch.ones([(4, 8), (2, 2, 8)][rank]),
}


def says_of_inputs(operation: type[torch.nn.Module], kind: str, rank: int) -> str:
    """What a chain raises that has no weight, and so takes any number of columns."""
    group = dist.new_group(timeout=TIMEOUT)
    chain = fp8core.ops.Sequential(operation(group), fp8core.ops.GELU())
    with pytest.raises(fp8core.OperandError) as caught:
        chain(INPUTS[kind](rank))
    return str(caught.value)


def changes_rows_of_a_scatter(group: Any, rank: int) -> str:
    layer, begun = new_linear(group, "row"), time.monotonic()
    x = torch.ones(32 + 32 * rank, HIDDEN // 2, dtype=torch.bfloat16)
    layer(x[:32])
    with pytest.raises(fp8core.Fp8CoreError) as caught:
        layer(x)
    assert time.monotonic() - begun < TIMEOUT.total_seconds() / 2
    return f"{type(caught.value).__name__}: {caught.value}"


def alternates(group: Any) -> list[int]:
    """How many comparisons each round of training and evaluation takes."""
    layer, communicator, counts = new_linear(group), of_group(group), []
    compare, seen = communicator.agree, [0]

    def counted(*arguments: Any) -> None:
        seen[0] += 1
        compare(*arguments)

    communicator.agree = counted  # type: ignore[method-assign]  # counts calls
    for _ in range(6):
        seen[0] = 0
        step(layer, CURRENT)
        with torch.no_grad():
            step(layer, CURRENT)
        counts.append(seen[0])
    return counts


def program(rank: int) -> dict[str, Any]:
    said: dict[str, Any] = {}
    is_on_host = DEVICE_TYPE == "cpu"
    for name, case in CASES.items():
        if not is_on_host and name not in BEFORE_COLLECTIVES:
            continue
        group = dist.new_group(timeout=TIMEOUT)
        with pytest.raises(fp8core.Fp8CoreError) as caught:
            case(new_linear(group), rank)
        said[name] = f"{type(caught.value).__name__}: {caught.value}"
    if is_on_host:
        of_scatter = dist.new_group(timeout=TIMEOUT)
        said["changes_rows_of_a_scatter"] = changes_rows_of_a_scatter(of_scatter, rank)
    for operation, kind in itertools.product(MOVING, INPUTS):
        said[f"{operation.__name__} {kind}"] = says_of_inputs(operation, kind, rank)
    said["alternates"] = alternates(dist.new_group(timeout=TIMEOUT))
    short = dist.new_group(timeout=datetime.timedelta(seconds=1))
    said["missing"] = ""
    if not rank:
        with pytest.raises(fp8core.CollectiveError) as missing:
            step(new_linear(short), CURRENT)
        said["missing"] = str(missing.value)
    dist.barrier()
    return said


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("parted")
    return run_ranks(program, folder)


@pytest.mark.parametrize(
    ("case", "of_first", "of_second"),
    [
        ("freezes_first", "of the input and parameters 1, 2", "of the input and parameter 2."),
        *(
            pytest.param(*told, marks=of_waiting_ranks)
            for told in (
                ("changes_recipe", "recipe: input e4m3 block=(0,0)", "input e4m3 block=(1,128)"),
                ("changes_to_known_recipe", "recipe: input e4m3", "recipe: high precision"),
                ("turns_gradients_off", "mode: gradients enabled", "mode: no gradients"),
                ("evaluates", "gradients enabled, training", "gradients enabled, evaluation"),
                ("freezes", "of the input and parameters 1, 2", "of the input and parameter 2."),
                ("changes_rows", "an input of [32, 64]", "an input of [64, 64]"),
                ("changes_rows_of_a_scatter", "waits in scatter", "an input of [64, 32]"),
            )
        ),
    ],
)
def test_every_rank_raises_what_differs(
    ranks: list[dict[str, Any]], case: str, of_first: str, of_second: str
) -> None:
    for said in (one[case] for one in ranks):
        assert said.startswith("OperandError: "), said
        first, second = said.split("; rank 1: ") if "; rank 1: " in said else ("", said)
        assert of_first in first, said
        assert of_second in second, said


@pytest.mark.parametrize("operation", [operation.__name__ for operation in MOVING])
@pytest.mark.parametrize(
    ("kind", "of_first", "of_second"),
    [
        ("columns", "an input of [4, 8]", "an input of [4, 16]"),
        ("dtype", "dtype: torch.float32", "dtype: torch.bfloat16"),
        ("dimensions", "an input of [4, 8]", "an input of [2, 2, 8]"),
    ],
)
def test_inputs_of_operations_are_compared(
    ranks: list[dict[str, Any]], operation: str, kind: str, of_first: str, of_second: str
) -> None:
    for said in (one[f"{operation} {kind}"] for one in ranks):
        first, second = said.split("; rank 1: ")
        assert of_first in first, said
        assert of_second in second, said


@of_waiting_ranks
def test_the_collective_is_named_in_which_the_other_rank_waits(
    ranks: list[dict[str, Any]],
) -> None:
    for said in (one["changes_recipe"] for one in ranks):
        assert "rank 0" in said
        assert "and waits in " in said
        assert "The group cannot go on" in said


def test_a_loop_that_alternates_stops_comparing(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert one["alternates"][0] > 0
        assert one["alternates"][-1] == 0


def test_a_rank_that_compares_nothing_is_named_after_the_timeout(
    ranks: list[dict[str, Any]],
) -> None:
    said = ranks[0]["missing"]
    assert "compares the layer" in said
    assert "ranks [1] did not take part within 1 s" in said
