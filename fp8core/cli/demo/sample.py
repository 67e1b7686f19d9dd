"""Text from a trained model: a held-out beginning, continued byte by byte with a cache."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor

import fp8core as te
from fp8core.cli.demo.model import ByteGPT, ModelConfig

TEMPERATURE = 0.7
"""Logits are divided by it: below 1, likely bytes become likelier."""


@torch.no_grad()
def continue_text(
    model: ByteGPT, config: ModelConfig, prompt: Tensor, num_bytes: int, *, seed: int
) -> bytes:
    """Return ``num_bytes`` bytes that the model draws after ``prompt [bytes]``, uint8.

    Keys and values of the bytes so far are kept. When they fill the context, the last half of it is
    computed again as a new beginning. The caller's precision is that of the model.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = prompt.to(torch.int64)[-config.context :]
    cache = _cache(config, device)
    drawn: list[int] = []
    start, num_kept = 0, 0
    while len(drawn) < num_bytes:
        if len(text) - start > config.context:
            start, num_kept = len(text) - config.context // 2, 0
            cache.reset()
        window = text[start:]
        cache.pre_step(OrderedDict({0: len(window) - num_kept}))
        logits = model(window[None].to(device), cache)[0, -1]
        num_kept = len(window)
        odds = torch.softmax(logits.float().cpu() / TEMPERATURE, dim=-1)
        following = torch.multinomial(odds, 1, generator=generator)
        drawn.append(int(following))
        text = torch.cat([text, following])
    return bytes(drawn)


def _cache(config: ModelConfig, device: torch.device) -> te.InferenceParams:
    """Return an empty cache for one text, in the dtype of torch.autocast."""
    is_cast = torch.is_autocast_enabled(device.type)
    return te.InferenceParams(
        max_batch_size=1,
        max_sequence_length=config.context,
        num_heads_kv=config.num_heads,
        head_dim_k=config.d_model // config.num_heads,
        dtype=torch.get_autocast_dtype(device.type) if is_cast else torch.float32,
    )
