"""Attention with a cache of keys and values against attention over whole sequences."""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import fp8core
from fp8core import (
    DotProductAttention,
    InferenceParams,
    OperandError,
    RotaryPositionEmbedding,
    UnsupportedError,
    apply_rotary_pos_emb,
    autocast,
    recipe,
)
from tests.device import DEVICE
from tests.pairs import pairs, turns

F64, BF16 = torch.float64, torch.bfloat16
HEADS, GROUPS, K_SIZE, V_SIZE = 4, 2, 8, 6
LAYOUTS = ("sbhd", "bshd", "thd")
PAGES: dict[str, dict[str, Any]] = {"rows": {}, "pages": {"is_paged": True, "page_size": 4}}
# The numbers of new tokens of two sequences, step by step.
SCHEDULES: dict[str, list[tuple[int, int]]] = {
    "prompt alone": [(7, 4)],
    "one by one": [(1, 1)] * 5,
    "prompt, then one by one": [(6, 3), *[(1, 1)] * 4],
    "chunks": [(3, 5), (4, 1), (0, 3), (2, 0), (1, 1)],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {},
    "padding": {"attn_mask_type": "padding_causal"},
    "bottom right": {"attn_mask_type": "padding_causal_bottom_right"},
    "window": {"window_size": (3, 0)},
    "softcap": {"softcap": 2.0},
    "off by one": {"softmax_type": "off-by-one"},
    "learnable": {"softmax_type": "learnable"},
    "scale": {"softmax_scale": 0.7},
}


def cache_for(kind: str = "rows", dtype: torch.dtype = F64, **options: Any) -> InferenceParams:
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_sequence_length": 16, "device": DEVICE}
    sizes |= {"num_heads_kv": GROUPS, "head_dim_k": K_SIZE, "head_dim_v": V_SIZE, "dtype": dtype}
    return InferenceParams(**{**sizes, **PAGES[kind], **options})


def layer_of(layout: str, **options: Any) -> DotProductAttention:
    sizes = (HEADS, (K_SIZE, V_SIZE), GROUPS)
    layer = DotProductAttention(*sizes, qkv_format=layout, layer_number=1, **options)
    if layer.softmax_offset is not None:
        with torch.no_grad():
            layer.softmax_offset.normal_()
    return layer.eval()


def padded(parts: Sequence[torch.Tensor], layout: str) -> torch.Tensor:
    """The tokens of each sequence as one tensor; NaN behind the shorter ones."""
    if layout == "thd":
        return torch.cat(list(parts))
    longest = max(map(len, parts))
    whole = parts[0].new_full((len(parts), longest, *parts[0].shape[1:]), torch.nan)
    for row, part in zip(whole, parts, strict=True):
        row[: len(part)] = part
    return whole if layout == "bshd" else whole.transpose(0, 1)


def taken_apart(y: torch.Tensor, layout: str, counts: Sequence[int]) -> list[torch.Tensor]:
    """The rows of each sequence; those behind them are zeros."""
    if layout == "thd":
        return list(y.split(list(counts)))
    rows = y if layout == "bshd" else y.transpose(0, 1)
    for row, count in zip(rows, counts, strict=True):
        assert not row[count:].any()
    return [row[:count] for row, count in zip(rows, counts, strict=True)]


def in_steps(
    layer: DotProductAttention,
    cache: InferenceParams,
    sequences: Sequence[Sequence[torch.Tensor]],
    schedule: Sequence[Sequence[int]],
    **given: Any,
) -> list[torch.Tensor]:
    """The outputs for ``sequences``, of each its q, k and v, computed by ``schedule``."""
    layout, done = layer.qkv_format, [0] * len(sequences)
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    for counts in schedule:
        cache.pre_step(OrderedDict(enumerate(counts)))
        spans = [slice(at, at + n) for at, n in zip(done, counts, strict=True)]
        qkv = [
            padded([part[at][span] for part, span in zip(sequences, spans, strict=True)], layout)
            for at in range(3)
        ]
        with torch.no_grad():
            y = layer(*qkv, inference_params=cache, **given)
        for output, rows in zip(outputs, taken_apart(y, layout, counts), strict=True):
            output.append(rows)
        done = [at + n for at, n in zip(done, counts, strict=True)]
    return [torch.cat(output) for output in outputs]


def random_sequences(schedule: Sequence[Sequence[int]], dtype: torch.dtype = F64) -> Any:
    sizes = ((HEADS, K_SIZE), (GROUPS, K_SIZE), (GROUPS, V_SIZE))
    lengths = [sum(counts) for counts in zip(*schedule, strict=True)]
    return [[torch.randn(n, *size, dtype=F64).to(dtype) for size in sizes] for n in lengths]


