"""A small model of transformers, its tokens, and a training of it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
TOKENS = torch.arange(3, 35).reshape(2, 16)


def llama(layers: int = 2) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": layers}))


def gpt2(layers: int = 2) -> Any:
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_head=2, n_layer=layers, **ids))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(input_ids=TOKENS).logits
    return result


def train(
    model: Any, steps: int, optimizer: torch.optim.Optimizer | None = None, lr: float = 1e-2
) -> list[float]:
    """Train what needs gradients, with AdamW unless another optimizer is given; the losses."""
    if optimizer is None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=lr)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
