"""Amaxes reduced over a process group, and over ranks that run different layers: two of gloo."""

from __future__ import annotations

import contextlib
import copy
import gc
import re
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fp8core import GroupedLinear, Linear, OperandError, autocast, checkpoint, recipe
from fp8core.collectives import Communicator, of_group
from fp8core.tensors import reduced_amaxes
from tests.ranks import device, emulated, run_ranks

E4M3_MAX, E5M2_MAX = 448.0, 57344.0
DELAYED = recipe.DelayedScaling(amax_history_len=4)


def within(group: Any, chosen: recipe.Recipe = DELAYED) -> autocast:
    return autocast(recipe=chosen, amax_reduction_group=group)


def layers(count: int, **options: Any) -> list[Linear]:
    return [Linear(8, 8, device=device(), **options) for _ in range(count)]


def run(layer: torch.nn.Module, value: float, *more: Any) -> torch.Tensor:
    output: torch.Tensor = layer(torch.full((4, 8), value), *more)
    return output.sum() * value


def step(
    group: Any, used: dict[int, float], of: list[Linear], chosen: recipe.Recipe = DELAYED
) -> None:
    """Run the layers of these numbers on inputs and gradients of these values."""
    with within(group, chosen):
        losses = [run(of[at], value) for at, value in used.items()]
    if losses:
        torch.stack(losses).sum().backward()


def first_step(
    group: Any, used: dict[int, float], of: list[Linear], chosen: recipe.Recipe = DELAYED
) -> None:
    """The first step of new layers, whose amaxes on a GPU wait for the next one: two there."""
    for _ in range(1 if device().type == "cpu" else 2):
        step(group, used, of, chosen)


def amaxes(of: list[Linear], way: str = "fwd") -> list[float]:
    """The amaxes of inputs, or of gradients, that the scales of the layers stand for."""
    largest = E4M3_MAX if way == "fwd" else E5M2_MAX
    found = [layer._buffers.get(f"scale_{way}") for layer in of]
    # Rounded, as a scale is.
    return [0.0 if one is None else round(largest / one[0].item(), 4) for one in found]


@contextlib.contextmanager
def counted() -> Iterator[list[str]]:
    """The collectives that run within, by the functions that start them."""
    names: list[str] = []

    def noting(owner: Any, name: str) -> Any:
        plain = getattr(owner, name)

        def note(*args: Any, **kwargs: Any) -> Any:
            names.append(name)
            return plain(*args, **kwargs)

        return mock.patch.object(owner, name, note)

    with noting(Communicator, "_start"), noting(dist, "all_gather_object"):
        yield names


def newest(history: torch.Tensor) -> torch.Tensor:
    return history[0]


def reduced(rank: int, group: Any) -> dict[str, Any]:
    """A layer whose amaxes differ, by the group that reduces them and how."""
    alone = [dist.new_group([member]) for member in range(2)][rank]
    found: dict[str, Any] = {}
    for name, over, fields in (
        *(("group", group, {}), ("no group", None, {}), ("a group of one", alone, {})),
        ("not reducing", group, {"reduce_amax": False}),
        ("most recent", group, {"amax_compute_algo": "most_recent"}),
        ("function", group, {"amax_compute_algo": newest}),
    ):
        (layer,) = layers(1)
        chosen = recipe.DelayedScaling(amax_history_len=4, **fields)
        first_step(over, {0: (2.0, 7.0)[rank]}, [layer], chosen)
        found[name] = [*amaxes([layer]), *amaxes([layer], "bwd")]
    two, three = layers(2), layers(1)
    step(group, dict([(0, 1.0), (1, 8.0)][:: -1 if rank else 1]), two)
    step(group, {0: float("inf") if rank else 2.0}, three)
    return {**found, "reversed": amaxes(two), "infinite on rank 1": amaxes(three)}


def dropped(rank: int, group: Any) -> dict[str, Any]:
    """Each rank skips another layer, in the first step and in later ones."""
    three = layers(3)
    step(group, [{0: 1.0, 1: 2.0}, {0: 3.0, 2: 8.0}][rank], three)
    first = {"first": amaxes(three), "first bwd": amaxes(three, "bwd")}
    step(group, [{2: 4.0}, {1: 7.0}][rank], three)
    return {**first, "second": amaxes(three), "second bwd": amaxes(three, "bwd")}


