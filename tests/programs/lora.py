"""Fine-tune a converted model by PEFT's LoRA, merge the adapters, and take the model back."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

import fp8core

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
base = model[0].weight.clone()
print(fp8core.convert(model, "current"))
adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["0", "2"], lora_dropout=0.0))
trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
assert len(trained) == 4

optimizer = torch.optim.AdamW(trained, lr=1e-2)
x, losses = torch.randn(64, 64), []
for _ in range(30):
    loss = (adapted(x) - x.roll(1)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.95 * losses[0]
assert torch.equal(adapted.base_model.model[0].base_layer.weight, base)

with torch.no_grad(), fp8core.autocast(enabled=False):
    want = adapted(x)
merged = fp8core.unconvert(adapted.merge_and_unload())
assert type(merged[0]) is nn.Linear
torch.testing.assert_close(merged(x), want)
