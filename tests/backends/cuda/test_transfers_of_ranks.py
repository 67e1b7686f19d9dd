"""Copies between two GPUs: layers against the same layers over NCCL, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8core
from fp8core.communicator import BESIDE, IN_PARTS, Communicator, of_group
from fp8core_backends.cuda import transfers
from tests.modules import test_parallel as parallel
from tests.modules import test_parallel_graphs as graphs
from tests.ranks import DEVICE_TYPE, device, run_ranks

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    pytest.mark.skipif(DEVICE_TYPE != "cuda", reason="TEST_DEVICE=cuda starts NCCL ranks"),
]
RECIPES = ("none", "current", "delayed", "rowwise", "block")
ROWS = 4096
LARGE = {"hidden": 2048, "ffn": 8192}


def ways(communicator: Communicator) -> dict[str, str]:
    return {"/".join(key): communicator.traffic.way(*key) for key, _ in communicator.traffic}


def large(communicator: Communicator, name: str) -> list[torch.Tensor]:
    """Three steps of an MLP whose rows take megabytes, without a wait between them."""
    chosen, rank = parallel.RECIPES[name](), communicator.rank
    torch.manual_seed(rank)
    mlp = fp8core.LayerNormMLP(
        LARGE["hidden"],
        LARGE["ffn"],
        bias=False,
        normalization="RMSNorm",
        activation="swiglu",
        params_dtype=torch.bfloat16,
        device=device(),
        tp_group=communicator,
        sequence_parallel=True,
        set_parallel_mode=True,
    )
    results: list[torch.Tensor] = []
    for step in range(3):
        source = torch.Generator(device()).manual_seed(10 * step + rank)
        x, dy = (
            torch.randn(ROWS, LARGE["hidden"], generator=source, device=device()).bfloat16()
            for _ in range(2)
        )
        mlp.zero_grad(set_to_none=True)
        with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
            y = mlp(x.requires_grad_())
        y.backward(dy)
        results += [y.detach(), x.grad, *(one.grad.clone() for one in mlp.parameters())]
    return results


def both(communicator: Communicator, run: Any, name: str) -> tuple[bool, dict[str, str], str]:
    """Whether ``run`` gives equal results with copies and without, and how rows travelled."""
    results, said = [], {}
    for fewest in (1, 1 << 60):
        transfers.FEWEST_BYTES = fewest
        communicator.traffic.clear()
        results.append(run(communicator, name))
        said = said or ways(communicator)
    return equal(*results), said, difference(*results)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(equal(one[key], other[key]) for key in one if key not in ("traffic", "counts"))
    if isinstance(one, list):
        return all(map(equal, one, other))
    return bool(torch.equal(one, other))


def difference(one: Any, other: Any) -> str:
    """Which results differ, and by how much."""
    pairs = (
        [(key, one[key], other[key]) for key in one if key not in ("traffic", "counts")]
        if isinstance(one, dict)
        else [(str(at), *pair) for at, pair in enumerate(zip(one, other, strict=True))]
    )
    return "; ".join(
        f"{key}: {((a.float() - b.float()).norm() / b.float().norm()).item():.2e}"
        for key, a, b in pairs
        if not torch.equal(a, b)
    )


def mlp(communicator: Communicator, name: str) -> dict[str, Any]:
    return parallel.parallel_mlp(communicator, name, sequence=True)


def over_nccl(rank: int) -> dict[str, Any]:
    communicator = of_group(None)
    returned: dict[str, Any] = {}
    for name in RECIPES:
        for kind, run in (("mlp", mlp), ("pair", parallel.pair), ("large", large)):
            returned[f"{name} {kind}"] = list(both(communicator, run, name))
            print(name, kind, returned[f"{name} {kind}"], flush=True)
    transfers.FEWEST_BYTES = 1
    for name in ("none", "current", "block"):
        chosen = parallel.RECIPES[name]()
        returned[f"{name} step"] = graphs.replays(communicator, chosen)
        returned[f"{name} callables"] = graphs.graphed(communicator, chosen)
        print(name, "graphs", returned[f"{name} step"], returned[f"{name} callables"], flush=True)
    dist.barrier()
    return returned


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8CORE_TRANSFERS", "1")
        patch.setenv("FP8CORE_AUTOTUNE", "0")
        patch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        return run_ranks(over_nccl, tmp_path_factory.mktemp("transfers"))


@pytest.mark.parametrize("kind", ["mlp", "pair", "large"])
@pytest.mark.parametrize("name", RECIPES)
def test_results_are_those_of_nccl(ranks: list[dict[str, Any]], name: str, kind: str) -> None:
    for one in ranks:
        is_equal, _, found = one[f"{name} {kind}"]
        assert is_equal, found


def test_rows_travelled_by_copies(ranks: list[dict[str, Any]]) -> None:
    _, said, _ = ranks[0]["current large"]
    assert {key: said[key] for key in said if "amax" not in key and "agreement" not in key} == {
        "gather/input": IN_PARTS,
        "scatter/output": IN_PARTS,
        "gather/grad_output": IN_PARTS,
        "gather/input again": BESIDE,
        "scatter/grad_input": BESIDE,
    }


@pytest.mark.parametrize("how", ["step", "callables"])
@pytest.mark.parametrize("name", ["none", "current", "block"])
def test_graphs_hold_copies(ranks: list[dict[str, Any]], name: str, how: str) -> None:
    assert [one[f"{name} {how}"] for one in ranks] == [[True] * 3] * 2
