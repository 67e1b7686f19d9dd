"""Hugging Face's Llama and GPT-2 as TransformerLayers: the same logits, and the weights back."""

from __future__ import annotations

import importlib.util
import json
import re
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from fp8core import (
    InferenceParams,
    OperandError,
    TransformerLayer,
    UnsupportedError,
    autocast,
    recipe,
)
from fp8core.conversion.huggingface import (
    from_hugging_face,
    layer_arguments,
    rotary_arguments,
    to_hugging_face,
)
from tests.docs.pages import DOCS
from tests.pairs import turns

LLAMA: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}
GPT2: dict[str, Any] = {
    "vocab_size": 61,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**LLAMA),
    "llama_bias": lambda: LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True),
    "llama_heads": lambda: LlamaConfig(**{**LLAMA, "num_key_value_heads": 4}, head_dim=16),
    "llama_tied": lambda: LlamaConfig(**LLAMA, tie_word_embeddings=True),
    "llama_linear_rope": lambda: LlamaConfig(
        **LLAMA, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    ),
    "gpt2": lambda: GPT2Config(**GPT2),
    "gpt2_inner": lambda: GPT2Config(**GPT2, n_inner=40, activation_function="relu"),
}
TOKENS = torch.arange(3, 43).reshape(2, 20)


