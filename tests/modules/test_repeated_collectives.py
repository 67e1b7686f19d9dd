"""Recorded runs of chains with collectives: the bits and the traffic of the program itself.

A layer records its second call, so that the third is the first one to be repeated. On the CPU the
recorder is that of :mod:`tests.recording_backend`; with TEST_DEVICE=cuda that of the CUDA backend.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.chain import series
from fp8core.chain.repeated import Repeated
from fp8core.collectives import Communicator, of_group
from fp8core.errors import Fp8CoreError
from tests.pairs import turns
from tests.ranks import DEVICE_TYPE, device, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")

PLUGIN = "tests.recording_backend"
RECORDING, OVERLAPPING = "recording", "recording_overlapping"
HIDDEN, FFN, ROWS, STEPS = 128, 256, 128, 4
RECIPES = ("delayed", "current", "block", "rowwise")
OTHER_CALLS = ("delayed", "block")
BACKENDS = (RECORDING, OVERLAPPING) if DEVICE_TYPE == "cpu" else ("",)
ROWS_OF: dict[str, tuple[int, ...]] = {
    "the same": (ROWS,),
    "other rows": (2 * ROWS,),
    "rows of no whole blocks": (72,),
    "three dimensions": (2, ROWS // 2),
    "the same again": (ROWS,),
}


def spread(communicator: Communicator, **options: Any) -> dict[str, Any]:
    return {"tp_group": communicator, "params_dtype": torch.bfloat16, "device": device(), **options}


def mlp(
    communicator: Communicator, hidden: int = HIDDEN, *, bias: bool = False, **options: Any
) -> Any:
    options = {"sequence_parallel": True, "activation": "swiglu", **options}
    given = spread(communicator, set_parallel_mode=True, normalization="RMSNorm", **options)
    return fp8core.LayerNormMLP(hidden, 2 * hidden, bias=bias, **given)


def column(communicator: Communicator) -> Any:
    given = spread(communicator, parallel_mode="column", sequence_parallel=True)
    return fp8core.Linear(HIDDEN, FFN, bias=False, **given)


def row(communicator: Communicator) -> Any:
    given = spread(communicator, parallel_mode="row", sequence_parallel=True)
    return fp8core.Linear(HIDDEN, HIDDEN, bias=False, **given)


LAYERS: dict[str, Callable[[Communicator], Any]] = {
    "mlp": mlp,
    "mlp with biases": lambda communicator: mlp(communicator, bias=True),
    "mlp without sequence parallelism": lambda one: mlp(one, sequence_parallel=False),
    "column": column,
    "row": row,
}
LARGE, LARGE_ROWS, LARGE_HIDDEN = "mlp of many rows", 1024, 2048
"""A rank's codes are so many that a backend of CUDA moves them beside products, where it can."""
if DEVICE_TYPE == "cuda":
    LAYERS[LARGE] = lambda communicator: mlp(communicator, LARGE_HIDDEN)


@contextlib.contextmanager
def without_recordings() -> Iterator[None]:
    """Have layers that are bound within run their programs, each time."""

    def the_program(program: Any, *others: object) -> Any:
        return program

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series, "Repeated", the_program)
        yield


def new_layer(kind: str, communicator: Communicator, name: str) -> Any:
    """A layer whose amaxes under the recipe ``name`` the ranks reduce in each step.

    On a GPU they begin to in the step after its first one, but for the first layer of a group,
    which is none of those that are compared.
    """
    torch.manual_seed(communicator.rank)
    layer = LAYERS[kind](communicator)
    if DEVICE_TYPE == "cuda":
        step(layer, name, communicator, values(shape_of(kind), communicator.rank))
        with reducing(name, communicator):
            pass
    return layer


def reducing(name: str, communicator: Communicator) -> Any:
    group = group_of(communicator)
    return fp8core.autocast(recipe=recipe.by_name(name), amax_reduction_group=group)


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * 2.0 ** (seed % 3)
    return x.to(device(), torch.bfloat16)


def step(
    layer: Any, name: str, communicator: Communicator, x: torch.Tensor, *, times: int = 1
) -> list[torch.Tensor]:
    """Return output, gradients, state and traffic of a step."""
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    layer._bindings.count()
    communicator.traffic.clear()
    with reducing(name, communicator):
        y = layer(x)
    dy = values(tuple(y.shape), 7 + communicator.rank) / 16
    for at in range(times):
        y.backward(dy, retain_graph=at + 1 < times)
    grads = [one.grad for one in (x, *layer.parameters())]
    state = [one.clone() for one in (*layer.buffers(), *layer._bindings.nonfinite.values())]
    # Delayed amaxes travel with those of the group's other layers, as long as these exist, and
    # again where a layer is new.
    sent = [
        torch.tensor([*count])
        for (_, purpose), count in communicator.traffic
        if purpose != "delayed amax"
    ]
    return [y.detach(), *grads, *state, *sent]


