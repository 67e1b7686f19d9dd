"""Steps of a KV cache on the device: recorded once, and replayed without the host."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core import (
    DotProductAttention,
    InferenceParams,
    KVCacheManager,
    OperandError,
    UnsupportedError,
)
from fp8core.context.capture import Graph, Pass
from fp8core.modules.sequences import inference, kv_cache
from fp8core.modules.sequences.inference import restored_caches
from fp8core.modules.sequences.kv_cache import NonPagedKVCacheManager
from fp8core.modules.sequences.rotary import Spans
from tests.device import DEVICE
from tests.modules.test_attention_cache import F64, K_SIZE, LAYOUTS, PAGES, Model, cache_for
from tests.modules.test_inference import KINDS, Failing, Lists, make
from tests.pairs import pairs


class Recording(TorchDispatchMode):
    """The kernels of a block, as a CUDA graph has them: each replay runs them again, from and into
    the same memory, and nothing else; what would read a value on the host is refused."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, result in self.calls:
                again = func(*args, **kwargs)
                pairs = zip(*map(torch.utils._pytree.tree_leaves, (result, again)), strict=True)
                for memory, value in pairs:
                    if isinstance(memory, torch.Tensor) and memory.data_ptr() != value.data_ptr():
                        memory.copy_(value)


@contextmanager
def recorded() -> Iterator[Any]:
    """Record the kernels of a block, which runs; on a GPU as a CUDA graph."""
    if DEVICE.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        gc.collect()  # a graph that is freed during a capture ends it
        with torch.cuda.graph(graph):
            yield graph
        graph.replay()
        return

    def refuse(tensor: torch.Tensor) -> None:
        raise AssertionError("the host reads a tensor")

    with pytest.MonkeyPatch.context() as patch, Recording() as recording:
        patch.setattr(torch.Tensor, "tolist", refuse)
        patch.setattr(Spans, "check", lambda *arguments: None)  # which reads on CPUs alone
        yield recording


def next_step(model: Model, cache: InferenceParams, words: torch.Tensor) -> torch.Tensor:
    """A step of one token a sequence, on the device."""
    cache.pre_step(ONES)
    return next_words(model, cache, words)


def warm_up(step: Callable[[], object]) -> None:
    """Run a step as torch needs it before a GPU captures it, without a trace in caches."""
    if DEVICE.type == "cuda":
        with restored_caches():
            step()


ONES = torch.ones(2, dtype=torch.int32, device=DEVICE)


def shaped(words: torch.Tensor, layout: str) -> torch.Tensor:
    """The words ``[b]`` as the tokens of a step."""
    return {"bshd": words[:, None], "sbhd": words[None], "thd": words}[layout]


def begun(kind: str, layout: str) -> tuple[Model, InferenceParams, torch.Tensor]:
    """A model, its cache with prompts of 6 and of 3 words, and the word behind each."""
    torch.manual_seed(0)
    model, cache = Model(layout, F64).eval(), cache_for(kind, head_dim_v=K_SIZE)
    prompts = torch.randint(50, (2, 6))
    words = torch.cat((prompts[0], prompts[1, :3])) if layout == "thd" else prompts
    cache.pre_step({"a": 6, "b": 3})
    with torch.no_grad():
        logits = model(words.t() if layout == "sbhd" else words, cache)
    rows = logits if layout == "thd" else logits.transpose(0, 1) if layout == "sbhd" else logits
    last = rows[[5, 8]] if layout == "thd" else rows[[0, 1], [5, 2]]
    return model, cache, last.argmax(-1)


