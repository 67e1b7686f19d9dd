"""Attention under Transformer Engine's name: batches of context-parallel ranks, and the choice of
an engine by its environment variables."""

from __future__ import annotations

import copy
import importlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8core
from fp8core.dispatch import select, table
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from tests.device import DEVICE

ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"


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


ENGINES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")


@pytest.fixture
def made(te: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Make a layer, the same one each time, under values of :data:`ENGINES`."""

    def make(values: Sequence[str], kind: str = "TransformerLayer") -> Any:
        for name, value in zip(ENGINES, values, strict=True):
            monkeypatch.setenv(name, value)
        torch.manual_seed(0)
        sizes = (64, 128, 4) if kind == "TransformerLayer" else (4, 16)
        mask = "self_attn_mask_type" if kind == "TransformerLayer" else "attn_mask_type"
        return getattr(te.pytorch, kind)(*sizes, **{mask: "causal"}).eval()

    return make


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The operations of attention that dispatch chooses from here on, each with its backend."""
    choices: list[tuple[str, str]] = []
    choose = select.choose

    def noted(*arguments: Any) -> select.Choice:
        choice = choose(*arguments)
        if "attention" in choice.desc.op:
            choices.append((choice.desc.op, choice.backend))
        return choice

    table.forget()
    monkeypatch.setattr(select, "choose", noted)
    return choices


BOTH = {("attention", "reference"), ("attention_backward", "reference")}


def test_the_environment_chooses_the_engine_of_attention(
    made: Callable[..., Any], chosen: list[tuple[str, str]]
) -> None:
    """When a layer is made, also inside of another."""
    x = torch.randn(16, 2, 64, device=DEVICE, requires_grad=True)
    want = made("111")(x)
    torch.testing.assert_close(made("011")(x), want)
    unfused = made("001")
    chosen.clear()
    for layer in (unfused, copy.deepcopy(unfused), pickle.loads(pickle.dumps(unfused))):
        for _ in range(2):
            y = layer(x)
            y.sum().backward()
            torch.testing.assert_close(y, want)
    assert set(chosen) == BOTH
    compiled = torch.compile(unfused, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want)
    assert set(chosen) == BOTH


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU has an engine besides")
@pytest.mark.parametrize("is_training", [True, False])
def test_an_engine_that_is_left_out_never_runs_a_remembered_call(
    made: Callable[..., Any], is_training: bool
) -> None:
    """Whether an equal layer ran before, whoever asks for the engine, and in a compiled graph."""
    q, x = (torch.randn(16, 2, *size, requires_grad=True) for size in ((4, 16), (64,)))
    for kind, inputs in (("DotProductAttention", (q, q, q)), ("TransformerLayer", (x,))):
        usual, layer = (made(values, kind).train(is_training) for values in ("111", "110"))
        usual(*inputs).sum().backward()
        for call in (layer, copy.deepcopy(layer), torch.compile(layer, backend="eager")):
            for _ in range(2):
                with pytest.raises(UnsupportedError, match="NVTE_UNFUSED_ATTN=0"):
                    call(*inputs)
        with fp8core.use_backend("reference"), pytest.raises(UnsupportedError) as caught:
            layer(*inputs)
        assert "use_backend() asks for reference, which is left out of attention" in str(
            caught.value
        )
        usual(*inputs).sum().backward()


@pytest.mark.parametrize("value", ["00", " 0", "-0"])
def test_a_variable_is_an_integer(made: Callable[..., Any], value: str) -> None:
    """As Transformer Engine reads it: ``int(os.environ.get(name, "1"))``."""
    for name, off in zip(
        ENGINES, ((value, "1", "1"), ("1", value, "1"), ("1", "1", value)), strict=True
    ):
        at = ENGINES.index(name)
        same = made(tuple("0" if i == at else "1" for i in range(3)), "DotProductAttention")
        assert made(off, "DotProductAttention")._engines == same._engines
    assert made(("02", "1", "-1"), "DotProductAttention")._engines == ()
    with pytest.raises(UnsupportedError, match="turn off every engine"):
        made((value,) * 3)


@pytest.mark.parametrize("value", ["false", "False", "", "off", "0.0", "0x0"])
def test_a_variable_that_is_no_integer_is_refused_by_name(
    made: Callable[..., Any], value: str
) -> None:
    for kind in ("DotProductAttention", "TransformerLayer"):
        for at, name in enumerate(ENGINES):
            with pytest.raises(RecipeError) as raised:
                made(tuple(value if i == at else "1" for i in range(3)), kind)
            assert f"{name}={value!r}: expected an integer" in str(raised.value)


def test_an_environment_without_an_engine_is_refused_when_a_layer_is_made(
    made: Callable[..., Any],
) -> None:
    for kind in ("DotProductAttention", "TransformerLayer"):
        with pytest.raises(UnsupportedError, match="NVTE_UNFUSED_ATTN=0 turn off every engine"):
            made("000", kind)
