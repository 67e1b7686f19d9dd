"""Cast some layers and some tensors in another way than the rest, and see that it is so."""

import torch

import fp8core as te
from fp8core import recipe


def rows_of_gradients(role: recipe.QuantizerRole) -> recipe.OperandSpec:
    """A scale for each row of gradients, in e5m2; one for each of the other tensors, in e4m3."""
    if role.tensor_type == "grad_output":
        return recipe.OperandSpec("e5m2", (1, 0), 57344.0)
    return recipe.OperandSpec("e4m3", (1, 0), 448.0)


custom = recipe.CustomRecipe(qfactory=rows_of_gradients)
mixed = recipe.PerLayer({"first": None, "last": "current"}, default=custom)
torch.manual_seed(0)
model = torch.nn.Sequential()
for name in ("first", "middle", "last"):
    model.add_module(name, torch.nn.Linear(64, 64))
te.convert(model, mixed)
print(te.explain(model, mixed))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, losses = torch.randn(64, 64), []
with te.monitor(model) as watch:
    for _ in range(20):
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step()
        losses.append(loss.item())
assert losses[-1] < 0.5 * losses[0]
assert watch.row("first", "input").format == "float32"
assert watch.row("middle", "grad_output").format.startswith("e5m2 block=(1,")
assert watch.row("middle", "input").format.startswith("e4m3 block=(1,")
assert watch.row("last", "weight").format.startswith("e4m3")
