"""Attention under Transformer Engine's name: batches of context-parallel ranks, and the choice of
an engine by its environment variables."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8core import transformer_engine as alias
from fp8core.errors import OperandError, UnsupportedError
from fp8core.integrations.transformer_engine import finder, layers
from tests.device import DEVICE

ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


@pytest.fixture
def te() -> Iterator[Any]:
    """The alias, whatever other tests of this process have imported."""
    finder.put(alias.VERSION)
    yield importlib.import_module("transformer_engine")
    alias.uninstall()


@pytest.fixture
def parallel(te: Any) -> Any:
    """The module of batches of context-parallel ranks."""
    return importlib.import_module(f"{ATTENTION}.context_parallel")


def on_rank(monkeypatch: pytest.MonkeyPatch, size: int, rank: int) -> None:
    """Have this process be ``rank`` of ``size`` for what only counts ranks."""
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: size)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)


def ints(*values: int) -> torch.Tensor:
    """Return offsets as attention takes them."""
    return torch.tensor(values, dtype=torch.int32)


def test_padded_packed_sequences_are_shared_over_ranks(
    parallel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, bounds = torch.arange(1, 8)[None], torch.tensor([0, 5, 7])
    ids, labels, starts = parallel.pad_thd_sequences_for_cp(tokens, tokens + 10, bounds, 4, 99)
    assert ids.tolist() == [1, 2, 3, 4, 5, 99, 99, 99, 6, 7, 99, 99]
    assert labels.tolist() == [11, 12, 13, 14, 15, -100, -100, -100, 16, 17, -100, -100]
    assert starts.tolist() == [0, 8, 12]
    positions = parallel.generate_positional_ids_for_cp(bounds, 4, dtype=torch.int32)
    assert positions.tolist() == [*range(8), *range(4)]
    assert positions.dtype == torch.int32
    expected = {0: [1, 2, 99, 99, 6, 99], 1: [3, 4, 5, 99, 7, 99]}
    for rank, its_tokens in expected.items():
        on_rank(monkeypatch, 2, rank)
        batch = ids[None], None, positions
        mine, none, places = parallel.get_batch_on_this_cp_rank(starts, *batch)
        assert mine.tolist() == [its_tokens]
        assert none is None
        assert places.tolist() == [[0, 1, 6, 7, 0, 3], [2, 3, 4, 5, 1, 2]][rank]


def test_tokens_in_the_first_dimension_are_found(
    parallel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_rank(monkeypatch, 2, 1)
    x = torch.arange(16).view(8, 2)
    mine, *_ = parallel.get_batch_on_this_cp_rank(ints(0, 8), x, None, None)
    assert torch.equal(mine, x[2:6])
    on_rank(monkeypatch, 1, 0)
    assert parallel.get_batch_on_this_cp_rank(ints(0, 8), x, None, None)[0] is x


def test_lengths_of_a_ranks_chunks(parallel: Any) -> None:
    bounds, local = ints(0, 5, 8), ints(0, 4, 8)  # each padded to 8 tokens, 4 of a rank
    halves = parallel.get_cu_seqlens_on_cp_rank
    assert torch.equal(halves(bounds, local, 2, 0, True, True), ints(0, 2, 4))
    assert torch.equal(halves(bounds, local, 2, 1, True, True), ints(0, 3, 4))
    assert torch.equal(halves(bounds, local, 2, 1, True, False), ints(0, 2, 3))
    assert torch.equal(halves(bounds, local, 2, 1, False, True), ints(0, 1, 1))


def test_indices_are_the_same_under_all_names(parallel: Any) -> None:
    native = importlib.import_module("transformer_engine_torch").thd_get_partitioned_indices
    where = parallel.get_thd_partitioned_indices(ints(0, 8, 12), 12, 2, 1, device="cpu")
    assert where.tolist() == [2, 3, 4, 5, 9, 10] == native(ints(0, 8, 12), 12, 2, 1).tolist()


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((ints(0, 8), torch.arange(7), None, None), OperandError, r"\[7\] of sequences that end"),
        ((ints(0, 8), torch.tensor(1), None, None), OperandError, r"\[\] of sequences that end"),
        ((ints(0, 6), torch.arange(6), None, None), OperandError, "multiples of 4"),
        (([0, 8], None, None, None), OperandError, "cu_seqlens is list"),
        ((torch.zeros(2), None, None, None), OperandError, r"cu_seqlens is torch.float32 \[2\]"),
        ((ints(), None, None, None), OperandError, r"torch.int32 \[0\]"),
        ((ints(0, 8), None, None, None, None, "bshd"), UnsupportedError, "qvk_format='bshd'"),
        ((ints(0, 8), None, None, None, None, "thd", 1), UnsupportedError, "expected 'thd' and"),
    ],
)
def test_batches_that_cannot_be_shared_are_refused(
    parallel: Any,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[Any, ...],
    error: type[Exception],
    said: str,
) -> None:
    on_rank(monkeypatch, 2, 0)
    with pytest.raises(error, match=said):
        parallel.get_batch_on_this_cp_rank(*arguments)


@pytest.mark.parametrize("factor", [0, 1.5, "4", None])
def test_positions_need_sequences_and_a_factor(parallel: Any, factor: Any) -> None:
    with pytest.raises(OperandError, match="divisibility_factor="):
        parallel.generate_positional_ids_for_cp(ints(0, 3), factor)
    for wrong in (ints(0, 4, 3), ints(1, 3), ints()[None], None):
        with pytest.raises(OperandError, match="cu_seqlens"):
            parallel.generate_positional_ids_for_cp(wrong, 4)
    assert not len(parallel.generate_positional_ids_for_cp(ints(0), 4))


def test_the_environment_chooses_the_engine_of_attention(
    te: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When a layer is made, also inside of another; what leaves no engine is refused by name."""
    chosen: list[dict[str, str]] = []

    def choose(**engines: str) -> Any:
        chosen.append(engines)
        return contextlib.nullcontext()

    def made(**engines: str) -> Any:
        for kind, value in {"FLASH": "1", "FUSED": "1", "UNFUSED": "1", **engines}.items():
            monkeypatch.setenv(f"NVTE_{kind}_ATTN", value)
        torch.manual_seed(0)
        return te.pytorch.TransformerLayer(64, 128, 4, self_attn_mask_type="causal").eval()

    monkeypatch.setattr(layers, "use_backend", choose)
    x = torch.randn(16, 2, 64)
    want = made()(x)
    assert torch.equal(made(FLASH="0")(x), want)
    assert not chosen
    unfused = made(FLASH="0", FUSED="0")
    for _ in range(3):
        torch.testing.assert_close(unfused(x), want)
    assert chosen == [{"attention": "reference", "attention_backward": "reference"}] * 3
    with pytest.raises(UnsupportedError, match="NVTE_FUSED_ATTN 0, leaves no engine"):
        made(FLASH="0", FUSED="0", UNFUSED="0")(x)
    if DEVICE.type == "cpu":
        with pytest.raises(UnsupportedError, match="a CPU has no other one"):
            made(UNFUSED="0")(x)