def idle(rank: int, group: Any) -> dict[str, Any]:
    """Rank 1 runs no layer at all in the second step, and all in the third."""
    two = layers(2)
    step(group, {0: 1.0, 1: 2.0 + rank}, two)
    step(group, [{0: 7.0, 1: 8.0}, {}][rank], two)
    second = amaxes(two)
    step(group, {0: 3.0, 1: 4.0}, two)
    with within(group):
        pass
    return {"second": second, "third": amaxes(two), "third bwd": amaxes(two, "bwd")}


def backward_inside(rank: int, group: Any) -> dict[str, Any]:
    """Backward within the autocast; rank 1 runs no layer in the first step, rank 0 in the third."""
    two, found = layers(2), {}
    alone, both = [{0: 2.0, 1: 3.0}, {}], [{0: 4.0, 1: 5.0}, {0: 1.0, 1: 7.0}]
    for at, used in enumerate((alone, both, [{}, {0: 9.0}])):
        with within(group):
            for layer, value in used[rank].items():
                run(two[layer], value).backward()
        found[f"fwd {at}"], found[f"bwd {at}"] = amaxes(two), amaxes(two, "bwd")
    return found


def flags_read_later(rank: int, group: Any) -> dict[str, Any]:
    """The same with flags that are read at the next reduction, as those on a GPU are."""

    def keep(reduction: Any, flags: torch.Tensor) -> None:
        reduction._flags = flags.clone(), mock.Mock()

    with mock.patch.object(reduced_amaxes._Reduction, "_keep", keep):
        return backward_inside(rank, group)


def later(rank: int, group: Any) -> dict[str, Any]:
    """Layers are made, and freed, between steps."""
    some = layers(2)
    step(group, {0: 1.0, 1: 2.0}, some)
    some += layers(1)
    step(group, {0: 1.0, 2: 3.0 + rank}, some)
    del some[0]
    gc.collect()
    step(group, {0: 9.0 if rank else 5.0}, some)
    return {"fwd": amaxes(some), "bwd": amaxes(some, "bwd")}


def microbatches(rank: int, group: Any) -> dict[str, Any]:
    """Two forwards and backwards in one autocast, of which each rank skips another one; the first
    layer is recomputed."""
    two = layers(2)
    with within(group):
        for at, batch in enumerate((1.0, 5.0)):
            x = torch.full((4, 8), batch + rank, requires_grad=True)
            y = checkpoint(two[0], x, use_reentrant=False)
            (y.sum() + (two[1](x).sum() if at == rank else 0.0)).backward()
    return {"fwd": amaxes(two), "bwd": amaxes(two, "bwd")}


def two_groups(rank: int, group: Any) -> dict[str, Any]:
    """A layer that one autocast runs in one group and one inside it in another."""
    other, two = dist.new_group([0, 1]), layers(2)
    for value in (1.0, 2.0):
        with within(group):
            run(two[0], value + rank)
            with within(other):
                if rank:
                    run(two[1], 3 * value)
        with within(other):
            run(two[0], 2 * value + rank)
    return {"fwd": amaxes(two)}


def raised(group: Any, of: dict[torch.nn.Module, tuple[Any, ...]]) -> str:
    try:
        with within(group):
            for layer, more in of.items():
                run(layer, 1.0, *more)
    except OperandError as error:
        return str(error)
    return "nothing"


def linear() -> torch.nn.Module:
    return Linear(8, 8, device=device())


def grouped() -> torch.nn.Module:
    return GroupedLinear(2, 8, 8, device=device())


def garbage(rank: int, group: Any) -> dict[str, Any]:
    """One rank alone keeps a model of before, and each uses another layer of a new one."""
    before = layers(2)
    step(group, {0: 1.0, 1: 1.0}, before)
    if rank:
        del before
    model = layers(2)
    first_step(group, [{0: 2.0}, {1: 3.0}][rank], model)
    return {"fwd": amaxes(model)}


def copied(rank: int, group: Any) -> dict[str, Any]:
    """Rank 1 alone copies a layer, then ranks skip layers of the model, and of a copy of it."""
    model = layers(2)
    extra = [copy.deepcopy(model[0]) for _ in range(rank)]
    step(group, [{0: 2.0}, {1: 3.0}][rank], model)
    copies = copy.deepcopy(model)
    del extra
    found: dict[str, Any] = {"fwd": amaxes(model)}
    found["differing"] = raised(group, {copies[rank]: ()})
    if device().type != "cpu":  # which differ in the next reduction
        found["differing"] = raised(group, {copies[rank]: ()})
    first_step(group, {0: 5.0 + rank, 1: 8.0}, copies)
    return {**found, "copies": amaxes(copies)}


