"""The network that the demo trains: a byte-level GPT whose blocks are the library's layers.

The four matrix products of a block are in LayerNormLinear (``qkv``), Linear (``proj``) and
LayerNormMLP (``mlp``), so the active recipe decides their precision. Embeddings, attention itself,
the last norm and the output head stay in torch and are never quantized, as is usual in practice.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import fp8core as te

__all__ = ["ByteGPT", "ModelConfig", "rotate"]

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
    num_layers: int = 2
    num_heads: int = 4
    context: int = 64
    embedded_bytes: int = 3


def rotate(heads: Tensor) -> Tensor:
    """Rotary position code: turn each pair of features by an angle proportional to the position.

    ``heads [..., context, head_size]``, any float dtype, even ``head_size``; the result has the
    same shape and dtype.
    Feature i is paired with i + head_size / 2, and the pair at position p turns by
    ``p * base^(-2i / head_size)``.

    Source: Su et al. 2021 (RoFormer), sec. 3.2.2, with a base that suits a short context.
    """
    context, size = heads.shape[-2:]
    exponents = torch.arange(0, size, 2, device=heads.device) / size
    positions = torch.arange(context, device=heads.device)
    angles = positions[:, None] * ROTARY_BASE**-exponents  # [context, size / 2]
    cos, sin = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Block(nn.Module):
    """One pre-norm transformer block: causal attention, then a GELU MLP of width 4 * d_model."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.d_model
        self.num_heads = config.num_heads
        self.qkv = te.LayerNormLinear(width, 3 * width)
        self.proj = te.Linear(width, width)
        self.mlp = te.LayerNormMLP(width, 4 * width)

    def attend(self, input: Tensor) -> Tensor:
        """Mix each position with those before it; ``[batch, context, d_model]`` in and out."""
        batch, context, width = input.shape
        heads = self.qkv(input).view(batch, context, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, context, size]
        mixed = functional.scaled_dot_product_attention(
            rotate(query), rotate(key), value, is_causal=True
        )
        output: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, context, width))
        return output

    def forward(self, input: Tensor) -> Tensor:
        """Map ``input [batch, context, d_model]`` to an output of the same shape."""
        input = input + self.attend(input)
        output: Tensor = input + self.mlp(input)
        return output


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
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.d_model)
        self.head = nn.Linear(config.d_model, NUM_BYTE_VALUES, bias=False)
        te.prepare(self)
        self.to(device)
        self._fill(config, seed)

    @torch.no_grad()
    def _fill(self, config: ModelConfig, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        matrix = 1 / math.sqrt(config.d_model)
        residual = matrix / math.sqrt(2 * config.num_layers)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                continue
            if name.endswith("bias") or name == "head.weight":
                parameter.zero_()
                continue
            deviation = residual if name.endswith(("proj.weight", "fc2_weight")) else matrix
            deviation = 1.0 if name.startswith("embeddings") else deviation
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """Score the next byte after each position.

        ``tokens [batch, context]`` int64, each 0..255. Returns logits ``[batch, context, 256]`` in
        the dtype of torch.autocast. Positions before the first count as byte 0.
        """
        context = tokens.shape[1]
        stream = self.embeddings[0](tokens)
        for distance, embedding in enumerate(self.embeddings[1:], start=1):
            earlier = functional.pad(tokens, (distance, 0))[:, :context]
            stream = stream + embedding(earlier)
        for block in self.blocks:
            stream = block(stream)
        logits: Tensor = self.head(self.norm(stream))
        return logits

    def num_parameters(self) -> int:
        """Return the number of trained values."""
        return sum(parameter.numel() for parameter in self.parameters())
