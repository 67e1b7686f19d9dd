"""The KV cache against a list of tokens per sequence: any order of steps, layouts and pages."""

from __future__ import annotations

import contextlib
import copy
import pickle
import random
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core import InferenceParams, KVCacheManager, OperandError, UnsupportedError
from fp8core.modules.sequences.kv_cache import NonPagedKVCacheManager, PagedKVCacheManager
from tests.device import DEVICE
from tests.pairs import turns

F64 = torch.float64
HEADS, K_SIZE, V_SIZE = 2, 4, 3
KINDS: dict[str, dict[str, Any]] = {
    "rows": {},
    "pages": {"is_paged": True, "page_size": 4},
    "few pages": {"is_paged": True, "page_size": 2, "total_num_pages": 9},
}
LAYOUTS = ("bshd", "sbhd", "thd")


def make(kind: str = "rows", **options: Any) -> InferenceParams:
    sizes = {"max_batch_size": 3, "max_sequence_length": 16, "num_heads_kv": HEADS}
    sizes |= {"head_dim_k": K_SIZE, "head_dim_v": V_SIZE, "dtype": F64, "device": DEVICE}
    return InferenceParams(**{**sizes, **KINDS[kind], **options})


Steps = OrderedDict[Hashable, int]
Pair = tuple[torch.Tensor, torch.Tensor]


def laid_out(parts: list[torch.Tensor], layout: str, extra: int = 0) -> torch.Tensor:
    """The tokens of each sequence as one tensor, padded with NaN, and by ``extra`` tokens more."""
    if layout == "thd":
        padding = torch.full((extra, *parts[0].shape[1:]), torch.nan, dtype=F64)
        return torch.cat([*parts, padding])
    longest = max(map(len, parts)) + extra
    whole = torch.full((len(parts), longest, *parts[0].shape[1:]), torch.nan, dtype=F64)
    for row, part in zip(whole, parts, strict=True):
        row[: len(part)] = part
    return whole.transpose(0, 1) if layout == "sbhd" else whole


class Lists:
    """What a cache has to hold: by layer and sequence, the keys and values of all its tokens."""

    def __init__(self, layers: tuple[int, ...] = (1, 2)) -> None:
        self.held: dict[int, dict[Hashable, Pair]] = {layer: {} for layer in layers}

    def step(
        self, cache: InferenceParams, steps: dict[Hashable, int], layout: str, extra: int = 0
    ) -> None:
        """Make a step of ``cache`` with random tokens, and compare what each layer returns."""
        cache.pre_step(OrderedDict(steps))
        for layer, held in self.held.items():
            new = {
                name: (
                    torch.randn(n, HEADS, K_SIZE, dtype=F64),
                    torch.randn(n, HEADS, V_SIZE, dtype=F64),
                )
                for name, n in steps.items()
            }
            before = {name: held.get(name) for name in steps}
            held.clear()
            for name, pair in new.items():
                old = before[name]
                held[name] = (
                    pair if old is None else tuple(map(torch.cat, zip(old, pair, strict=True)))
                )
            given = [laid_out([pair[at] for pair in new.values()], layout, extra) for at in (0, 1)]
            self.check(layer, steps, cache.step(layer, *given, layout))

    def check(self, layer: int, steps: dict[Hashable, int], got: Any) -> None:
        lengths = [len(pair[0]) for pair in self.held[layer].values()]
        assert got.cu_seqlens_q.diff().tolist() == list(steps.values())
        assert got.cu_seqlens_kv.diff().tolist() == lengths
        assert got.cu_seqlens_q.dtype == got.cu_seqlens_kv.dtype == torch.int32
        assert got.max_seqlen_kv == max(lengths)
        for row, (keys, values) in enumerate(self.held[layer].values()):
            assert torch.equal(got.k_cache[row, : len(keys)], keys)
            assert torch.equal(got.v_cache[row, : len(values)], values)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_prefill_and_decode(kind: str, layout: str) -> None:
    cache, lists = make(kind), Lists()
    lists.step(cache, {"a": 5, "b": 3}, layout)
    for _ in range(4):
        lists.step(cache, {"a": 1, "b": 1}, layout)
    assert dict(cache.sequences) == {"a": 9, "b": 7}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_chunks_of_different_lengths(kind: str, layout: str) -> None:
    cache, lists = make(kind), Lists()
    for steps in ({0: 4, 1: 1}, {0: 1, 1: 5}, {0: 0, 1: 2}, {0: 3, 1: 0}):
        lists.step(cache, dict(steps), layout, extra=2)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_end_and_others_begin_in_their_place(kind: str) -> None:
    cache, lists = make(kind), Lists()
    for steps in (
        {0: 4, 1: 2, 2: 5},
        {0: 1, 2: 1},
        {3: 3, 2: 1, 0: 1},
        {0: 1, 1: 2, 3: 1},
        {1: 1},
        {4: 7, 1: 1},
    ):
        lists.step(cache, dict(steps), "bshd")