def whole(layer: DotProductAttention, qkv: Sequence[torch.Tensor], **given: Any) -> torch.Tensor:
    """The output for a whole sequence, ``[s, columns]``."""
    with torch.no_grad():
        y: torch.Tensor = layer(
            *(part[None] for part in qkv), qkv_format="bshd", attn_mask_type="causal", **given
        )
    return y[0]


def assert_close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= 1e-12 * float(want.abs().max())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", PAGES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_steps_give_what_the_whole_gives(schedule: str, kind: str, layout: str) -> None:
    sequences = random_sequences(SCHEDULES[schedule])
    layer = layer_of(layout, attn_mask_type="padding_causal")
    outputs = in_steps(layer, cache_for(kind), sequences, SCHEDULES[schedule])
    for got, qkv in zip(outputs, sequences, strict=True):
        assert_close(got, whole(layer, qkv))


def test_every_option_of_attention_holds_with_a_cache() -> None:
    for layout, options in turns(LAYOUTS, OPTIONS):
        schedule = SCHEDULES["chunks"]
        sequences, layer = random_sequences(schedule), layer_of(layout, **OPTIONS[options])
        for got, qkv in zip(
            in_steps(layer, cache_for(), sequences, schedule), sequences, strict=True
        ):
            assert_close(got, whole(layer, qkv))


def test_alibi_counts_from_the_earlier_tokens() -> None:
    for layout in LAYOUTS:
        schedule = SCHEDULES["chunks"]
        sequences, layer = random_sequences(schedule), layer_of(layout)
        given = {"core_attention_bias_type": "alibi"}
        outputs = in_steps(layer, cache_for(), sequences, schedule, **given)
        for got, qkv in zip(outputs, sequences, strict=True):
            assert_close(got, whole(layer, qkv, **given))


@pytest.mark.parametrize("mask_type", ["no_mask", "padding"])
def test_without_a_causal_mask_a_step_sees_all_keys(mask_type: str) -> None:
    schedule = [(3, 2), (2, 3)]
    sequences, layer = random_sequences(schedule), layer_of("bshd", attn_mask_type=mask_type)
    outputs = in_steps(layer, cache_for(), sequences, schedule)
    for at, (got, (q, k, v)) in enumerate(zip(outputs, sequences, strict=True)):
        first = schedule[0][at]
        for rows, keys in ((slice(0, first), first), (slice(first, None), 5)):
            with torch.no_grad():
                given = (q[None, rows], k[None, :keys], v[None, :keys])
                want = layer(*given, attn_mask_type="no_mask")[0]
            assert_close(got[rows], want)


def test_a_cache_is_reset_and_used_again() -> None:
    schedule, layer, cache = SCHEDULES["chunks"], layer_of("bshd"), cache_for("pages")
    for _ in range(2):
        sequences = random_sequences(schedule)
        outputs = in_steps(layer, cache, sequences, schedule)
        for got, qkv in zip(outputs, sequences, strict=True):
            assert_close(got, whole(layer, qkv))
        cache.reset()


def test_the_arguments_that_a_cache_replaces_are_not_read() -> None:
    schedule = SCHEDULES["chunks"]
    sequences, layer = random_sequences(schedule), layer_of("bshd")
    given = {
        "cu_seqlens_q": torch.tensor([0, 99, 0], dtype=torch.int32),
        "attention_mask": torch.zeros(1, 1, 1, 1, dtype=torch.bool),
        "max_seqlen_q": 1,
    }
    for got, qkv in zip(
        in_steps(layer, cache_for(), sequences, schedule, **given), sequences, strict=True
    ):
        assert_close(got, whole(layer, qkv))


def test_a_recipe_leaves_the_cache_in_the_dtype_of_the_model() -> None:
    schedule = SCHEDULES["chunks"]
    sequences, layer = random_sequences(schedule, BF16), layer_of("bshd")
    cache = cache_for(dtype=BF16)
    with autocast(recipe=recipe.Float8CurrentScaling()):
        in_steps(layer, cache, sequences, schedule)
    assert {part.dtype for part in cache.cache_manager.cache[1]} == {BF16}


