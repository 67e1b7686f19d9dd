"""Attention over the ranks of a context-parallel group against one process with whole sequences.

One start of four ranks serves all tests: two groups of two, and one of four.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from fp8core.distributed import pad_thd_sequences_for_cp, thd_get_partitioned_indices
from fp8core.errors import OperandError
from tests.device import VALUES_ARE_READ
from tests.distributed import context_work
from tests.distributed.context_work import CASES, DIM, FOUR, LENGTH, TWO, WAYS, Case, Tensors
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(context_work.work, tmp_path_factory.mktemp("ranks"), world_size=4)


def bounds(case: Case, tensors: Tensors) -> dict[str, float]:
    """How far two computations may be apart, each with its own order of additions.

    A logit adds up ``d`` products, an exponential has 2^-20 in float32 (2 ulp in float64); a weight
    is off by twice their sum, relatively, and a result adds up weights whose sum is 1. A gradient
    of queries adds up weights times differences of ``grad . v``, and one of keys or values at most
    one weight of each query of the heads that read it. Rounding to the dtype comes once to each.
    """
    q, k, v, grad = (x.double().abs() for x in tensors)
    heads, groups = q.shape[-2], k.shape[-2]
    grad = grad.unflatten(-1, (heads, -1))
    scale = q.shape[-1] ** -0.5
    largest = float(q.sum(-1).max() * k.max()) * scale
    unit = 2.0**-53 if case.dtype == torch.float64 else 2.0**-24
    weight = 2 * ((q.shape[-1] + 16) * unit * largest + (16 * unit))
    flow = float(grad.sum(-1).max() * v.max())
    rows = LENGTH * heads // groups
    sizes = {
        "out": float(v.max()),
        "q": 4 * scale * flow * float(k.max()),
        "k": 4 * scale * flow * float(q.max()) * rows,
        "v": float(grad.max()) * rows,
    }
    return {name: 2 * weight * size for name, size in sizes.items()}


def rounding(case: Case, want: torch.Tensor) -> float:
    """The spacing of the dtype at the largest element: parts are rounded before they are merged."""
    return 4 * torch.finfo(case.dtype).eps * float(want.abs().max())


@pytest.fixture(scope="module")
def wanted() -> dict[str, dict[str, torch.Tensor]]:
    return {name: context_work.expected(case) for name, case in CASES.items()}


Wanted = dict[str, dict[str, torch.Tensor]]


def compared(ranks: list[dict[str, Any]], wanted: Wanted, key: str) -> list[tuple[str, Any, Any]]:
    """Each rank's results with those of one process for its tokens."""
    size, _, name = key.split()
    chunks = context_work.chunks_of(CASES[name], int(size))
    pairs = []
    for tensor in ("out", "q", "k", "v"):
        parts = chunks.parts(wanted[name][tensor])
        pairs += [
            (tensor, rank[key][tensor], parts[at % int(size)]) for at, rank in enumerate(ranks)
        ]
    return pairs


SPLIT = [
    f"{size} {way} {name}"
    for size, pairs in ((2, TWO), (4, FOUR))
    for name, way in pairs
    if way != "a2a" and name not in ("current", "delayed")
]
SAME = [
    f"{size} a2a {name}"
    for size, pairs in ((2, TWO), (4, FOUR))
    for name, way in pairs
    if way == "a2a"
]


@pytest.mark.parametrize("key", SPLIT)
def test_keys_in_parts_give_what_one_process_computes(
    ranks: list[dict[str, Any]], wanted: Wanted, key: str
) -> None:
    case = CASES[key.split()[2]]
    limits = bounds(case, context_work.tensors_of(case))
    for tensor, got, want in compared(ranks, wanted, key):
        limit = limits[tensor] + rounding(case, want)
        assert (got.double() - want.double()).abs().max() <= limit, tensor


@pytest.mark.parametrize("key", SAME)
def test_heads_are_exchanged_bit_for_bit(
    ranks: list[dict[str, Any]], wanted: Wanted, key: str
) -> None:
    for tensor, got, want in compared(ranks, wanted, key):
        assert torch.equal(got, want), tensor


@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("way", ["p2p", "all_gather"])
def test_quantized_keys_in_parts_are_as_accurate_as_whole_ones(
    ranks: list[dict[str, Any]], wanted: Wanted, way: str, recipe: str
) -> None:
    chunks = context_work.chunks_of(CASES["bfloat16"], 2)
    exact = chunks.parts(wanted["bfloat16"]["out"]).float()
    whole = chunks.parts(wanted[recipe]["out"]).float()
    for rank in range(2):
        error = (ranks[rank][f"2 {way} {recipe}"]["out"].float() - exact[rank]).norm()
        assert error <= 1.25 * (whole[rank] - exact[rank]).norm()