@pytest.mark.parametrize(("kind", "seed"), turns(["rows", "pages"], range(6)))
def test_any_order_of_steps(kind: str, seed: int) -> None:
    choose, cache, lists = random.Random(seed), make(kind), Lists((0, 7))
    for _ in range(25):
        running = [name for name, length in cache.sequences.items() if length < 13]
        kept = choose.sample(running, choose.randint(0, len(running)))
        fresh = [f"{seed}-{choose.random()}" for _ in range(choose.randint(0, 3 - len(kept)))]
        names = choose.sample([*kept, *fresh], len(kept) + len(fresh))
        if names:
            steps = {name: choose.randint(name not in kept, 3) for name in names}
            lists.step(cache, steps, choose.choice(LAYOUTS), extra=choose.randint(0, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_reset_frees_everything_and_keeps_the_memory(kind: str) -> None:
    cache = make(kind)
    Lists().step(cache, {0: 6, 1: 6, 2: 6}, "bshd")
    before = {layer: pair[0].data_ptr() for layer, pair in cache.cache_manager.cache.items()}
    cache.reset()
    assert dict(cache.sequences) == {}
    assert cache.batch_size == 0
    Lists().step(cache, {1: 2, 0: 3, 3: 6}, "bshd")
    after = {layer: pair[0].data_ptr() for layer, pair in cache.cache_manager.cache.items()}
    assert after == before


def test_a_sequence_can_begin_again_under_the_same_id() -> None:
    for kind in KINDS:
        cache, lists = make(kind), Lists()
        lists.step(cache, {0: 6}, "bshd")
        lists.step(cache, {1: 2}, "bshd")
        lists.step(cache, {0: 3, 1: 1}, "bshd")
        assert dict(cache.sequences) == {0: 3, 1: 3}, kind


def test_lengths_before_the_step_are_the_positions_of_its_tokens() -> None:
    cache, lists = make(), Lists()
    lists.step(cache, {0: 4, 1: 2}, "bshd")
    assert cache.get_seqlens_pre_step().tolist() == [0, 0]
    lists.step(cache, {2: 2, 1: 1, 0: 1}, "bshd")
    assert cache.get_seqlens_pre_step().tolist() == [0, 2, 4]
    assert cache.get_seqlens_pre_step().dtype == torch.int32
    assert dict(cache.sequences_pre_step) == {2: 0, 1: 2, 0: 4}


def test_sums_of_lengths_are_in_the_same_memory_in_each_step() -> None:
    cache, lists = make(), Lists()
    lists.step(cache, {0: 4, 1: 2}, "bshd")
    addresses = cache.cu_seqlens_q.data_ptr(), cache.cu_seqlens_kv.data_ptr()
    assert cache.cu_seqlens_q.tolist() == [0, 4, 6, 6]
    lists.step(cache, {0: 1, 1: 1}, "bshd")
    assert cache.cu_seqlens_kv.tolist() == [0, 5, 8, 8]
    assert (cache.cu_seqlens_q.data_ptr(), cache.cu_seqlens_kv.data_ptr()) == addresses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_format_that_comes_out_says_both(layout: str) -> None:
    cache = make(qkv_format=layout)
    wanted = "bshd" if layout == "bshd" else f"{layout}_2bshd"
    assert cache.output_qkv_format == wanted
    cache.pre_step({0: 1})
    new = laid_out([torch.zeros(1, HEADS, K_SIZE, dtype=F64)], layout)
    got = cache.step(1, new, new[..., :V_SIZE], layout)
    assert got.qkv_format == wanted
    assert (cache.input_qkv_format, cache.cache_qkv_format) == (layout, "bshd")


def test_rows_are_views_of_the_cache() -> None:
    cache = make()
    Lists((1,)).step(cache, {0: 4, 1: 2}, "bshd")
    cache.pre_step({0: 1, 1: 1})
    new = torch.zeros(2, 1, HEADS, K_SIZE, dtype=F64)
    got = cache.step(1, new, new[..., :V_SIZE], "bshd")
    assert got.k_cache.data_ptr() == cache.cache_manager.cache[1][0].data_ptr()


def test_a_paged_cache_needs_memory_for_its_pages_alone() -> None:
    cache = make("few pages")
    Lists((1,)).step(cache, {0: 8, 1: 1}, "bshd")
    assert cache.cache_manager.cache[1][0].shape == (9, 2, HEADS, K_SIZE)
    table = cache.cache_manager.page_table  # type: ignore[attr-defined]  # a paged one has it
    assert table[:2].tolist() == [[0, 1, 2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0, 0, 0]]


def test_a_step_can_be_made_again_after_it_failed() -> None:
    cache, lists = make(), Lists((1,))
    lists.step(cache, {0: 4, 1: 2}, "bshd")
    cache.pre_step({1: 1, 0: 1})
    keys = torch.randn(2, 1, HEADS, K_SIZE, dtype=F64)
    with pytest.raises(OperandError):
        cache.step(1, keys, keys, "bshd")  # values of another size
    for _ in range(2):
        got = cache.step(1, keys, keys[..., :V_SIZE], "bshd")
        assert torch.equal(got.k_cache[0, :3], torch.cat((lists.held[1][1][0], keys[0])))
        assert torch.equal(got.k_cache[1, :5], torch.cat((lists.held[1][0][0], keys[1])))


def test_a_cache_is_used_inside_and_outside_of_inference_mode() -> None:
    for first in [True, False]:
        cache, lists = make(), Lists()
        for is_inside in (first, not first):
            with torch.inference_mode(is_inside), torch.no_grad():
                lists.step(cache, {0: 2, 1: 1}, "bshd")


def test_no_step_needs_no_memory() -> None:
    assert make().cache_manager.cache == {}


def test_allocate_memory_can_be_called_before() -> None:
    cache = make()
    cache.allocate_memory(5)
    assert [part.shape[-1] for part in cache.cache_manager.cache[5]] == [K_SIZE, V_SIZE]


def test_repr_tells_sizes_and_sequences() -> None:
    cache = make("pages")
    cache.pre_step({"x": 3})
    text = repr(cache)
    assert "12 pages of 4" in text
    assert "sequences={'x': 3}" in text


# What is refused, with the cache as it was


def state(cache: InferenceParams) -> list[object]:
    manager = cache.cache_manager
    tensors = [part.tolist() for pair in manager.cache.values() for part in pair]
    lengths = [dict(cache.sequences), dict(manager.sequences), cache.batch_size]
    buffers = [cache.cu_seqlens_q.tolist(), cache.cu_seqlens_kv.tolist()]
    pages = manager.page_table.tolist() if isinstance(manager, PagedKVCacheManager) else None
    return [tensors, lengths, buffers, cache.get_seqlens_pre_step().tolist(), pages]


def test_a_step_that_does_not_fit_changes_nothing() -> None:
    for kind, steps, text in [
        ("rows", {0: 1, 1: 12}, "is full: sequence 1 has 5 tokens and gets 12 more.*is 16"),
        ("rows", {0: 1, 1: 1, 2: 1, 3: 1}, "is full: a step of 4 sequences.*max_batch_size is 3"),
        ("pages", {0: 13}, "is full: sequence 0 has 4 tokens and gets 13 more"),
        ("few pages", {0: 8, 1: 9}, "needs 8 more pages of 2 tokens, and 4 of 9 are free"),
        ("rows", {0: -1}, "-1 new tokens of sequence 0"),
        ("rows", {0: 1.5}, "1.5 new tokens"),
        ("rows", {0: True}, "True new tokens"),
        ("rows", {0: torch.tensor(1.0)}, r"tensor\(1\..*\) new tokens"),
    ]:
        cache, lists = make(kind), Lists((1,))
        lists.step(cache, {0: 4, 1: 5}, "bshd")
        before = state(cache)
        with pytest.raises(OperandError, match=text):
            cache.pre_step(steps)
        assert state(cache) == before
        lists.step(cache, {1: 1, 0: 2}, "bshd")


def test_room_that_a_finished_sequence_leaves_is_used_in_the_same_step() -> None:
    cache, lists = make("few pages"), Lists()
    lists.step(cache, {0: 9, 1: 8}, "bshd")
    with pytest.raises(OperandError, match="1 more pages of 2 tokens, and 0 of 9 are free"):
        cache.pre_step({0: 1, 1: 1})
    lists.step(cache, {0: 1, 2: 8}, "bshd")


def keys_and_values(**changed: Any) -> dict[str, Any]:
    new_k = torch.zeros(2, 3, HEADS, K_SIZE, dtype=F64)
    given = {"layer_number": 1, "new_k": new_k, "new_v": new_k[..., :V_SIZE], "qkv_format": "bshd"}
    return {**given, **changed}


def test_tensors_that_do_not_fit_are_named() -> None:
    for changed, text in [
        ({"qkv_format": "bhsd"}, "qkv_format='bhsd'; expected one of bshd, sbhd, thd"),
        ({"qkv_format": "sbhd"}, r"'sbhd' with s >= 3, b = 2, h = 2, d = 4"),
        ({"new_k": torch.zeros(2, 2, HEADS, K_SIZE, dtype=F64)}, "s >= 3"),
        ({"new_k": torch.zeros(3, 3, HEADS, K_SIZE, dtype=F64)}, "b = 2"),
        ({"new_k": torch.zeros(2, 3, 1, K_SIZE, dtype=F64)}, "h = 2"),
        ({"new_v": torch.zeros(2, 3, HEADS, K_SIZE, dtype=F64)}, r"new_v is \[2, 3, 2, 4\].*d = 3"),
        ({"new_v": torch.zeros(2, 4, HEADS, V_SIZE, dtype=F64)}, "expected the same tokens"),
        ({"new_k": torch.zeros(6, HEADS, K_SIZE, dtype=F64)}, r"\[6, 2, 4\]"),
        (
            {"new_k": torch.zeros(2, 3, HEADS, K_SIZE)},
            f"float32 on {DEVICE}, the cache torch.float64",
        ),
        ({"new_k": torch.zeros(2, 3, HEADS, K_SIZE, dtype=F64, device="meta")}, "on meta"),
    ]:
        cache = make()
        Lists((1,)).step(cache, {0: 4, 1: 5}, "bshd")
        cache.pre_step({0: 3, 1: 1})
        before = state(cache)
        with pytest.raises(OperandError, match=text):
            cache.step(**keys_and_values(**changed))
        assert state(cache) == before


def test_a_device_by_another_of_its_names_is_that_device() -> None:
    for kind in list(KINDS):
        alias = {"cpu": "cpu:0", "cuda": "cuda"}[DEVICE.type]  # tensors on them say "cpu", "cuda:0"
        cache = make(kind, device=alias)
        Lists((1,)).step(cache, {0: 2, 1: 1}, "bshd")


def test_a_step_without_pre_step_is_refused() -> None:
    cache = make()
    new_k = torch.zeros(0, 3, HEADS, K_SIZE, dtype=F64)
    with pytest.raises(OperandError, match="pre_step"):
        cache.step(**keys_and_values(new_k=new_k, new_v=new_k[..., :V_SIZE]))
    with pytest.raises(OperandError, match=r"b = 0, .*, as no pre_step\(\) named a sequence"):
        cache.step(**keys_and_values())


def test_a_layer_that_was_left_out_is_named() -> None:
    for kind in ["rows", "pages"]:
        cache = make(kind)
        Lists((1,)).step(cache, {0: 4, 1: 5}, "bshd")
        cache.pre_step({0: 3, 1: 3})
        with pytest.raises(
            OperandError, match="layer 2 holds 0 of the 4 earlier tokens of sequence 0"
        ):
            cache.step(**keys_and_values(layer_number=2))


class Failing(TorchDispatchMode):
    """Has the operation ``at`` fail, counted from 0, before it runs or ``after`` it."""

    def __init__(self, at: int, *, after: bool) -> None:
        super().__init__()
        self.left, self.after = at, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.left -= 1
        output = func(*args, **kwargs or {}) if self.after or self.left != -1 else None
        if self.left == -1:
            raise MemoryError
        return output


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_whose_operation_failed_is_made_again_or_refused(kind: str, after: bool) -> None:
    """While rows move; never with rows that have moved twice."""
    results: list[Any] = []
    for at in range(99):
        torch.manual_seed(0)
        cache = make(kind)
        Lists((1,)).step(cache, {"a": 2, "b": 4, "c": 3}, "bshd")
        cache.pre_step({"c": 1, "a": 1, "d": 1})
        new_k = torch.randn(3, 1, HEADS, K_SIZE, dtype=F64)
        step = keys_and_values(new_k=new_k, new_v=new_k[..., :V_SIZE])
        ends = False
        with contextlib.suppress(MemoryError), Failing(at, after=after):
            cache.step(**step)
            ends = True
        with contextlib.suppress(OperandError):
            results.append(cache.step(**step)[:2])
        if ends:
            break
    assert len(results) > at / 2
    for result in results:
        assert all(map(torch.equal, result, results[-1]))


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_an_id_that_began_again_are_not_those_of_the_one_before(kind: str) -> None:
    cache = make(kind)
    Lists((1, 2)).step(cache, {"a": 3}, "bshd")
    Lists((2,)).step(cache, {"b": 3}, "bshd")
    Lists((2,)).step(cache, {"a": 3}, "bshd")
    cache.pre_step({"a": 1})
    new_k = torch.zeros(1, 1, HEADS, K_SIZE, dtype=F64)
    with pytest.raises(OperandError, match="layer 1 holds 0 of the 3 earlier tokens"):
        cache.step(**keys_and_values(new_k=new_k, new_v=new_k[..., :V_SIZE]))


def test_memory_that_holds_tokens_is_not_allocated_again() -> None:
    for kind in KINDS:
        cache, lists = make(kind), Lists((1,))
        lists.step(cache, {0: 4, 1: 2}, "bshd")
        cache.allocate_memory(1)
        lists.step(cache, {0: 1, 1: 1}, "bshd")


def test_a_step_that_failed_leaves_the_format() -> None:
    cache = make(qkv_format="sbhd")
    cache.pre_step({0: 3, 1: 1})
    with pytest.raises(OperandError):
        cache.step(**keys_and_values(new_v=torch.zeros(2, 3, HEADS, 9, dtype=F64)))
    assert (cache.input_qkv_format, cache.output_qkv_format) == ("sbhd", "sbhd_2bshd")


def test_a_step_that_is_no_mapping_is_named() -> None:
    for steps in [[1, 2], None, 3]:
        with pytest.raises(OperandError, match="by the id of each sequence"):
            make().pre_step(steps)


def test_keys_that_are_no_tensor_are_named() -> None:
    cache = make()
    cache.pre_step({0: 3, 1: 1})
    with pytest.raises(OperandError, match=r"new_k is NoneType; expected a torch\.Tensor"):
        cache.step(**keys_and_values(new_k=None))


def test_pages_that_the_cache_lacks_are_named() -> None:
    for kind, text in [("rows", "no pages"), ("pages", r"layers \[\]")]:
        with pytest.raises(OperandError, match=text):
            make(kind).convert_paged_to_nonpaged(1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_goes_on_alone(kind: str, copied: Callable[[InferenceParams], Any]) -> None:
    cache, lists = make(kind), Lists((1,))
    lists.step(cache, {0: 2, 1: 1}, "bshd")
    other, before = copied(cache), state(cache)
    copy.deepcopy(lists).step(other, {0: 1, 1: 2}, "bshd")
    assert state(cache) == before
    lists.step(cache, {1: 1, 0: 2}, "bshd")


def test_more_tokens_than_max_ctx_len_are_refused() -> None:
    cache = make(max_ctx_len=4)
    cache.pre_step({0: 4})
    with pytest.raises(OperandError, match="5 new tokens of sequence 1, and max_ctx_len is 4"):
        cache.pre_step({0: 1, 1: 5})
    assert dict(cache.sequences) == {0: 4}


def test_sizes_that_make_no_sense_are_named() -> None:
    for options, error, text in [
        ({"num_heads_kv": None}, OperandError, "num_heads_kv=None"),
        ({"head_dim_k": 0}, OperandError, "head_dim_k=0"),
        ({"dtype": None}, UnsupportedError, "dtype=None"),
        ({"dtype": torch.float8_e4m3fn}, UnsupportedError, "float8_e4m3fn"),
        ({"is_paged": True}, OperandError, "page_size=None"),
        ({"is_paged": True, "page_size": 5}, OperandError, "that divides the length"),
        (
            {"is_paged": True, "page_size": 4, "total_num_pages": 0},
            OperandError,
            "total_num_pages=0",
        ),
        ({"max_ctx_len": 17}, OperandError, "at most max_sequence_length=16"),
        ({"qkv_format": "bhsd"}, OperandError, "bhsd"),
    ]:
        with pytest.raises(error, match=text):
            make(**options)


# A manager of the user's own


class Counting(NonPagedKVCacheManager):
    """The rows, in the signature of Transformer Engine's managers, and a count of its steps."""

    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes)
        self.steps = 0

    def step(self, *arguments: Any) -> Pair:
        self.steps += 1
        return super().step(*arguments)


class Backward(Counting):
    def pre_step(self, step_dict: Any) -> Any:
        return OrderedDict(reversed(super().pre_step(step_dict).items()))


def test_a_custom_manager_takes_the_place() -> None:
    cache = make(custom_cache_manager=Counting)
    Lists((1, 2, 3)).step(cache, {0: 4, 1: 5}, "thd")
    manager = cache.cache_manager
    assert isinstance(manager, Counting)
    assert isinstance(manager, KVCacheManager)
    assert manager.steps == 3


def test_a_custom_manager_of_another_order_is_refused() -> None:
    cache = make(custom_cache_manager=Backward)
    with pytest.raises(OperandError, match=r"Backward\.pre_step returned the sequences \[1, 0\]"):
        cache.pre_step({0: 4, 1: 5})
