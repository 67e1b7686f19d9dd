"""Convert a small random Llama of Hugging Face in one line, and fine-tune it on Python's sources.

``python docs/examples/llama.py --recipe mxfp8``; needs transformers, downloads nothing.
"""

from __future__ import annotations

import argparse
import inspect
import textwrap

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import fp8core
from fp8core.recipe import names

CONTEXT = 64
NUM_BYTE_VALUES = 256


def make_model(hidden: int) -> LlamaForCausalLM:
    """Return a Llama of random weights whose tokens are bytes."""
    config = LlamaConfig(
        vocab_size=NUM_BYTE_VALUES,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batches(num: int, rows: int) -> torch.Tensor:
    """Return ``num`` batches of random windows of a text: tokens [num, rows, CONTEXT] int64."""
    text = torch.tensor(list(inspect.getsource(textwrap).encode()))
    starts = torch.randint(len(text) - CONTEXT, (num, rows, 1))
    return text[starts + torch.arange(CONTEXT)]


def fine_tune(model: LlamaForCausalLM, steps: int, rows: int) -> None:
    """Train ``model`` as if nothing had been converted; print the loss of some steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, tokens in enumerate(batches(steps, rows), start=1):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, steps) or step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=names(), default="mxfp8")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=8, help="windows in a batch")
    parser.add_argument("--hidden", type=int, default=64, help="width of the model")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = make_model(args.hidden)
    print(fp8core.convert(model, recipe=args.recipe))
    fine_tune(model, args.steps, args.rows)
