"""Rows that travel beside products: the results, counts and order of a backend that moves them."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.collectives import BESIDE, IN_PARTS, PLAIN, READ, Communicator, of_group
from fp8core.dispatch import plugins
from fp8core.inspection.on_meta import sent_by
from tests.in_process import communicators, run_in_threads
from tests.modules import test_parallel as parallel
from tests.overlapping_backend import LOG, NAME, PLAIN_NAME
from tests.ranks import device, run_ranks

RECIPES = ("none", "current", "delayed", "rowwise", "block", "mxfp8")
PLUGIN = "tests.overlapping_backend"


@pytest.fixture(scope="module", autouse=True)
def plugin() -> Any:
    """The backend of these tests, here and in the processes of ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8CORE_PLUGINS", PLUGIN)
        plugins.reload()
        yield
    plugins.reload()


def ways(communicator: Communicator) -> dict[str, str]:
    return {"/".join(key): communicator.traffic.way(*key) for key, _ in communicator.traffic}


def of_backend(communicator: Communicator, backend: str) -> dict[str, Any]:
    returned: dict[str, Any] = {}
    with fp8core.use_backend(backend):
        for name in RECIPES:
            returned[f"{name} mlp"] = parallel.parallel_mlp(communicator, name, sequence=True)
            returned[f"{name} ways"] = ways(communicator)
            returned[f"{name} pair"] = parallel.pair(communicator, name)
        returned["bias"] = parallel.parallel_mlp(communicator, "current", sequence=True, bias=True)
        returned["replicated"] = parallel.parallel_mlp(communicator, "current", sequence=False)
        returned["replicated ways"] = ways(communicator)
        returned["uneven"] = parallel.parallel_mlp(communicator, "block", sequence=True, rows=72)
        returned["frozen"] = frozen(communicator)
    return returned


def frozen(communicator: Communicator) -> dict[str, Any]:
    """A column-parallel linear whose weight is not trained: no weight gradient is computed, beside
    which the sum of the gradient of the input could travel."""
    data = parallel.Data(ranks=communicator.size)
    spread = {"tp_group": communicator, "sequence_parallel": True, "parallel_mode": "column"}
    layer = parallel.new_linear(parallel.HIDDEN, parallel.FFN, **spread)
    with torch.no_grad():
        layer.weight.copy_(data.w1.chunk(communicator.size)[communicator.rank])
    layer.weight.requires_grad_(False)
    x = data.x[0].chunk(communicator.size)[communicator.rank].clone().requires_grad_()
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        y = layer(x)
    communicator.traffic.clear()
    y.backward(torch.ones_like(y))
    return {"y": y.detach(), "dx": x.grad, "ways": ways(communicator)}


def program(communicator: Communicator) -> dict[str, Any]:
    assert os.environ["FP8CORE_PLUGINS"] == PLUGIN
    returned = {backend: of_backend(communicator, backend) for backend in (PLAIN_NAME, NAME)}
    LOG.clear()
    LOG[communicator.rank] = []
    with fp8core.use_backend(NAME):
        parallel.parallel_mlp(communicator, "current", sequence=True)
    events = LOG.pop(communicator.rank)
    steps = len(events) // 3  # the same in each of three steps
    return {**returned, "events": events[-steps:]}


def over_gloo(rank: int) -> dict[str, Any]:
    return program(of_group(None))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(over_gloo, tmp_path_factory.mktemp("overlap"))


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


CASES = [*(f"{name} {kind}" for name in RECIPES for kind in ("mlp", "pair")), "bias", "uneven"]


def test_results_bytes_and_calls_are_those_of_plain_collectives(
    ranks: list[dict[str, Any]],
) -> None:
    for case in [*CASES, "replicated"]:
        for one in ranks:
            assert equal(one[NAME][case], one[PLAIN_NAME][case]), case