def next_words(model: Model, cache: InferenceParams, words: torch.Tensor) -> torch.Tensor:
    """The likeliest words, and others at each position, as those soon stay the same."""
    with torch.no_grad():
        words = model(shaped(words, model.layout), cache).argmax(-1).view(2)
        return (words + cache.get_seqlens_pre_step()) % 50


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", PAGES)
def test_a_recorded_step_generates_the_words_of_eager_steps(kind: str, layout: str) -> None:
    model, cache, words = begun(kind, layout)
    eager = [words]
    for _ in range(10):
        cache.pre_step({"a": 1, "b": 1})
        eager.append(next_words(model, cache, eager[-1]))
    assert len({tuple(pair.tolist()) for pair in eager}) > 3
    model, cache, words = begun(kind, layout)
    replayed = [words.clone()]
    with recorded() as step:
        cache.pre_step(ONES)
        words.copy_(next_words(model, cache, words))
    replayed.append(words.clone())
    for _ in range(9):
        step.replay()
        replayed.append(words.clone())
    assert torch.equal(torch.stack(replayed), torch.stack(eager))
    assert cache.sequences == {"a": 16, "b": 13}
    assert cache.sequences_pre_step == {"a": 15, "b": 12}


@pytest.mark.parametrize("kind", PAGES)
def test_a_step_goes_on_after_sequences_ended_and_others_began(kind: str) -> None:
    """With the rows of the first step, which the layers move between two replays."""
    model, cache, words = begun(kind, "bshd")
    warm_up(partial(next_step, model, cache, words))
    with recorded() as step:
        cache.pre_step(ONES)
        words.copy_(next_words(model, cache, words))
    step.replay()
    prompt = torch.randint(50, (2, 3))
    judge = copy.deepcopy(cache)
    for each in (cache, judge):
        each.pre_step({"c": 3, "b": 0})
        with torch.no_grad():
            model(prompt, each)
        each.pre_step({"b": 0, "c": 0})
    second = words.flip(0)
    words.copy_(second)
    for _ in range(3):
        step.replay()
        judge.pre_step({"b": 1, "c": 1})
        second = next_words(model, judge, second)
        assert torch.equal(words, second)
    assert cache.sequences == judge.sequences == {"b": 8, "c": 6}
    cache.pre_step({"b": 1, "c": 1})
    judge.pre_step({"b": 1, "c": 1})
    assert torch.equal(next_words(model, cache, words), next_words(model, judge, words))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_change_between_replays_store_what_they_say(kind: str, layout: str) -> None:
    cache, lists, most = make(kind), Lists(), 3
    lists.step(cache, {"a": 2, "b": 3}, layout)
    counts = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    sizes = {"bshd": (2, most), "sbhd": (most, 2), "thd": (2 * most,)}[layout]
    new = [torch.zeros(*sizes, 2, size, dtype=F64) for size in (4, 3)]
    with recorded() as step:
        cache.pre_step(counts, max_seqlen_q=most)
        results = {layer: cache.step(layer, *new, layout) for layer in (1, 2)}
    for steps in ({"a": 1, "b": 3}, {"a": 0, "b": 1}, {"a": 3, "b": 0}, {"a": 2, "b": 2}):
        counts.copy_(torch.tensor([*steps.values()]))
        parts = [[torch.randn(n, 2, x.shape[-1], dtype=F64) for n in steps.values()] for x in new]
        for memory, tokens in zip(new, parts, strict=True):
            memory.fill_(torch.nan)
            if layout == "thd":
                memory[: sum(steps.values())] = torch.cat(tokens)
                continue
            for row, part in zip(
                memory if layout == "bshd" else memory.transpose(0, 1), tokens, strict=True
            ):
                row[: len(part)] = part
        step.replay()
        for layer, both in lists.held.items():
            for at, (name, (keys, values)) in enumerate(both.items()):
                both[name] = torch.cat((keys, parts[0][at])), torch.cat((values, parts[1][at]))
                got = results[layer]
                assert torch.equal(got.k_cache[at, : len(both[name][0])], both[name][0])
                assert torch.equal(got.v_cache[at, : len(both[name][1])], both[name][1])
                assert not got.k_cache.isnan().any()
            assert results[layer].cu_seqlens_kv.diff().tolist() == [
                len(keys) for keys, _ in both.values()
            ]
            assert results[layer].cu_seqlens_q.diff().tolist() == [*steps.values()]
    lists.step(cache, {"b": 1, "c": 2}, layout)


