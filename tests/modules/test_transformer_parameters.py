"""The parameters of TransformerLayer: names, shapes, first values, and one weight for several."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fp8core import MultiheadAttention, TransformerLayer
from tests.modules.transformer_oracle import (
    F64,
    FFN,
    HEADS,
    NO_DROPOUT,
    OPTIONS,
    Arguments,
    B,
    H,
    S,
    new_layer,
    shaken,
    states,
)

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


def fused(layer: torch.nn.Module, interleaved: bool) -> dict[str, torch.Tensor]:
    """Return the state of a layer whose query, key and value are one weight."""
    state = dict(layer.state_dict())
    prefix = "self_attention.layernorm_qkv"
    groups = state[f"{prefix}.key_weight"].shape[0] // (H // HEADS)
    for kind in ("weight", "bias"):
        parts = [state.pop(f"{prefix}.{part}_{kind}") for part in ("query", "key", "value")]
        if interleaved:
            parts = [part.unflatten(0, (groups, -1)) for part in parts]
        joined = torch.cat(parts, dim=1 if interleaved else 0)
        state[f"{prefix}.{kind}"] = joined.flatten(0, 1) if interleaved else joined
    return state


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("groups", [4, 2])
def test_fused_projections_compute_the_same(groups: int, interleaved: bool) -> None:
    split = new_layer(num_gqa_groups=groups)
    one = new_layer(num_gqa_groups=groups, fuse_qkv_params=True, qkv_weight_interleaved=interleaved)
    one.load_state_dict(fused(split, interleaved))
    x = states()
    torch.testing.assert_close(one(x), split(x))


@pytest.mark.parametrize("interleaved", [True, False])
def test_fused_projections_of_cross_attention_compute_the_same(interleaved: bool) -> None:
    make = partial(MultiheadAttention, H, HEADS, attention_type="cross", attn_mask_type="no_mask")
    make = partial(make, attention_dropout=0.0, params_dtype=F64, num_gqa_groups=2)
    split = shaken(make())
    one = make(fuse_qkv_params=True, qkv_weight_interleaved=interleaved)
    state = dict(split.state_dict())
    for kind in ("weight", "bias"):
        parts = [state.pop(f"key_value.{part}_{kind}") for part in ("key", "value")]
        if interleaved:
            parts = [part.unflatten(0, (2, -1)) for part in parts]
        joined = torch.cat(parts, dim=1 if interleaved else 0)
        state[f"key_value.{kind}"] = joined.flatten(0, 1) if interleaved else joined
    one.load_state_dict(state)
    encoded = states(S + 2, B, H, seed=3)
    got, want = (one_(states(), encoder_output=encoded) for one_ in (one, split))
    torch.testing.assert_close(got, want)


NAMES: dict[str, tuple[Arguments, str]] = {
    "encoder": (
        {},
        "self_attention.layernorm_qkv.layer_norm_weight "
        "self_attention.layernorm_qkv.layer_norm_bias "
        "self_attention.layernorm_qkv.query_weight self_attention.layernorm_qkv.key_weight "
        "self_attention.layernorm_qkv.value_weight self_attention.layernorm_qkv.query_bias "
        "self_attention.layernorm_qkv.key_bias self_attention.layernorm_qkv.value_bias "
        "self_attention.proj.weight self_attention.proj.bias "
        "layernorm_mlp.layer_norm_weight layernorm_mlp.layer_norm_bias layernorm_mlp.fc1_weight "
        "layernorm_mlp.fc1_bias layernorm_mlp.fc2_weight layernorm_mlp.fc2_bias",
    ),
    "fused": (
        {"fuse_qkv_params": True, "bias": False, "normalization": "RMSNorm"},
        "self_attention.layernorm_qkv.layer_norm_weight self_attention.layernorm_qkv.weight "
        "self_attention.proj.weight layernorm_mlp.layer_norm_weight layernorm_mlp.fc1_weight "
        "layernorm_mlp.fc2_weight",
    ),
    "post_ln": (
        {"output_layernorm": True, "bias": False, "qk_norm_type": "RMSNorm"},
        "self_attention.qkv.query_weight self_attention.qkv.key_weight "
        "self_attention.qkv.value_weight self_attention.q_norm.weight self_attention.k_norm.weight "
        "self_attention.proj.weight layernorm_mlp.layer_norm_weight layernorm_mlp.layer_norm_bias "
        "layernorm_mlp.fc1_weight layernorm_mlp.fc2_weight layernorm.weight layernorm.bias",
    ),
    "decoder": (
        {"layer_type": "decoder", "bias": False, "normalization": "RMSNorm"},
        "self_attention.layernorm_qkv.layer_norm_weight self_attention.layernorm_qkv.query_weight "
        "self_attention.layernorm_qkv.key_weight self_attention.layernorm_qkv.value_weight "
        "self_attention.proj.weight inter_attention.layernorm_query.layer_norm_weight "
        "inter_attention.layernorm_query.query_weight inter_attention.key_value.key_weight "
        "inter_attention.key_value.value_weight inter_attention.proj.weight "
        "layernorm_mlp.layer_norm_weight layernorm_mlp.fc1_weight layernorm_mlp.fc2_weight",
    ),
}


def test_parameter_names_are_transformer_engine_s() -> None:
    for case in NAMES:
        arguments, names = NAMES[case]
        layer = TransformerLayer(H, FFN, HEADS, device="meta", **arguments)
        assert {name for name, _ in layer.named_parameters()} == set(names.split()), case


def test_parameter_shapes() -> None:
    layer = TransformerLayer(H, FFN, HEADS, 2, kv_channels=16, activation="swiglu", device="meta")
    shapes = {name: tuple(own.shape) for name, own in layer.named_parameters()}
    assert shapes["self_attention.layernorm_qkv.query_weight"] == (HEADS * 16, H)
    assert shapes["self_attention.layernorm_qkv.key_weight"] == (2 * 16, H)
    assert shapes["self_attention.proj.weight"] == (H, HEADS * 16)
    assert shapes["layernorm_mlp.fc1_weight"] == (2 * FFN, H)


def test_a_query_projection_without_norm_is_one_weight() -> None:
    layer = MultiheadAttention(H, HEADS, attention_type="cross", bias=False, device="meta")
    names = [name for name, _ in layer.named_parameters()]
    expected = ["query_layer.weight", "key_value.key_weight", "key_value.value_weight"]
    assert names == [*expected, "proj.weight"]


@pytest.mark.parametrize("option", ["pre_ln", "decoder"])
def test_transformer_engine_s_state_dict_loads(option: str) -> None:
    saved, fresh = (
        new_layer(**OPTIONS[option]),
        TransformerLayer(H, FFN, HEADS, params_dtype=F64, **NO_DROPOUT, **OPTIONS[option]),
    )
    state = dict(saved.state_dict())
    attentions = ["self_attention", *(["inter_attention"] if option == "decoder" else [])]
    for prefix in attentions:
        linears = (
            ["layernorm_qkv"] if prefix == "self_attention" else ["layernorm_query", "key_value"]
        )
        for child in (*linears, "core_attention", "proj"):
            state[f"{prefix}.{child}._extra_state"] = torch.zeros(0, dtype=torch.uint8)
    state["layernorm_mlp._extra_state"] = torch.zeros(0, dtype=torch.uint8)
    fresh.load_state_dict(state, strict=True)
    for name, value in saved.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value)


def test_init_methods_fill_what_they_are_for() -> None:
    layer = TransformerLayer(
        H,
        FFN,
        HEADS,
        layer_type="decoder",
        init_method=torch.nn.init.ones_,
        output_layer_init_method=torch.nn.init.zeros_,
    )
    for name, own in layer.named_parameters():
        if own.dim() == 2:
            is_output = name.endswith(("proj.weight", "fc2_weight"))
            assert (own == (0 if is_output else 1)).all(), name