def test_a_gradient_without_a_weight_gradient_is_equal_too(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        for key in ("y", "dx"):
            assert torch.equal(one[NAME]["frozen"][key], one[PLAIN_NAME]["frozen"][key])


@pytest.mark.parametrize("name", ["current", "delayed"])
def test_what_a_product_reads_travels_in_parts_and_the_rest_beside(
    ranks: list[dict[str, Any]], name: str
) -> None:
    for one in ranks:
        found = one[NAME][f"{name} ways"]
        large = {key: way for key, way in found.items() if "amax" not in key}
        assert large == {
            "gather/input": IN_PARTS,
            "scatter/output": IN_PARTS,
            "gather/grad_output": IN_PARTS,
            "gather/input again": BESIDE,
            "scatter/grad_input": BESIDE,
        }
        assert found.get("max/amax") == (READ if name == "current" else None)


def test_columnwise_codes_of_blocks_travel_beside_dgrad(ranks: list[dict[str, Any]]) -> None:
    found = ranks[0][NAME]["mxfp8 ways"]
    assert found["gather/input"] == IN_PARTS
    assert found["gather/input again"] == BESIDE
    assert found["gather/input scales"] == PLAIN  # few bytes


def test_a_sum_without_a_weight_gradient_travels_in_parts(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert one[NAME]["frozen"]["ways"] == {"scatter/grad_input": IN_PARTS}


def test_without_transfers_all_is_plain(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert {*one[PLAIN_NAME]["current ways"].values()} == {PLAIN}
        assert {*one[NAME]["replicated ways"].values()} == {PLAIN}


def test_products_of_a_rank_s_rows_run_while_those_of_others_travel(
    ranks: list[dict[str, Any]],
) -> None:
    half, rows = parallel.ROWS // 2, parallel.ROWS
    part = f"product of {half} of {rows} rows"
    largest = "maximum of torch.float32 [1]"
    codes, sums = f"torch.uint8 {[half, parallel.HIDDEN]}", f"{[half, parallel.HIDDEN]}"
    for rank, one in enumerate(ranks):
        other = 1 - rank
        assert one["events"] == [
            *(largest, f"gather of {codes}"),  # the input of fc1
            *(part, f"rows of rank {other}", part),
            f"scatter of torch.bfloat16 {sums}",  # the output of fc2
            *(part, f"send to rank {other}", part, "sum"),
            *(largest, f"gather of {codes}"),  # the gradient of the output
            *(part, f"rows of rank {other}", part),
            f"rows of rank {rank}",  # its wgrad reads all rows
            f"gather of {codes}",  # the input of fc1, beside its dgrad
            f"scatter of torch.bfloat16 {sums}",  # beside the wgrad
            f"send to rank {other}",
            *(f"rows of rank {other}", f"rows of rank {rank}"),
            "sum",
        ]


def test_four_ranks_sum_what_travels_in_parts() -> None:
    def work(communicator: Communicator) -> dict[str, Any]:
        with fp8core.use_backend(NAME):
            return parallel.parallel_mlp(communicator, "current", sequence=True)

    parts = run_in_threads(work, 4)
    with fp8core.use_backend(NAME):
        judge = parallel.one_process("current", ranks=4)
    parallel.check(parts, "", judge, split=True)


def test_explain_says_how_each_collective_runs() -> None:
    first, _ = communicators(2)
    mlp = parallel.new_mlp(tp_group=first, sequence_parallel=True, set_parallel_mode=True)
    said = {}
    for backend in (NAME, PLAIN_NAME):
        with fp8core.use_backend(backend):
            chosen = recipe.Float8CurrentScaling()
            sent = sent_by(mlp, chosen, device(), torch.bfloat16)
        said[backend] = {f"{one.collective}/{one.tensor}": one.way for one in sent}
    assert {*said[PLAIN_NAME].values()} == {PLAIN}
    assert said[NAME] == {
        "gather/input": IN_PARTS,
        "gather/input again": BESIDE,
        "gather/grad_output": IN_PARTS,
        "scatter/output": IN_PARTS,
        "scatter/grad_input": BESIDE,
        "max/amax": READ,
    }