def spoil_length(cache: InferenceParams, counts: torch.Tensor) -> None:
    cache.seqlens[0] = -3


def spoil_page(cache: InferenceParams, counts: torch.Tensor) -> None:
    cache.cache_manager.page_table[0, 1] = 99  # type: ignore[attr-defined]


def spoil_page_below(cache: InferenceParams, counts: torch.Tensor) -> None:
    cache.cache_manager.page_table[0, 0] = -1  # type: ignore[attr-defined]


def hold(cache: InferenceParams, row: int, length: int) -> None:
    """As if steps had brought so many tokens."""
    cache._lengths[[3, 5], row] = length


def raise_length(cache: InferenceParams, counts: torch.Tensor) -> None:
    cache.seqlens[0] = 7  # of which steps brought 5


def fill(cache: InferenceParams, counts: torch.Tensor) -> None:
    hold(cache, 0, 16)


def fill_pages(cache: InferenceParams, counts: torch.Tensor) -> None:
    """Sequence b takes the pages that were free."""
    cache.cache_manager.page_table[1] = torch.tensor([2, 3, 4, 5, 6, 7, 8, 8])  # type: ignore[attr-defined]
    hold(cache, 1, 13)
    hold(cache, 0, 4)


def beyond(cache: InferenceParams, counts: torch.Tensor) -> None:
    cache.seqlens[0] = 2**31 - 1


def below(cache: InferenceParams, counts: torch.Tensor) -> None:
    counts[0] = -1


def above(cache: InferenceParams, counts: torch.Tensor) -> None:
    counts[0] = 2**62


FAULTY: list[tuple[str, Callable[..., None], str]] = [
    ("rows", fill, "sequence 'a' of 16 tokens is full: its new tokens reach beyond max_sequence"),
    ("pages", fill, "sequence 'a' of 16 tokens is full"),
    ("rows", spoil_length, "sequence 'a' of -3 tokens began at a length that is not from 0"),
    ("pages", spoil_length, "sequence 'a' of -3 tokens began at a length"),
    ("rows", beyond, "sequence 'a' of 2147483647 tokens began at a length"),
    ("rows", raise_length, "sequence 'a' of 7 tokens began at a length that is not from 0 to the"),
    ("few pages", raise_length, "sequence 'a' of 7 tokens began at a length that is not from 0"),
    ("rows", below, "sequence 'a' of 4 tokens got a number of new tokens that is not from 0"),
    ("pages", above, "sequence 'a' of 4 tokens got a number of new tokens"),
    ("few pages", spoil_page, "sequence 'a' of 4 tokens has a page that is none of the cache's"),
    ("few pages", spoil_page_below, "sequence 'a' of 4 tokens has a page that is none of"),
    ("few pages", fill_pages, "sequence 'a' of 4 tokens got no page: all of them are in use"),
]


def tokens_of(x: torch.Tensor, layout: str) -> torch.Tensor:
    """What a tensor ``[tokens, heads, ...]`` of one token of each sequence has, by sequence."""
    return x.flatten(0, 1) if layout != "thd" else x


def slots_of(cache: InferenceParams, row: int, length: int) -> list[int]:
    """The slots of the first tokens of a sequence."""
    if not cache.is_paged:
        return [row * 16 + at for at in range(length)]
    pages = cache.cache_manager.page_table[row].tolist()  # type: ignore[attr-defined]
    return [
        pages[at // cache.page_size] * cache.page_size + at % cache.page_size
        for at in range(length)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "spoil", "text"), FAULTY)
