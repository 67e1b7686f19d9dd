"""TransformerLayer with a cache of keys and values, and with sequences of different lengths."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from fp8core import (
    InferenceParams,
    RotaryPositionEmbedding,
    UnsupportedError,
    autocast,
)
from tests.chain import fused_toy
from tests.modules.transformer_oracle import (
    F64,
    HEADS,
    OPTIONS,
    STATELESS,
    B,
    H,
    S,
    by_name,
    new_layer,
    states,
)
from tests.pairs import turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


# ---- generation ----


@pytest.mark.parametrize(
    ("option", "layout"),
    turns(["pre_ln", "groups", "RMSNorm_after_rope", "decoder"], ["sbhd", "bshd"]),
)
def test_steps_with_a_cache_equal_the_full_forward(option: str, layout: str) -> None:
    layer = new_layer(**OPTIONS[option], attn_input_format=layout).eval()
    call: dict[str, Any] = {"rotary_pos_emb": RotaryPositionEmbedding(H // HEADS)(S + 2)}
    x, batch_dim = states(), 1
    if option == "decoder":
        call["encoder_output"] = states(S + 2, B, H, seed=3)
    if layout == "bshd":
        x, batch_dim = x.transpose(0, 1), 0
        if "encoder_output" in call:
            call["encoder_output"] = call["encoder_output"].transpose(0, 1)
    cache = InferenceParams(B, S, OPTIONS[option].get("num_gqa_groups", HEADS), H // HEADS, F64)
    steps = []
    with torch.no_grad():
        for new in x.split([3, 1, 2], dim=1 - batch_dim):
            cache.pre_step(OrderedDict((row, new.shape[1 - batch_dim]) for row in range(B)))
            steps.append(layer(new, inference_params=cache, **call))
        full = layer(x, **call)
    torch.testing.assert_close(torch.cat(steps, dim=1 - batch_dim), full, rtol=1e-11, atol=1e-11)


def test_a_step_refuses_positions_in_cross_attention() -> None:
    for call, asked in [
        ({"core_attention_bias_type": "alibi"}, "ALiBi"),
        ({"enc_dec_window_size": (2, 1)}, r"window \(2, 1\)"),
        ({"enc_dec_attn_mask_type": "causal_bottom_right"}, r"causal mask or window \(-1, 0\)"),
    ]:
        layer = new_layer(**OPTIONS["decoder"], attn_input_format="bshd").eval()
        cache = InferenceParams(B, S, HEADS, H // HEADS, F64)
        cache.pre_step(OrderedDict((row, 1) for row in range(B)))
        with torch.no_grad(), pytest.raises(UnsupportedError, match=f"{asked} in cross attention"):
            layer(states(B, 1, H), encoder_output=states(B, S, H), inference_params=cache, **call)


def test_prompts_of_different_lengths_share_a_batch() -> None:
    layer = new_layer(attn_input_format="bshd").eval()
    angles = RotaryPositionEmbedding(H // HEADS)(S)
    x, lengths = states(B, S, H), [5, 3, 1]
    cache = InferenceParams(B, S, HEADS, H // HEADS, F64)
    with torch.no_grad():
        cache.pre_step(OrderedDict(enumerate(lengths)))
        first = layer(x, inference_params=cache, rotary_pos_emb=angles)
        cache.pre_step(OrderedDict((row, 1) for row in range(B)))
        new = torch.stack([x[row, length] for row, length in enumerate(lengths)])[:, None]
        second = layer(new, inference_params=cache, rotary_pos_emb=angles)
        full = layer(x, rotary_pos_emb=angles)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(first[row, :length], full[row, :length])
        torch.testing.assert_close(second[row, 0], full[row, length])


def test_a_cache_that_was_reset_serves_another_model() -> None:
    cache = InferenceParams(B, S, HEADS, H // HEADS, F64)
    outputs = []
    for layer in (new_layer(attn_input_format="bshd"), new_layer(attn_input_format="bshd")):
        cache.pre_step(OrderedDict(enumerate([S] * B)))
        with torch.no_grad():
            outputs.append(layer(states(B, S, H), inference_params=cache))
        cache.reset()
    assert torch.equal(*outputs)


# ---- sequences of different lengths ----


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_shorter_sequences_do_not_see_their_padding(layout: str) -> None:
    layer = new_layer(attn_input_format=layout, self_attn_mask_type="padding_causal")
    angles = RotaryPositionEmbedding(H // HEADS)(S)
    x, lengths = states(B, S, H), [S, 2, 4]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    alone = new_layer()
    want = [
        alone(x[row, :length, None], rotary_pos_emb=angles)[:, 0]
        for row, length in enumerate(lengths)
    ]
    if layout == "thd":
        tokens = torch.cat([x[row, :length] for row, length in enumerate(lengths)])
        got = layer(tokens, rotary_pos_emb=angles, cu_seqlens_q=ends, max_seqlen_q=S)
        torch.testing.assert_close(got, torch.cat(want))
        return
    given = x.transpose(0, 1) if layout == "sbhd" else x
    got = layer(given, rotary_pos_emb=angles, cu_seqlens_q=ends)
    got = got.transpose(0, 1) if layout == "sbhd" else got
    for row, length in enumerate(lengths):
        torch.testing.assert_close(got[row, :length], want[row])


@pytest.mark.parametrize("name", STATELESS)
def test_the_last_residual_of_a_post_ln_layer_is_added_with_the_norm(name: str | None) -> None:
    def run() -> torch.Tensor:
        torch.manual_seed(0)  # of stochastic rounding
        layer = new_layer(torch.bfloat16, output_layernorm=True)
        with autocast(enabled=name is not None, recipe=by_name(name)):
            return layer(states(dtype=torch.bfloat16))

    want = run()
    with fused_toy.installed("add_norm") as calls:
        got = run()
    assert torch.equal(got, want)
    assert calls["add_norm"] == 1


def test_padding_between_packed_sequences_moves_no_position() -> None:
    layer = new_layer(attn_input_format="thd", self_attn_mask_type="padding_causal")
    angles = RotaryPositionEmbedding(H // HEADS)(S)
    x, lengths = states(2, S, H), [2, 4]
    want = layer(
        torch.cat([x[0, :2], x[1, :4]]),
        rotary_pos_emb=angles,
        cu_seqlens_q=torch.tensor([0, 2, 6], dtype=torch.int32),
    )
    got = layer(
        x.flatten(0, 1),
        rotary_pos_emb=angles,
        cu_seqlens_q=torch.tensor([0, 2, 6], dtype=torch.int32),
        cu_seqlens_q_padded=torch.tensor([0, S, 2 * S], dtype=torch.int32),
    ).view(2, S, H)
    kept = torch.cat([got[row, :length] for row, length in enumerate(lengths)])
    torch.testing.assert_close(kept, want)