@pytest.mark.parametrize("way", WAYS)
def test_the_gradient_of_a_learned_sink_is_shared_by_the_ranks(
    ranks: list[dict[str, Any]], wanted: Wanted, way: str
) -> None:
    shares = [rank[f"2 {way} learnable"]["offset"] for rank in ranks[:2]]
    torch.testing.assert_close(shares[0] + shares[1], wanted["learnable"]["offset"])


def test_backward_drops_what_forward_dropped(ranks: list[dict[str, Any]]) -> None:
    for way in WAYS:
        found = [rank[f"dropped {way}"] for rank in ranks[:2]]
        assert all(one["differs"] > 0.01 for one in found), way
        out, v = (sum(one[name] for one in found) for name in ("out", "v"))
        assert out == pytest.approx(v, rel=1e-10), way


def test_the_largest_logits_are_those_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for way in WAYS:
        case = Case(layer={"return_max_logit": True})
        _, want = context_work.layer_of(case)(*context_work.tensors_of(case)[:3])
        for rank in ranks:
            torch.testing.assert_close(rank[f"largest {way}"], want)


@pytest.mark.parametrize("way", ["p2p", "a2a"])
def test_a_compiled_graph_gives_the_same_bits(ranks: list[dict[str, Any]], way: str) -> None:
    assert all(rank[f"compiled {way}"] for rank in ranks[:2])


ELEMENTS = LENGTH // 2 * context_work.BATCH * DIM * 4
"""The bytes of one head on one of two ranks, in float32."""


def test_what_travels(ranks: list[dict[str, Any]]) -> None:
    for way, sent in {
        # Keys and values of 4 groups each, forward and backward; their gradients.
        "p2p": {"keys and values": 2 * 2 * 4 * ELEMENTS, "gradients": 2 * 4 * ELEMENTS},
        "all_gather": {"keys and values": 2 * 2 * 4 * ELEMENTS, "gradients": 2 * 4 * ELEMENTS},
        # Half of q, k, v, and again with the result and its gradient; half of the result and of
        # the gradients.
        "a2a": {"heads": (16 + 16 + 16) * ELEMENTS // 2, "tokens": (8 + 16) * ELEMENTS // 2},
    }.items():
        found = ranks[0][f"bytes {way}"]
        assert found == sent, (way, sent)


def test_no_tokens_give_no_gradients(ranks: list[dict[str, Any]]) -> None:
    for way in ["p2p", "all_gather", "a2a"]:
        for rank in ranks:
            assert rank[f"no tokens {way}"][0] == 0, way


def test_a_transformer_layer_hands_the_group_on(ranks: list[dict[str, Any]]) -> None:
    want = context_work.run_block(context_work.block(), context_work.block_input())
    chunks = context_work.chunks_of(Case("bshd"), 2)
    for rank, found in enumerate(ranks[:2]):
        for name in ("out", "grad"):
            part = chunks.parts(want[name])[rank]
            torch.testing.assert_close(found["block"][name], part, rtol=1e-5, atol=1e-5)
    share = ranks[0]["block"]["weight"] + ranks[1]["block"]["weight"]
    torch.testing.assert_close(share, want["weight"], rtol=1e-5, atol=1e-4)


MESSAGES = {
    "odd": "has 15 tokens of each sequence on this rank; expected the two chunks",
    "odd on one": "rank 0: refused, DotProductAttention(8, 16): query_layer [15, 2, 8, 16] has 15",
    "differing": "differ in a call of attention",
    "cut": "Pad every sequence to a multiple of 4 tokens",
    "heads": "3 heads in 3 groups with cp_comm_type='a2a' over 2 ranks",
    "window": r"window_size=(5, 0) with cp_comm_type='p2p' is not offered; choose 'a2a'",
    "alibi": "core_attention_bias_type='alibi' with cp_comm_type='p2p'",
    "ranks": "cp_global_ranks=[7, 8]",
    "delayed": "scales are reduced over one group",
    "hierarchy": "expected a list of two process groups",
}


def test_bad_input_is_named_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for case in MESSAGES:
        for rank in ranks:
            assert MESSAGES[case] in rank["refused"][case]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("case", "second"), {"one rank alone": "high precision", "formats": "q e5m2"}.items()
)
def test_recipes_that_differ_are_named_on_every_rank(
    ranks: list[dict[str, Any]], way: str, case: str, second: str
) -> None:
    for rank in ranks:
        said = rank[f"recipes {way}"][case]
        assert "differ in the layer DotProductAttention(8, 16)" in said
        first_rank, second_rank = said.split("; rank 1: ")
        assert "recipe: q e4m3" in first_rank
        assert f"recipe: {second}" in second_rank