def group_of(communicator: Any) -> Any:
    return communicator.group


def recorded(layer: Any) -> list[bool]:
    """Whether forward and backward are recorded, for each number of rows."""
    (chain,) = layer._bindings.last[1].parts
    programs = chain._programs.values()
    return [all(one.is_recorded) for one in programs if isinstance(one, Repeated)]


def unequal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> list[int]:
    """The positions of what differs."""
    shapes = [[tuple(one.shape) for one in results] for results in (ours, theirs)]
    assert len(ours) == len(theirs), f"recorded {shapes[0]}, not recorded {shapes[1]}"
    return [
        at
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True))
        if (one.shape, one.stride(), one.dtype) != (other.shape, other.stride(), other.dtype)
        or not torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
    ]


def compared(run: Callable[[], list[list[torch.Tensor]]]) -> list[list[int]]:
    """Return what differs in each step between a layer that records and one that does not."""
    ours = run()
    with without_recordings():
        theirs = run()
    return [unequal(one, other) for one, other in zip(ours, theirs, strict=True)]


def of_steps(communicator: Communicator, kind: str, name: str) -> dict[str, Any]:
    flags: list[list[bool]] = []

    def run() -> list[list[torch.Tensor]]:
        layer = new_layer(kind, communicator, name)
        given = [values(shape_of(kind), seed + communicator.rank) for seed in range(STEPS)]
        given[-1][3, 5] = float("inf")  # is counted, and leaves delayed scales as they are
        results = [step(layer, name, communicator, x) for x in given]
        flags.append(recorded(layer))
        return results

    return {"differ": compared(run), "recorded": flags[0], "not recorded": flags[1]}


def shape_of(kind: str) -> tuple[int, int]:
    """The rows and columns of a rank's input."""
    if kind == LARGE:
        return LARGE_ROWS, LARGE_HIDDEN
    return ROWS, HIDDEN // 2 if kind == "row" else HIDDEN


def of_other_calls(communicator: Communicator, name: str) -> dict[str, Any]:
    """Calls that differ from the recorded one, each followed by one like it."""

    def run() -> list[list[torch.Tensor]]:
        layer = new_layer("mlp", communicator, name)
        results = []

        def add(x: torch.Tensor, chosen: str = name, times: int = 1) -> None:
            results.append(step(layer, chosen, communicator, x, times=times))

        for seed in range(3):
            add(values((ROWS, HIDDEN), seed))
        for shape in ROWS_OF.values():
            add(values((*shape, HIDDEN), 5))
        add(values((ROWS, HIDDEN), 6), times=2)
        add(values((ROWS, HIDDEN + 8), 7)[:, :HIDDEN])
        add(values((ROWS, HIDDEN), 8), "block" if name != "block" else "current")
        add(values((ROWS, HIDDEN), 9))
        with torch.no_grad(), fp8core.autocast(recipe=recipe.by_name(name)):
            results.append([layer(values((ROWS, HIDDEN), 10))])
        layer.fc1_weight.requires_grad_(False)
        results.append([one for one in frozen_step(layer, name) if one is not None])
        layer.fc1_weight.requires_grad_(True)
        layer.set_tensor_parallel_group(group_of(communicator))
        for seed in range(3):
            add(values((ROWS, HIDDEN), 20 + seed))
        return results

    return {"differ": compared(run)}


def frozen_step(layer: Any, name: str) -> list[torch.Tensor | None]:
    x = values((ROWS, HIDDEN), 11).requires_grad_()
    layer.zero_grad(set_to_none=True)
    with fp8core.autocast(recipe=recipe.by_name(name)):
        y = layer(x)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(one.grad for one in layer.parameters())]


def of_another_group(communicator: Communicator) -> dict[str, Any]:
    """A layer that has recorded its steps is given another group of the same ranks."""

    def run() -> list[list[torch.Tensor]]:
        layer = new_layer("mlp", communicator, "current")
        results = [
            step(layer, "current", communicator, values((ROWS, HIDDEN), 1)) for _ in range(3)
        ]
        begun = communicator.begun
        other = of_group(torch.distributed.new_group(list(range(communicator.size))))
        layer.set_tensor_parallel_group(group_of(other))
        results += [step(layer, "current", other, values((ROWS, HIDDEN), 1)) for _ in range(3)]
        counts.append([communicator.begun - begun, other.begun])
        return results

    counts: list[list[int]] = []
    return {"differ": compared(run), "begun": counts}