def differing(rank: int) -> dict[str, Any]:
    """Ranks whose layers differ, in groups of their own."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    found = {"number": raised(groups[0], dict.fromkeys(layers(2 + rank), ()))}
    gc.collect()
    made = [make() for make in (linear, grouped)[:: -1 if rank else 1]]
    arguments = {Linear: (), GroupedLinear: ([2, 2],)}
    found["order"] = raised(groups[1], {layer: arguments[type(layer)] for layer in made})
    del made
    gc.collect()
    same = layers(1)
    step(groups[0], {0: 1.0 + rank}, same)
    return {**found, "afterwards": amaxes(same)}


def collectives(rank: int, group: Any) -> dict[str, Any]:
    """How many collectives a step has after the first one."""
    two = layers(2)
    found: dict[str, Any] = {}
    step(group, {0: 1.0, 1: 1.0}, two)
    with counted() as names:
        step(group, {0: 1.0, 1: 1.0}, two)
    found["step"] = names
    with counted() as names, torch.no_grad(), within(group):
        run(two[0], 1.0)
    found["evaluation"] = names
    for name, kind, other in (
        (
            *("not reducing", "delayed"),
            recipe.DelayedScaling(amax_history_len=4, reduce_amax=False),
        ),
        ("no delayed scales", "mxfp8", recipe.PerLayer({}, recipe.MXFP8BlockScaling())),
    ):
        with counted() as names, emulated(kind), within(group, other):
            run(layers(1)[0], 1.0).backward()
        found[name] = names
    column = layers(1, parallel_mode="column", tp_group=group, tp_size=2)
    first_step(group, {0: 1.0 + rank}, column)
    found["column"] = amaxes(column)
    with of_group(group).counting() as traffic:
        step(group, {0: 1.0 + rank}, column)
    return {**found, "of a column": traffic["max", "delayed amax"].calls}


def work(rank: int) -> dict[str, Any]:
    """Run every scenario as ``rank`` of two."""
    torch.manual_seed(0)
    scenarios = (
        *(
            reduced,
            dropped,
            idle,
            backward_inside,
            flags_read_later,
            later,
            microbatches,
            two_groups,
        ),
        *(collectives, garbage, copied),
    )
    found = {one.__name__: one(rank, dist.new_group([0, 1])) for one in scenarios}
    return {**found, "differing": differing(rank)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found."""
    return run_ranks(work, tmp_path_factory.mktemp("gloo"))


def of_both(ranks: list[dict[str, Any]], scenario: str, name: str) -> Any:
    first, second = (rank[scenario][name] for rank in ranks)
    assert first == second
    return first


def test_amaxes_are_the_maximum_over_the_group(ranks: list[dict[str, Any]]) -> None:
    for name in ["group", "most recent", "function"]:
        assert of_both(ranks, "reduced", name) == [7.0, 7.0], name


def test_nothing_is_reduced_unless_asked(ranks: list[dict[str, Any]]) -> None:
    for name in ["no group", "a group of one", "not reducing"]:
        assert [rank["reduced"][name] for rank in ranks] == [[2.0, 2.0], [7.0, 7.0]], name


def test_an_infinite_amax_of_one_rank_is_recorded_by_none(ranks: list[dict[str, Any]]) -> None:
    assert of_both(ranks, "reduced", "infinite on rank 1") == [E4M3_MAX]  # of a scale of 1


def test_layers_are_matched_however_each_rank_orders_them(ranks: list[dict[str, Any]]) -> None:
    assert of_both(ranks, "reduced", "reversed") == [1.0, 8.0]


def test_a_layer_that_a_rank_skips_first_takes_the_amax_of_the_others(
    ranks: list[dict[str, Any]],
) -> None:
    assert ranks[0]["dropped"]["first"] == [3.0, 2.0, 0.0]
    assert ranks[1]["dropped"]["first"] == [3.0, 0.0, 8.0]


