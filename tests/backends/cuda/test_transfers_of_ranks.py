"""Copies between two GPUs: layers against the same layers over NCCL, bit for bit."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8core
from fp8core.collectives import BESIDE, IN_PARTS, READ, Communicator, of_group
from fp8core_backends.cuda import transfers
from tests.modules import test_parallel as parallel
from tests.modules import test_parallel_graphs as graphs
from tests.ranks import DEVICE_TYPE, device, result_of, run_ranks

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    pytest.mark.skipif(DEVICE_TYPE != "cuda", reason="TEST_DEVICE=cuda starts NCCL ranks"),
]
RECIPES = ("none", "current", "delayed", "rowwise", "block")
ROWS = 4096
LARGE = {"hidden": 2048, "ffn": 8192}
SIZES = (4096, 1024)
STEPS = int(os.environ.get("STRESS_STEPS", "40"))


def ways(communicator: Communicator) -> dict[str, str]:
    return {"/".join(key): communicator.traffic.way(*key) for key, _ in communicator.traffic}


def new_mlp(communicator: Communicator) -> Any:
    torch.manual_seed(communicator.rank)
    return fp8core.LayerNormMLP(
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


def values(rank: int, step: int, rows: int = ROWS) -> list[torch.Tensor]:
    """An input and the gradient of an output."""
    source = torch.Generator(device()).manual_seed(10 * step + rank)
    size = (rows, LARGE["hidden"])
    return [torch.randn(size, generator=source, device=device()).bfloat16() for _ in range(2)]


def large(communicator: Communicator, name: str) -> list[torch.Tensor]:
    """Three steps of an MLP whose rows take megabytes, without a wait between them."""
    chosen, mlp = parallel.RECIPES[name](), new_mlp(communicator)
    results: list[torch.Tensor] = []
    for step in range(3):
        x, dy = values(communicator.rank, step)
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


class Pauses:
    """Keeps this rank behind at random, or ahead: its host, its device, or neither."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(rank)

    def __call__(self, _: Any = None) -> None:
        kind, length = self._random.randrange(4), self._random.random()
        if kind == 0:
            time.sleep(0.003 * length)
        elif kind == 1:
            torch.cuda._sleep(int(4e6 * length))  # 2 ms at most


class Layer:
    """An MLP, and its results on inputs of several sizes as the group alone moves rows."""

    def __init__(self, communicator: Communicator, name: str) -> None:
        self.rank, self.recipe = communicator.rank, parallel.RECIPES[name]()
        self.mlp = new_mlp(communicator)
        self.inputs = {
            (rows, seed): values(self.rank, seed, rows) for rows in SIZES for seed in range(2)
        }
        self.expected = {key: self.run(key, ahead) for key in self.inputs}

    def forward(self, key: Any, *, recomputes: bool = False) -> tuple[Any, Any]:
        x = self.inputs[key][0].detach().requires_grad_()
        with fp8core.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            y = fp8core.checkpoint(self.mlp, x) if recomputes else self.mlp(x)
        return x, y

    def backward(self, key: Any, x: Any, y: Any, pause: Any) -> list[torch.Tensor]:
        self.mlp.zero_grad(set_to_none=True)
        y.register_hook(pause)
        y.backward(self.inputs[key][1])
        return [y.detach(), x.grad, *(one.grad for one in self.mlp.parameters())]

    def run(self, key: Any, pause: Any, *, recomputes: bool = False) -> list[torch.Tensor]:
        x, y = self.forward(key, recomputes=recomputes)
        pause()
        return self.backward(key, x, y, pause)


