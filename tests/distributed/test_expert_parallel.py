"""Experts on two ranks against one process that has all of them.

One start of two ranks serves all tests.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fp8core import GroupedLinear, ops
from fp8core.distributed import Experts
from fp8core.errors import OperandError, UnsupportedError
from tests.distributed import expert_work
from tests.distributed.expert_work import CASES, COUNTS, EXPERTS, HIDDEN, INNER, RECIPES
from tests.ranks import run_ranks

Ranks = list[dict[str, Any]]
ORDER = [(expert, rank) for expert in range(EXPERTS) for rank in (0, 1)]
"""How one process has the rows: those of the first expert, of rank 0 and of rank 1, and so on."""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    return run_ranks(expert_work.work, tmp_path_factory.mktemp("ranks"))


def whole(kind: str) -> list[torch.Tensor]:
    """The rows of both ranks, and the gradients of their results."""
    tensors = []
    for number in (0, 1):
        parts = [
            expert_work.rows_of(kind, rank)[number].split(list(COUNTS[kind][rank]))
            for rank in (0, 1)
        ]
        tensors.append(torch.cat([parts[rank][expert] for expert, rank in ORDER]))
    return tensors


def by_rank(kind: str, rows: torch.Tensor) -> list[torch.Tensor]:
    """Rows of one process as the ranks have them."""
    parts = rows.split([COUNTS[kind][rank][expert] for expert, rank in ORDER])
    named = dict(zip(ORDER, parts, strict=True))
    return [torch.cat([named[expert, rank] for expert in range(EXPERTS)]) for rank in (0, 1)]


def expected(recipe: str, kind: str, *, bias: bool = False) -> dict[str, Any]:
    """What one process computes in the second of two steps, as the ranks do."""
    x, grad = whole(kind)
    counts = [sum(column) for column in zip(*COUNTS[kind], strict=True)]
    layer = expert_work.experts(0, EXPERTS, bias=bias)
    if not bias:
        expert_work.run(layer, RECIPES[recipe], x, grad, counts)
        layer.zero_grad()
    results = expert_work.run(layer, RECIPES[recipe], x, grad, counts)
    names = [name for name, _ in layer.named_parameters()]
    results["weights"] = dict(zip(names, results["weights"], strict=True))
    return results


def same_weights(found: dict[str, Any], want: dict[str, Any], rank: int) -> bool:
    names = [f"{layer}.weight{2 * rank + expert}" for layer in ("0", "2") for expert in (0, 1)]
    return all(
        torch.equal(got, want["weights"][name])
        for got, name in zip(found["weights"], names, strict=True)
    )


# NVFP4 rounds gradients by chance, in another order of rows.
EXACT = [(recipe, kind) for recipe, kind in CASES if recipe != "nvfp4"]


def test_experts_over_ranks_are_those_of_one_process(ranks: Ranks) -> None:
    for recipe, kind in EXACT:
        want = expected(recipe, kind)
        for rank, found in enumerate(one[f"{recipe} {kind}"] for one in ranks):
            assert torch.equal(found["out"], by_rank(kind, want["out"])[rank]), (recipe, kind)
            assert torch.equal(found["grad"], by_rank(kind, want["grad"])[rank]), (recipe, kind)
            assert same_weights(found, want, rank), (recipe, kind)


def test_results_under_nvfp4_are_those_of_one_process(ranks: Ranks) -> None:
    for kind in ["aligned", "ragged"]:
        want = by_rank(kind, expected("nvfp4", kind)["out"])
        for rank, found in enumerate(ranks):
            assert torch.equal(found[f"nvfp4 {kind}"]["out"], want[rank]), kind


def test_biases_are_summed_over_the_rows_of_all_ranks(ranks: Ranks) -> None:
    want = expected("block", "aligned", bias=True)
    for rank, found in enumerate(one["bias"] for one in ranks):
        assert torch.equal(found["out"], by_rank("aligned", want["out"])[rank])
        assert torch.equal(found["grad"], by_rank("aligned", want["grad"])[rank])


SENT = sum(COUNTS["aligned"][0][2:])
"""Rows that leave rank 0 for the other one."""
BYTES = {
    "none": (2, 0),
    "current": (1, 0),
    "delayed": (2, 0),
    # One float32 a row.
    "rowwise": (2, 4),
    # One float32 for 128 elements of a row, and for 128 rows of a column.
    "block": (2, 2 * 4 * HIDDEN / 128),
    # One byte for 32.
    "mxfp8": (2, 2 * HIDDEN / 32),
}


def test_bytes_of_rows_that_leave(ranks: Ranks) -> None:
    for recipe in BYTES:
        each, scales = BYTES[recipe]
        sent = ranks[0][f"{recipe} aligned"]["bytes"]
        for tensor in ("input", "grad_output"):
            assert sent[tensor] == SENT * HIDDEN * each, recipe
            assert sent.get(f"{tensor} scales", 0) == SENT * scales, recipe


def test_blocks_that_end_within_the_rows_of_a_rank_travel_in_high_precision(ranks: Ranks) -> None:
    sent = ranks[0]["block ragged"]["bytes"]
    assert sent["input"] == sum(COUNTS["ragged"][0][2:]) * HIDDEN * 2
    assert "input scales" not in sent


def test_a_mixture_gives_the_tokens_of_one_process(ranks: Ranks) -> None:
    wanted = expert_work.moe(None, 0, EXPERTS, [0, 1])
    for found, want in zip(ranks, wanted, strict=True):
        assert torch.equal(found["moe"]["out"], want["out"])
        assert torch.equal(found["moe"]["grad"], want["grad"])


def test_a_layout_states_whose_delayed_scales_a_rank_has(ranks: Ranks) -> None:
    length = RECIPES["delayed"].amax_history_len
    for rank, found in enumerate(one["layout"] for one in ranks):
        # Slots of input, weight and output, and in backward of the gradients.
        assert found["scale_fwd"] == [[1, rank, 2, (2, EXPERTS, 3), (0, 2 * rank, 0), 0, 2]]
        shape, offset = (length, 2, EXPERTS, 2), (0, 0, 2 * rank, 0)
        assert found["amax_history_bwd"] == [[2, rank, 2, shape, offset, 0, length]]
        assert found["0.weight"][0][:3] == [None, 0, 1]


def test_rows_arrive_by_expert_and_by_rank(ranks: Ranks) -> None:
    found = ranks[1]["exchange"]
    first, second = COUNTS["ragged"]
    labels = [
        (100.0 * rank + expert, float(at))
        for expert in (2, 3)
        for rank, counts in ((0, first), (1, second))
        for at in range(counts[expert])
    ]
    assert found["arrived"].tolist() == [list(label) for label in labels]
    assert found["splits"] == [31, 14]


def test_rows_come_back_and_so_do_gradients(ranks: Ranks) -> None:
    for rank in ranks:
        assert rank["exchange"]["is same"]
        assert torch.equal(rank["exchange"]["grad"], torch.full_like(rank["exchange"]["grad"], 2))


def test_explain_names_what_travels(ranks: Ranks) -> None:
    block, current = ranks[0]["explain"]
    lines = [line.partition(": exchange of ")[2] for line in block.splitlines()]
    named = {line.split(" over ")[0]: line for line in lines if line}
    assert "2 ranks of group" in named["input"]
    assert "e4m3 block=(1,128)" in named["input"]
    assert "bfloat16" in named["output"]
    assert "max of amax" in current


MESSAGES = {
    "counts": ("expected 4 counts >= 0", "rank 0 of group"),
    "no integers": ("expected 4 integers", "rank 0 of group"),
    "no counts": ("tokens_per_expert=None; expected 4 integers", "rank 0 of group"),
    "columns": ("has k=127", "rank 0 of group"),
    "experts": ("1 experts on each rank; rank 1: 2 experts", "differ in the layer Experts"),
    "exchange": ("tokens_per_expert=[-1, 0, 31, 12]", "rank 0: refused, TokenExchange: tokens"),
    "odd": ("3 experts over 2 ranks", "3 experts over 2 ranks"),
    "no number": ("tokens_per_expert=None; expected integers", "rank 1: 4 experts"),
    "no values": ("torch.int64 [4] on meta; expected 4 integers", "rank 0 of group"),
    "rows": ("47 rows; expected 48", "rank 0: refused, TokenExchange: 47 rows"),
    "dtype": ("rank 0: torch.float32 rows of [128]", "rank 1: torch.bfloat16 rows of [128]"),
    "sharded": ("0.weight0 over the ranks [0, 1]", "0.weight2 over the ranks [0, 1]"),
    "sharded state": ("0.weight0 over the ranks [0, 1]", "0.weight2 over the ranks [0, 1]"),
    "parametrized": ("0.weight0 is computed by", "0.weight2 is computed by"),
    "no group": ("'experts' is no process group", "'experts' is no process group"),
}


def test_bad_input_is_named_on_every_rank(ranks: Ranks) -> None:
    for case in MESSAGES:
        for rank, message in zip(ranks, MESSAGES[case], strict=True):
            assert message in rank["refused"][case]


def test_a_state_without_the_experts_of_a_rank_is_refused_there(ranks: Ranks) -> None:
    first, second = (rank["loaded"] for rank in ranks)
    assert not first
    assert "FusedAdam.load_state_dict: it has states of '0.weight2', which none of its" in second


@pytest.mark.parametrize("name", ["none", "current", "delayed"])
def test_layers_that_appear_twice_run_twice(name: str) -> None:
    gelu = ops.GELU()
    given: dict[str, Any] = {"bias": False, "params_dtype": torch.bfloat16, "device": "cpu"}
    linear = GroupedLinear(2, 64, 64, **given)
    first, second = copy.deepcopy(linear), copy.deepcopy(linear)
    x, grad = torch.randn(2, 32, 64).bfloat16()
    shared = expert_work.run(Experts(linear, gelu, linear, gelu), RECIPES[name], x, grad, [16, 16])
    apart = expert_work.run(
        Experts(first, ops.GELU(), second, ops.GELU()), RECIPES[name], x, grad, [16, 16]
    )
    assert torch.equal(shared["out"], apart["out"])
    assert torch.equal(shared["grad"], apart["grad"])
    sums = [
        one + other for one, other in zip(apart["weights"][:2], apart["weights"][2:], strict=True)
    ]
    assert all(map(torch.equal, shared["weights"], sums))


def test_layers_of_other_sizes_are_refused() -> None:
    fc1, fc2 = expert_work.linears(0, 2)
    with pytest.raises(
        OperandError, match=r"layer 1, GroupedLinear.* takes 128 columns.* gets 256"
    ):
        Experts(fc1, fc2)


def test_layers_of_other_numbers_of_experts_are_refused() -> None:
    (fc1, _), (_, fc2) = expert_work.linears(0, 2), expert_work.linears(0, 3)
    with pytest.raises(OperandError, match=r"grouped linears with \[2, 3\] experts"):
        Experts(fc1, ops.SwiGLU(), fc2)


def test_layers_that_take_more_than_rows_are_refused() -> None:
    fc1, fc2 = expert_work.linears(0, 2)
    with pytest.raises(UnsupportedError, match="ScaledSwiGLU is not offered"):
        Experts(fc1, ops.ScaledSwiGLU(), fc2)
    late = GroupedLinear(2, INNER, HIDDEN, delay_wgrad_compute=True, device="cpu")
    with pytest.raises(UnsupportedError, match="delay_wgrad_compute"):
        Experts(fc1, ops.SwiGLU(), late)


def test_experts_of_one_rank_need_no_group() -> None:
    layer = expert_work.experts(0, 2)
    x = torch.randn(5, HIDDEN).bfloat16()
    fc1, act, fc2 = layer.children()
    want = fc2(act(fc1(x, [2, 3])), [2, 3])
    assert torch.equal(layer(x, [2, 3]), want)
    with pytest.raises(OperandError, match="add up to the rows"):
        layer(x, [2, 2])