def test_a_full_cache_is_refused_and_as_it_was() -> None:
    for kind in PAGES:
        schedule = [(9, 12), (1, 1), (3, 3)]
        sequences = random_sequences([*schedule, (1, 0)])
        layer, cache = layer_of("bshd"), cache_for(kind)
        parts = [
            [part[:-1] for part in qkv] if at == 0 else qkv for at, qkv in enumerate(sequences)
        ]
        outputs = in_steps(layer, cache, parts, schedule)
        with pytest.raises(OperandError, match="is full: sequence 1 has 16 tokens and gets 1 more"):
            cache.pre_step({0: 1, 1: 1})
        tails = [[part[-1:] for part in sequences[0]], [part[:0] for part in sequences[1]]]
        more = in_steps(layer, cache, tails, [(1, 0)])
        assert_close(torch.cat((outputs[0], more[0])), whole(layer, sequences[0]))


def test_a_compiled_layer_takes_the_steps() -> None:
    torch._dynamo.reset()
    schedule = [(5, 3), (1, 1), (1, 1)]
    sequences, layer, cache = random_sequences(schedule), layer_of("bshd"), cache_for()
    compiled = torch.compile(layer, backend="aot_eager")
    compiled.qkv_format = layer.qkv_format
    outputs = in_steps(compiled, cache, sequences, schedule)  # type: ignore[arg-type]
    for got, qkv in zip(outputs, sequences, strict=True):
        assert_close(got, whole(layer, qkv))


def test_an_arbitrary_mask_is_refused() -> None:
    layer, cache = layer_of("bshd", attn_mask_type="arbitrary"), cache_for()
    with pytest.raises(UnsupportedError, match="'arbitrary' with inference_params"):
        in_steps(layer, cache, random_sequences([(3, 3)]), [(3, 3)])
    assert cache.cache_manager.cache == {}


def test_another_kind_of_cache_is_named() -> None:
    (q, k, v), _ = random_sequences([(3, 3)])
    with pytest.raises(OperandError, match=r"inference_params is dict.*InferenceParams"):
        layer_of("bshd")(q[None], k[None], v[None], inference_params={})


def test_a_call_that_failed_does_not_take_the_number_of_another_layer() -> None:
    cache, (first, second) = cache_for(), (layer_of("bshd"), layer_of("bshd"))
    cache.pre_step({"a": 2})
    q, k = (torch.randn(1, 2, heads, K_SIZE, dtype=F64) for heads in (HEADS, GROUPS))
    with torch.no_grad():
        with pytest.raises(OperandError, match="new_k is"):
            first(q, k[:, :1], k[:, :1, :, :V_SIZE], inference_params=cache)
        second(q, k, k[..., :V_SIZE], inference_params=cache)
        with pytest.raises(OperandError, match="two layers have layer_number=1"):
            first(q, k, k[..., :V_SIZE], inference_params=cache)


@pytest.mark.parametrize("kind", ["rows", "pages"])
def test_a_step_with_gradients_computes_the_same_and_refuses_backward(kind: str) -> None:
    def steps(layer: fp8core.TransformerLayer) -> torch.Tensor:
        cache = cache_for(kind, head_dim_v=K_SIZE)
        for counts in ((3, 2), (1, 1)):
            cache.pre_step(dict(enumerate(counts)))
            x = torch.full((max(counts), len(counts), HEADS * K_SIZE), 0.5, dtype=F64)
            y = layer(x, inference_params=cache)
        return y

    layer = fp8core.TransformerLayer(
        HEADS * K_SIZE,
        16,
        HEADS,
        num_gqa_groups=GROUPS,
        layer_number=1,
        params_dtype=F64,
        self_attn_mask_type="causal",
    ).eval()
    y = steps(layer)
    with torch.no_grad():
        assert torch.equal(y, steps(layer))
    with pytest.raises(UnsupportedError, match="backward through a KV cache"):
        y.sum().backward()


# A model


