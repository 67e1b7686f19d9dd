"""Train a transformer block under current scaling, and in high precision beside it."""

import torch

import fp8core as te


def train(recipe: str | None) -> list[float]:
    """The losses of 100 steps that learn by heart what follows, which no byte alone tells."""
    torch.manual_seed(0)
    rows = torch.randint(4, (17, 8))  # [s + 1, b]
    embedding, head = torch.nn.Embedding(4, 64), torch.nn.Linear(64, 4)
    block = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0)
    model = torch.nn.Sequential(embedding, block, head)
    optimizer = te.optimizers.FusedAdam(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(100):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            logits = model(rows[:-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


exact, low = train(None), train("current")
print(f"loss {low[0]:.2f} -> {low[-1]:.2f}, in high precision {exact[-1]:.2f}")
assert low[0] > 1.2  # ln 4 = 1.39
assert low[-1] < 0.7 * low[0]
assert low != exact, "the recipe changed nothing"
assert abs(low[-1] - exact[-1]) < 0.1 * exact[0]
