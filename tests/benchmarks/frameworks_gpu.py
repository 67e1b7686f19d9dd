"""Training steps under a framework, FP8 against the framework's own bf16, in shuffled turns.

    python -m tests.benchmarks.frameworks_gpu accelerate
    python -m tests.benchmarks.frameworks_gpu lightning [--layers 4 --hidden 4096 --tokens 8192]

The model is a GPT of torch's modules, the same weights and batches for each contestant: float32
parameters, AdamW, and the framework's autocast of bf16. Accelerate runs bf16, its FP8 through
Transformer Engine's name, and a model that ``fp8core.convert`` changed; Lightning's Fabric runs
``bf16-mixed`` and ``bf16-true`` against ``Fp8CorePrecision`` with the same dtypes, the plug-in that
its Trainer takes as well. The recipe of FP8 is delayed scaling. Prints the median step of each
contestant, its ratio to bf16 and its losses.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

import fp8core
from fp8core import transformer_engine
from tests.benchmarks.measuring.device import CUDA, HOST, Device, versions
from tests.benchmarks.measuring.intervals import median_interval, ratios
from tests.benchmarks.measuring.turns import Stop, eager_us

HEAD = 128
HISTORY = 16
BATCHES = 4


class Sizes(NamedTuple):
    """Of the model and of a batch."""

    layers: int
    hidden: int
    tokens: int
    vocabulary: int
    sequence: int


class Block(torch.nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.heads = max(1, hidden // HEAD)
        self.norm1 = torch.nn.LayerNorm(hidden)
        self.qkv = torch.nn.Linear(hidden, 3 * hidden)
        self.proj = torch.nn.Linear(hidden, hidden)
        self.norm2 = torch.nn.LayerNorm(hidden)
        self.fc1 = torch.nn.Linear(hidden, 4 * hidden)
        self.fc2 = torch.nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[b, s, h]``."""
        shape = (*x.shape[:2], 3, self.heads, -1)
        q, k, v = self.qkv(self.norm1(x)).view(shape).permute(2, 0, 3, 1, 4)
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(heads.transpose(1, 2).flatten(2))
        hidden = torch.nn.functional.gelu(self.fc1(self.norm2(x)), approximate="tanh")
        total: torch.Tensor = x + self.fc2(hidden)
        return total


class Model(torch.nn.Module):
    """Token ids ``[b, s]`` to the loss of predicting each next one."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.blocks = torch.nn.Sequential(*(Block(sizes.hidden) for _ in range(sizes.layers)))
        self.norm = torch.nn.LayerNorm(sizes.hidden)
        self.head = torch.nn.Linear(sizes.hidden, sizes.vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss."""
        logits = self.head(self.norm(self.blocks(self.embed(tokens))))
        flat = logits[:, :-1].flatten(0, 1).float()
        return torch.nn.functional.cross_entropy(flat, tokens[:, 1:].flatten())


class Bench(NamedTuple):
    """What the contestants of one framework share."""

    sizes: Sizes
    device: Device
    batches: list[torch.Tensor]

    def model(self, dtype: torch.dtype = torch.float32) -> Model:
        """Return the model with the weights that every contestant begins with."""
        torch.manual_seed(0)
        with self.device.torch_device:
            return Model(self.sizes).to(dtype)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer of every contestant."""
        fused = self.device is CUDA
        return torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=fused)


class Contestant:
    """A training step under a framework, and the losses of its steps."""

    def __init__(
        self, bench: Bench, model: Any, optimizer: Any, backward: Callable[[torch.Tensor], None]
    ) -> None:
        self.batches = bench.batches
        self.model, self.optimizer, self.backward = model, optimizer, backward
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Train on the next batch."""
        loss = self.model(self.batches[len(self.losses) % len(self.batches)])
        self.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())


Contestants = dict[str, Contestant]


