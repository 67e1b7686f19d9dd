"""A converted model of transformers that generates: one query a sequence by the kernel."""

from __future__ import annotations

import copy
import inspect
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.utils import counters
from transformers import CompileConfig, LlamaConfig, LlamaForCausalLM, StaticCache

import fp8core
from fp8core import use_backend
from fp8core_backends.cuda.attention_cached import SingleQueryAttention
from tests.backends.cuda.cuda_cases import DEVICE

pytestmark = pytest.mark.needs_accelerator("cuda")

CAPACITY, LAYERS = 96, 2
_NAMES = inspect.signature(transformers.LlamaModel.forward).parameters
CACHE = "cache" if "cache" in _NAMES else "past_key_values"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by the capacity of each call of the kernel."""
    capacities: list[int] = []
    run = SingleQueryAttention.__call__

    def noting(self: Any, q: Any, k: Any, v: Any, **keywords: Any) -> Any:
        capacities.append(k.shape[1])
        return run(self, q, k, v, **keywords)

    monkeypatch.setattr(SingleQueryAttention, "__call__", noting)
    return capacities


def model_of(dtype: torch.dtype = torch.bfloat16) -> Any:
    """A model whose attention tells keys apart."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": LAYERS},
        **{"max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2},
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        for name in ("q_proj", "k_proj"):
            nn.init.normal_(getattr(layer.self_attn, name).weight, 0.0, 0.1)
    return model.to(DEVICE, dtype).eval()


def prompt(batch: int = 3, length: int = 70) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and their mask, with padding on the left of the first sequence."""
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 256, (batch, length), generator=source)
    mask = torch.ones_like(tokens)
    mask[0, :37] = 0
    return tokens.to(DEVICE), mask.to(DEVICE)


def test_a_token_is_as_near_to_float64_as_by_sdpa(calls: list[int]) -> None:
    """With the products of both in FP8; the worst row."""
    tokens, mask = prompt()
    longer = torch.nn.functional.pad(mask, (0, 1), value=1)
    logits = []
    exact = model_of().double()
    for kind in ("exact", "kernel", "sdpa"):
        model = exact if kind == "exact" else model_of()
        if kind != "exact":
            fp8core.convert(model, "current")
        cache = StaticCache(config=model.config, max_cache_len=CAPACITY)
        chosen = use_backend(attention="reference") if kind == "sdpa" else nullcontext()
        with torch.no_grad(), chosen:
            model(tokens, attention_mask=mask, **{CACHE: cache})
            y = model(tokens[:, :1], attention_mask=longer, **{CACHE: cache}).logits
        logits.append(y.double())
    assert calls == [CAPACITY] * LAYERS
    kernel, sdpa = ((y - logits[0]).norm(dim=-1).max() for y in logits[1:])
    assert 0 < kernel <= 1.1 * sdpa


def test_one_graph_serves_the_steps_of_a_static_cache(calls: list[int]) -> None:
    tokens, _ = prompt()
    model = model_of()
    fp8core.quantize_(model, "current")
    token = tokens[:, :1].clone()
    results: list[list[torch.Tensor]] = []
    for captures in (False, True):
        cache = StaticCache(config=model.config, max_cache_len=CAPACITY)

        def step() -> torch.Tensor:
            with torch.no_grad():
                y: torch.Tensor = model(token, **{CACHE: cache}).logits  # noqa: B023  used here
            return y

        with torch.no_grad():
            model(tokens, **{CACHE: cache})
        graph = torch.cuda.CUDAGraph()
        if captures:
            step()
            for layer in cache.layers:
                layer.cumulative_length.sub_(1)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                logits = step()
        results.append([])
        for at in range(5):
            token.copy_(tokens[:, at : at + 1])
            if captures:
                graph.replay()
            else:
                logits = step()
            results[-1].append(logits.clone())
    assert len(calls) == LAYERS * (5 + 2)
    for eager, replayed in zip(*results, strict=True):
        torch.testing.assert_close(replayed, eager, atol=2**-5, rtol=2**-5)
    assert not torch.equal(*results[1][:2])


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
def test_generate_compiles_one_graph_of_a_token(calls: list[int]) -> None:
    tokens, mask = prompt()
    model = model_of()
    fp8core.quantize_(model, "current")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    options |= {"cache_implementation": "static", "eos_token_id": None, "pad_token_id": 0}
    want = model.generate(tokens, **options, disable_compile=True)
    assert len(calls) == LAYERS * 5
    torch._dynamo.reset()
    counters.clear()
    compiled = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    got = model.generate(tokens, **options, compile_config=compiled)
    assert torch.equal(got, want)
    assert len(calls) == 2 * LAYERS * 5
    assert counters["stats"]["unique_graphs"] == 1
    other = copy.deepcopy(model)
    with use_backend(attention="reference"):
        sdpa = other.generate(tokens, **options, disable_compile=True)
    assert len(calls) == 2 * LAYERS * 5
    assert torch.equal(sdpa[:, :71], want[:, :71])
    torch._dynamo.reset()
