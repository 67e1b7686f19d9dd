"""The arguments and inputs that TransformerLayer and MultiheadAttention refuse."""

from __future__ import annotations

import pytest
import torch

from fp8core import (
    MultiheadAttention,
    OperandError,
    RecipeError,
    TransformerLayer,
    UnsupportedError,
)
from tests.modules.transformer_oracle import (
    FFN,
    HEADS,
    B,
    H,
    S,
    new_attention,
    new_layer,
    states,
)

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


def test_arguments_of_ranks_that_do_not_fit_are_refused() -> None:
    for arguments, message in [
        ({"tp_group": object()}, r"tp_group=.*expected a torch.distributed process group"),
        ({"get_rng_state_tracker": object()}, "expected a function that returns a tracker"),
        ({"tp_size": 3}, "the 3 ranks of its group do not divide it"),
    ]:
        with pytest.raises(OperandError, match=message):
            TransformerLayer(H, FFN, HEADS, device="meta", set_parallel_mode=True, **arguments)


def test_overlap_in_buffers_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"TransformerLayer\(ub_tp_comm_overlap="):
        TransformerLayer(H, FFN, HEADS, device="meta", ub_tp_comm_overlap=True)


def test_distribution_of_attention_is_refused_by_name() -> None:
    for name in ["ub_overlap_ag", "ub_bulk_wgrad"]:
        with pytest.raises(UnsupportedError, match=rf"MultiheadAttention\({name}=True"):
            MultiheadAttention(H, HEADS, device="meta", **{name: True})


def test_options_of_one_rank_are_taken() -> None:
    TransformerLayer(
        H, FFN, HEADS, device="meta", set_parallel_mode=True, ub_overlap_ag=False, tp_size=1
    )
    MultiheadAttention(H, HEADS, device="meta", set_parallel_mode=True)


def test_wrong_arguments_are_named_errors() -> None:
    for arguments, error, message in [
        ({"num_gqa_groups": 3}, OperandError, r"num_gqa_groups=3.*1, 2, 4"),
        ({"num_attention_heads": 5}, OperandError, r"num_attention_heads=5.*kv_channels"),
        ({"num_attention_heads": 0}, OperandError, r"num_attention_heads=0"),
        ({"kv_channels": -1}, OperandError, r"kv_channels=-1"),
        ({"hidden_dropout": 1.1}, OperandError, r"hidden_dropout=1.1"),
        ({"attention_dropout": -0.1}, OperandError, r"attention_dropout=-0.1"),
        ({"drop_path_rate": 1.1}, OperandError, r"drop_path_rate=1.1"),
        ({"drop_path_rate": None}, OperandError, r"drop_path_rate=None"),
        ({"layer_type": "decode"}, RecipeError, r"encoder, decoder.*Did you mean 'decoder'"),
        ({"normalization": "rms"}, RecipeError, r"LayerNorm, RMSNorm"),
        ({"activation": "gulu"}, RecipeError, r"gelu"),
        ({"qk_norm_type": "L2"}, RecipeError, r"L2Normalization, RMSNorm, LayerNorm"),
        ({"self_attn_mask_type": "casual"}, (RecipeError, OperandError), r"causal"),
        ({"attn_input_format": "bhsd"}, (RecipeError, OperandError), r"bshd"),
        ({"softmax_type": "soft"}, (RecipeError, OperandError), r"vanilla"),
        ({"fuse_wgrad_accumulation": True}, UnsupportedError, r"fuse_qkv_params=True"),
        ({"parallel_attention_mlp": True, "layer_type": "decoder"}, OperandError, r"layer_type"),
        ({"parallel_attention_mlp": True, "output_layernorm": True}, OperandError, r"output_"),
        (
            {"parallel_attention_mlp": True, "apply_residual_connection_post_layernorm": True},
            OperandError,
            r"apply_residual_connection_post_layernorm",
        ),
    ]:
        given = {"num_attention_heads": HEADS, **arguments}
        with pytest.raises(error, match=message):
            TransformerLayer(H, FFN, device="meta", **given)


def test_an_unknown_attention_type_lists_the_known() -> None:
    with pytest.raises(RecipeError, match="self, cross"):
        MultiheadAttention(H, HEADS, attention_type="croos", device="meta")


def test_a_decoder_without_an_encoder_is_refused() -> None:
    with pytest.raises(OperandError, match="encoder_output is None"):
        new_layer(layer_type="decoder")(states())
    with pytest.raises(OperandError, match="encoder_output is None"):
        new_attention(attention_type="cross")(states())


def test_an_encoder_refuses_what_it_would_not_use() -> None:
    for name in ["encoder_output", "enc_dec_attn_mask"]:
        with pytest.raises(OperandError, match=rf"{name} is given.*layer_type='decoder'"):
            new_layer()(states(), **{name: states()})


def test_self_attention_refuses_an_encoder_s_output() -> None:
    with pytest.raises(OperandError, match="attention_type='cross'"):
        new_attention()(states(), encoder_output=states())


def test_a_wrong_hidden_size_names_both() -> None:
    with pytest.raises(OperandError, match=rf"k={H + 1}"):
        new_layer()(states(S, B, H + 1))


def test_dropped_paths_of_packed_sequences_need_their_ends() -> None:
    layer = new_layer(drop_path_rate=0.5, attn_input_format="thd", self_attn_mask_type="padding")
    assert layer.drop_path is not None
    with pytest.raises(OperandError, match="cu_seqlens_q"):
        layer.drop_path(states(S, H), None)


@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
@pytest.mark.parametrize("shape", [(0, 2, 32), (5, 0, 32)])
def test_no_tokens_give_none_and_zero_gradients(
    layer_type: str, shape: tuple[int, int, int]
) -> None:
    layer = new_layer(layer_type=layer_type)
    given = states(*shape).requires_grad_()
    encoded = states(3, shape[1], 32) if layer_type == "decoder" else None
    output = layer(given, encoder_output=encoded)
    assert output.shape == shape
    output.sum().backward()
    assert given.grad is not None
    assert not any(p.grad.any() for p in layer.parameters() if p.grad is not None)


def test_hidden_states_that_are_no_tensor_are_named() -> None:
    for given in [None, [1.0]]:
        with pytest.raises(OperandError, match=r"hidden_states is .*; expected a torch\.Tensor"):
            new_layer()(given)


def test_angles_are_one_tensor_or_two() -> None:
    for number in [1, 3]:
        angles = (torch.zeros(4, 1, 1, 8),) * number
        with pytest.raises(OperandError, match=f"rotary_pos_emb is a tuple of {number}; expected"):
            new_layer()(states(4, 2, 32), rotary_pos_emb=angles)