def _accelerate_one(bench: Bench, precision: str, handlers: Iterable[Any], recipe: Any) -> Any:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # a process has one precision, a contestant its own
    model = bench.model()
    if recipe is not None:
        print(fp8core.convert(model, recipe))
    is_cpu = bench.device is HOST
    accelerator = Accelerator(cpu=is_cpu, mixed_precision=precision, kwargs_handlers=list(handlers))
    model, optimizer = accelerator.prepare(model, bench.optimizer(model))
    return Contestant(bench, model, optimizer, accelerator.backward)


def accelerate(bench: Bench) -> Contestants:
    """Return the contestants of Accelerate."""
    transformer_engine.install()
    from accelerate.utils import TERecipeKwargs

    asked = TERecipeKwargs(fp8_format="HYBRID", amax_history_len=HISTORY, amax_compute_algo="max")
    recipe = fp8core.recipe.DelayedScaling(amax_history_len=HISTORY)
    return {
        "bf16": _accelerate_one(bench, "bf16", [], None),
        "fp8": _accelerate_one(bench, "fp8", [asked], None),
        "converted": _accelerate_one(bench, "bf16", [], recipe),
    }


def _precision(dtype: torch.dtype) -> Any:
    from fp8core.lightning import Fp8CorePrecision

    recipe = {"recipe": "DelayedScaling", "amax_history_len": HISTORY}
    return Fp8CorePrecision(recipe, weights_dtype=dtype)


def lightning(bench: Bench) -> Contestants:
    """Return the contestants of Lightning's Fabric."""
    from lightning import Fabric

    contestants = {}
    for name, dtype, options in (
        ("bf16", torch.float32, {"precision": "bf16-mixed"}),
        ("fp8", torch.float32, {"plugins": [_precision(torch.float32)]}),
        ("bf16-true", torch.bfloat16, {"precision": "bf16-true"}),
        ("fp8-true", torch.bfloat16, {"plugins": [_precision(torch.bfloat16)]}),
    ):
        kind = bench.device.torch_device.type
        fabric = Fabric(accelerator=kind, devices=1, **options)
        model = bench.model(dtype)
        model, optimizer = fabric.setup(model, bench.optimizer(model))
        contestants[name] = Contestant(bench, model, optimizer, fabric.backward)
    return contestants


def lines(times: dict[str, list[float]], losses: dict[str, list[float]]) -> list[str]:
    """Return what is printed: the step in ms, its ratio to the bf16 of its dtypes, the losses."""
    printed = []
    for name, taken in times.items():
        base = "bf16-true" if name.endswith("-true") else "bf16"
        over = median_interval(ratios(taken, times[base]))
        few = [losses[name][at] for at in (0, len(losses[name]) // 2, -1)]
        step = statistics.median(taken) / 1e3
        printed.append(
            f"{name:10} {step:9.2f} ms, over {base} {over.median:.3f} [{over.low:.3f}, "
            f"{over.high:.3f}] in {over.turns} turns, losses "
            f"{' '.join(f'{loss:.4f}' for loss in few)} of {len(losses[name])} steps"
        )
    return printed


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("framework", choices=["accelerate", "lightning"])
    for name, size in zip(Sizes._fields, (4, 4096, 8192, 8192, 2048), strict=True):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--cpu", action="store_true", help="try it out; the figures mean nothing")
    asked = parser.parse_args()
    sizes = Sizes(*(getattr(asked, name) for name in Sizes._fields))
    device = HOST if asked.cpu else CUDA
    torch.manual_seed(1)
    shape = (sizes.tokens // sizes.sequence, sizes.sequence)
    draw = functools.partial(torch.randint, sizes.vocabulary, shape, device=device.torch_device)
    bench = Bench(sizes, device, [draw() for _ in range(BATCHES)])
    contestants = {"accelerate": accelerate, "lightning": lightning}[asked.framework](bench)
    print(versions("fp8core", asked.framework), sizes)
    calls = {name: one.step for name, one in contestants.items()}
    times = eager_us(calls, Stop(asked.seconds), clock=device.clock)
    losses = {name: [float(x) for x in one.losses] for name, one in contestants.items()}
    print(*lines(times, losses), sep="\n", flush=True)


if __name__ == "__main__":
    main()
