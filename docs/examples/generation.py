"""Generate with a step that a CUDA graph replays for every length; without a GPU it is eager."""

import sys

import torch
from decoder import Decoder, LlamaConfig

import fp8core as te


class _Step(torch.nn.Module):
    def __init__(self, model: Decoder, cache: te.InferenceParams) -> None:
        super().__init__()
        self.model, self.cache, self.counts = model, cache, torch.ones(2, dtype=torch.int32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the next tokens ``[b, 1]``; the lengths of the cache are on the device alone."""
        self.cache.pre_step(self.counts)
        return self.model(tokens, self.cache).argmax(-1)


@torch.no_grad()
def generated(model: Decoder, prompt: torch.Tensor, captures: bool) -> list[list[int]]:
    """Return prompts of 8 tokens and 16 behind each, by a graph if it ``captures`` the step."""
    cache = te.InferenceParams(2, 24, 4, 16, torch.bfloat16)
    cache.pre_step({0: 8, 1: 8})
    tokens = [prompt, model(prompt, cache)[:, -1:].argmax(-1)]
    step = _Step(model, cache)
    if captures:
        step = te.make_graphed_callables(step, (tokens[-1].clone(),), enabled=None)
    for _ in range(15):
        tokens.append(step(tokens[-1]).clone())
    return torch.cat(tokens, 1).tolist()


torch.set_default_device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
config = LlamaConfig(vocab_size=256, hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
model, prompt = Decoder(config, torch.bfloat16).eval(), torch.randint(256, (2, 8))
te.quantize_(model, *sys.argv[1:] or ["rowwise"])
print(generated(model, prompt, prompt.is_cuda), generated(model, prompt, False), sep="\n")
