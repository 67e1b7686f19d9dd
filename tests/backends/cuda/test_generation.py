"""A generation on a device: no token builds a plan or waits, and none meets what others left."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch._dynamo.utils import counters

from fp8core import (
    InferenceParams,
    OperandError,
    RotaryPositionEmbedding,
    TransformerLayer,
    autocast,
    make_graphed_callables,
    quantize_,
    quantized_model_init,
)
from fp8core_backends.cuda.attention_plans import Graphs
from tests.backends.cuda.cuda_cases import DEVICE, nothing_waits
from tests.backends.cuda.generation import (
    CACHES,
    CAPACITY,
    GROUPS,
    HEADS,
    LAYOUTS,
    OPTIONS,
    PAGES,
    SIZE,
    STEPS,
    Generation,
)
from tests.backends.cuda.test_attention import bound, desc_of
from tests.pairs import pairs

pytestmark = pytest.mark.needs_accelerator("cuda")


@pytest.fixture(autouse=True)
def frontend() -> None:
    """Skip where cuDNN's frontend is not installed."""
    bound(desc_of("padding"))


@pytest.mark.parametrize(("kind", "layout", "options"), pairs(CACHES, LAYOUTS, OPTIONS))
def test_sequences_that_come_and_go_have_the_results_of_the_reference(
    kind: str, layout: str, options: str
) -> None:
    native, judge = (Generation(layout, kind, DEVICE, **OPTIONS[options]) for _ in range(2))
    for seed, (counts, nan_in) in enumerate(STEPS):
        got = native.step(counts, "cudnn", seed, nan_in)
        want = judge.step(counts, "reference", seed, nan_in)
        for ours, theirs in zip(got, want, strict=True):
            for name in counts:
                if name != nan_in:
                    torch.testing.assert_close(ours[name], theirs[name], atol=2**-6, rtol=2**-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_builds_no_plan_and_does_not_wait(layout: str) -> None:
    generation = Generation(layout, "rows", DEVICE)
    generation.step({"a": 9, "b": 5}, "cudnn", seed=0)
    tokens = {"thd": (2,), "bshd": (2, 1), "sbhd": (1, 2)}[layout]
    qkv = [
        torch.randn(*tokens, heads, SIZE, device=DEVICE).bfloat16()
        for heads in (HEADS, GROUPS, GROUPS)
    ]

    def step() -> None:
        generation.cache.pre_step(OrderedDict(a=1, b=1))
        with torch.no_grad():
            generation.attended(qkv)

    for _ in range(2):
        step()
    before = Graphs.built
    with nothing_waits():
        for _ in range(20):
            step()
    assert Graphs.built == before


def decoder(name: str | None) -> list[TransformerLayer]:
    """Two layers in high precision, or with weights that are stored in a recipe."""
    with quantized_model_init(enabled=name is not None, recipe=name):
        return [
            TransformerLayer(
                *(256, 512, HEADS),
                num_gqa_groups=GROUPS,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                fuse_qkv_params=True,
                attn_input_format="bshd",
                layer_number=1 + at,
                params_dtype=torch.bfloat16,
                device=DEVICE,
            ).eval()
            for at in range(2)
        ]


@pytest.mark.parametrize("name", [None, "current"])
def test_a_token_through_a_transformer_layer_does_not_wait(name: str | None) -> None:
    """In high precision, and with weights that are stored quantized."""
    layers = decoder(name)
    angles = RotaryPositionEmbedding(SIZE)(CAPACITY).to(DEVICE)
    cache = InferenceParams(2, CAPACITY, GROUPS, SIZE, torch.bfloat16, device=DEVICE)

    def step(x: torch.Tensor) -> None:
        cache.pre_step(OrderedDict.fromkeys("ab", x.shape[1]))
        with torch.no_grad(), autocast(enabled=name is not None, recipe=name):
            for layer in layers:
                x = layer(x, inference_params=cache, rotary_pos_emb=angles)
        assert x.shape[-1] == 256

    prompt, token = (torch.randn(2, length, 256, device=DEVICE).bfloat16() for length in (8, 1))
    step(prompt)
    for _ in range(3):
        step(token)
    before = Graphs.built
    with nothing_waits():
        for _ in range(10):
            step(token)
    assert Graphs.built == before


class Step(torch.nn.Module):
    """A token of each sequence of a cache, through layers."""

    def __init__(self, layers: list[TransformerLayer], cache: InferenceParams) -> None:
        super().__init__()
        self.layers, self.cache = torch.nn.ModuleList(layers), cache
        self.angles = RotaryPositionEmbedding(SIZE)(CAPACITY).to(DEVICE)
        self.counts = torch.ones(2, dtype=torch.int32, device=DEVICE)

    def begin(self, prompt: torch.Tensor) -> torch.Tensor:
        self.cache.pre_step({"a": 9, "b": 5})
        return self.through(prompt)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, inference_params=self.cache, rotary_pos_emb=self.angles)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cache.pre_step(self.counts)
        return self.through(x)


