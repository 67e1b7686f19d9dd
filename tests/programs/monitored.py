"""Watch the casts of a training, draw them, and ask which recipe loses least."""

from pathlib import Path

import torch

import fp8core

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
fp8core.convert(model, "current")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x = torch.randn(64, 64)
x[:, 0] *= 1e4  # an outlier
with fp8core.monitor(model, every=2) as watch:
    for _ in range(4):
        loss = (model(x) - x.sign()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.step()

print(watch.table())
assert watch.row("0", "input").underflow_share > 0.02 > watch.row("0", "weight").underflow_share
assert watch.first_nonfinite is None
watch.to_csv("monitor.csv")
assert Path("monitor.csv").read_text().startswith("step,layer")
watch.plot("sqnr.png")
watch.plot_exponents("exponents.png", "0", "input")
assert all(Path(name).read_bytes().startswith(b"\x89PNG") for name in ("sqnr.png", "exponents.png"))
tried = watch.what_if(["current", "block"])
print(tried.table())
best, last = tried.summary()
assert (best.recipe, last.recipe) == ("block", "current")
worst, _ = tried.worst("current")[0]
fp8core.convert(fp8core.unconvert(model), tried.suggest("current", k=1))
with fp8core.monitor(model) as watch:
    model(x).sum().backward()
    watch.step()
assert watch.row(worst, "input").format == "float32"
