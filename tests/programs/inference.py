"""Store a model's weights in a byte each, answer with them, and keep them in a file."""

import copy

import torch
from torch import nn

import fp8core

torch.manual_seed(0)
layers = [nn.Embedding(256, 128), nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128)]
model = nn.Sequential(*layers).to(torch.bfloat16).eval()
model.add_module("lm_head", nn.Linear(128, 256, dtype=torch.bfloat16))
fresh, tokens = copy.deepcopy(model), torch.arange(64)
with torch.no_grad():
    want = model(tokens).float()

report = fp8core.quantize_(model, "rowwise")
print(report)
assert report.stored == ("1.weight", "3.weight")
weight = model[1].weight
assert isinstance(weight, fp8core.QuantizedTensor)
assert weight.nbytes < 0.6 * 2 * weight.numel()
answers = model(tokens)
assert nn.functional.cosine_similarity(answers.float(), want).min() > 0.99
assert not answers.requires_grad

torch.save(model.state_dict(), "stored.pt")
fp8core.quantize_(fresh, "rowwise")
fresh.load_state_dict(torch.load("stored.pt"))
assert torch.equal(fresh(tokens), answers)
