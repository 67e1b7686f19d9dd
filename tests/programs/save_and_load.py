"""Stop a training under delayed scaling, save it, and go on in a new model with the same losses."""

import tempfile

import torch

import fp8core as te

recipe = te.recipe.DelayedScaling(amax_history_len=4)
batches = torch.randn(6, 64, 64)


def start() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer."""
    model = torch.nn.Sequential(te.LayerNormLinear(64, 128), torch.nn.GELU(), te.Linear(128, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses of some steps."""
    losses = []
    for step in steps:
        with te.autocast(recipe=recipe):
            loss = (model(batches[step]) - batches[step]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


file = tempfile.mkdtemp() + "/checkpoint.pt"
model, optimizer = start()
train(model, optimizer, range(3))
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
resumed, its_optimizer = start()
state = torch.load(file)
resumed.load_state_dict(state["model"])
its_optimizer.load_state_dict(state["optimizer"])
assert train(resumed, its_optimizer, range(3, 6)) == train(model, optimizer, range(3, 6))
