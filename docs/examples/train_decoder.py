"""Train a decoder of 125 million parameters on the sources of torch, in bf16 or in a recipe.

``python docs/examples/train_decoder.py --recipe current --seed 1``, or on several devices, with
sharded parameters, ``torchrun --nproc-per-node 2 docs/examples/train_decoder.py --recipe block``.
Prints losses, time and memory, and adds a line of JSON with them to ``--results``.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR

import fp8core as te
from fp8core.distributed import gather_quantized
from fp8core.optimizers import FusedAdam

BF16, FLOAT = torch.bfloat16, torch.float32
REPORT = 10  # steps between two lines
HELD_OUT_FILES, HELD_OUT_WINDOWS = 50, 192  # every 50th file is held out
OPTIONS = dict(normalization="RMSNorm", activation="swiglu", bias=False, params_dtype=BF16)
OPTIONS |= dict(hidden_dropout=0.0, attention_dropout=0.0)
OPTIONS |= dict(fuse_qkv_params=True, attn_input_format="bshd")


class Decoder(nn.Module):
    """Rows of bytes in, the mean loss of each next byte out; parameters in bfloat16."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        first, last = (partial(nn.init.normal_, std=0.02 / n**0.5) for n in (1, 2 * args.layers))
        options = {**OPTIONS, "init_method": first, "output_layer_init_method": last}
        self.embedding = nn.Embedding(256, args.hidden, dtype=BF16)
        self.layers = nn.ModuleList(
            te.TransformerLayer(args.hidden, args.ffn, args.heads, **options, layer_number=number)
            for number in range(1, args.layers + 1)
        )
        self.norm = te.RMSNorm(args.hidden, params_dtype=BF16)
        self.head = nn.Linear(args.hidden, 256, bias=False, dtype=BF16)
        for module in (self.embedding, self.head):
            first(module.weight)
        angles = te.RotaryPositionEmbedding(args.hidden // args.heads)(args.context)
        self.register_buffer("angles", angles, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return the loss of ``rows [b, s + 1]``."""
        x = self.embedding(rows[:, :-1])
        for layer in self.layers:
            x = layer(x, rotary_pos_emb=self.angles)
        logits = self.head(self.norm(x)).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, rows[:, 1:].flatten())


def sources(folder: Path) -> list[Tensor]:
    """Return the bytes of a folder's Python files: those to train on, and those held out."""
    files = sorted(folder.rglob("*.py"))
    held_out = set(files[::HELD_OUT_FILES])
    parts = ([file for file in files if (file in held_out) == is_held] for is_held in (False, True))
    texts = (bytearray(b"".join(file.read_bytes() for file in part)) for part in parts)
    return [torch.frombuffer(text, dtype=torch.uint8) for text in texts]


class Ranks(NamedTuple):
    """This process among those of torchrun; alone without it."""

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, kind: str) -> Ranks:
        """Join the group that torchrun has started, if there is one."""
        if "LOCAL_RANK" not in os.environ:
            return cls(0, 1, torch.device(kind))
        is_cpu = kind == "cpu"
        device = torch.device(kind, None if is_cpu else int(os.environ["LOCAL_RANK"]))
        if not is_cpu:
            torch.accelerator.set_device_index(device.index)
        dist.init_process_group(device_id=None if is_cpu else device)
        return cls(dist.get_rank(), dist.get_world_size(), device)

    @property
    def group(self) -> Any:
        """The group of all ranks, None without one."""
        return dist.group.WORLD if dist.is_initialized() else None

    def windows(self, text: Tensor, starts: Tensor, length: int) -> Tensor:
        """Return this rank's share of the windows of ``text`` that begin at ``starts``."""
        own = starts.tensor_split(self.size)[self.rank]
        return text[own[:, None] + torch.arange(length, device="cpu")].long().to(self.device)

    def mean(self, value: Tensor) -> float:
        """Return the mean of the ranks' values."""
        value = value.detach().clone() / self.size
        if self.group is not None:
            dist.all_reduce(value)
        return value.item()


def main(args: argparse.Namespace) -> None:
    """Train, print losses, and leave the line of results."""
    ranks = Ranks.join(args.device)
    if args.batch % ranks.size:
        raise SystemExit(f"--batch {args.batch} is no multiple of {ranks.size} ranks")
    train, held_out = sources(args.text)
    torch.manual_seed(args.seed)  # the weights of all ranks are the same
    model = Decoder(args).to(ranks.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    if ranks.group is not None:
        if args.recipe not in ("bf16", "nvfp4"):  # weights of 4 bits are gathered in bfloat16
            gather_quantized(model, args.recipe)
        mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        for module in (*model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=FLOAT))
    masters = {"master_weights": True, "store_param_remainders": True}  # float32, as 16 bits more
    optimizer = FusedAdam(model.parameters(), args.rate, (0.9, 0.95), weight_decay=0.1, **masters)
    warm_up = max(1, args.steps // 15)
    schedule = LambdaLR(  # falls to a tenth
        optimizer,
        lambda at: min((at + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * at / args.steps)),
    )
    chosen = {"enabled": False} if args.recipe == "bf16" else {"recipe": args.recipe}
    autocast = partial(te.autocast, **chosen, amax_reduction_group=ranks.group)
    length = args.context + 1

    def evaluate() -> float:
        starts = torch.linspace(0, len(held_out) - length - 1, HELD_OUT_WINDOWS, device="cpu")
        parts = [ranks.windows(held_out, part, length) for part in starts.long().split(args.batch)]
        with torch.no_grad(), autocast():
            losses = [model(part) for part in parts]
        return ranks.mean(torch.stack(losses).mean())

    source = torch.Generator("cpu").manual_seed(args.seed)
    curve, seconds, hosts, start = {}, [], [], time.perf_counter()
    for step in range(1, args.steps + 1):
        begin = time.perf_counter()
        starts = torch.randint(len(train) - length, (args.batch,), generator=source, device="cpu")
        with autocast():
            loss = model(ranks.windows(train, starts, length))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % REPORT == 1:  # the device had nothing to do
            hosts.append(time.perf_counter() - begin)
        is_evaluated = step % args.evaluate == 0 or step == args.steps
        if step % REPORT == 0 or is_evaluated:
            text = f"step {step}: loss {ranks.mean(loss):.4f}"  # waits for the device
            seconds.append((time.perf_counter() - start) / (step % REPORT or REPORT))
            if is_evaluated:
                curve[step] = evaluate()
                text += f", held-out loss {curve[step]:.4f}"
            if ranks.rank == 0:
                print(f"{text}, {1e3 * seconds[-1]:.1f} ms a step", flush=True)
            start = time.perf_counter()
    seconds = statistics.median(seconds[1:] or seconds)  # without the first, which warms up
    module = None if ranks.device.type == "cpu" else torch.get_device_module(ranks.device)
    results = {
        **{name: value for name, value in vars(args).items() if name not in ("text", "results")},
        **{"ranks": ranks.size, "parameters": parameters, "torch": torch.__version__},
        **{"text_bytes": len(train), "held_out_bytes": len(held_out)},
        "device": "cpu" if module is None else module.get_device_name(),
        "ms": round(1e3 * seconds, 2),
        "host_ms": round(1e3 * statistics.median(hosts[1:] or hosts), 2),
        "tokens_per_s": round(args.batch * args.context / seconds),
        "peak_mib": None if module is None else module.max_memory_allocated() >> 20,
        "held_out_loss": curve,
    }
    if ranks.rank == 0:
        print(line := json.dumps(results), flush=True)
        with args.results.open("a") as file:
            file.write(line + "\n")
    if ranks.group is not None:
        dist.barrier()  # of nothing: gloo's threads let go of the tensors of what came before
        dist.destroy_process_group()


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"layers": 10, "hidden": 1024, "ffn": 2688, "heads": 16, "context": 1024, "batch": 32}
    for name, value in {**sizes, "steps": 1500, "evaluate": 250, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--rate", type=float, default=6e-4, help="the largest learning rate")
    parser.add_argument("--recipe", choices=["bf16", *te.recipe.names()], default="current")
    parser.add_argument("--text", type=Path, default=Path(torch.__file__).parent)
    parser.add_argument("--results", type=Path, default=Path("train_decoder.jsonl"))
    default = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    parser.add_argument("--device", default=default.type)
    return parser


if __name__ == "__main__":
    main(parser().parse_args())
