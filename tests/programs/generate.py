"""Generate with a cache of keys and values: the tokens of whole forwards, one at a time."""

import torch

import fp8core as te

torch.manual_seed(0)
embedding, head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 64, bias=False)
options = {"self_attn_mask_type": "causal", "attn_input_format": "bshd"}
layers = [te.TransformerLayer(32, 64, 2, layer_number=n, **options).eval() for n in (1, 2)]
angles = te.RotaryPositionEmbedding(16)(32)


def logits(tokens: torch.Tensor, cache: te.InferenceParams | None = None) -> torch.Tensor:
    """Of the token after each one."""
    x = embedding(tokens)
    for layer in layers:
        x = layer(x, rotary_pos_emb=angles, inference_params=cache)
    return head(x)


with torch.no_grad(), te.autocast(recipe="rowwise"):
    prompt = torch.randint(64, (2, 8))
    cache = te.InferenceParams(2, 32, 2, 16, torch.float32)
    cache.pre_step({0: 8, 1: 8})
    step = logits(prompt, cache)[:, -1:]
    tokens = torch.cat([prompt, step.argmax(-1)], 1)
    for _ in range(8):
        cache.pre_step({0: 1, 1: 1})
        step = logits(tokens[:, -1:], cache)
        whole = logits(tokens)[:, -1:]  # without the cache
        assert (step - whole).norm() < 1e-2 * whole.norm()
        tokens = torch.cat([tokens, step.argmax(-1)], 1)
assert tokens.shape == (2, 17)
assert torch.equal(tokens[:, :8], prompt)
