"""Train a converted model with Accelerate, in microbatches, and go on from its saved state."""

import torch
from accelerate import Accelerator

import fp8core

torch.manual_seed(0)
accelerator = Accelerator(gradient_accumulation_steps=2)


def start():
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fp8core.convert(model, "delayed")
    fp8core.prepare(model, "delayed")
    return accelerator.prepare(model, optimizer)


def train(model, optimizer) -> list[float]:
    losses = []
    for x in inputs.expand(16, 32, 64):
        with accelerator.accumulate(model):
            loss = (model(x) - x.sign()).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


inputs = torch.randn(32, 64, device=accelerator.device)
model, optimizer = start()
losses = train(model, optimizer)
assert losses[-1] < 0.7 * losses[0]
accelerator.save_state("state")
want = train(model, optimizer)
accelerator.load_state("state")
assert train(model, optimizer) == want
