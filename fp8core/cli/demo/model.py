"""The network that the demo trains: a byte-level GPT of the library's Transformer layers.

The four matrix products of a layer take the precision of the active recipe. Embeddings, attention
itself, the last norm and the output head are never quantized, as is usual in practice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8core as te

NUM_BYTE_VALUES = 256
ROTARY_BASE = 1000.0
"""Longest wavelength of the position code, in units of 2 pi bytes; far beyond the context."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes of a ``ByteGPT``.

    ``context`` is in bytes, one token each. The embedding of a position is the sum of those of the
    last ``embedded_bytes`` bytes, its own included. ``d_model / num_heads`` must be even.
    """

    d_model: int = 128
    num_layers: int = 1
    num_heads: int = 4
    context: int = 64
    embedded_bytes: int = 3


class ByteGPT(nn.Module):
    """A GPT over bytes with an unquantized output head; its weights follow from ``seed`` alone.

    Embeddings are normal with deviation 1, matrices ``1 / sqrt(d_model)``, those that write into
    the residual stream divided by ``sqrt(2 * num_layers)`` (Radford et al. 2019, GPT-2, sec. 2.3);
    biases are 0 and norms the identity. The head is 0, so that the first loss is exactly ln 256.
    All are drawn on the CPU, so that they are the same on any device.
    """

    def __init__(self, config: ModelConfig, *, seed: int, device: torch.device) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(
            nn.Embedding(NUM_BYTE_VALUES, config.d_model) for _ in range(config.embedded_bytes)
        )
        self.blocks = nn.ModuleList(
            te.TransformerLayer(
                config.d_model,
                4 * config.d_model,
                config.num_heads,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                layer_number=number,
                fuse_qkv_params=True,
                attn_input_format="bshd",
            )
            for number in range(1, config.num_layers + 1)
        )
        self.rotary = te.RotaryPositionEmbedding(
            config.d_model // config.num_heads, rotary_base=ROTARY_BASE
        )
        self.norm = nn.LayerNorm(config.d_model)
        self.head = te.Linear(config.d_model, NUM_BYTE_VALUES, bias=False)
        te.prepare(self)
        self.to(device)
        self._fill(config, seed)

    @torch.no_grad()
    def _fill(self, config: ModelConfig, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        matrix = 1 / math.sqrt(config.d_model)
        residual = matrix / math.sqrt(2 * config.num_layers)
        for name, parameter in self.named_parameters():
            if "layer_norm_" in name or name.startswith("norm."):
                continue
            if name.endswith("bias") or name == "head.weight":
                parameter.zero_()
                continue
            deviation = residual if name.endswith(("proj.weight", "fc2_weight")) else matrix
            deviation = 1.0 if name.startswith("embeddings") else deviation
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)

    def forward(self, tokens: Tensor, cache: te.InferenceParams | None = None) -> Tensor:
        """Score the next byte after each position.

        ``tokens [batch, context]`` int64, each 0..255. Returns logits ``[batch, context, 256]`` in
        the dtype of torch.autocast. Positions before the first count as byte 0. With a ``cache``,
        whose step is begun, only the positions that it does not hold yet are computed and returned.
        """
        context = tokens.shape[1]
        stream = self.embeddings[0](tokens)
        for distance, embedding in enumerate(self.embeddings[1:], start=1):
            earlier = functional.pad(tokens, (distance, 0))[:, :context]
            stream = stream + embedding(earlier)
        if cache is not None:
            stream = stream[:, int(cache.get_seqlens_pre_step()[0]) :]
        angles = self.rotary(context)
        for block in self.blocks:
            stream = block(stream, rotary_pos_emb=angles, inference_params=cache)
        with te.autocast(enabled=False):
            logits: Tensor = self.head(self.norm(stream))
        return logits

    def num_parameters(self) -> int:
        """Return the number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters())
