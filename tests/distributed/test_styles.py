"""Styles of ``parallelize_module`` against the same shards in threads of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.collectives import Communicator
from fp8core.conformance.in_process import run_in_threads
from tests.distributed import styles_work as work
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(work.two_ranks, tmp_path_factory.mktemp("ranks"))


@functools.cache
def judged(name: str) -> list[list[dict[str, torch.Tensor]]]:
    return run_in_threads(lambda group: work.judge(group, name), 2)


@pytest.mark.parametrize("kind", ["native", "converted"])
@pytest.mark.parametrize("name", work.RECIPES)
def test_styles_equal_one_process_on_the_same_shards(
    ranks: list[Any], kind: str, name: str
) -> None:
    for rank, wanted in enumerate(judged(name)):
        for result, want in zip(ranks[rank][f"{kind}_{name}"], wanted, strict=True):
            assert result.keys() == want.keys()
            different = [key for key in want if not torch.equal(result[key], want[key])]
            assert not different


def test_batch_first_shards_equal_those_of_the_sequence(ranks: list[Any]) -> None:
    for rank, wanted in enumerate(judged("current")):
        (result,) = ranks[rank]["batch_first"]
        want = dict(wanted[0])
        want |= {key: want[key].transpose(0, 1) for key in ("y", "dx")}
        # The operands of this wgrad have other strides, and its float32 sums another order.
        one, other = (given.pop("ffn.up.weight").float() for given in (result, want))
        bound = work.ROWS * work.BATCH * 2.0**-24 * float(other.abs().max())
        assert torch.allclose(one, other, rtol=2.0**-7, atol=bound)
        assert not [key for key in want if not torch.equal(result[key], want[key])]


def test_a_norm_inside_equals_one_process(ranks: list[Any]) -> None:
    for sequence in [False, True]:
        wanted = run_in_threads(functools.partial(work.fused_judge, sequence=sequence), 2)
        for rank, want in enumerate(wanted):
            result = ranks[rank][f"fused_{sequence}"]
            assert result.keys() == want.keys(), sequence
            assert not [key for key in want if not torch.equal(result[key], want[key])], sequence


def test_parameters_are_dtensors(ranks: list[Any]) -> None:
    shard0, shard1, whole = "(Shard(dim=0),)", "(Shard(dim=1),)", "(Replicate(),)"
    assert ranks[0]["placements"] == dict(
        zip(work.PARAMETERS, (whole, shard0, shard0, shard1, whole), strict=True)
    )


def test_what_does_not_fit_is_named_on_every_rank(ranks: list[Any]) -> None:
    for case, text in [
        ("odd", "OperandError: ColwiseParallel of Linear(64, 33)"),
        ("mlp", "UnsupportedError: ColwiseParallel of LayerNormMLP"),
        ("norm", "UnsupportedError: SequenceParallel of LayerNormMLP"),
        ("output", "OperandError: RowwiseParallel of Linear(64, 64): S(2) of its rows"),
        ("rows", "OperandError: RowwiseParallel of Linear(32, 64): the input lies as S(0)"),
        ("columns", "OperandError: ColwiseParallel of Linear(64, 32): S(1) of its rows"),
        ("twice", "OperandError: ColwiseParallel of Linear(64, 32): the layer is spread"),
    ]:
        assert [one["refusals"][case].startswith(text) for one in ranks] == [True, True], ranks[0][
            "refusals"
        ][case]


def test_a_refused_layer_stays_whole(ranks: list[Any]) -> None:
    assert [one["refusals"]["odd_is_whole"] for one in ranks] == ["[33, 64]"] * 2


def trained(group: Communicator) -> dict[str, torch.Tensor]:
    """The judge of four ranks: two replicas whose gradients are averaged, in each of two shards."""
    block = work.by_arguments(group)
    for at in range(2):
        outputs, total = [], {name: torch.zeros_like(one) for name, one in block.named_parameters()}
        for replica in range(2):
            with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
                y = block(work.mine(work.input_of(at, replica), group.rank))
            y.backward(work.mine(work.gradient_of(at, replica), group.rank))
            outputs.append(y.detach())
            for name, parameter in block.named_parameters():
                grad = parameter.grad
                assert grad is not None
                if name in ("norm.weight", "ffn.down.bias"):
                    grad = group.sum(grad).wait()
                total[name] += grad / 2
                parameter.grad = None
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                parameter.add_(total[name], alpha=-0.01)
    result = {name: one.detach() for name, one in block.named_parameters()}
    return {"y0": outputs[0], "y1": outputs[1], **result}


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(work.four_ranks, tmp_path_factory.mktemp("four"), world_size=4)


def test_two_by_two_with_fsdp2_equals_one_process(four_ranks: list[Any]) -> None:
    for kind in ["plain", "quantized"]:
        wanted = run_in_threads(trained, 2)
        for rank, result in enumerate(four_ranks):
            assert torch.equal(result[kind]["y"], wanted[rank % 2][f"y{rank // 2}"]), kind
        dims = {"ffn.up.weight": 0, "ffn.up.bias": 0, "ffn.down.weight": 1}
        for name in work.PARAMETERS:
            parts = [want[name] for want in wanted]
            whole = torch.cat(parts, dims[name]) if name in dims else parts[0]
            assert torch.equal(four_ranks[0][kind][name], whole), name