def test_a_fault_touches_no_other_sequence_and_is_raised_once(
    kind: str, spoil: Callable[..., None], text: str, layout: str
) -> None:
    """Of sequence a, which then sees nothing."""
    torch.manual_seed(0)
    cache, counts = make(kind, head_dim_v=4), ONES.long()
    layer = DotProductAttention(2, 4, qkv_format=layout, layer_number=1).eval()
    cache.pre_step({"a": 4, "b": 3})
    prompt = [torch.randn(*{"bshd": (2, 4), "sbhd": (4, 2), "thd": (7,)}[layout], 2, 4, dtype=F64)]
    qkv = [shaped(torch.randn(2, 2, 4, dtype=F64), layout) for _ in range(3)]
    with torch.no_grad():
        layer(*prompt * 3, inference_params=cache)
        with recorded() as step:
            cache.pre_step(counts)
            out = layer(*qkv, inference_params=cache)
    cache.seqlens[:2] = torch.tensor([4, 3])  # as before the step
    spoil(cache, counts)
    start = int(cache.seqlens[1])
    wanted = [part.clone().flatten(0, 1) for part in cache.cache_manager.cache[1]]
    step.replay()
    slots = slots_of(cache, 1, start + 1)
    row = 0 if layout == "thd" and spoil is below else 1  # behind as many rows as a has tokens
    for part, memory, new in zip(cache.cache_manager.cache[1], wanted, qkv[1:], strict=True):
        memory[slots[-1]] = tokens_of(new, layout)[row]
        assert torch.equal(part.flatten(0, 1), memory)
    rows = tokens_of(out, layout)
    assert not rows[1 - row].any()
    keys, values = (memory[slots][None] for memory in wanted)
    with torch.no_grad():
        options = {"qkv_format": "bshd", "attn_mask_type": "no_mask"}
        whole = layer(tokens_of(qkv[0], layout)[None, row, None], keys, values, **options)
    torch.testing.assert_close(rows[row], whole.flatten(), rtol=1e-12, atol=1e-12)
    with pytest.raises(OperandError, match=text):
        cache.pre_step({"b": 1})
    cache.pre_step({"b": 1})
    assert cache.sequences == {"b": start + 2}


def test_a_fault_is_raised_where_the_host_asks_next() -> None:
    def calls(cache: InferenceParams) -> list[Callable[[], object]]:
        return [cache.reset, lambda: cache.sequences, lambda: cache.sequences_pre_step]

    for at in range(3):
        cache = make()
        cache.pre_step({"a": 16})
        cache.pre_step(ONES[:1])
        with pytest.raises(OperandError, match="sequence 'a' of 16 tokens is full"):
            calls(cache)[at]()
        assert cache.sequences == ({"a": 16} if at else {})
        repr(cache)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_more_sequences_than_the_host_began_is_named(kind: str) -> None:
    cache = make(kind)
    cache.pre_step({"a": 1, "b": 1})
    warm_up(partial(cache.pre_step, ONES))
    with recorded() as step:
        cache.pre_step(ONES)
    cache.pre_step({"a": 1})
    step.replay()
    with pytest.raises(OperandError, match="sequence 1 is none of the 1 that the last step on"):
        cache.pre_step({"a": 1})
    cache.reset()
    step.replay()
    with pytest.raises(OperandError, match="sequence 0 is none of the 0"):
        cache.reset()


def test_warming_up_leaves_a_cache_as_it_was() -> None:
    for kind in PAGES:
        model, cache, words = begun(kind, "bshd")
        memory = [part for pair in cache.cache_manager.cache.values() for part in pair]
        before = [part.clone() for part in memory]
        with restored_caches():
            for _ in range(20):
                cache.pre_step(ONES)
                next_words(model, cache, words)
        assert all(torch.equal(*pair) for pair in zip(memory, before, strict=True))
        assert cache.sequences == {"a": 6, "b": 3}
        cache.pre_step(ONES)
        judge, other, _ = begun(kind, "bshd")
        other.pre_step({"a": 1, "b": 1})
        assert torch.equal(next_words(model, cache, words), next_words(judge, other, words))


