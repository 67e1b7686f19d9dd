"""Train a small GPT whose parameters are sharded over processes and gathered in low precision.

``torchrun --nproc-per-node 2 docs/examples/sharded.py --recipe block``; see its options by --help.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8core
from fp8core.distributed import gather_quantized

TEXT = torch.tensor(list(Path(argparse.__file__).read_bytes()))


class GPT(nn.Module):
    """Rows of bytes in, the loss of each next byte out; parameters in float32."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        blocks = [fp8core.TransformerLayer(hidden, 4 * hidden, 4) for _ in range(2)]
        self.embedding, self.head = nn.Embedding(256, hidden), nn.Linear(hidden, 256)
        self.blocks = nn.Sequential(*blocks)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean over rows [bytes, rows]."""
        scores = self.head(self.blocks(self.embedding(rows[:-1])))  # [bytes, rows, 256]
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), rows[1:].flatten())


def main(recipe: str, steps: int, hidden: int, checkpoint: str, device: str) -> None:
    """Train, save, and print the loss."""
    where = torch.device(device, dist.get_node_local_rank() if device != "cpu" else None)
    torch.set_default_device(where)
    dist.init_process_group(device_id=where if where.index is not None else None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = GPT(hidden)
    if recipe != "nvfp4":  # weights of 4 bits are gathered in bfloat16
        gather_quantized(model, recipe)  # before fully_shard
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    if checkpoint and Path(checkpoint).exists():
        state = get_state_dict(model, optimizer)
        dcp.load(dict(zip(("model", "optimizer"), state, strict=True)), checkpoint_id=checkpoint)
        set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1])
    for step in range(steps):
        starts = torch.randint(len(TEXT) - 65, (8 * world_size,), device="cpu").chunk(world_size)
        rows = torch.stack([TEXT[at : at + 65] for at in starts[rank]], dim=1).to(where)
        with fp8core.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
            loss = model(rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    if checkpoint:
        state = get_state_dict(model, optimizer)
        dcp.save(dict(zip(("model", "optimizer"), state, strict=True)), checkpoint_id=checkpoint)
    dist.barrier()  # of nothing: gloo's threads let go of the tensors of what came before
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in {"steps": 20, "hidden": 128, "checkpoint": "", "device": "cpu"}.items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    parser.add_argument("--recipe", default="block")
    main(**vars(parser.parse_args()))