def _example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("decoder", DOCS / "examples" / "decoder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


EXAMPLE = _example()


def theirs(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return Hugging Face's model with random weights, biases and norms."""
    config = CONFIGS[name]()
    torch.manual_seed(0)
    kind = LlamaForCausalLM if name.startswith("llama") else GPT2LMHeadModel
    model = kind(config).eval()
    with torch.no_grad():
        for own in model.parameters():
            if own.dim() == 1:
                own.add_(torch.randn_like(own), alpha=0.2)
    return model.to(dtype)


def ours(model: Any) -> Any:
    """Return the same model of TransformerLayers."""
    mine = EXAMPLE.Decoder(model.config, next(model.parameters()).dtype).eval()
    mine.load_state_dict(from_hugging_face(model.state_dict(), model.config))
    return mine


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_theirs_in_float32(name: str) -> None:
    model = theirs(name)
    with torch.no_grad():
        want, got = model(TOKENS).logits, ours(model)(TOKENS)
    # float32: 2 layers with sums of up to 128 products; relative to the largest logit of the row
    error = (got - want).abs().amax(-1) / want.abs().amax(-1)
    assert error.max() < 2e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_theirs_in_bfloat16(name: str) -> None:
    model, exact = theirs(name, torch.bfloat16), theirs(name).double()
    # The same rounded weights in float64 say which of the two is nearer to the truth.
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        truth = exact(TOKENS).logits
        errors = [
            ((logits.double() - truth).norm() / truth.norm()).item()
            for logits in (ours(model)(TOKENS), model(TOKENS).logits)
        ]
    assert errors[0] < 5e-2  # some ten roundings of 2^-9 a layer, of branches larger than their sum
    assert errors[0] < 1.25 * errors[1]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradients_are_theirs(name: str) -> None:
    model = theirs(name)
    mine = ours(model)
    for one, logits in ((model, model(TOKENS).logits), (mine, mine(TOKENS))):
        one.zero_grad()
        logits.square().mean().backward()
    grads = {key: own.grad for key, own in model.named_parameters()}
    if name == "gpt2" or "lm_head.weight" not in grads:  # the head is the embedding
        grads["lm_head.weight"] = mine.head.weight.grad
        embedding = "transformer.wte.weight"
        grads[embedding] = grads[embedding] - mine.head.weight.grad
    got = {key: own.grad for key, own in mine.named_parameters()}
    for key, want in from_hugging_face(grads, model.config).items():
        # Of key biases it is rounding noise: the softmax does not change with them.
        scale = want.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(got[key] / scale, want / scale, rtol=0, atol=2e-4, msg=key)


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_come_back_bit_for_bit(name: str) -> None:
    model = theirs(name)
    for is_fused in (False, True):
        mine = from_hugging_face(model.state_dict(), model.config, fuse_qkv_params=is_fused)
        back = to_hugging_face(mine, model.config)
        assert back.keys() == model.state_dict().keys()
        for key, value in model.state_dict().items():
            assert torch.equal(back[key], value), (key, is_fused)


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_fused_projections_compute_the_same(name: str, is_interleaved: bool) -> None:
    model = theirs(name)
    states, order = model.state_dict(), {"qkv_weight_interleaved": is_interleaved}
    split = from_hugging_face(states, model.config)
    fused = from_hugging_face(states, model.config, fuse_qkv_params=True, **order)
    arguments = layer_arguments(model.config)
    x = torch.randn(5, 2, 32)
    outputs = []
    for state, extra in ((split, {}), (fused, {"fuse_qkv_params": True, **order})):
        layer = TransformerLayer(**arguments, **extra).eval()
        layer.load_state_dict(
            {k.removeprefix("layers.0."): v for k, v in state.items() if k.startswith("layers.0.")}
        )
        outputs.append(layer(x))
    torch.testing.assert_close(*outputs)
    back = to_hugging_face(fused, model.config, **order)
    assert all(torch.equal(back[key], value) for key, value in states.items())


def test_a_model_trained_with_delayed_scales_comes_back() -> None:
    model = theirs("llama")
    mine = ours(model)
    with autocast(recipe=recipe.DelayedScaling()):
        mine(TOKENS).sum().backward()
    assert any("amax_history" in key for key in mine.state_dict())
    back = to_hugging_face(mine.state_dict(), model.config)
    assert all(torch.equal(back[key], value) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["llama_tied", "gpt2"])
def test_a_model_without_a_head_loads_if_the_head_is_tied(name: str) -> None:
    model = theirs(name)
    base = model.base_model.state_dict()
    got = from_hugging_face(base, model.config)
    assert torch.equal(got["head.weight"], got["embedding.weight"])
    assert torch.equal(
        got["norm.weight"], from_hugging_face(model.state_dict(), model.config)["norm.weight"]
    )


def test_buffers_of_older_versions_are_passed_over() -> None:
    model = theirs("gpt2")
    state = {**model.state_dict(), "transformer.h.0.attn.bias": torch.ones(1, 1, 64, 64)}
    assert (
        from_hugging_face(state, model.config).keys()
        == from_hugging_face(model.state_dict(), model.config).keys()
    )


def test_a_config_is_an_object_or_its_json() -> None:
    config = CONFIGS["llama"]()
    written = json.loads(config.to_json_string())
    assert layer_arguments(written) == layer_arguments(config)
    assert rotary_arguments(written) == rotary_arguments(config)


def test_configs_of_older_versions_give_the_same_angles() -> None:
    older = {**LLAMA, "model_type": "llama", "rope_theta": 500.0}
    assert rotary_arguments(older) == {"dim": 8, "rotary_base": 500.0}
    older["rope_scaling"] = {"type": "linear", "factor": 2.0}
    assert rotary_arguments(older)["seq_len_interpolation_factor"] == 2.0


# ---- generation ----


def cached_logits(model: Any, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Return the logits of ``tokens [b, s]``: of the first ``prompt`` at once, then one by one."""
    batch, length = tokens.shape
    sizes = model.layers[0].self_attention.core_attention.heads
    dtype = model.embedding.weight.dtype
    cache = InferenceParams(batch, length, sizes.groups, sizes.head_dim, dtype)
    logits = []
    for new in tokens.split([prompt, *[1] * (length - prompt)], dim=1):
        cache.pre_step(OrderedDict((row, new.shape[1]) for row in range(batch)))
        logits.append(model(new, cache))
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_theirs(name: str) -> None:
    model = theirs(name)
    want = model.generate(
        TOKENS[:, :8], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert torch.equal(EXAMPLE.generate(ours(model), TOKENS[:, :8], 12), want)


@pytest.mark.parametrize(("name", "prompt"), [("llama", 1), ("gpt2", 7)])
def test_cached_logits_are_those_of_the_full_forward(name: str, prompt: int) -> None:
    model = ours(theirs(name, torch.float64))
    with torch.no_grad():
        full, cached = model(TOKENS), cached_logits(model, TOKENS, prompt)
    assert ((cached - full).abs().amax(-1) / full.abs().amax(-1)).max() < 1e-12


@pytest.mark.parametrize("name", ["delayed", "mxfp8"])
def test_generation_in_a_recipe_repeats(name: str) -> None:
    model = ours(theirs("llama"))
    tokens = []
    for _ in range(2):
        with autocast(recipe=recipe.by_name(name)):
            tokens.append(EXAMPLE.generate(model, TOKENS[:, :8], 6))
    assert tokens[0].shape == (2, 14)
    assert torch.equal(*tokens)


# ---- what is refused ----


def test_missing_tensors_are_named() -> None:
    state = theirs("llama").state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(OperandError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        from_hugging_face(state, CONFIGS["llama"]())


def test_a_missing_head_is_named_if_it_is_not_tied() -> None:
    model = theirs("llama")
    with pytest.raises(OperandError, match=r"lacks lm_head\.weight"):
        from_hugging_face(model.base_model.state_dict(), model.config)


def test_tensors_without_a_place_are_named() -> None:
    state = {**theirs("llama").state_dict(), "model.layers.2.mlp.up_proj.weight": torch.ones(1)}
    with pytest.raises(OperandError, match=r"layers\.2\.mlp\.up_proj\.weight.*lacks"):
        from_hugging_face(state, CONFIGS["llama"]())


def test_other_shapes_than_the_config_s_are_refused() -> None:
    state = theirs("llama").state_dict()
    config = LlamaConfig(**{**LLAMA, "intermediate_size": 40})
    with pytest.raises(OperandError, match=r"gate_proj.* is \[48, 32\]; .* says \[40, 32\]"):
        from_hugging_face(state, config)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "rows": lambda value: value[:-1],
    "columns": lambda value: value[..., :-1],
    "dimensions": lambda value: value[None],
    "type": lambda value: value.tolist(),
}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_tensor_has_the_config_s_shape(name: str) -> None:
    model = theirs(name)
    state = model.state_dict()
    for change, key in turns(CHANGES, state):
        changed = {**state, key: CHANGES[change](state[key])}
        with pytest.raises(OperandError, match=re.escape(f"from_hugging_face: {key} is ")):
            from_hugging_face(changed, model.config)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_every_parameter_has_the_config_s_shape(name: str, is_fused: bool) -> None:
    model = theirs(name)
    state = from_hugging_face(model.state_dict(), model.config, fuse_qkv_params=is_fused)
    for change, key in turns(CHANGES, state):
        changed = {**state, key: CHANGES[change](state[key])}
        with pytest.raises(OperandError, match=re.escape(f"to_hugging_face: {key} is ")):
            to_hugging_face(changed, model.config)


def test_a_projection_is_fused_or_in_parts() -> None:
    model = theirs("llama")
    parts, fused = (
        from_hugging_face(model.state_dict(), model.config, fuse_qkv_params=is_fused)
        for is_fused in (False, True)
    )
    with pytest.raises(OperandError, match="expected a fused projection or its parts"):
        to_hugging_face({**parts, **fused}, model.config)


@pytest.mark.parametrize("config", [None, "llama"])
def test_what_is_no_config_is_named(config: Any) -> None:
    with pytest.raises(OperandError, match=r"expected the config of a model"):
        layer_arguments(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mistral"}, r"'mistral'.*llama, gpt2.*fp8core\.convert"),
        ({"model_type": "llama", **LLAMA, "attention_bias": True}, "mlp_bias=False"),
        ({"model_type": "llama", **LLAMA, "hidden_act": "gelu"}, r"hidden_act='gelu'.*silu"),
        ({"model_type": "gpt2", **GPT2, "activation_function": "gelu"}, "activation_function"),
        ({"model_type": "gpt2", **GPT2, "scale_attn_weights": False}, "scale_attn_weights=False"),
        (
            {"model_type": "gpt2", **GPT2, "scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=True",
        ),
    ],
    ids=["family", "bias", "llama_activation", "gpt2_activation", "unscaled", "inverse_scale"],
)
def test_options_that_a_layer_lacks_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        layer_arguments(config)


def test_scaled_angles_are_refused_by_name() -> None:
    config = {"model_type": "llama", **LLAMA, "rope_parameters": {"rope_type": "llama3"}}
    with pytest.raises(UnsupportedError, match=r"'llama3'.*default.*linear"):
        rotary_arguments(config)
    with pytest.raises(UnsupportedError, match="GPT-2"):
        rotary_arguments({"model_type": "gpt2", **GPT2})


def test_a_config_without_sizes_is_refused() -> None:
    with pytest.raises(OperandError, match="no 'hidden_size'"):
        layer_arguments({"model_type": "llama", "num_attention_heads": 4})
