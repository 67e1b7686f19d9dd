"""Generate with a step that a CUDA graph replays for every length; without a GPU it is eager."""

import sys

import torch
from decoder import Decoder, LlamaConfig, generate

import fp8core as te


class Step(torch.nn.Module):
    """A step of a cache: how long the sequences are is on the device alone."""

    def __init__(self, model: Decoder, cache: te.InferenceParams) -> None:
        super().__init__()
        self.model, self.cache = model, cache
        self.counts = torch.ones(cache.batch_size, dtype=torch.int32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the next tokens ``[b, 1]`` behind ``tokens``."""
        self.cache.pre_step(self.counts)
        return self.model(tokens, self.cache).argmax(-1)


torch.set_default_device(torch.accelerator.current_accelerator(check_available=True) or "cpu")
config = LlamaConfig(vocab_size=256, hidden_size=64, num_attention_heads=4, num_hidden_layers=2)
model, prompt = Decoder(config, torch.bfloat16).eval(), torch.randint(256, (2, 8))
te.quantize_(model, *sys.argv[1:] or ["rowwise"])
cache = te.InferenceParams(2, 24, 4, 16, torch.bfloat16)
with torch.no_grad():
    cache.pre_step({0: 8, 1: 8})
    tokens = [prompt, model(prompt, cache)[:, -1:].argmax(-1)]
    step = Step(model, cache)
    if prompt.is_cuda:
        step = te.make_graphed_callables(step, (tokens[-1].clone(),), enabled=False)
    for _ in range(15):
        tokens.append(step(tokens[-1]).clone())
print(torch.cat(tokens, 1).tolist(), generate(model, prompt, 16).tolist(), sep="\n")
