"""Attention of a generation on CUDA, on the CPU: with cuDNN stood in for, no token builds a plan,
and no row behind a sequence reaches it."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fp8core import DotProductAttention, InferenceParams, OperandError, use_backend
from fp8core.backend_api import API_VERSION, BackendSpec
from fp8core.dispatch import plugins
from fp8core.modules import attention
from fp8core_backends.cuda import attention_call, attention_lengths, attention_plans
from fp8core_backends.cuda.attention_plans import Graphs
from tests.backends.cuda.attention_stand_in import StandIn
from tests.backends.cuda.generation import (
    CACHES,
    CAPACITY,
    GROUPS,
    HEADS,
    LAYOUTS,
    OPTIONS,
    PAGE,
    PAGES,
    SIZE,
    STEPS,
    Generation,
)
from tests.pairs import pairs

_backends: list[StandIn] = []
_numbers = itertools.count()


def made() -> StandIn:
    """The stand-in of this test, for the plug-in."""
    return _backends[-1]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A backend for tensors of the CPU, which has built no plan."""
    name = f"cudnn_{next(_numbers)}"  # what was bound by a name stays
    _backends.append(StandIn(monkeypatch))
    spec = BackendSpec(name, ("cpu",), f"{__name__}:made", priority=-1, api_version=API_VERSION)
    monkeypatch.setitem(plugins.load().backends, spec.name, spec)
    monkeypatch.setattr(Generation, "cudnn", name)
    yield
    _backends.clear()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_build_no_plan_after_the_first(layout: str, options: str) -> None:
    generation = Generation(layout, "rows", **OPTIONS[options])
    generation.step({"a": 9, "b": 5}, "cudnn", seed=0)
    generation.step({"a": 1, "b": 1}, "cudnn", seed=1)
    before = Graphs.built
    for seed in range(20):
        generation.step({"a": 1, "b": 1}, "cudnn", seed)
    assert before > 0
    assert Graphs.built == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_build_a_plan_for_each_power_of_two(layout: str) -> None:
    generation = Generation(layout, "pages")
    generation.step({"a": 1, "b": 1}, "cudnn", seed=0)
    before = Graphs.built
    for seed in range(CAPACITY - 1):
        generation.step({"a": 1, "b": 1}, "cudnn", seed)
    # 8, 16, 32 and 64 tokens, of which ragged ones are rounded up to 64.
    assert Graphs.built - before == (0 if layout == "thd" else 4)


@pytest.mark.parametrize(("kind", "layout", "options"), pairs(CACHES, LAYOUTS, OPTIONS))
def test_what_a_sequence_leaves_reaches_no_other(kind: str, layout: str, options: str) -> None:
    """NaN of a token, of one that has ended and of padding, are where the reference has them."""
    native, judge = (Generation(layout, kind, **OPTIONS[options]) for _ in range(2))
    for seed, (counts, nan_in) in enumerate(STEPS):
        got = native.step(counts, "cudnn", seed, nan_in)
        want = judge.step(counts, "reference", seed, nan_in)
        for layer, (ours, theirs) in enumerate(zip(got, want, strict=True)):
            for name in counts:
                assert bool(theirs[name].isnan().any()) == (name == nan_in), (layer, name)
                if name != nan_in:
                    torch.testing.assert_close(ours[name], theirs[name], atol=2**-6, rtol=2**-6)


@pytest.mark.parametrize("kind", PAGES)
def test_a_cache_that_was_reset_holds_nothing_of_before(kind: str) -> None:
    native, judge = (Generation("bshd", kind) for _ in range(2))
    native.step({"a": 30, "b": 9}, "cudnn", 0, "a")
    native.cache.reset()
    got, want = (
        one.step({"c": 3}, name, 1) for one, name in ((native, "cudnn"), (judge, "reference"))
    )
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours["c"], theirs["c"], atol=2**-6, rtol=2**-6)


