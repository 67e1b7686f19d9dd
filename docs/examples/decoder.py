"""Run a Llama or GPT-2 of Hugging Face as TransformerLayers, and generate with a cache.

``python docs/examples/decoder.py --recipe mxfp8``; needs transformers, downloads nothing.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import fp8core as te
from fp8core.conversion.huggingface import from_hugging_face, layer_arguments, rotary_arguments


class Decoder(nn.Module):
    """A language model of TransformerLayers, with the sizes of a Llama's or GPT-2's ``config``."""

    def __init__(self, config: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        arguments = {**layer_arguments(config), "attn_input_format": "bshd", "params_dtype": dtype}
        hidden, eps = arguments["hidden_size"], arguments["layernorm_epsilon"]
        length, angles = config.max_position_embeddings, None
        self.embedding, self.positions = nn.Embedding(config.vocab_size, hidden, dtype=dtype), None
        if config.model_type == "llama":
            angles = te.RotaryPositionEmbedding(**rotary_arguments(config))(length)
        else:
            self.positions = nn.Embedding(length, hidden, dtype=dtype)
        self.register_buffer("angles", angles, persistent=False)
        self.layers = nn.ModuleList(
            te.TransformerLayer(**arguments, layer_number=number)
            for number in range(1, config.num_hidden_layers + 1)
        )
        norm = {"RMSNorm": te.RMSNorm, "LayerNorm": te.LayerNorm}[arguments["normalization"]]
        self.norm = norm(hidden, eps, params_dtype=dtype)
        self.head = nn.Linear(hidden, config.vocab_size, bias=False, dtype=dtype)

    def forward(self, tokens: Tensor, cache: te.InferenceParams | None = None) -> Tensor:
        """Return the logits ``[b, s, vocabulary]`` of ``tokens [b, s]``, which follow the cache."""
        x = self.embedding(tokens)
        if self.positions is not None:
            past = 0 if cache is None else cache.get_seqlens_pre_step()[:, None]
            x = x + self.positions(past + torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles, inference_params=cache)
        return self.head(self.norm(x))


@torch.no_grad()
def generate(model: Decoder, prompt: Tensor, num: int) -> Tensor:
    """Return ``prompt [b, s]`` and the ``num`` likeliest tokens after it."""
    batch, length = prompt.shape
    dtype, sizes = model.embedding.weight.dtype, model.layers[0].self_attention.core_attention.heads
    cache = te.InferenceParams(batch, length + num, sizes.groups, sizes.head_dim, dtype)
    tokens = new = prompt
    for _ in range(num):
        cache.pre_step(OrderedDict((row, new.shape[1]) for row in range(batch)))
        new = model(new, cache)[:, -1:].argmax(-1)
        tokens = torch.cat([tokens, new], dim=1)
    return tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=te.recipe.names(), default="mxfp8")
    args = parser.parse_args()
    torch.set_default_device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_attention_heads=4)
    config.vocab_size, config.num_hidden_layers, config.max_position_embeddings = 256, 2, 64
    model = Decoder(config).eval()
    model.load_state_dict(from_hugging_face(LlamaForCausalLM(config).state_dict(), config))
    with te.autocast(recipe=args.recipe):
        print(generate(model, torch.randint(256, (2, 8)), 16)[:, 8:].tolist())