@pytest.mark.parametrize(("kind", "name"), [("rows", None), ("rows", "current"), ("pages", None)])
def test_a_graphed_step_has_the_results_of_eager_steps(kind: str, name: str | None) -> None:
    """In rows bit for bit; of pages a graph reads as many as there may be, in another order."""
    layers = decoder(name)
    prompt, *tokens = (torch.randn(2, n, 256, device=DEVICE).bfloat16() for n in (9, *[1] * 40))
    results: list[list[torch.Tensor]] = [[], []]
    for is_graphed in (False, True):
        options = {"device": DEVICE, **PAGES[kind]}
        cache = InferenceParams(2, CAPACITY, GROUPS, SIZE, torch.bfloat16, **options)
        step = Step(layers, cache)
        with torch.no_grad(), autocast(enabled=name is not None, recipe=name):
            step.begin(prompt)
            if is_graphed:
                chosen = {"enabled": name is not None, "recipe": name}
                make_graphed_callables(step, (tokens[0].clone(),), **chosen)
                assert cache.sequences == {"a": 9, "b": 5}
            for token in tokens:
                if not is_graphed:
                    cache.pre_step({"a": 1, "b": 1})
                y = step(token) if is_graphed else step.through(token)
                results[is_graphed].append(y.clone())
        assert cache.sequences == {"a": 49, "b": 45}
    for eager, graphed in zip(*results, strict=True):
        if kind == "rows":
            assert torch.equal(eager, graphed)
        else:
            torch.testing.assert_close(eager, graphed, rtol=2**-5, atol=2**-4)
    with torch.no_grad(), nothing_waits():
        for _ in range(CAPACITY - 49 + 2):
            y = step(tokens[0])
    assert y[1].isfinite().all()
    with pytest.raises(OperandError, match="sequence 'a' of 64 tokens is full"):
        cache.pre_step({"b": 1})
    assert cache.sequences == {"a": 64, "b": 62}


def test_a_step_of_numbers_on_the_host_is_not_captured() -> None:
    cache = InferenceParams(1, CAPACITY, GROUPS, SIZE, torch.bfloat16, device=DEVICE)
    cache.pre_step({"a": 1})
    new = torch.zeros(1, 1, GROUPS, SIZE, device=DEVICE).bfloat16()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        new.add_(1)
        with pytest.raises(OperandError, match=r"captured\. Give it a tensor"):
            cache.pre_step({"a": 1})
        with pytest.raises(OperandError, match=r"captured\. Make a step"):
            cache.step(1, new, new, "bshd")
    cache.step(1, new, new, "bshd")


@pytest.mark.filterwarnings("ignore")  # of transformers and of torch's compiler
def test_a_stored_model_of_transformers_generates_in_graphs_of_torch() -> None:
    """Compiled by ``generate`` itself; one graph serves tokens and prompts of every length."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, **heads)
    model = transformers.LlamaForCausalLM(config).to(DEVICE, torch.bfloat16).eval()
    quantize_(model, "rowwise")
    words = torch.randint(256, (2, 9), device=DEVICE)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static"}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    torch._dynamo.reset()
    counters.clear()
    for length in (9, 5):
        prompt = words[:, :length]
        inputs = {**options, "inputs": prompt, "attention_mask": torch.ones_like(prompt)}
        eager = model.generate(**inputs, disable_compile=True)
        compiled = model.generate(**inputs)
        assert torch.equal(eager.logits[0], compiled.logits[0])  # prompts are not compiled
        torch.testing.assert_close(eager.logits[1], compiled.logits[1], rtol=2**-4, atol=2**-4)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["inductor"]["cudagraph_skips"]
    torch._dynamo.reset()
