"""Compile a converted model as one graph, and train it with the losses of eager."""

import copy

import torch
from torch import nn

import fp8core


def losses(model: nn.Module, weights: nn.Module) -> list[float]:
    """Of 4 steps that train ``weights``."""
    optimizer = torch.optim.SGD(weights.parameters(), lr=5.0)
    values = []
    for x in batches:
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


torch.manual_seed(0)
batches = torch.randn(64, 64).expand(4, 64, 64)
eager = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
fp8core.convert(eager, "current")
model = copy.deepcopy(eager)
compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
got = losses(compiled, model)
assert got == losses(eager, eager)
assert got[-1] < 0.9 * got[0]
with torch.no_grad():  # another number of rows
    rows = torch.randn(32, 64)
    assert torch.equal(compiled(rows), eager(rows))