def test_so_does_the_gradient_of_a_layer(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["dropped"]["first bwd"] == [3.0, 2.0, 0.0]
    assert ranks[1]["dropped"]["first bwd"] == [3.0, 0.0, 8.0]


def test_ranks_that_skip_different_layers_mix_no_amaxes(ranks: list[dict[str, Any]]) -> None:
    for name in ["second", "second bwd"]:
        assert [rank["dropped"][name][0] for rank in ranks] == [3.0, 3.0], name
        # A layer that a rank had not used before begins there without the amaxes of the first step.
        assert ranks[0]["dropped"][name][1:] == [7.0, 4.0], name
        assert ranks[1]["dropped"][name][1:] == [7.0, 8.0], name


def test_a_rank_that_runs_no_layer_takes_part(ranks: list[dict[str, Any]]) -> None:
    assert of_both(ranks, "idle", "second") == [7.0, 8.0]
    assert of_both(ranks, "idle", "third") == [7.0, 8.0]


def test_gradients_wait_for_a_rank_that_has_run_no_layer(ranks: list[dict[str, Any]]) -> None:
    assert of_both(ranks, "idle", "third bwd") == [7.0, 8.0]


@pytest.mark.parametrize("way", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["backward_inside", "flags_read_later"])
def test_backward_within_the_autocast_of_a_rank_that_runs_no_layer(
    ranks: list[dict[str, Any]], name: str, way: str
) -> None:
    first, *later = ([rank[name][f"{way} {at}"] for rank in ranks] for at in range(3))
    assert first == [[2.0, 3.0], [0.0, 0.0]]  # rank 1 has not run a layer so far
    assert later == [[[4.0, 7.0]] * 2, [[9.0, 7.0]] * 2]


@pytest.mark.parametrize("way", ["fwd", "bwd"])
def test_layers_that_are_made_or_freed_later_are_matched(
    ranks: list[dict[str, Any]], way: str
) -> None:
    assert of_both(ranks, "later", way) == [9.0, 4.0]


def test_layers_are_matched_whatever_garbage_a_rank_has_collected(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["garbage"]["fwd"] for rank in ranks] == [[2.0, 0.0], [0.0, 3.0]]


def test_a_copy_on_one_rank_changes_no_numbers_of_layers(ranks: list[dict[str, Any]]) -> None:
    assert [rank["copied"]["fwd"] for rank in ranks] == [[2.0, 0.0], [0.0, 3.0]]


def test_copies_that_ranks_cannot_match_raise_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    message = of_both(ranks, "copied", "differing")
    assert re.search(
        r"rank 1 .*, copy 0 of layer \d+ of its process.*run each of them once", message
    )


def test_copies_that_all_ranks_run_are_matched(ranks: list[dict[str, Any]]) -> None:
    assert of_both(ranks, "copied", "copies") == [6.0, 8.0]


def test_microbatches_and_recomputes_are_matched(ranks: list[dict[str, Any]]) -> None:
    assert of_both(ranks, "microbatches", "fwd") == [6.0, 6.0]
    assert of_both(ranks, "microbatches", "bwd") == [1.0, 1.0]


def test_a_layer_of_two_groups_is_reduced_in_that_of_its_autocast(
    ranks: list[dict[str, Any]],
) -> None:
    first, second = (rank["two_groups"]["fwd"] for rank in ranks)
    assert first[0] == second[0] == 5.0
    assert second[1] == 6.0


@pytest.mark.parametrize(
    ("name", "difference"),
    [
        (
            "number",
            r"rank 0 of the group has no other layer, "
            r"rank 1 of the group has Linear\(8, 8\) fwd with 3 amaxes",
        ),
        (
            "order",
            r"rank 0 of the group has Linear\(8, 8\) fwd with 3 amaxes.*, "
            r"rank 1 of the group has GroupedLinear.* fwd with 6 amaxes",
        ),
    ],
    ids=["number", "order"],
)
def test_layers_that_differ_raise_on_every_rank(
    ranks: list[dict[str, Any]], name: str, difference: str
) -> None:
    message = of_both(ranks, "differing", name)
    assert re.search(difference, message), message


def test_the_group_goes_on_after_that(ranks: list[dict[str, Any]]) -> None:
    assert of_both(ranks, "differing", "afterwards") == [2.0]


def test_a_step_has_one_collective_for_each_way(ranks: list[dict[str, Any]]) -> None:
    assert of_both(ranks, "collectives", "step") == ["_start"] * 2


def test_what_records_nothing_that_is_reduced_has_no_collective(
    ranks: list[dict[str, Any]],
) -> None:
    for name in ["evaluation", "not reducing", "no delayed scales"]:
        assert of_both(ranks, "collectives", name) == [], name


def test_a_layer_over_the_ranks_of_the_group_is_reduced_by_them(
    ranks: list[dict[str, Any]],
) -> None:
    assert of_both(ranks, "collectives", "column") == [2.0]
    assert of_both(ranks, "collectives", "of a column") == 2  # one each way