class Block(torch.nn.Module):
    """A decoder block of the library's layers, with rotary embedding."""

    def __init__(self, number: int, layout: str, dtype: torch.dtype) -> None:
        super().__init__()
        options: dict[str, Any] = {"params_dtype": dtype, "bias": False}
        size = HEADS * K_SIZE
        self.layout = layout
        self.qkv = fp8core.LayerNormLinear(size, (HEADS + 2 * GROUPS) * K_SIZE, **options)
        self.attention = DotProductAttention(
            HEADS,
            K_SIZE,
            GROUPS,
            qkv_format=layout,
            layer_number=number,
            attn_mask_type="padding_causal",
        )
        self.out = fp8core.Linear(size, size, **options)
        self.mlp = fp8core.LayerNormMLP(size, 2 * size, **options)

    def forward(
        self, x: torch.Tensor, freqs: torch.Tensor, cache: InferenceParams | None, **given: Any
    ) -> torch.Tensor:
        rows = self.qkv(x)  # not unflatten: a graph takes none where a device is torch's default
        heads = rows.view(*rows.shape[:-1], -1, K_SIZE)
        q, k, v = heads.split([HEADS, GROUPS, GROUPS], dim=-2)
        starts, cu_seqlens = None, given.get("cu_seqlens_q")
        if cache is not None:
            starts = cache.get_seqlens_pre_step()
            cu_seqlens = cache.cu_seqlens_q[: cache.batch_size + 1]
        q, k = (
            apply_rotary_pos_emb(one, freqs, self.layout, starts, cu_seqlens=cu_seqlens)
            for one in (q, k)
        )
        y = x + self.out(self.attention(q, k, v, inference_params=cache, **given))
        return y + self.mlp(y)


class Model(torch.nn.Module):
    """Two blocks between an embedding and logits of 50 words."""

    def __init__(self, layout: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.layout = layout
        self.embedding = torch.nn.Embedding(50, HEADS * K_SIZE, dtype=dtype)
        self.blocks = torch.nn.ModuleList(Block(number, layout, dtype) for number in (1, 2))
        self.norm = fp8core.RMSNorm(HEADS * K_SIZE, params_dtype=dtype)
        self.head = fp8core.Linear(HEADS * K_SIZE, 50, bias=False, params_dtype=dtype)
        self.rotary = RotaryPositionEmbedding(K_SIZE)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)

    def forward(
        self, words: torch.Tensor, cache: InferenceParams | None = None, **given: Any
    ) -> torch.Tensor:
        x, freqs = self.embedding(words), self.rotary(16)
        for block in self.blocks:
            x = block(x, freqs, cache, **given)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def lengths_of(words: torch.Tensor) -> dict[str, torch.Tensor]:
    """The arguments of attention for one sequence."""
    ends = torch.tensor([0, len(words)], dtype=torch.int32)
    return {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}


def logits_of_whole(model: Model, words: torch.Tensor) -> torch.Tensor:
    """The logits ``[s, 50]`` of a whole sequence."""
    batch = words if model.layout == "thd" else words[None]
    batch = batch if model.layout != "sbhd" else batch.t()
    with torch.no_grad():
        y = model(batch, **lengths_of(words))
    return y.reshape(len(words), -1)


def logits_in_steps(
    model: Model, words: Sequence[torch.Tensor], schedule: Sequence[Sequence[int]], kind: str
) -> list[torch.Tensor]:
    dtype, done = model.embedding.weight.dtype, [0] * len(words)
    cache = cache_for(kind, dtype, head_dim_v=K_SIZE)
    logits: list[list[torch.Tensor]] = [[] for _ in words]
    for counts in schedule:
        cache.pre_step(OrderedDict(enumerate(counts)))
        parts = [one[at : at + n] for one, at, n in zip(words, done, counts, strict=True)]
        batch = torch.cat(parts)
        if model.layout != "thd":
            batch = torch.nn.utils.rnn.pad_sequence(parts, batch_first=model.layout == "bshd")
        with torch.inference_mode():
            y = model(batch, cache)
        if model.layout == "sbhd":
            y = y.transpose(0, 1)
        rows = y.split(list(counts)) if model.layout == "thd" else y
        for kept, row, n in zip(logits, rows, counts, strict=True):
            kept.append(row[:n])
        done = [at + n for at, n in zip(done, counts, strict=True)]
    return [torch.cat(kept) for kept in logits]


