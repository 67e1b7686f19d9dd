"""A generation on a device: no token builds a plan or waits, and none meets what others left."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch

from fp8core import (
    InferenceParams,
    RotaryPositionEmbedding,
    TransformerLayer,
    autocast,
    quantized_model_init,
    recipe,
)
from fp8core_backends.cuda.attention_plans import Graphs
from tests.backends.cuda.cuda_cases import DEVICE, nothing_waits
from tests.backends.cuda.generation import (
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


@pytest.mark.parametrize(("kind", "layout", "options"), pairs(PAGES, LAYOUTS, OPTIONS))
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


@pytest.mark.parametrize("name", [None, "current"])
def test_a_token_through_a_transformer_layer_does_not_wait(name: str | None) -> None:
    """In high precision, and with weights that are stored quantized."""
    chosen = None if name is None else recipe.by_name(name)
    with quantized_model_init(enabled=name is not None, recipe=chosen):
        layers = [
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
    angles = RotaryPositionEmbedding(SIZE)(CAPACITY).to(DEVICE)
    cache = InferenceParams(2, CAPACITY, GROUPS, SIZE, torch.bfloat16, device=DEVICE)

    def step(x: torch.Tensor) -> None:
        cache.pre_step(OrderedDict.fromkeys("ab", x.shape[1]))
        with torch.no_grad(), autocast(enabled=name is not None, recipe=chosen):
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
