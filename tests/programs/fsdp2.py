"""Shard a model by FSDP2, gather its weights as codes, train it, and take its state elsewhere."""

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import fp8core as te

# Under torchrun without arguments; here the only rank of a group.
dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
mesh = dist.device_mesh.init_device_mesh(torch.get_default_device().type, (1,))


def start(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(*(te.LayerNormMLP(64, 128) for _ in range(2)))
    te.distributed.gather_quantized(model, "current")
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def loss_of(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with te.autocast(recipe="current"):
        return (model(x) - x.sign()).square().mean()


model, restored, x = start(0), start(1), torch.randn(64, 64)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
first = loss_of(model, x).item()
for _ in range(20):
    optimizer.zero_grad()
    loss_of(model, x).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
assert loss_of(model, x) < 0.5 * first
set_model_state_dict(restored, get_model_state_dict(model))
assert torch.equal(loss_of(restored, x), loss_of(model, x))
dist.destroy_process_group()
