"""A model in training, saved by two ranks and loaded by two and by one.

Transformer layers under ``fully_shard`` with weights gathered quantized, stepped by ``FusedAdam``
with masters: parameters, delayed scales, masters and averages. What was loaded has to be what was
saved, bit for bit, and the next steps those of the model that went on.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8core
from fp8core.distributed import gather_quantized
from fp8core.optimizers import FusedAdam
from tests.benchmarks.measuring import markdown
from tests.ranks import DEVICE_TYPE, device, run_ranks

__all__ = ["RECIPES", "main", "rows", "work"]

RECIPES = ("bf16", "delayed", "current", "block")
HIDDEN, FFN, HEADS, TOKENS, BATCH = (
    (1024, 4096, 16, 512, 4) if DEVICE_TYPE == "cuda" else (64, 128, 4, 16, 2)
)
STEPS = 2
"""Before a save, and after it."""
COLUMNS = ("recipe", "ranks that load", "state", "next losses", "state after them")


class Job:
    """Layers in training on the ranks of the default group."""

    def __init__(self, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.options = {"enabled": False} if name == "bf16" else {"recipe": name}
        self.model: Any = nn.Sequential(
            *(
                fp8core.TransformerLayer(
                    HIDDEN,
                    FFN,
                    HEADS,
                    hidden_dropout=0.0,
                    attention_dropout=0.0,
                    fuse_qkv_params=True,
                    params_dtype=torch.bfloat16,
                    device=device(),
                )
                for _ in range(2)
            )
        )
        if name != "bf16":
            gather_quantized(self.model, name)
        mesh = init_device_mesh(DEVICE_TYPE, (dist.get_world_size(),))
        for module in (*self.model, self.model):
            fully_shard(module, mesh=mesh)
            # Gradients are those of the first rank: no sum depends on how many ranks there are.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        self.optimizer = FusedAdam(
            self.model.parameters(), lr=1e-3, master_weights=True, store_param_remainders=True
        )

    def steps(self, first: int) -> list[float]:
        """Train on batches that follow from their number; return the losses."""
        losses = []
        for number in range(first, first + STEPS):
            source = torch.Generator().manual_seed(number)
            x = torch.randn(TOKENS, BATCH, HIDDEN, generator=source).to(device(), torch.bfloat16)
            with fp8core.autocast(**self.options, amax_reduction_group=dist.group.WORLD):
                loss = self.model(x).float().square().mean()
            (loss * float(dist.get_rank() == 0)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def state(self) -> dict[str, Any]:
        """Return the parts of this rank, as ``torch.distributed.checkpoint`` takes them."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state = get_state_dict(self.model, self.optimizer, options=options)
        return dict(zip(("model", "optimizer"), state, strict=True))

    def load(self, folder: str) -> None:
        """Load the parts of this rank."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(flatten_optimizer_state_dict=True),
        )

    def digests(self) -> dict[str, str]:
        """Return a digest of the bytes of each whole tensor of the state."""
        found = {}
        for kind, tensors in self.state().items():
            for name, value in tensors.items():
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                if isinstance(whole, torch.Tensor):
                    plain = torch.empty(whole.shape, dtype=whole.dtype, device="cpu").copy_(
                        whole.detach()
                    )
                    content = plain.view(-1).view(torch.uint8).numpy().tobytes()
                    whole = hashlib.sha256(content).hexdigest()
                found[f"{kind} {name}"] = str(whole)
        return found


def work(rank: int, name: str, folder: str, part: str) -> dict[str, Any]:
    """Save and go on, or load over other initial weights and go on, as a rank."""
    # Else a device may sum in another order, and each process chooses algorithms by their times.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    job = Job(name, seed=int(part == "loads"))
    if part == "saves":
        job.steps(0)
        dcp.save(job.state(), checkpoint_id=folder)
    else:
        job.load(folder)
    at_save = job.digests()
    return {"state": at_save, "losses": job.steps(STEPS), "after": job.digests()}


def rows(name: str, folder: Path) -> list[tuple[str, ...]]:
    """Return a row for each number of ranks that load what two saved under a recipe."""
    checkpoint = str(folder / "checkpoint")

    def results(part: str, size: int) -> dict[str, Any]:
        place = folder / f"{part}{size}"
        place.mkdir()
        first: dict[str, Any] = run_ranks(work, place, name, checkpoint, part, world_size=size)[0]
        return first

    saved, found = results("saves", 2), []
    for size in (2, 1):
        loaded = results("loads", size)
        differences = (_difference(saved[part], loaded[part]) for part in saved)
        found.append((name, str(size), *differences))
    return found


def _difference(saved: Any, loaded: Any) -> str:
    """Say whether values are equal, and which are not."""
    if saved == loaded:
        return "equal"
    if isinstance(saved, list):
        return f"{saved} and {loaded}"
    parts = [name for name in {**saved, **loaded} if saved.get(name) != loaded.get(name)]
    return f"{len(parts)} of {len(saved)} differ: {', '.join(parts[:3])}"


def rows_of(name: str) -> list[tuple[str, ...]]:
    """Return the rows of a recipe, or one with what was raised."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return rows(name, Path(folder))
        except AssertionError as error:
            print(error, file=sys.stderr, flush=True)
            return [(name, "", "a rank failed", str(error).splitlines()[0][:200], "")]


def main() -> int:
    """Print the table; return how many rows are not equal."""
    print(*markdown.head(COLUMNS), sep="\n", flush=True)
    differing = 0
    # Recipes beside each other: nothing is timed.
    with ProcessPoolExecutor(4 if DEVICE_TYPE == "cuda" else 1, get_context("spawn")) as pool:
        for several in pool.map(rows_of, RECIPES):
            for row in several:
                differing += row[2:] != ("equal",) * 3
                print(markdown.line(row), flush=True)
    return differing
