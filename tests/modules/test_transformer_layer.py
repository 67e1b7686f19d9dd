"""TransformerLayer and MultiheadAttention: what they compute, what they draw, what they refuse.

Values are compared with a layer written in plain float64 torch (:class:`Plain`), which reads the
same parameters by their names.
"""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional

import fp8core
from fp8core import (
    InferenceParams,
    MultiheadAttention,
    OperandError,
    RecipeError,
    RotaryPositionEmbedding,
    TransformerLayer,
    UnsupportedError,
    autocast,
    checkpoint,
    explain,
    recipe,
)
from tests.chain import fused_toy

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

H, FFN, HEADS, S, B = 32, 48, 4, 6, 3
F64 = torch.float64
NO_DROPOUT: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
STATELESS = [None, *(name for name in recipe.names() if name != "delayed")]

Arguments = dict[str, Any]


def by_name(name: str | None) -> recipe.Recipe | None:
    return None if name is None else recipe.by_name(name)


def shaken(module: torch.nn.Module) -> torch.nn.Module:
    """Move the parameters away from their first values, so that a norm or bias is no identity."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, dtype=F64), alpha=0.2)
    return module


def made(dtype: torch.dtype = F64, **arguments: Any) -> TransformerLayer:
    torch.manual_seed(0)
    given = {**NO_DROPOUT, **arguments}
    return shaken(TransformerLayer(H, FFN, HEADS, params_dtype=dtype, **given))  # type: ignore[return-value]


def states(*shape: int, seed: int = 2, dtype: torch.dtype = F64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape or (S, B, H), generator=generator, dtype=F64).to(dtype)


class Plain:
    """A layer in torch's own operations, in sbhd, from a state_dict and the layer's arguments."""

    def __init__(self, layer: torch.nn.Module, **arguments: Any) -> None:
        self.state = dict(layer.state_dict())
        self.arguments = arguments

    def norm(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        gamma, beta = self.state[weight], self.state.get(weight.replace("weight", "bias"))
        if self.arguments.get("zero_centered_gamma"):
            gamma = gamma + 1
        if self.arguments.get("normalization") == "RMSNorm":
            return functional.rms_norm(x, x.shape[-1:], gamma, 1e-5)
        return functional.layer_norm(x, x.shape[-1:], gamma, beta, 1e-5)

    def linear(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        return functional.linear(
            x, self.state[weight], self.state.get(weight.replace("weight", "bias"))
        )

    def attention(
        self, prefix: str, x: torch.Tensor, encoded: torch.Tensor | None, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the attention's output and its normalized input."""
        first = "layernorm_qkv" if encoded is None else "layernorm_query"
        normed = x
        if f"{prefix}.{first}.layer_norm_weight" in self.state:
            normed = self.norm(x, f"{prefix}.{first}.layer_norm_weight")
        else:
            first = "qkv"
        second, source = (first, normed) if encoded is None else ("key_value", encoded)
        projections = (
            self.linear(normed, f"{prefix}.{first}.query_weight"),
            self.linear(source, f"{prefix}.{second}.key_weight"),
            self.linear(source, f"{prefix}.{second}.value_weight"),
        )
        q, k, v = (rows.unflatten(-1, (-1, H // HEADS)).permute(1, 2, 0, 3) for rows in projections)
        q, k = self.positioned(q, k)
        k, v = (one.repeat_interleave(HEADS // one.shape[1], 1) for one in (k, v))
        logits = q @ k.mT / math.sqrt(H // HEADS)
        if causal:
            logits = logits.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
        mixed = (logits.softmax(-1) @ v).permute(2, 0, 1, 3).flatten(-2)
        return self.linear(mixed, f"{prefix}.proj.weight"), normed

    def positioned(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.arguments.get("qk_norm_before_rope")
        steps = [self.qk_normed, self.rotated] if before else [self.rotated, self.qk_normed]
        for step in steps:
            q, k = step(q, "q_norm"), step(k, "k_norm")
        return q, k

    def qk_normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        kind, size = self.arguments.get("qk_norm_type"), x.shape[-1:]
        weight = self.state.get(f"self_attention.{name}.weight")
        if kind == "L2Normalization":
            return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()
        if kind == "RMSNorm":
            return functional.rms_norm(x, size, weight, 1e-6)
        if kind == "LayerNorm":
            bias = self.state[f"self_attention.{name}.bias"]
            return functional.layer_norm(x, size, weight, bias, 1e-6)
        return x

    def rotated(self, x: torch.Tensor, _: str) -> torch.Tensor:
        angles = self.arguments.get("rotary_pos_emb")
        if angles is None:
            return x
        angles = angles[: x.shape[-2], 0, 0].to(F64)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    def mlp(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self.norm(x, "layernorm_mlp.layer_norm_weight")
        inner = self.linear(normed, "layernorm_mlp.fc1_weight")
        if self.arguments.get("activation") == "swiglu":
            gate, value = inner.chunk(2, -1)
            inner = functional.silu(gate) * value
        else:
            inner = functional.gelu(inner, approximate="tanh")
        return self.linear(inner, "layernorm_mlp.fc2_weight"), normed

    def __call__(self, x: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        keeps_norm = self.arguments.get("apply_residual_connection_post_layernorm")
        branch, normed = self.attention("self_attention", x, None, causal=True)
        if self.arguments.get("parallel_attention_mlp"):
            return x + branch + self.mlp(x)[0]
        is_normed = keeps_norm and not self.arguments.get("output_layernorm")
        x = branch + (normed if is_normed else x)
        if encoded is not None:
            branch, normed = self.attention("inter_attention", x, encoded, causal=False)
            x = branch + (normed if keeps_norm else x)
        branch, normed = self.mlp(x)
        x = branch + (normed if keeps_norm else x)
        return self.norm(x, "layernorm.weight") if self.arguments.get("output_layernorm") else x


OPTIONS: dict[str, Arguments] = {
    "pre_ln": {},
    "rms_swiglu": {"normalization": "RMSNorm", "activation": "swiglu", "bias": False},
    "zero_centered": {"zero_centered_gamma": True},
    "groups": {"num_gqa_groups": 2},
    "one_group": {"num_gqa_groups": 1},
    "post_ln": {"output_layernorm": True},
    "residual_of_norm": {"apply_residual_connection_post_layernorm": True},
    "post_ln_residual_of_norm": {
        "output_layernorm": True,
        "apply_residual_connection_post_layernorm": True,
    },
    "parallel": {"parallel_attention_mlp": True},
    "decoder": {"layer_type": "decoder"},
    "decoder_groups": {"layer_type": "decoder", "num_gqa_groups": 2},
    "decoder_residual_of_norm": {
        "layer_type": "decoder",
        "apply_residual_connection_post_layernorm": True,
    },
    **{
        f"{kind}_{'before' if before else 'after'}_rope": {
            "qk_norm_type": kind,
            "qk_norm_before_rope": before,
        }
        for kind in ("RMSNorm", "LayerNorm", "L2Normalization")
        for before in (False, True)
    },
}


def runs(option: str) -> tuple[TransformerLayer, Arguments, Plain]:
    """Return the layer, the tensors of a call beside hidden_states, and the same in torch."""
    arguments, call = OPTIONS[option], {}
    layer = made(**arguments)
    if "rope" in option:
        call["rotary_pos_emb"] = RotaryPositionEmbedding(H // HEADS)(S)
    plain = Plain(layer, **arguments, **call)
    if arguments.get("layer_type") == "decoder":
        call["encoder_output"] = states(S + 2, B, H, seed=3)
    return layer, call, plain


@pytest.mark.parametrize("option", OPTIONS)
def test_equals_the_layer_in_torch(option: str) -> None:
    layer, call, plain = runs(option)
    x = states().requires_grad_()
    want = plain(x, call.get("encoder_output"))
    (want_grad,) = torch.autograd.grad(want.square().sum(), x)
    got = layer(x, **call)
    (got_grad,) = torch.autograd.grad(got.square().sum(), x)
    # float64: sums of up to 48 products of size 10, through four layers.
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("option", ["pre_ln", "post_ln", "parallel", "decoder"])
def test_every_parameter_gets_a_gradient(option: str) -> None:
    layer, call, _ = runs(option)
    layer(states(), **call).square().sum().backward()
    without = [name for name, own in layer.named_parameters() if own.grad is None]
    assert without == []


def test_the_encoder_gets_a_gradient() -> None:
    layer, call, _ = runs("decoder")
    encoded = call["encoder_output"].requires_grad_()
    layer(states(), encoder_output=encoded).square().sum().backward()
    assert encoded.grad is not None
    assert encoded.grad.abs().max() > 0


def test_layouts_agree() -> None:
    x = states()
    want = made()(x)
    batch_first = made(attn_input_format="bshd")(x.transpose(0, 1))
    torch.testing.assert_close(batch_first.transpose(0, 1), want)
    tokens, ends = x.transpose(0, 1).reshape(B * S, H), torch.arange(B + 1, dtype=torch.int32) * S
    packed = made(attn_input_format="thd", self_attn_mask_type="padding_causal")(
        tokens, cu_seqlens_q=ends, max_seqlen_q=S
    )
    torch.testing.assert_close(packed.view(B, S, H).transpose(0, 1), want)


@pytest.mark.parametrize("is_rotated", [True, False])
def test_backward_holds_no_more_of_the_heads_than_it_reads(is_rotated: bool) -> None:
    layer = made().self_attention
    x = torch.randn(S, B, H, dtype=layer.proj.weight.dtype, requires_grad=True)
    given = {"rotary_pos_emb": RotaryPositionEmbedding(H // HEADS)(S)} if is_rotated else {}
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(tensor), tensor)[1], lambda tensor: tensor
    ):
        layer(x, **given)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved}
    read = dict.fromkeys(storages, 0)
    for one in {(one.data_ptr(), one.numel()): one for one in saved}.values():
        read[one.untyped_storage().data_ptr()] += one.numel() * one.element_size()
    assert read == storages


def test_rotary_halves_or_neighbours() -> None:
    x = states()
    angles = RotaryPositionEmbedding(H // HEADS, interleaved=True)(S)
    halves = made()(x, rotary_pos_emb=RotaryPositionEmbedding(H // HEADS)(S))
    neighbours = made(rotary_pos_interleaved=True)(x, rotary_pos_emb=angles)
    assert not torch.allclose(halves, neighbours)
    # The same turns for columns in another order, which queries and keys share.
    permuted = made(rotary_pos_interleaved=True)
    order = torch.arange(H).view(HEADS, 2, -1).transpose(1, 2).reshape(-1)
    with torch.no_grad():
        for name in ("query_weight", "key_weight", "query_bias", "key_bias"):
            own = getattr(permuted.self_attention.layernorm_qkv, name)
            own.copy_(own[order].clone())
    torch.testing.assert_close(permuted(x, rotary_pos_emb=angles), halves)


# ---- generation ----


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("option", ["pre_ln", "groups", "RMSNorm_after_rope", "decoder"])
def test_steps_with_a_cache_equal_the_full_forward(option: str, layout: str) -> None:
    layer = made(**OPTIONS[option], attn_input_format=layout).eval()
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


def test_prompts_of_different_lengths_share_a_batch() -> None:
    layer = made(attn_input_format="bshd").eval()
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


def test_two_layers_of_one_number_are_refused() -> None:
    first, second = (made(attn_input_format="bshd", layer_number=number) for number in (1, 1))
    cache = InferenceParams(B, S, HEADS, H // HEADS, F64)
    cache.pre_step(OrderedDict(enumerate([S] * B)))
    with torch.no_grad():
        x = first(states(B, S, H), inference_params=cache)
        with pytest.raises(OperandError, match="two layers have layer_number=1"):
            second(x, inference_params=cache)


def test_a_cache_that_was_reset_serves_another_model() -> None:
    cache = InferenceParams(B, S, HEADS, H // HEADS, F64)
    outputs = []
    for layer in (made(attn_input_format="bshd"), made(attn_input_format="bshd")):
        cache.pre_step(OrderedDict(enumerate([S] * B)))
        with torch.no_grad():
            outputs.append(layer(states(B, S, H), inference_params=cache))
        cache.reset()
    assert torch.equal(*outputs)


# ---- sequences of different lengths ----


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_shorter_sequences_do_not_see_their_padding(layout: str) -> None:
    layer = made(attn_input_format=layout, self_attn_mask_type="padding_causal")
    angles = RotaryPositionEmbedding(H // HEADS)(S)
    x, lengths = states(B, S, H), [S, 2, 4]
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    alone = made()
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
        layer = made(torch.bfloat16, output_layernorm=True)
        with autocast(enabled=name is not None, recipe=by_name(name)):
            return layer(states(dtype=torch.bfloat16))

    want = run()
    with fused_toy.installed("add_norm") as calls:
        got = run()
    assert torch.equal(got, want)
    assert calls["add_norm"] == 1


def test_padding_between_packed_sequences_moves_no_position() -> None:
    layer = made(attn_input_format="thd", self_attn_mask_type="padding_causal")
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


# ---- parameters ----


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
    split = made(num_gqa_groups=groups)
    one = made(num_gqa_groups=groups, fuse_qkv_params=True, qkv_weight_interleaved=interleaved)
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


@pytest.mark.parametrize("case", NAMES)
def test_parameter_names_are_transformer_engine_s(case: str) -> None:
    arguments, names = NAMES[case]
    layer = TransformerLayer(H, FFN, HEADS, device="meta", **arguments)
    assert {name for name, _ in layer.named_parameters()} == set(names.split())


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
        made(**OPTIONS[option]),
        TransformerLayer(H, FFN, HEADS, params_dtype=F64, **NO_DROPOUT, **OPTIONS[option]),
    )
    state = dict(saved.state_dict())
    attentions = ["self_attention", *(["inter_attention"] if option == "decoder" else [])]
    for prefix in attentions:
        linears = (
            ["layernorm_qkv"] if prefix == "self_attention" else ["layernorm_query", "key_value"]
        )
        for child in (*linears, "core_attention", "proj"):
            state[f"{prefix}.{child}._extra_state"] = torch.zeros(3, dtype=torch.uint8)
    state["layernorm_mlp._extra_state"] = torch.zeros(3, dtype=torch.uint8)
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


# ---- MultiheadAttention by itself ----


def attention(**arguments: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    given = {"attention_dropout": 0.0, "params_dtype": F64, "input_layernorm": True, **arguments}
    return shaken(MultiheadAttention(H, HEADS, **given))  # type: ignore[return-value]


def test_returned_bias_is_not_added() -> None:
    want = attention()(states())
    output, bias = attention(return_bias=True)(states())
    torch.testing.assert_close(output + bias, want)


def test_return_order_is_output_bias_norm() -> None:
    layer = attention(return_bias=True, return_layernorm_output=True)
    output, bias, normed = layer(states())
    assert bias is layer.proj.bias
    assert output.shape == normed.shape == (S, B, H)
    _, alone = attention(return_layernorm_output=True)(states())
    torch.testing.assert_close(alone, normed)
    plain = Plain(layer)
    weight = "layernorm_qkv.layer_norm_weight"
    torch.testing.assert_close(normed, plain.norm(states(), weight))


def test_without_a_norm_there_is_none_to_return() -> None:
    layer = attention(input_layernorm=False, return_layernorm_output=True)
    assert isinstance(layer(states()), torch.Tensor)


# ---- random numbers ----


def test_a_seed_repeats_dropout() -> None:
    layer = made(hidden_dropout=0.5, attention_dropout=0.5, drop_path_rate=0.3)
    results = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        results.append(layer(states()))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_evaluation_drops_nothing() -> None:
    layer = made(hidden_dropout=0.5, attention_dropout=0.5, drop_path_rate=0.5).eval()
    assert torch.equal(layer(states()), made()(states()))


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("option", ["pre_ln", "post_ln", "parallel"])
def test_a_recompute_draws_the_same(option: str, use_reentrant: bool) -> None:
    drops = {"hidden_dropout": 0.3, "attention_dropout": 0.3, "drop_path_rate": 0.3}
    layer = made(torch.float32, **OPTIONS[option], **drops)

    def gradients(run: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        layer.zero_grad()
        x = states(dtype=torch.float32).requires_grad_()
        torch.manual_seed(5)
        with autocast(recipe=recipe.Float8CurrentScaling()):
            y = run(x)
        torch.randn(3)  # the recompute restores the generators
        y.square().sum().backward()
        return [y.detach(), x.grad, *(own.grad for own in layer.parameters())]

    again = gradients(lambda x: checkpoint(layer, x, use_reentrant=use_reentrant))
    for got, want in zip(again, gradients(layer), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_a_dropped_path_is_a_sample_s(layout: str) -> None:
    num, rate = 64, 0.4
    layer = made(drop_path_rate=rate, attn_input_format=layout)
    assert layer.drop_path is not None
    shape = {"sbhd": (2, num, H), "bshd": (num, 2, H), "thd": (2 * num, H)}[layout]
    ends = torch.arange(num + 1, dtype=torch.int32) * 2
    torch.manual_seed(3)
    dropped = layer.drop_path(torch.ones(shape, dtype=F64), ends)
    samples = {"sbhd": 1, "bshd": 0, "thd": 0}[layout]
    by_sample = dropped.movedim(samples, 0).reshape(num, -1)
    assert all(row.unique().numel() == 1 for row in by_sample)
    torch.testing.assert_close(by_sample.unique(), torch.tensor([0, 1 / (1 - rate)], dtype=F64))
    kept = (by_sample[:, 0] > 0).double().mean().item()
    assert abs(kept - (1 - rate)) < 4 * math.sqrt(rate * (1 - rate) / num)


def test_hidden_dropout_has_its_rate() -> None:
    layer = made(hidden_dropout=0.25, parallel_attention_mlp=True)
    x = states(64, 8, H)
    zeros = (layer(x) == x).double().mean().item()  # where the branch was dropped
    assert abs(zeros - 0.25) < 4 * math.sqrt(0.25 * 0.75 / x.numel())


# ---- precision ----


@pytest.mark.parametrize("name", STATELESS)
def test_a_recipe_reaches_the_linear_layers_alone(name: str | None) -> None:
    layer = made(torch.bfloat16)
    x = states(dtype=torch.bfloat16)
    with autocast(enabled=name is not None, recipe=by_name(name)):
        y = layer(x)
    exact = x.double()
    want = Plain(copy.deepcopy(layer).double())(exact)
    noise = ((y.double() - want).norm() / (want - exact).norm()).item()
    # bfloat16 inputs and weights; FP8 at 4 % a product, FP4 at 12 %, over two branches
    assert noise < {None: 0.02, "nvfp4": 0.4}.get(name, 0.15)
    if name is not None:
        assert noise > 0.005


@pytest.mark.parametrize("kind", [recipe.DelayedScaling, recipe.Float8CurrentScaling])
def test_attention_takes_the_recipe_if_that_says_so(kind: type[recipe.Recipe]) -> None:
    outputs = []
    for flag in (False, True):
        layer = made(torch.bfloat16)
        x = states(dtype=torch.bfloat16).requires_grad_()
        with autocast(recipe=kind(fp8_dpa=flag)):
            y = checkpoint(layer, x, use_reentrant=False) if flag else layer(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        assert all(own.grad is not None for own in layer.parameters())
        outputs.append(y.double())
    branch = (outputs[0] - states(dtype=torch.bfloat16)).norm()
    assert 0 < (outputs[1] - outputs[0]).norm() < 0.1 * branch


def test_first_and_later_microbatches_agree() -> None:
    layer, x = made(torch.bfloat16), states(dtype=torch.bfloat16)
    with autocast(recipe=recipe.Float8CurrentScaling()):
        first, later = (layer(x, is_first_microbatch=flag) for flag in (True, False))
        with torch.no_grad():
            layer.layernorm_mlp.fc1_weight.mul_(2)
        with pytest.raises(OperandError, match="is_first_microbatch"):
            layer(x, is_first_microbatch=False)
    assert torch.equal(first, later)


def test_torch_autocast_decides_the_dtype() -> None:
    layer = made(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(states(dtype=torch.float32))
    assert y.dtype == torch.bfloat16


def test_checkpointed_core_attention_computes_the_same() -> None:
    layer = made(attention_dropout=0.3)
    results = []
    for flag in (False, True):
        layer.zero_grad()
        torch.manual_seed(4)
        y = layer(states(), checkpoint_core_attention=flag)
        y.square().sum().backward()
        results.append([y.detach(), *(own.grad.clone() for own in layer.parameters())])
    for got, want in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_quantized_weights_need_one_weight_for_query_key_and_value() -> None:
    chosen = recipe.Float8CurrentScaling()
    with fp8core.quantized_model_init(recipe=chosen):
        layer = TransformerLayer(H, FFN, HEADS, fuse_qkv_params=True, params_dtype=torch.bfloat16)
        with pytest.raises(UnsupportedError, match="fuse_qkv_params=True"):
            TransformerLayer(H, FFN, HEADS)
    quantized = [n for n, p in layer.named_parameters() if isinstance(p, fp8core.QuantizedTensor)]
    assert len(quantized) == 4
    with autocast(recipe=chosen):
        layer(states(dtype=torch.bfloat16)).sum().backward()


def test_main_grad_accumulates_with_one_weight() -> None:
    layer = TransformerLayer(
        H, FFN, HEADS, fuse_qkv_params=True, fuse_wgrad_accumulation=True, **NO_DROPOUT
    )
    weights = [own for own in layer.parameters() if own.dim() == 2]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
    layer(states(dtype=torch.float32)).square().sum().backward()
    assert all(weight.grad is None and weight.main_grad.any() for weight in weights)


# ---- whole-model tools ----


def test_explain_names_every_layer_and_attention() -> None:
    model = fp8core.prepare(torch.nn.ModuleList([made(torch.bfloat16)]))
    text = str(explain(model, recipe.Float8CurrentScaling()))
    names = ("layernorm_qkv", "core_attention", "proj")
    for name in (*(f"0.self_attention.{own}" for own in names), "0.layernorm_mlp"):
        assert name in text


def test_a_name_reaches_the_children() -> None:
    layer = TransformerLayer(H, FFN, HEADS, name="layers.3", layer_type="decoder", device="meta")
    assert layer.self_attention.layernorm_qkv.name == "layers.3.self_attention.layernorm_qkv"
    assert layer.inter_attention.key_value.name == "layers.3.inter_attention.key_value"
    assert layer.self_attention.core_attention.name == "layers.3.self_attention.core_attention"
    assert layer.layernorm_mlp.name == "layers.3.layernorm_mlp"


def test_a_copy_computes_the_same() -> None:
    layer = made()
    assert torch.equal(copy.deepcopy(layer)(states()), layer(states()))


def test_a_layer_on_meta_gets_memory_and_values() -> None:
    layer = TransformerLayer(H, FFN, HEADS, device="meta", **NO_DROPOUT)
    assert layer(torch.empty(S, B, H, device="meta")).shape == (S, B, H)
    layer.to_empty(device="cpu")
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    y = layer(states(dtype=torch.float32))
    assert y.isfinite().all()


@pytest.mark.parametrize("name", [None, "current"])
def test_a_compiled_layer_computes_the_same(name: str | None) -> None:
    layer, x = made(torch.bfloat16), states(dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for run in (layer, compiled):
        layer.zero_grad()
        own = x.clone().requires_grad_()
        with autocast(enabled=name is not None, recipe=by_name(name)):
            y = run(own)
        y.float().square().sum().backward()
        results.append([y.detach(), own.grad, *(p.grad.clone() for p in layer.parameters())])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


def test_the_layer_of_the_documentation_runs(caplog: pytest.LogCaptureFixture) -> None:
    te = fp8core
    layer = te.TransformerLayer(
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=16,
        num_gqa_groups=8,
        layernorm_epsilon=1e-5,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        self_attn_mask_type="causal",
        normalization="RMSNorm",
        activation="swiglu",
    )
    fp8_recipe = recipe.DelayedScaling()
    hidden_states = torch.randn(8, 2, 64)
    for attention_mask in (None, torch.zeros(2, 1, 1, 8, dtype=torch.bool)):
        for _ in range(2):
            with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
                output = layer(hidden_states, attention_mask)
            output.sum().backward()
    ignored = [record for record in caplog.records if "attention_mask" in record.getMessage()]
    assert len(ignored) == 1


# ---- what is refused ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tp_group": object()}, r"tp_group=.*expected a torch.distributed process group"),
        ({"get_rng_state_tracker": object()}, "expected a function that returns a tracker"),
        ({"tp_size": 3}, "the 3 ranks of its group do not divide it"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_ranks_that_do_not_fit_are_refused(arguments: Arguments, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        TransformerLayer(H, FFN, HEADS, device="meta", set_parallel_mode=True, **arguments)


def test_overlap_in_buffers_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match=r"TransformerLayer\(ub_tp_comm_overlap="):
        TransformerLayer(H, FFN, HEADS, device="meta", ub_tp_comm_overlap=True)


@pytest.mark.parametrize("name", ["ub_overlap_ag", "ub_bulk_wgrad"])
def test_distribution_of_attention_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=rf"MultiheadAttention\({name}=True"):
        MultiheadAttention(H, HEADS, device="meta", **{name: True})


def test_options_of_one_rank_are_taken() -> None:
    TransformerLayer(
        H, FFN, HEADS, device="meta", set_parallel_mode=True, ub_overlap_ag=False, tp_size=1
    )
    MultiheadAttention(H, HEADS, device="meta", set_parallel_mode=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_gqa_groups": 3}, OperandError, r"num_gqa_groups=3.*1, 2, 4"),
        ({"num_attention_heads": 5}, OperandError, r"num_attention_heads=5.*kv_channels"),
        ({"num_attention_heads": 0}, OperandError, r"num_attention_heads=0"),
        ({"kv_channels": -1}, OperandError, r"kv_channels=-1"),
        ({"hidden_dropout": 1.0}, OperandError, r"hidden_dropout=1.0"),
        ({"attention_dropout": -0.1}, OperandError, r"attention_dropout=-0.1"),
        ({"drop_path_rate": 1.0}, OperandError, r"rate=1.0"),
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
    ],
    ids=lambda value: "-".join(map(str, value.items())) if isinstance(value, dict) else "",
)
def test_wrong_arguments_are_named_errors(
    arguments: Arguments, error: type[Exception], message: str
) -> None:
    given = {"num_attention_heads": HEADS, **arguments}
    with pytest.raises(error, match=message):
        TransformerLayer(H, FFN, device="meta", **given)


def test_an_unknown_attention_type_lists_the_known() -> None:
    with pytest.raises(RecipeError, match="self, cross"):
        MultiheadAttention(H, HEADS, attention_type="croos", device="meta")


def test_a_decoder_without_an_encoder_is_refused() -> None:
    with pytest.raises(OperandError, match="encoder_output is None"):
        made(layer_type="decoder")(states())
    with pytest.raises(OperandError, match="encoder_output is None"):
        attention(attention_type="cross")(states())


@pytest.mark.parametrize("name", ["encoder_output", "enc_dec_attn_mask"])
def test_an_encoder_refuses_what_it_would_not_use(name: str) -> None:
    with pytest.raises(OperandError, match=rf"{name} is given.*layer_type='decoder'"):
        made()(states(), **{name: states()})


def test_self_attention_refuses_an_encoder_s_output() -> None:
    with pytest.raises(OperandError, match="attention_type='cross'"):
        attention()(states(), encoder_output=states())


def test_a_wrong_hidden_size_names_both() -> None:
    with pytest.raises(OperandError, match=rf"k={H + 1}"):
        made()(states(S, B, H + 1))


def test_dropped_paths_of_packed_sequences_need_their_ends() -> None:
    layer = made(drop_path_rate=0.5, attn_input_format="thd", self_attn_mask_type="padding")
    assert layer.drop_path is not None
    with pytest.raises(OperandError, match="cu_seqlens_q"):
        layer.drop_path(states(S, H), None)


@pytest.mark.parametrize("layer_type", ["encoder", "decoder"])
@pytest.mark.parametrize("shape", [(0, 2, 32), (5, 0, 32)])
def test_no_tokens_give_none_and_zero_gradients(
    layer_type: str, shape: tuple[int, int, int]
) -> None:
    layer = made(layer_type=layer_type)
    given = states(*shape).requires_grad_()
    encoded = states(3, shape[1], 32) if layer_type == "decoder" else None
    output = layer(given, encoder_output=encoded)
    assert output.shape == shape
    output.sum().backward()
    assert given.grad is not None
    assert not any(p.grad.any() for p in layer.parameters() if p.grad is not None)


@pytest.mark.parametrize("given", [None, [1.0]])
def test_hidden_states_that_are_no_tensor_are_named(given: Any) -> None:
    with pytest.raises(OperandError, match=r"hidden_states is .*; expected a torch\.Tensor"):
        made()(given)


@pytest.mark.parametrize("number", [1, 3])
def test_angles_are_one_tensor_or_two(number: int) -> None:
    angles = (torch.zeros(4, 1, 1, 8),) * number
    with pytest.raises(OperandError, match=f"rotary_pos_emb is a tuple of {number}; expected"):
        made()(states(4, 2, 32), rotary_pos_emb=angles)