class Recorded(Graph):
    """A graph of :func:`recorded`."""

    def __init__(self) -> None:
        pass

    def record(self, function: Callable[[], Any], pool: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch, recorded() as self.recording:
            patch.setattr(inference, "is_capturing", lambda: True)
            return function()

    def replay(self) -> None:
        self.recording.replay()


class Step(torch.nn.Module):
    """A step of one word of each sequence."""

    def __init__(self, model: Model, cache: InferenceParams) -> None:
        super().__init__()
        self.model, self.cache = model, cache

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        self.cache.pre_step(ONES)
        return next_words(self.model, self.cache, words)


@pytest.mark.parametrize("kind", PAGES)
def test_a_captured_pass_goes_on_from_where_the_cache_was(kind: str) -> None:
    """As make_graphed_callables warms it up and captures it."""
    model, cache, words = begun(kind, "bshd")
    with restored_caches():
        captured = Pass(Step(model, cache), (words.clone(),), {}, {}, Recorded)
        for _ in range(20):
            captured.run_forward()
            captured.run_backward(allow_unused=False)
        captured.run_forward("pool")
    assert cache.sequences == {"a": 6, "b": 3}
    judge, other, second = begun(kind, "bshd")
    for _ in range(10):
        words = captured.run((words,), {}, clones=True).clone()
        other.pre_step({"a": 1, "b": 1})
        second = next_words(judge, other, second)
        assert torch.equal(words, second)
    captured.run((words,), {}, clones=True)
    with pytest.raises(OperandError, match="sequence 'a' of 16 tokens is full"):
        cache.pre_step({"a": 0, "b": 1})
    assert cache.sequences == {"a": 16, "b": 14}


def test_tokens_are_taken_back() -> None:
    """As those that a model did not accept."""
    for kind in KINDS:
        cache, lists = make(kind), Lists((1,))
        lists.step(cache, {"a": 5, "b": 2}, "bshd")
        cache.seqlens[:2] -= torch.tensor([3, 0])
        lists.held[1]["a"] = tuple(part[:2] for part in lists.held[1]["a"])  # type: ignore[assignment]
        lists.step(cache, {"a": 2, "b": 1}, "bshd")
        assert cache.sequences == {"a": 4, "b": 3}


@pytest.mark.parametrize("kind", KINDS)
def test_a_length_above_what_a_cache_has_is_refused_once(kind: str) -> None:
    """Where the host reads it, or in a step on the device; until then lower ones can rise again."""
    for length in (6, 17, -1, -(2**31)):
        for is_step in (False, True):
            cache, lists = make(kind), Lists((1,))
            lists.step(cache, {"a": 5, "b": 2}, "bshd")
            cache.seqlens[0] = 3
            cache.seqlens[0] = 5
            assert cache.sequences == {"a": 5, "b": 2}
            before = [part.clone() for part in cache.cache_manager.cache[1]]
            cache.seqlens[0] = length
            if is_step:
                cache.pre_step(torch.tensor([2, 0], device=DEVICE), 2)
                new = torch.ones(2, 2, 2, 4, dtype=F64)
                got = cache.step(1, new, new[..., :3], "bshd")
                assert got.cu_seqlens_kv.tolist() == [0, 0, 2]
            with pytest.raises(OperandError, match=f"'a' of {length} tokens began at a length"):
                cache.pre_step({"a": 1, "b": 1})
            for part, memory in zip(cache.cache_manager.cache[1], before, strict=True):
                assert torch.equal(part, memory)
            assert cache.seqlens.tolist() == [5, 2, -1]
            lists.step(cache, {"a": 1, "b": 1}, "bshd")
            cache.seqlens.sub_(1)  # behind the batch too, where nothing reads it
            assert cache.sequences == {"a": 5, "b": 2}
            if is_step:
                cache.pre_step(torch.zeros(2, dtype=torch.int32, device=DEVICE))
            cache.seqlens[0] = 6  # which was taken back
            with pytest.raises(OperandError, match="'a' of 6 tokens began at a length"):
                cache.reset()


@pytest.mark.parametrize("kind", KINDS)
def test_steps_that_fail_between_layers_are_taken_back_again_and_again(kind: str) -> None:
    cache, lists = make(kind), Lists((1, 2))
    lists.step(cache, {"a": 4, "b": 2}, "bshd")
    new = torch.ones(2, 1, 2, 4, dtype=F64)
    for counts in (ONES, ONES * 0, {"a": 1, "b": 1}, ONES, ONES):
        cache.pre_step(counts)
        cache.step(1, new, new[..., :3], "bshd")  # and layer 2 not
        cache.seqlens[:2] = torch.tensor([4, 2])
        assert cache.sequences == {"a": 4, "b": 2}
    lists.step(cache, {"a": 1, "b": 0}, "bshd")


@pytest.mark.parametrize("kind", KINDS)
def test_pages_of_a_sequence_at_fault_stay_with_it(kind: str) -> None:
    cache, new = make(kind), torch.ones(2, 6, 2, 4, dtype=F64)
    lists = Lists((1,))
    lists.step(cache, {"a": 6, "b": 2}, "bshd")
    for length in (-1, 9):
        cache.seqlens[0] = length
        cache.pre_step(torch.tensor([0, 6 if length < 0 else 0], device=DEVICE), 6)
        cache.step(1, new, new[..., :3], "bshd")
        with pytest.raises(OperandError, match=f"'a' of {length} tokens began"):
            cache.sequences  # noqa: B018  which looks
    more = torch.ones(6, 2, 4, dtype=F64)
    held = lists.held[1]["b"]
    lists.held[1]["b"] = (torch.cat((held[0], more)), torch.cat((held[1], more[..., :3])))
    lists.step(cache, {"a": 1, "b": 1}, "bshd")


def test_a_pickle_from_before_lengths_were_held_goes_on() -> None:
    cache, lists = make("few pages"), Lists((1,))
    lists.step(cache, {"a": 5, "b": 2}, "bshd")
    cache._lengths = cache._lengths[:5].clone()
    cache._views = cache._views_of(2)
    cache = pickle.loads(pickle.dumps(cache))
    cache.pre_step(ONES * 0)
    lists.step(cache, {"a": 2, "b": 1}, "bshd")


def test_a_graph_of_packed_tokens_reads_memory_that_stays() -> None:
    """Where sequences begin, for attention: made before the graph, and kept behind it."""
    layer = DotProductAttention(2, 4, qkv_format="thd", layer_number=1).eval()
    cache, made = make("pages", head_dim_v=4), []
    for steps in ({"a": 2, "b": 3}, ONES, {"c": 1}, {"a": 2, "b": 3}, ONES):
        cache.pre_step(steps)
        count = 2 if steps is ONES else sum(steps.values())
        with torch.no_grad():
            layer(*[torch.ones(count, 2, 4, dtype=F64)] * 3, inference_params=cache)
        made.append({key: numbers.data_ptr() for key, numbers in cache._starts.items()})
        if len(made) == 3:
            cache.reset()
    assert made[0] == made[1]
    assert made[-1] == made[2] | made[0]


@pytest.mark.parametrize(("kind", "layout"), pairs(PAGES, LAYOUTS))
def test_a_step_is_compiled_once_for_all_lengths_and_sequences(kind: str, layout: str) -> None:
    """As one graph, which goes on from eager steps and steps of numbers on the host."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, cache, words = begun(kind, layout)
    judge = copy.deepcopy(cache)
    step = torch.compile(next_step, fullgraph=True, backend=counter)
    eager = next_step
    for names in ("abc", "bda"):
        for run in (step, step, eager, step):
            second = next_step(model, judge, words)
            words = run(model, cache, words)
            assert torch.equal(words, second)
        assert cache.sequences == judge.sequences
        prompt = torch.randint(50, (2, 3))
        for each in (cache, judge):
            each.pre_step({names[1]: 3, names[2]: 3})
            with torch.no_grad():
                model({"bshd": prompt, "sbhd": prompt.t(), "thd": prompt.flatten()}[layout], each)
    assert counter.frame_count == 1
    cache.seqlens[0] = 16
    hold(cache, 0, 16)
    step(model, cache, words)
    with pytest.raises(OperandError, match="sequence 'd' of 16 tokens is full"):
        cache.pre_step({"a": 1})


@pytest.mark.parametrize("kind", PAGES)
def test_a_compiled_step_writes_to_memory_whose_address_stays(kind: str) -> None:
    """Else torch captures no CUDA graph of it, with mode="reduce-overhead"."""
    seen: list[tuple[list[int], list[int]]] = []

    def noted(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        inputs = torch._guards.TracingContext.get().fw_metadata
        seen.append((inputs.mutated_inp_runtime_indices, inputs.static_input_indices))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    model, cache, words = begun(kind, "bshd")
    cache = copy.deepcopy(cache)
    backend = aot_autograd(fw_compiler=noted)
    torch.compile(next_step, fullgraph=True, backend=backend)(model, cache, words)
    ((written, static),) = seen
    assert len(written) >= 5
    assert {*written} <= {*static}


def values(item: Any, path: str = "") -> dict[str, Any]:
    """What a cache has on the host and on the device, in plain numbers by its path."""
    if isinstance(item, torch.Tensor):
        return {path: item.tolist()}
    if isinstance(item, InferenceParams | KVCacheManager):
        kept = {"read_length": 0, **vars(item)}
        derived = ("_layers", "_changes")  # from the rest, by the layers that take the step
        item = {name: one for name, one in kept.items() if name not in derived}
    if isinstance(item, tuple | list):
        item = dict(enumerate(item))
    if not isinstance(item, dict):
        return {path: item}
    parts = [values(one, f"{path}.{name}") for name, one in item.items()]
    return {path: [*item], **dict(itertools.chain(*map(dict.items, parts)))}


def different(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The paths at which two caches differ."""
    return [path for path in {**one, **other} if one.get(path) != other.get(path)]


class Interrupt:
    """Raises KeyboardInterrupt before the line ``at`` of the modules of caches, counted from 0."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(("inference.py", "kv_cache.py")):
            return None
        if event == "line":
            self.left -= 1
            if self.left == -1:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def __enter__(self) -> None:
        sys.settrace(self)

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)


@pytest.mark.parametrize("on_device", [True, False])
@pytest.mark.parametrize("kind", ["rows", "few pages"])
def test_an_interrupt_leaves_a_step_that_has_begun_or_none(kind: str, on_device: bool) -> None:
    """Before any line, and before or behind any operation; then the cache goes on."""

    def begun() -> tuple[InferenceParams, Lists]:
        torch.manual_seed(0)
        cache, lists = make(kind), Lists((1,))
        lists.step(cache, {"a": 2, "b": 4}, "bshd")
        lists.step(cache, {"b": 1, "a": 1}, "bshd")
        assert len(cache.seqlens) == 3  # from this look on rows move as a step begins
        return cache, lists

    given: Any = torch.tensor([2, 1], device=DEVICE) if on_device else {"c": 1, "a": 2, "b": 1}
    most = 2 if on_device else None
    before, after = (begun()[0] for _ in range(2))
    after.pre_step(given, most)
    states = [values(before), values(after)]
    assert different(*states)
    seen = set()
    for interrupts in (Interrupt, partial(Failing, after=False), partial(Failing, after=True)):
        for at in itertools.count():
            cache, lists = begun()
            ends = False
            raised = contextlib.suppress(KeyboardInterrupt, MemoryError)
            with torch.enable_grad(), raised, interrupts(at):  # else the mode of within is left
                cache.pre_step(given, most)
                ends = True
            paths = [different(values(cache), state) for state in states]
            assert [] in paths, min(paths, key=len)
            seen.add(paths.index([]))
            if ends:
                break
            if at % 7 == 0 and not paths[0]:
                lists.step(cache, {"a": 1, "b": 2, "d": 1}, "bshd")
    assert seen == {0, 1}


def test_numbers_that_make_no_step_are_named() -> None:
    cache = make(max_ctx_len=4)
    with pytest.raises(
        OperandError, match=r"expected int32 \[0\] on .*begins them by a number for"
    ):
        cache.pre_step(ONES)
    cache.pre_step({"a": 1, "b": 2})
    for numbers, most, text in [
        (ONES[:1], None, r"pre_step of torch.int32 \[1\] on .*; expected int32 \[2\]"),
        (ONES.float(), None, "torch.float32"),
        (ONES.bool(), None, "torch.bool"),
        (ONES[:, None], None, r"\[2, 1\]"),
        (ONES.to("meta"), None, "on meta"),
        (ONES, 0, "max_seqlen_q=0"),
        (ONES, 1.5, "max_seqlen_q=1.5"),
        (ONES, 5, r"pre_step\(max_seqlen_q=5\); expected at most 4"),
        ({"a": 1, "b": 1}, 1, "expected it beside a tensor"),
    ]:
        with pytest.raises(OperandError, match=text):
            cache.pre_step(numbers, most)  # type: ignore[arg-type]  # wrong ones
    assert cache.sequences == {"a": 1, "b": 2}
    cache = make(custom_cache_manager=NonPagedKVCacheManager)
    cache.pre_step({"a": 1, "b": 2})
    with pytest.raises(UnsupportedError, match="a step on the device with NonPagedKVCacheManager"):
        cache.pre_step(ONES)
    cache.seqlens.zero_()
    cache.pre_step({"a": 1, "b": 1})


def test_what_a_graph_would_repeat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, new = make(), torch.zeros(1, 1, 2, 4, dtype=F64)
    cache.pre_step({"a": 1})
    monkeypatch.setattr(kv_cache, "is_capturing", lambda: True)
    with pytest.raises(OperandError, match="of numbers on the host while a CUDA graph is captured"):
        cache.pre_step({"a": 1})
    with pytest.raises(OperandError, match=r"first step of layer 1 while.*Make a step with it"):
        cache.step(1, new, new[..., :3], "bshd")
    cache.allocate_memory(1)
    with pytest.raises(OperandError, match=r"rows of other sequences while.*Make a step with the"):
        cache.step(1, new, new[..., :3], "bshd")
    assert cache.sequences == {"a": 1}


def test_a_layer_that_was_left_out_is_named() -> None:
    new = torch.ones(2, 1, 2, 4, dtype=F64)
    for kind in KINDS:
        for is_next_on_device in (False, True):
            cache = make(kind)
            Lists((1, 2)).step(cache, {"a": 4, "b": 2}, "bshd")
            for layers in ((1, 2), (1,)):
                cache.pre_step(ONES)
                for layer in layers:
                    cache.step(layer, new, new[..., :3], "bshd")
            cache.pre_step(ONES if is_next_on_device else {"a": 1, "b": 1})
            cache.step(1, new, new[..., :3], "bshd")
            with pytest.raises(OperandError, match="layer 2 holds 5 of the 6 earlier tokens of"):
                cache.step(2, new, new[..., :3], "bshd")


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_steps_of_its_own(kind: str) -> None:
    cache, new = make(kind), torch.ones(2, 1, 2, 4, dtype=F64)
    Lists((1,)).step(cache, {"a": 4, "b": 2}, "bshd")
    cache.pre_step(ONES)
    cache.step(1, new, new[..., :3], "bshd")
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        other.pre_step(ONES)
        got = other.step(1, new * 2, new[..., :3], "bshd")
        assert got.k_cache[0, 4:6, 0, 0].tolist() == got.k_cache[1, 2:4, 0, 0].tolist() == [1, 2]
        assert other.sequences == {"a": 6, "b": 4}
        assert cache.sequences == {"a": 5, "b": 3}
