"""Steps of a layer with a cache: queries, keys and values are rotated in one call, keys and values
stored in one, with the bits of a call for each."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp8core as te
from fp8core import InferenceParams
from fp8core.modules import multihead_attention
from fp8core.modules.sequences.kv_cache import _joined
from tests.pairs import pairs

BF16, HIDDEN, HEADS, GROUPS, HEAD = torch.bfloat16, 64, 4, 2, 16
LAYOUTS = ("bshd", "sbhd", "thd")
CACHES: dict[str, dict[str, Any]] = {
    "rows": {},
    "pages": {"is_paged": True, "page_size": 4},
    "codes": {"storage_format": "e4m3"},
    "pages of codes": {"is_paged": True, "page_size": 4, "storage_format": "e4m3"},
}
ANGLES = te.RotaryPositionEmbedding(HEAD)(32)


class Counting(TorchDispatchMode):
    """Counts torch's calls that write to a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.writes += func is torch.ops.aten.index_copy_.default
        return func(*args, **(kwargs or {}))


def layer_of(layout: str, **options: Any) -> te.MultiheadAttention:
    torch.manual_seed(0)
    padded = {"attn_mask_type": "padding_causal"} if layout == "thd" else {}
    shared = {"num_gqa_groups": GROUPS, "attention_dropout": 0.0, "params_dtype": BF16}
    return te.MultiheadAttention(
        HIDDEN,
        HEADS,
        qkv_format=layout,
        layer_number=1,
        **padded,
        **shared,
        **options,
    ).eval()


def cache_of(kind: str) -> InferenceParams:
    return InferenceParams(3, 16, GROUPS, HEAD, BF16, **CACHES[kind])


def tokens_of(layout: str, counts: dict[str, int], seed: int) -> torch.Tensor:
    """Return random tokens of a step, of which no sequence has fewer than it brings."""
    most = max(counts.values())
    sizes = {
        "bshd": (len(counts), most),
        "sbhd": (most, len(counts)),
        "thd": (sum(counts.values()),),
    }[layout]
    torch.manual_seed(seed)
    return torch.randn(*sizes, HIDDEN).to(BF16)


STEPS = ({"a": 5, "b": 3}, {"a": 1, "b": 1}, {"b": 1, "a": 1, "c": 2}, {"a": 1, "c": 1})


def generated(layer: Any, cache: InferenceParams, layout: str) -> list[torch.Tensor]:
    """Return the outputs of prompts, of steps, and of steps on the device beyond the capacity, and
    what the cache then has."""
    results = []
    with torch.no_grad():
        for at, counts in enumerate(STEPS):
            cache.pre_step(counts)
            x = tokens_of(layout, counts, at)
            results.append(layer(x, inference_params=cache, rotary_pos_emb=ANGLES))
        ones = torch.ones(2, dtype=torch.int32)
        for at in range(10):
            cache.pre_step(ones)
            x = tokens_of(layout, {"a": 1, "c": 1}, 50 + at)
            results.append(layer(x, inference_params=cache, rotary_pos_emb=ANGLES))
    return [*results, *cache.cache_manager.cache[1], cache.seqlens.clone()]


@contextmanager
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have each tensor be rotated by itself, so that no memory holds keys and values."""
    with monkeypatch.context() as patched:
        patched.setattr(multihead_attention, "rotated_parts", lambda *_: None)
        yield


OPTIONS: dict[str, dict[str, Any]] = {
    "split": {},
    "interleaved rows": {"fuse_qkv_params": True},
    "interleaved pairs": {"rotary_pos_interleaved": True},
    "normalized": {"qk_norm_type": "RMSNorm"},
    "normalized before": {"qk_norm_type": "RMSNorm", "qk_norm_before_rope": True},
}


@pytest.mark.parametrize(("layout", "kind", "name"), pairs(LAYOUTS, CACHES, OPTIONS))
def test_steps_have_the_bits_of_a_call_for_each(
    layout: str, kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = layer_of(layout, **OPTIONS[name])
    joined = generated(layer, cache_of(kind), layout)
    with apart(monkeypatch):
        alone = generated(layer, cache_of(kind), layout)
    assert len(joined) == len(alone)
    for ours, theirs in zip(joined, alone, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", CACHES)
def test_keys_and_values_are_written_in_one_call(
    kind: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes() -> int:
        with Counting() as counting:
            generated(layer, cache_of(kind), layout)
        return counting.writes

    layer = layer_of(layout)
    one = writes()
    assert one == (len(STEPS) + 10) * (2 if "codes" in kind else 1)
    with apart(monkeypatch):
        assert writes() == 2 * one


def test_values_of_another_size_are_written_by_themselves() -> None:
    cache = InferenceParams(2, 8, 2, 8, BF16, 4)
    cache.pre_step({0: 2, 1: 1})
    k, v = torch.randn(2, 2, 2, 8).to(BF16), torch.randn(2, 2, 2, 4).to(BF16)
    got = cache.step(1, k, v, "bshd")
    assert torch.equal(got.k_cache[:, :2][0], k[0])
    assert torch.equal(got.v_cache[:, :1], v[:, :1])


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@pytest.mark.parametrize("kind", CACHES)
def test_a_copied_cache_goes_on(kind: str, again: Any) -> None:
    layer, cache = layer_of("bshd"), cache_of(kind)
    generated(layer, cache, "bshd")
    copied = again(cache)
    for each in (cache, copied):
        with pytest.raises(te.OperandError, match="is full"):
            each.pre_step({"c": 1})
        each.pre_step({"c": 1})
    x = tokens_of("bshd", {"c": 1}, 9)
    with torch.no_grad():
        ours, theirs = (
            layer(x, inference_params=each, rotary_pos_emb=ANGLES) for each in (cache, copied)
        )
    assert torch.equal(ours, theirs)
    for mine, other in zip(
        cache.cache_manager.cache[1], copied.cache_manager.cache[1], strict=True
    ):
        assert torch.equal(mine, other)
        assert mine.data_ptr() != other.data_ptr()


def test_only_what_lies_in_one_memory_is_joined() -> None:
    rows = torch.arange(2 * 3 * 6 * 4.0).view(2, 3, 6, 4)
    q, k, v = rows.split_with_sizes([2, 2, 2], -2)
    both = _joined(k, v)
    assert both is not None
    assert torch.equal(both[..., 0, :, :], k)
    assert torch.equal(both[..., 1, :, :], v)
    query_and_values = _joined(q, v)
    assert query_and_values is not None
    assert torch.equal(query_and_values[..., 1, :, :], v)
    for first, second in (
        *((v, k), (k, k), (k, v.clone()), (k, v[..., :2]), (k, v.transpose(0, 1)), (k, v.int())),
        (k, v.view(torch.int32)),
    ):
        assert _joined(first, second) is None
