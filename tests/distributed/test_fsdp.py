"""FSDP2 with quantized gathers beside unsharded models, in two processes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.distributed.fsdp_work import (
    COLUMNS,
    KINDS,
    OPTIMIZERS,
    TRAINED,
    work,
)
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes computed."""
    return run_ranks(work, tmp_path_factory.mktemp("ranks"))


def test_outputs_and_weights_are_those_of_the_unsharded_model(ranks: list[dict[str, Any]]) -> None:
    for name in TRAINED:
        for rank in ranks:
            made = rank["trained"][name]
            assert made["outputs"] == [True] * 3, name
            assert all(made["weights"]), name
            assert all(made["moved"]), name
            assert made["quantized"].count(True) == 2, name


def codes_and_scales(name: str, rows: int, columns: int) -> int:
    """Bytes of a rank's rows: codes of each orientation that is gathered, and scales."""
    blocks = -(-rows // 128) * -(-columns // 128)
    return {
        "current": rows * columns,
        "block": rows * columns + 4 * blocks,
        "mxfp8": 2 * (rows * columns + rows * columns // 32),
        "rowwise": 2 * rows * columns + 4 * rows,
    }[name]


def test_gathers_move_codes_and_scales(ranks: list[dict[str, Any]]) -> None:
    for name in ["current", "block", "mxfp8", "rowwise"]:
        middle, last = TRAINED[name][1]
        sizes = (middle // 2, COLUMNS), (last // 2, middle)
        forward = [codes_and_scales(name, *size) + 2 * size[0] for size in sizes]  # and biases
        for rank in ranks:
            # Each layer in forward and in backward, in three steps.
            assert rank["trained"][name]["gathered"] == [*forward, *forward[::-1]] * 3, name


def test_all_weights_share_one_reduction_a_forward(ranks: list[dict[str, Any]]) -> None:
    for name, count in [
        ("current", 3),
        ("block", 0),
        ("block, blocks span ranks", 3),
        ("mxfp8", 0),
        ("rowwise", 3),
    ]:
        assert [rank["trained"][name]["reductions"] for rank in ranks] == [count] * 2, (name, count)


def test_two_microbatches_and_an_evaluation_reduce_once_each(ranks: list[dict[str, Any]]) -> None:
    assert [rank["microbatches"] for rank in ranks] == [3, 3]


def test_blocks_that_are_sharded_alone_train_as_unsharded(ranks: list[dict[str, Any]]) -> None:
    assert [rank["blocks alone"] for rank in ranks] == [True, True]


def test_a_write_of_one_rank_alone_is_seen_by_all(ranks: list[dict[str, Any]]) -> None:
    assert [rank["written by one rank"] for rank in ranks] == [True, True]


def test_a_weight_that_is_gathered_before_forward_is_up_to_date(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["unsharded first"] for rank in ranks] == [True, True]


def test_gathered_weights_are_freed_after_forward_and_after_backward(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        sizes = rank["memory"]
        assert len(sizes["forward"]) == 2
        assert sum(sizes["forward"]) == 0
        assert sum(sizes["backward"]) == 0


def test_writes_that_torch_does_not_count_are_seen(ranks: list[dict[str, Any]]) -> None:
    assert [rank["written"] for rank in ranks] == [[True] * 6] * 2


def test_the_first_gather_may_be_in_inference_mode(ranks: list[dict[str, Any]]) -> None:
    assert [rank["evaluated first"] for rank in ranks] == [True, True]


def test_shards_that_a_state_replaces_are_quantized_by_their_values(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["replaced"] for rank in ranks] == [True, True]


@pytest.mark.parametrize("name", ["current", "block", "mxfp8"])
@pytest.mark.parametrize("how", ["fp8core", "torch"])
def test_a_recompute_gives_equal_gradients(
    ranks: list[dict[str, Any]], name: str, how: str
) -> None:
    assert [rank["recomputed"][name][how] for rank in ranks] == [True, True]


def test_a_frozen_weight_stays_among_others(ranks: list[dict[str, Any]]) -> None:
    assert [rank["frozen"] for rank in ranks] == [[True, True, True, False, True]] * 2


def test_optimizers_and_clipping_do_as_with_a_gather_in_high_precision(
    ranks: list[dict[str, Any]],
) -> None:
    for name in OPTIMIZERS:
        assert [rank["clipped"][name] for rank in ranks] == [True, True], name


def test_float32_weights_are_rounded_once_under_mixed_precision(
    ranks: list[dict[str, Any]],
) -> None:
    assert [rank["mixed precision"] for rank in ranks] == [[True, "torch.float32"]] * 2


def test_layers_of_each_kind_train_as_unsharded(ranks: list[dict[str, Any]]) -> None:
    for name in KINDS:
        for rank in ranks:
            made = rank["kinds"][name]
            assert all(made["outputs"]), name
            assert all(made["weights"]), name
            assert made["quantized"].count(True) == {"TransformerLayer": 4, "GroupedLinear": 2}.get(
                name, 3
            ), name


def test_replicas_of_shards_train_as_one_model(ranks: list[dict[str, Any]]) -> None:
    assert [rank["replicated"] for rank in ranks] == [True, True]


def test_parts_of_tensor_parallel_weights_are_gathered(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["tensor parallel"] == ["QuantizedTensor", [256, COLUMNS], True]


def test_tied_weights_stay_tied(ranks: list[dict[str, Any]]) -> None:
    assert all(all(rank["tied"]) for rank in ranks)


def test_weights_that_stay_gathered_are_gathered_once_a_step(
    ranks: list[dict[str, Any]],
) -> None:
    for rank in ranks:
        made = rank["kept"]
        assert all(made["outputs"])
        assert all(made["weights"])
        assert len(made["gathered"]) == 3


def test_a_compiled_model_computes_the_same(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        made = rank["compiled"]
        assert all(made["outputs"])
        assert all(made["weights"])
        assert made["gathered"][0] == codes_and_scales("current", 128, 128)


def test_ranks_with_other_recipes_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        said = rank["refused"]["recipes"]
        for at, format_ in enumerate((r"block=\(0,0\)", r"block=\(128,128\) power_of_two")):
            assert re.search(
                rf"rank {at}: e4m3 {format_} \(plan \w+\): 0.weight \[256, 128\]", said
            )


def test_a_shard_along_another_dimension_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("0.weight: a quantized gather" in rank["refused"]["dimension"] for rank in ranks)


def test_an_autocast_with_another_recipe_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all("the recipe of autocast needs" in r["refused"]["another recipe"] for r in ranks)