def one_by_one(generation: Generation, steps: int, seed: int = 100) -> list[Any]:
    return [generation.step({"a": 1, "b": 1}, "cudnn", seed + at) for at in range(steps)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", PAGES)
def test_a_token_repeats_what_the_one_before_did(
    kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of a call that is prepared anew, and the lengths read once a step."""
    torch.manual_seed(0)
    native, anew = (Generation(layout, kind) for _ in range(2))
    prepared: list[object] = []
    prepare = DotProductAttention.prepared

    def noted(layer: DotProductAttention, *given: Any) -> Any:
        prepared.append(layer)
        return prepare(layer, *given)

    read: list[object] = []
    read_lengths = attention_call.sequences_of

    def noted_lengths(*given: Any) -> Any:
        read.append(given)
        return read_lengths(*given)

    monkeypatch.setattr(attention_call, "sequences_of", noted_lengths)
    for one in (native, anew):
        one.step({"a": 9, "b": 14}, "cudnn", 0)
        one_by_one(one, 2)
    monkeypatch.setattr(DotProductAttention, "prepared", noted)
    read.clear()
    got = one_by_one(native, 6)
    in_pages = kind == "pages"  # whose sizes double once
    assert len(prepared) == (2 if in_pages else 0)
    assert len(read) == 6
    monkeypatch.setattr(attention, "replay", lambda *arguments: None)
    for ours, theirs in zip(got, one_by_one(anew, 6), strict=True):
        for layer, other in zip(ours, theirs, strict=True):
            assert all(torch.equal(layer[name], other[name]) for name in "ab")


def test_a_step_of_another_form_is_prepared() -> None:
    """More tokens, other sequences, a cache that was reset, and another cache."""
    native, judge = (Generation("bshd", "rows") for _ in range(2))
    steps: list[dict[str, int]] = [{"a": 3, "b": 2}, *[{"a": 1, "b": 1}] * 3, {"a": 1, "b": 0}]
    steps += [{"b": 1, "a": 1}, {"a": 1, "c": 1}, {"a": 1}, {"a": 1}, {"a": 1, "c": 1}]
    for reset in (False, True):
        if reset:
            native.cache.reset()
            judge.cache.reset()
        for seed, counts in enumerate(steps):
            got, want = (
                one.step(counts, name, seed)
                for one, name in ((native, "cudnn"), (judge, "reference"))
            )
            for ours, theirs in zip(got, want, strict=True):
                for name in counts:
                    torch.testing.assert_close(ours[name], theirs[name], atol=2**-6, rtol=2**-6)
    other = Generation("bshd", "rows")
    other.layers = native.layers
    one_by_one(other, 2)
    assert other.cache.sequences == {"a": 2, "b": 2}


def test_layers_that_remember_a_step_keep_no_cache_alive() -> None:
    generation = Generation("bshd", "rows")
    one_by_one(generation, 3)
    cache = weakref.ref(generation.cache)
    generation.cache = InferenceParams(4, CAPACITY, GROUPS, SIZE, torch.bfloat16, device="cpu")
    gc.collect()
    assert cache() is None


def test_two_layers_of_one_number_are_refused_in_a_repeated_step() -> None:
    generation = Generation("bshd", "rows")
    one_by_one(generation, 3)
    first = generation.layers[0]  # the cache forgets a layer that is gone
    generation.layers[0] = Generation("bshd", "rows").layers[0]
    assert first is not generation.layers[0]
    with pytest.raises(OperandError, match="two layers have layer_number=1"):
        one_by_one(generation, 1)


def test_lengths_of_a_captured_graph_are_read_in_each_replay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    of = attention_lengths.OfLengths[int]()
    sums = torch.tensor([0, 1], dtype=torch.int32)
    given = attention_lengths.Keywords(sums, sums, None, None, None, None)
    computed = itertools.count()

    def read() -> int:
        return of.of(given, (), 0, lambda: next(computed))

    assert [read(), read()] == [0, 0]
    sums[1] = 2
    assert [read(), read()] == [1, 1]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert [read(), read()] == [2, 3]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert read() == 1
    with torch.inference_mode():
        unseen = torch.tensor([0, 1], dtype=torch.int32)
        given = attention_lengths.Keywords(unseen, unseen, None, None, None, None)
        assert [read(), read()] == [4, 5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prompts_of_many_lengths_build_few_plans(layout: str) -> None:
    """Of rounded lengths, with the results of the reference."""
    native, judge = (Generation(layout, "rows") for _ in range(2))
    before = Graphs.built
    for length in range(2, CAPACITY + 1):
        got, want = (
            one.step({length: length}, name, length)
            for one, name in ((native, "cudnn"), (judge, "reference"))
        )
        torch.testing.assert_close(got[1][length], want[1][length], atol=2**-6, rtol=2**-6)
    assert Graphs.built - before == 1  # of up to 64 tokens; the layers share it


@pytest.mark.parametrize("kind", PAGES)
def test_where_tokens_go_is_in_the_same_memory_in_each_step(kind: str) -> None:
    """As a captured graph of a step finds it."""
    generation = Generation("bshd", kind)
    one_by_one(generation, 2)
    manager: Any = generation.cache.cache_manager

    def addresses() -> list[int]:
        tensors = [manager._tokens.slot, generation.cache.cu_seqlens_kv]
        tensors += [generation.cache.step_cu_seqlens[0], generation.cache.get_seqlens_pre_step()]
        return [one.data_ptr() for one in tensors] + (
            [manager._read.data_ptr()] if kind == "pages" else []
        )

    first = addresses()
    one_by_one(generation, 1)
    assert addresses() == first
    assert manager._tokens.slot.tolist() == [2, 2 + (PAGE if kind == "pages" else CAPACITY)]


def test_a_full_store_drops_the_plan_used_least_recently(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plans, "_MAX_PLANS", 2)
    layer = DotProductAttention(HEADS, SIZE, GROUPS, qkv_format="bshd", window_size=(6, 0))

    def built(length: int) -> int:
        before = Graphs.built
        q, k, v = (torch.randn(1, length, n, SIZE).bfloat16() for n in (HEADS, GROUPS, GROUPS))
        with torch.no_grad(), use_backend(Generation.cudnn):
            layer(q, k, v)
        return Graphs.built - before

    assert [built(length) for length in (8, 9, 8, 10, 8, 9)] == [1, 1, 0, 1, 0, 1]
