"""A Transformer layer in plain float64 torch, with the parameters of one of fp8core."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from fp8core import MultiheadAttention, RotaryPositionEmbedding, TransformerLayer, recipe

__all__ = [
    "F64",
    "FFN",
    "HEADS",
    "NO_DROPOUT",
    "OPTIONS",
    "STATELESS",
    "Arguments",
    "B",
    "H",
    "Plain",
    "S",
    "by_name",
    "layer_and_oracle",
    "new_attention",
    "new_layer",
    "shaken",
    "states",
]


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


def new_layer(dtype: torch.dtype = F64, **arguments: Any) -> TransformerLayer:
    torch.manual_seed(0)
    given = {**NO_DROPOUT, **arguments}
    return shaken(TransformerLayer(H, FFN, HEADS, params_dtype=dtype, **given))  # type: ignore[return-value]


def new_attention(**arguments: Any) -> MultiheadAttention:
    torch.manual_seed(0)
    given = {"attention_dropout": 0.0, "params_dtype": F64, "input_layernorm": True, **arguments}
    return shaken(MultiheadAttention(H, HEADS, **given))  # type: ignore[return-value]


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


def layer_and_oracle(option: str) -> tuple[TransformerLayer, Arguments, Plain]:
    """Return the layer, the tensors of a call beside hidden_states, and the same in torch."""
    arguments, call = OPTIONS[option], {}
    layer = new_layer(**arguments)
    if "rope" in option:
        call["rotary_pos_emb"] = RotaryPositionEmbedding(H // HEADS)(S)
    plain = Plain(layer, **arguments, **call)
    if arguments.get("layer_type") == "decoder":
        call["encoder_output"] = states(S + 2, B, H, seed=3)
    return layer, call, plain
