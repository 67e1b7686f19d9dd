"""TransformerLayer and MultiheadAttention: what they compute and what they draw."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch

import fp8core
from fp8core import (
    MultiheadAttention,
    RotaryPositionEmbedding,
    TransformerLayer,
    UnsupportedError,
    autocast,
    checkpoint,
    explain,
    recipe,
    reporting,
)
from tests.device import DEVICE
from tests.modules.transformer_oracle import (
    F64,
    FFN,
    HEADS,
    NO_DROPOUT,
    OPTIONS,
    STATELESS,
    Arguments,
    B,
    H,
    Plain,
    S,
    by_name,
    layer_and_oracle,
    new_attention,
    new_layer,
    shaken,
    states,
)

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work


@pytest.mark.parametrize("option", OPTIONS)
def test_equals_the_layer_in_torch(option: str) -> None:
    layer, call, plain = layer_and_oracle(option)
    x = states().requires_grad_()
    want = plain(x, call.get("encoder_output"))
    (want_grad,) = torch.autograd.grad(want.square().sum(), x)
    got = layer(x, **call)
    (got_grad,) = torch.autograd.grad(got.square().sum(), x)
    # float64: sums of up to 48 products of size 10, through four layers.
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(got_grad, want_grad, rtol=1e-8, atol=1e-8)


def test_every_parameter_gets_a_gradient() -> None:
    for option in ["pre_ln", "post_ln", "parallel", "decoder"]:
        layer, call, _ = layer_and_oracle(option)
        layer(states(), **call).square().sum().backward()
        without = [name for name, own in layer.named_parameters() if own.grad is None]
        assert without == [], option


def test_the_encoder_gets_a_gradient() -> None:
    layer, call, _ = layer_and_oracle("decoder")
    encoded = call["encoder_output"].requires_grad_()
    layer(states(), encoder_output=encoded).square().sum().backward()
    assert encoded.grad is not None
    assert encoded.grad.abs().max() > 0


def test_layouts_agree() -> None:
    x = states()
    want = new_layer()(x)
    batch_first = new_layer(attn_input_format="bshd")(x.transpose(0, 1))
    torch.testing.assert_close(batch_first.transpose(0, 1), want)
    tokens, ends = x.transpose(0, 1).reshape(B * S, H), torch.arange(B + 1, dtype=torch.int32) * S
    packed = new_layer(attn_input_format="thd", self_attn_mask_type="padding_causal")(
        tokens, cu_seqlens_q=ends, max_seqlen_q=S
    )
    torch.testing.assert_close(packed.view(B, S, H).transpose(0, 1), want)


@pytest.mark.parametrize("is_rotated", [True, False])
def test_backward_holds_no_more_of_the_heads_than_it_reads(is_rotated: bool) -> None:
    layer = new_layer().self_attention
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
    halves = new_layer()(x, rotary_pos_emb=RotaryPositionEmbedding(H // HEADS)(S))
    neighbours = new_layer(rotary_pos_interleaved=True)(x, rotary_pos_emb=angles)
    assert not torch.allclose(halves, neighbours)
    # The same turns for columns in another order, which queries and keys share.
    permuted = new_layer(rotary_pos_interleaved=True)
    order = torch.arange(H).view(HEADS, 2, -1).transpose(1, 2).reshape(-1)
    with torch.no_grad():
        for name in ("query_weight", "key_weight", "query_bias", "key_bias"):
            own = getattr(permuted.self_attention.layernorm_qkv, name)
            own.copy_(own[order].clone())
    torch.testing.assert_close(permuted(x, rotary_pos_emb=angles), halves)


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


# ---- MultiheadAttention by itself ----


def test_returned_bias_is_not_added() -> None:
    want = new_attention()(states())
    output, bias = new_attention(return_bias=True)(states())
    torch.testing.assert_close(output + bias, want)


def test_return_order_is_output_bias_norm() -> None:
    layer = new_attention(return_bias=True, return_layernorm_output=True)
    output, bias, normed = layer(states())
    assert bias is layer.proj.bias
    assert output.shape == normed.shape == (S, B, H)
    _, alone = new_attention(return_layernorm_output=True)(states())
    torch.testing.assert_close(alone, normed)
    plain = Plain(layer)
    weight = "layernorm_qkv.layer_norm_weight"
    torch.testing.assert_close(normed, plain.norm(states(), weight))


def test_without_a_norm_there_is_none_to_return() -> None:
    layer = new_attention(input_layernorm=False, return_layernorm_output=True)
    assert isinstance(layer(states()), torch.Tensor)


# ---- random numbers ----


def test_a_seed_repeats_dropout() -> None:
    layer = new_layer(hidden_dropout=0.5, attention_dropout=0.5, drop_path_rate=0.3)
    results = []
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        results.append(layer(states()))
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


def test_evaluation_drops_nothing() -> None:
    layer = new_layer(hidden_dropout=0.5, attention_dropout=0.5, drop_path_rate=0.5).eval()
    assert torch.equal(layer(states()), new_layer()(states()))


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
def test_a_dropped_path_is_a_sample_s(layout: str) -> None:
    num, rate = 64, 0.4
    layer = new_layer(drop_path_rate=rate, attn_input_format=layout)
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


def test_a_block_that_is_always_dropped_leaves_the_residual() -> None:
    for drops in ["hidden_dropout", "drop_path_rate"]:
        layer = new_layer(**{drops: 1.0})
        x = states(2, 4, H).requires_grad_()
        y = layer(x)
        y.sum().backward()
        assert torch.equal(y, x), drops
        assert torch.equal(x.grad, torch.ones_like(x)), drops


def test_hidden_dropout_has_its_rate() -> None:
    layer = new_layer(hidden_dropout=0.25, parallel_attention_mlp=True)
    x = states(64, 8, H)
    zeros = (layer(x) == x).double().mean().item()  # where the branch was dropped
    assert abs(zeros - 0.25) < 4 * math.sqrt(0.25 * 0.75 / x.numel())


# ---- precision ----


@pytest.mark.parametrize("name", STATELESS)
def test_a_recipe_reaches_the_linear_layers_alone(name: str | None) -> None:
    layer = new_layer(torch.bfloat16)
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
        layer = new_layer(torch.bfloat16)
        x = states(dtype=torch.bfloat16).requires_grad_()
        with autocast(recipe=kind(fp8_dpa=flag)):
            y = checkpoint(layer, x, use_reentrant=False) if flag else layer(x)
        y.float().square().sum().backward()
        assert x.grad is not None
        assert all(own.grad is not None for own in layer.parameters())
        outputs.append(y.double())
    branch = (outputs[0] - states(dtype=torch.bfloat16)).norm()
    assert 0 < (outputs[1] - outputs[0]).norm() < 0.1 * branch


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
    model = fp8core.prepare(torch.nn.ModuleList([new_layer(torch.bfloat16)]))
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


def test_a_layer_on_meta_gets_memory_and_values() -> None:
    layer = TransformerLayer(H, FFN, HEADS, device="meta", **NO_DROPOUT)
    assert layer(torch.empty(S, B, H, device="meta")).shape == (S, B, H)
    layer.to_empty(device=DEVICE)
    for module in layer.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    y = layer(states(dtype=torch.float32))
    assert y.isfinite().all()


def test_the_layer_of_the_documentation_runs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_logged", set())
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


# ---- its parameters: names, shapes, first values, and one weight for several ----


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