def differing(found: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    """How many elements differ, counted on the device."""
    pairs = zip(found, expected, strict=True)
    return torch.stack([(one != other).sum() for one, other in pairs]).sum()


class Graph:
    """A captured step of a layer."""

    def __init__(self, layer: Layer, key: Any) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # the buffers that the graph takes over
                layer.run(key, ahead)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._results = layer.run(key, ahead)
        self.expected = layer.expected[key]

    def run(self) -> list[torch.Tensor]:
        self._graph.replay()
        return self._results


def ahead(_: Any = None) -> None:
    """No pause."""


def step(layers: list[Layer], graph: Graph, shared: random.Random, pause: Any) -> torch.Tensor:
    """One of several ways to train two layers, the same one on all ranks."""
    first, second = shared.sample(layers, 2)
    keys = [(shared.choice(SIZES), shared.randrange(2)) for _ in range(2)]
    pause()
    way = shared.randrange(5)
    if way == 0:  # one after the other
        pairs = [(first, keys[0]), (second, keys[1])]
        results = [(one.run(key, pause), one.expected[key]) for one, key in pairs]
    elif way == 1:  # a layer recomputes its forward
        results = [(first.run(keys[0], pause, recomputes=True), first.expected[keys[0]])]
    elif way == 2:  # two microbatches under way, the second goes back first
        started = [first.forward(key) for key in keys]
        results = []
        for key, (x, y) in reversed(list(zip(keys, started, strict=True))):
            pause()
            found = [one.clone() for one in first.backward(key, x, y, pause)]
            results.append((found, first.expected[key]))
    elif way == 3:  # a graph, and a layer
        results = [
            ([one.clone() for one in graph.run()], graph.expected),
            (first.run(keys[0], pause), first.expected[keys[0]]),
        ]
    else:  # on another stream, and then again on this one
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            found = second.run(keys[1], pause)
        torch.cuda.current_stream().wait_stream(side)
        results = [
            (found, second.expected[keys[1]]),
            (first.run(keys[0], pause), first.expected[keys[0]]),
        ]
    return torch.stack([differing(*one) for one in results]).sum()


def paused(rank: int) -> dict[str, list[int]]:
    """Steps in which ranks run ahead of each other: how many elements differ in each."""
    transfers.FEWEST_BYTES = 1 << 60
    other = of_group(dist.new_group([0, 1]))
    layers = [Layer(of_group(None), "current"), Layer(of_group(None), "block")]
    layers += [Layer(other, "current"), Layer(other, "none")]
    transfers.FEWEST_BYTES = 1 << 16
    graph = Graph(layers[0], (SIZES[0], 0))
    returned = {}
    for fills in (False, True):  # with it, torch.empty fills memory
        torch.use_deterministic_algorithms(fills)
        shared, pause = random.Random(0), Pauses(rank)
        counts = [step(layers, graph, shared, pause) for _ in range(STEPS)]
        returned["deterministic" if fills else "as usual"] = torch.stack(counts).tolist()
    torch.use_deterministic_algorithms(False)
    print({key: (len(one), sum(map(bool, one))) for key, one in returned.items()}, flush=True)
    dist.barrier()
    return returned


def deserted(rank: int, folder: str) -> None:
    """Rank 1 takes part in some steps; what rank 0 says then, whose next step begins on the host,
    by sharing memory, or waits for it on the device."""
    said = []
    torch.save(said, result_of(Path(folder), rank))
    groups = [dist.new_group([0, 1], timeout=timedelta(seconds=3)) for _ in range(2)]
    (x, dy), known = values(rank, 0), []
    for steps, group in zip((1, 4), groups, strict=True):
        mlp = new_mlp(of_group(group))
        for _ in range(steps):  # the second allocates, later ones do not
            mlp(x.requires_grad_()).backward(dy)
        known.append(mlp)
    torch.cuda.synchronize()
    if rank == 1:
        time.sleep(15)
    for mlp in known if rank == 0 else ():
        try:
            mlp(x).backward(dy)
            torch.cuda.synchronize()
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error}")
            print(said[-1], flush=True)
    torch.save(said, result_of(Path(folder), rank))
    os._exit(0)  # the device's context is lost


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


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FP8CORE_TRANSFERS", "1")
        patch.setenv("FP8CORE_AUTOTUNE", "0")
        patch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        patch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # asked for by deterministic products
        yield


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
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
    assert said["max/amax"] == READ


@pytest.mark.parametrize("how", ["step", "callables"])
@pytest.mark.parametrize("name", ["none", "current", "block"])
def test_graphs_hold_copies(ranks: list[dict[str, Any]], name: str, how: str) -> None:
    assert [one[f"{name} {how}"] for one in ranks] == [[True] * 3] * 2


def test_ranks_that_run_ahead_compute_the_same(tmp_path: Path) -> None:
    for one in run_ranks(paused, tmp_path):
        assert one == {"as usual": [0] * STEPS, "deterministic": [0] * STEPS}


def test_a_rank_that_is_left_alone_ends_in_errors(tmp_path: Path) -> None:
    (on_host, on_device), _ = run_ranks(deserted, tmp_path, str(tmp_path))
    assert "CollectiveError: gather" in on_host
    assert "rank 1 did not come to share memory with rank 0 within 3 s" in on_host
    assert "CUDA error" in on_device