def of_parted_ranks(communicator: Communicator) -> dict[str, Any]:
    """One rank changes its recipe after steps that both have recorded."""
    layer = new_layer("mlp", communicator, "current")
    for seed in range(4):
        step(layer, "current", communicator, values((ROWS, HIDDEN), seed))
    try:
        chosen = "block" if communicator.rank else "current"
        step(layer, chosen, communicator, values((ROWS, HIDDEN), 9))
    except Fp8CoreError as error:
        return {"error": f"{type(error).__name__}: {error}", "recorded": recorded(layer)}
    return {"error": "", "recorded": recorded(layer)}


def work(rank: int) -> dict[str, Any]:
    communicator = of_group()
    returned: dict[str, Any] = {}
    new_layer("mlp", communicator, "delayed")
    for backend in BACKENDS:
        with fp8core.use_backend(backend) if backend else contextlib.nullcontext():
            for kind, name in combinations(backend):
                returned[f"{backend} {kind} {name}"] = of_steps(communicator, kind, name)
            returned[f"{backend} ways"] = dict(ways(communicator))
    with fp8core.use_backend(RECORDING) if DEVICE_TYPE == "cpu" else contextlib.nullcontext():
        for name in OTHER_CALLS:
            returned[f"other calls {name}"] = of_other_calls(communicator, name)
        returned["another group"] = of_another_group(communicator)
        if DEVICE_TYPE == "cpu":  # over NCCL the watchdog ends the process
            returned["parted"] = of_parted_ranks(communicator)
    return returned


def combinations(backend: str) -> list[tuple[str, str]]:
    """Kinds of layers with the recipes of their steps: an MLP with each of them."""
    if backend == OVERLAPPING:
        return turns(["mlp", "row"], RECIPES)
    others = [kind for kind in LAYERS if kind != "mlp"]
    return [*(("mlp", name) for name in RECIPES), *turns(others, RECIPES[::-1])]


def ways(communicator: Communicator) -> Iterator[tuple[str, str]]:
    for key, _ in communicator.traffic:
        yield "/".join(key), communicator.traffic.way(*key)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("repeated")
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE_TYPE == "cpu":
            patch.setenv("FP8CORE_PLUGINS", PLUGIN)
        else:
            patch.setenv("FP8CORE_AUTOTUNE", os.environ.get("FP8CORE_AUTOTUNE", "0"))
        return run_ranks(work, folder)


CASES = [f"{backend} {kind} {name}" for backend in BACKENDS for kind, name in combinations(backend)]


@pytest.mark.parametrize("case", CASES)
def test_repeated_steps_have_the_program_s_bits_and_traffic(
    ranks: list[dict[str, Any]], case: str
) -> None:
    assert [one[case]["differ"] for one in ranks] == [[[]] * STEPS] * 2
    if LARGE in case:
        # A product that takes rows as they arrive allocates by torch, which the recorder of CUDA
        # refuses.
        return
    assert [one[case]["recorded"] for one in ranks] == [[True]] * 2
    assert [one[case]["not recorded"] for one in ranks] == [[]] * 2


def test_calls_that_differ_from_the_recorded_one_compute_as_ever(
    ranks: list[dict[str, Any]],
) -> None:
    for name in OTHER_CALLS:
        for one in ranks:
            assert not any(one[f"other calls {name}"]["differ"]), name


def test_a_layer_that_is_given_another_group_calls_that_one(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        (of_first, of_other), *others = one["another group"]["begun"]
        assert others == [[of_first, of_other]]
        assert of_first == 0
        assert of_other > 0
        assert not any(one["another group"]["differ"])


@pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="NCCL's watchdog ends the process")
def test_a_rank_that_changes_its_recipe_is_named_on_every_rank(
    ranks: list[dict[str, Any]],
) -> None:
    for one in ranks:
        assert "differ in" in one["parted"]["error"], one["parted"]
        assert one["parted"]["error"].startswith("OperandError")
    assert ranks[0]["parted"]["recorded"] == [True]


@pytest.mark.skipif(DEVICE_TYPE != "cpu", reason="the backend of these tests is of the CPU")
def test_rows_that_travel_beside_products_do_so_in_repeats(ranks: list[dict[str, Any]]) -> None:
    for one in ranks:
        assert {"beside products", "in parts"} & {*one[f"{OVERLAPPING} ways"].values()}
