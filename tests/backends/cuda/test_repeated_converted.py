"""A converted layer with its attention as one chain on a device: recorded whole, with the bits of
programs that run each time, and as near to the model as two chains around its own attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fp8core
from fp8core import recipe
from fp8core.chain import series
from fp8core.chain.repeated import Repeated
from fp8core.conversion import decoder

transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    # A gradient is accumulated on the stream of its first step.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
NAMES = ("delayed", "current", "block")
SEQUENCES, LENGTH = 2, 128
LENGTHS = (LENGTH, LENGTH // 2) * 4
"""Of the steps: a direction is recorded in its third at the latest, and repeated behind that."""
SIZES: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2},
    **{"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 256},
}


def llama(name: str) -> Any:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    report = fp8core.convert(model.bfloat16().train(), name)
    assert not report.apart
    return model


@contextmanager
def run_each_time() -> Iterator[None]:
    """Have programs run each time, instead of being recorded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(series, "Repeated", lambda program, *others: program)
        yield


def step(model: Any, seed: int, length: int = LENGTH) -> list[torch.Tensor]:
    """Return the logits, all gradients, and the delayed states afterwards."""
    torch.manual_seed(100 + seed)
    tokens = torch.randint(256, (SEQUENCES, length), device="cuda")
    model.zero_grad()
    logits = model(tokens, use_cache=False).logits
    logits.float().square().mean().backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    return [logits.detach(), *grads, *(one.clone() for one in model.buffers())]


def recorded(model: Any) -> list[tuple[bool, bool]]:
    """Return for each layer and number of rows whether forward and backward are recorded."""
    wholes = [vars(layer)[decoder._CHAINS].whole for layer in model.model.layers]
    chains = [links for whole in wholes for links, *_ in whole._chains.values()]
    programs = [one for chain in chains for one in chain._programs.values()]
    return [one.is_recorded for one in programs if isinstance(one, Repeated)]


@pytest.mark.parametrize("name", NAMES)
def test_a_repeated_layer_has_the_bits_of_its_program(name: str) -> None:
    model, judge = llama(name), llama(name)
    for seed, length in enumerate(LENGTHS):
        with run_each_time():
            expected = step(judge, seed, length)
        for ours, theirs in zip(step(model, seed, length), expected, strict=True):
            assert torch.equal(ours, theirs)
    assert recorded(model) == [(True, True)] * 4
    assert recorded(judge) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_as_near_to_the_model_as_two_chains_are(name: str) -> None:
    model, apart, own = llama(name), llama(name), llama(name)
    fp8core.unconvert(own)
    results = [step(model, 0)[0], step(own, 0)[0]]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        results.append(step(apart, 0)[0])
    assert recorded(apart) == []
    errors = [(each.float() - results[1].float()).norm() for each in (results[0], results[2])]
    assert errors[0] <= 1.05 * errors[1]


def held_and_peak(step: Callable[[], torch.Tensor]) -> tuple[int, int]:
    """Return the bytes that the sixth call of ``step`` holds for backward beside its result, and
    the most that it and backward add."""
    for _ in range(6):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = step()
        held = torch.cuda.memory_allocated() - before - y.nbytes
        y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]  # torch's
        del y
        peak = torch.cuda.max_memory_allocated() - before
    return held, peak


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_holds_what_a_transformer_layer_holds(name: str) -> None:
    model = llama(name)
    layer, hidden, heads = model.model.layers[0], SIZES["hidden_size"], SIZES["num_attention_heads"]
    options: dict[str, Any] = {
        **{"num_gqa_groups": SIZES["num_key_value_heads"], "normalization": "RMSNorm"},
        **{"activation": "swiglu", "bias": False, "attn_input_format": "bshd"},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True},
        **{"qkv_weight_interleaved": False, "params_dtype": torch.bfloat16, "device": "cuda"},
    }
    own = fp8core.TransformerLayer(hidden, SIZES["intermediate_size"], heads, **options)
    length = 8 * LENGTH
    x = torch.randn(SEQUENCES, length, hidden, dtype=torch.bfloat16, device="cuda").requires_grad_()
    pair = model.model.rotary_emb(x, torch.arange(length, device="cuda")[None])
    angles = fp8core.RotaryPositionEmbedding(hidden // heads)(length).cuda()

    def converted() -> torch.Tensor:
        y = layer(x, attention_mask=None, position_embeddings=pair)
        return y  # type: ignore[no-any-return]  # transformers'

    def of_library() -> torch.Tensor:
        with fp8core.autocast(recipe=recipe.by_name(name)):
            y: torch.Tensor = own(x, rotary_pos_emb=angles)
        return y

    (held, peak), (held_by_own, peak_of_own) = held_and_peak(converted), held_and_peak(of_library)
    assert recorded(model) == [(True, True)]
    print(f"{name}: held {held} and {held_by_own}, peak {peak} and {peak_of_own}")
    # Scales of three weights more, each in memory of its own; a tensor of tokens has more bytes.
    assert held <= held_by_own + angles.nbytes + (64 << 10)