@pytest.mark.parametrize("way", ["context", "sequence"])
@pytest.mark.parametrize("layout", ["thd", "sbhd"])
def test_a_dropped_path_drops_whole_samples(
    ranks: list[dict[str, Any]], way: str, layout: str
) -> None:
    by_rank = [rank[f"kept {way} {layout}"] for rank in ranks[:2]]
    tokens = [first + second for first, second in zip(*by_rank, strict=True)]
    assert {sum(map(len, tokens))} == {48 if layout == "thd" else 32}
    assert all(len(set(one)) == 1 for one in tokens)
    assert {one[0] for one in tokens} == {True, False}


def test_ranks_with_other_numbers_of_samples_drop_none(ranks: list[dict[str, Any]]) -> None:
    assert all("rank 0: 3 samples; rank 1: 4 samples" in rank["other samples"] for rank in ranks)


def test_batches_are_split_and_joined_again(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["helpers"] for rank in ranks[:2])
    tokens = torch.arange(2 * LENGTH).view(2, LENGTH)
    quarter = LENGTH // 4
    assert torch.equal(first["batch"], torch.cat((tokens[:, :quarter], tokens[:, -quarter:]), 1))
    assert torch.equal(second["batch"], tokens[:, quarter:-quarter])
    assert torch.equal(first["whole"], tokens)
    assert first["packed"].tolist()[:8] == [0, 1, 2, 3, 12, 13, 14, 15]
    assert torch.equal(second["whole packed"], torch.arange(48))
    assert "2 ranks do not divide" in first["odd"]


def test_tokens_to_join_that_differ_raise_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        said = rank["helpers"]["differing"]
        assert re.search(r"rank 0: torch.int64 \[32, 1\]; rank 1: torch.int64 \[32, 2\]", said), (
            said
        )


def test_packed_tokens_to_join_that_do_not_fit_raise_on_every_rank(
    ranks: list[dict[str, Any]],
) -> None:
    messages = {
        "starts within a chunk": "gather_from_cp_ranks: 48 tokens, .*expected multiples of 4",
        "starts behind the end": "offsets that ascend from 0 to at most 48",
        "starts that descend": "offsets that ascend from 0 to at most 48",
        "starts in two dimensions": r"gather_from_cp_ranks: cu_seqlens is torch.int64 \[1, 2\]",
        "starts of one rank": r"rank 0: .*\[0, 16, 24, 48\]; rank 1: .*\[0, 20, 28, 48\]",
    }
    for rank in ranks:
        for name, said in messages.items():
            assert re.search(said, rank["helpers"][name]), name


def test_packed_sequences_are_padded_for_two_chunks_a_rank() -> None:
    ids, labels, starts = pad_thd_sequences_for_cp(
        torch.arange(1, 8), torch.arange(11, 18), torch.tensor([0, 5, 5, 7]), 4, 9
    )
    assert ids.tolist() == [1, 2, 3, 4, 5, 9, 9, 9, 6, 7, 9, 9]
    assert labels.tolist() == [11, 12, 13, 14, 15, -100, -100, -100, 16, 17, -100, -100]
    assert starts.tolist() == [0, 8, 8, 12]


@VALUES_ARE_READ
def test_indices_of_sequences_that_ranks_do_not_divide_are_refused() -> None:
    with pytest.raises(OperandError, match="expected multiples of 4, two chunks"):
        thd_get_partitioned_indices(torch.tensor([0, 6, 12]), 12, 2, 0)


@VALUES_ARE_READ
@pytest.mark.parametrize("bounds", [[4, 12], [0, 8, 4, 12], [0, 16], [-4, 12]])
def test_indices_of_sequences_that_do_not_lie_among_the_tokens_are_refused(
    bounds: list[int],
) -> None:
    with pytest.raises(OperandError, match="offsets that ascend from 0 to at most 12"):
        thd_get_partitioned_indices(torch.tensor(bounds), 12, 2, 0)
