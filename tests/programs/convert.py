"""Convert a model of torch in place, train it with the optimizer of before, and convert it back."""

import torch
from torch import nn

import fp8core

torch.manual_seed(0)
hidden = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 64))
model = nn.Sequential()
model.add_module("hidden", hidden)
model.add_module("head", nn.Linear(64, 10))
names, classes = [*model.state_dict()], [type(module) for module in model.modules()]
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

report = fp8core.convert(model, "block")
print(report)
assert "2 of 3 linear layers converted" in str(report)  # the head stays as it is
assert isinstance(hidden[0], nn.Linear)
assert [*model.state_dict()] == names

x = torch.randn(256, 64)
labels = x[:, :10].argmax(1)
losses = []
for _ in range(30):
    loss = nn.functional.cross_entropy(model(x), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.5 * losses[0]

low = model(x)
fp8core.unconvert(model)
assert [type(module) for module in model.modules()] == classes
exact = model(x)
assert not torch.equal(low, exact)
assert (low - exact).norm() < 0.1 * exact.norm()
