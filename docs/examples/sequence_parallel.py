"""Train a small language model whose layers are spread over ranks, on CPUs or on GPUs.

``torchrun --nproc-per-node 2 docs/examples/sequence_parallel.py --recipe mxfp8``
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fp8core as te
from fp8core.collectives import of_group

HIDDEN, SEQUENCE, BATCH, SIZES = 128, 128, 4, (128, 512, 4)
NO_DROPOUT = dict(hidden_dropout=0.0, attention_dropout=0.0)


class Model(nn.Module):
    """Bytes in, logits of the next bytes out; each rank has its part of every sequence."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, HIDDEN, device=device)
        self.positions = nn.Embedding(SEQUENCE, HIDDEN, device=device)
        spread = dict(tp_group=dist.group.WORLD, sequence_parallel=True, set_parallel_mode=True)
        self.layer = te.TransformerLayer(*SIZES, device=device, **spread, **NO_DROPOUT)
        self.head = nn.Linear(HIDDEN, 256, device=device)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return the logits ``[s / ranks, b, 256]`` of a rank's ``tokens [s / ranks, b]``."""
        x = self.embedding(tokens) + self.positions(positions)[:, None]
        return self.head(self.layer(x))

    def shared(self) -> list[Tensor]:
        """Return the parameters that all ranks have alike: all but those split over them."""
        return [p for p in self.parameters() if not getattr(p, "tensor_model_parallel", False)]


def main() -> None:
    """Train, and print losses and how much a rank sends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="mxfp8", choices=te.recipe.names())
    chosen = te.recipe.by_name(parser.parse_args().recipe)
    is_gpu = torch.cuda.is_available()
    device = torch.device("cuda", dist.get_node_local_rank()) if is_gpu else torch.device("cpu")
    dist.init_process_group("nccl" if is_gpu else "gloo", device_id=device if is_gpu else None)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # weights that are split over the ranks differ
    model = Model(device)
    for parameter in model.shared():
        dist.broadcast(parameter.data, 0)
    torch.manual_seed(0)  # and the batches do not
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    text = torch.tensor([*Path(argparse.__file__).read_bytes()], device=device)
    mine = torch.arange(SEQUENCE, device=device).chunk(ranks)[rank]
    for step in range(40):
        starts = torch.randint(len(text) - SEQUENCE - 1, (BATCH,)).to(device)
        rows = text[starts + torch.arange(SEQUENCE + 1, device=device)[:, None]]  # [s + 1, b]
        with of_group().counting() as traffic, te.autocast(recipe=chosen):
            logits = model(rows[mine], mine)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[mine + 1].flatten())
            (loss / ranks).backward()
        for parameter in model.shared():  # whose gradients each rank has of its own rows
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach() / ranks)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: {traffic.total.bytes} bytes sent, loss {loss:.3f}")
    dist.barrier()  # of nothing: gloo's threads let go of the tensors of what came before
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