def random_words(schedule: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    return [torch.randint(50, (sum(counts),)) for counts in zip(*schedule, strict=True)]


def test_logits_of_steps_are_those_of_the_whole() -> None:
    for schedule, kind, layout in pairs(SCHEDULES, PAGES, LAYOUTS):
        model, words = Model(layout, F64).eval(), random_words(SCHEDULES[schedule])
        logits = logits_in_steps(model, words, SCHEDULES[schedule], kind)
        for got, sequence in zip(logits, words, strict=True):
            assert_close(got, logits_of_whole(model, sequence))


@pytest.mark.parametrize(("schedule", "layout"), turns(SCHEDULES, LAYOUTS))
def test_bfloat16_logits_are_within_two_steps_of_the_largest(schedule: str, layout: str) -> None:
    model, words = Model(layout, BF16).eval(), random_words(SCHEDULES[schedule])
    for got, sequence in zip(
        logits_in_steps(model, words, SCHEDULES[schedule], "rows"), words, strict=True
    ):
        want = logits_of_whole(model, sequence)
        largest = want.abs().amax(-1, keepdim=True).double()
        ulp = 2.0 ** (torch.frexp(largest).exponent - 1).double() * torch.finfo(BF16).eps
        assert bool(((got.double() - want.double()).abs() <= 2 * ulp).all())
        top = want.topk(2).values.double()
        is_clear = (top[:, 0] - top[:, 1]) > 4 * ulp[:, 0]
        assert torch.equal(got.argmax(-1)[is_clear], want.argmax(-1)[is_clear])


def decibels(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The ratio of signal to noise of each row."""
    noise = (x - like).double().square().sum(-1).clamp(min=1e-30)
    return 10 * torch.log10(like.double().square().sum(-1) / noise)


def logits_under(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits of steps and of the whole under a recipe, and of the whole in bfloat16."""
    schedule = SCHEDULES["prompt, then one by one"]
    model, words = Model("bshd", BF16), random_words(schedule)
    plain = [logits_of_whole(model.eval(), one) for one in words]
    with autocast(recipe=recipe.by_name(name)):
        model.train()(words[0][None], **lengths_of(words[0])).sum().backward()
    with autocast(recipe=recipe.by_name(name)):
        steps = logits_in_steps(model.eval(), words, schedule, "rows")
        whole = [logits_of_whole(model, one) for one in words]
    return torch.cat(steps), torch.cat(whole), torch.cat(plain)


def test_scales_that_no_other_token_enters_leave_the_logits() -> None:
    # On CUDA a product of few rows may be faster by a kernel that adds in another order,
    # so that a result lies on the other side of the edge between two codes.
    adds_alike = DEVICE.type == "cpu" or os.environ.get("FP8CORE_AUTOTUNE") == "0"
    for name in ["delayed", "rowwise", "block", "mxfp8"]:
        steps, whole, plain = logits_under(name)
        if adds_alike:
            assert float(decibels(steps, whole).min()) > 100, name
        else:
            floor = float(decibels(whole, plain).median()) - 3
            assert float(decibels(steps, whole).median()) > floor, name


def test_scales_of_a_tensor_change_logits_by_no_more_than_the_recipe() -> None:
    for name in ["current", "nvfp4"]:
        steps, whole, plain = logits_under(name)
        # both are rounded, each by its own scales: half the signal to noise ratio of either
        floor = float(decibels(whole, plain).median()) - 3
        assert float(decibels(steps, whole).median()) > floor, name
        assert float(decibels(steps, plain).median()) > floor, name


def test_generated_words_are_those_without_a_cache() -> None:
    model, prompts = Model("bshd", F64).eval(), random_words([(5, 3)])
    cache = cache_for("pages", head_dim_v=K_SIZE)
    words = [prompt.tolist() for prompt in prompts]
    batch = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    counts = [5, 3]
    for _ in range(6):
        cache.pre_step(OrderedDict(enumerate(counts)))
        with torch.inference_mode():
            last = model(batch, cache)[torch.arange(2), torch.tensor(counts) - 1]
        batch, counts = last.argmax(-1, keepdim=True), [1, 1]
        for sequence, word in zip(words, batch[:, 0].tolist(), strict=True):
            sequence.append(word)
    for prompt, sequence in zip(prompts, words, strict=True):
        known = prompt.tolist()
        for _ in range(6):
            known.append(int(logits_of_whole(model, torch.tensor(known))[-1].argmax()))
        assert sequence == known


def test_sequences_come_and_go_while_others_run() -> None:
    model = Model("bshd", F64).eval()
    cache = cache_for("rows", head_dim_v=K_SIZE)
    words = {name: torch.randint(50, (9,)) for name in "abc"}
    done = dict.fromkeys(words, 0)
    for steps in ({"a": 4, "b": 2}, {"a": 1, "b": 1}, {"c": 3, "b": 1}, {"b": 2, "c": 1}):
        cache.pre_step(steps)
        parts = [words[name][done[name] : done[name] + n] for name, n in steps.items()]
        batch = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        with torch.inference_mode():
            logits = model(batch, cache)
        for row, (name, n) in zip(logits, steps.items(), strict=True):
            before, done[name] = done[name], done[name] + n
            want = logits_of_whole(model, words[name][: done[name]])[before:]
            assert_close(row[:n], want)
    assert list(itertools.islice(cache.sequences, 2)) == ["b", "c"]
