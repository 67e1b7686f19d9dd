"""Register a number format and a recipe of one's own, and train a model in them."""

import sys

import torch
from torch import nn

import fp8core
from fp8core.backend_api import hookimpl
from fp8core.dispatch import plugins
from fp8core.formats import minifloat
from fp8core.recipe import Float8RowwiseScaling


@hookimpl
def fp8core_register_formats(register):
    register(minifloat("e3m2", 3, 2, specials="finite"))


@hookimpl
def fp8core_register_recipes(register):
    register("rowwise6", lambda: Float8RowwiseScaling(fp8_format="e3m2"))


plugins.register(sys.modules[__name__], "six_bits")
assert "rowwise6" in fp8core.recipe.names()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
fp8core.convert(model, "rowwise6")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, losses = torch.randn(64, 64), []
with fp8core.use_backend("reference"):  # no other backend knows the format
    for _ in range(30):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
assert losses[-1] < 0.5 * losses[0]
