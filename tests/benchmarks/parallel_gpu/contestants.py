"""Who is measured: steps of layers over ranks, of fp8core, Transformer Engine and torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fp8core import recipe
from fp8core.collectives import of_group
from tests.benchmarks.measuring.contest import step_of
from tests.benchmarks.measuring.libraries import EPS, swiglu_mlp, under_recipe
from tests.benchmarks.parallel_gpu.cases import HIGH, Job, Size
from tests.benchmarks.parallel_gpu.together import Ranks, Step

__all__ = ["ALONE", "COLLECTIVES", "Contestants", "Entrant", "contestants"]

ALONE = "alone"
"""After a contestant's name: the same shards without communication."""
COLLECTIVES = "collectives"
"""The collectives of a step by themselves, quantized as Float8CurrentScaling has them."""
ASYNC = "torchao tensorwise"
LEARNING_RATE = 1e-4


class Entrant(NamedTuple):
    """A step, and how many collectives it takes part in and bytes it sends, where that is known."""

    step: Step
    traffic: Callable[[], tuple[int, int]] | None = None


Contestants = dict[str, Callable[[], Entrant]]


def contestants(job: Job, ranks: Ranks) -> Contestants:
    """Return the makers of all contestants of the job's kind, by name."""
    made = _sequence_parallel(job, ranks) if job.kind == "sequence_parallel" else _fsdp(job, ranks)
    return {name: make for name, make in made.items() if name.split()[0] in job.libraries}


def _sequence_parallel(job: Job, ranks: Ranks) -> Contestants:
    made: Contestants = {COLLECTIVES: lambda: _collectives(job.size, ranks)}
    for name in job.recipes:
        for library in ("te", "fp8core"):
            for suffix, is_alone in (("", False), (f" {ALONE}", True)):
                made[f"{library} {name}{suffix}"] = _layernorm_mlp(
                    library, name, job.size, ranks, is_alone
                )
    if "current" in job.recipes:
        made[ASYNC] = lambda: _torchao_async(job.size, ranks)
    return made


def _layernorm_mlp(
    library: str, name: str, size: Size, ranks: Ranks, is_alone: bool
) -> Callable[[], Entrant]:
    """Return the maker of an RMSNorm, SwiGLU MLP without biases, whose columns are split.

    ``is_alone``: the same shards on all tokens, and no collective.
    """

    def make() -> Entrant:
        ffn, rows, group = size.ffn, size.tokens, None if is_alone else ranks.group
        if is_alone:
            ffn //= ranks.size
        else:
            rows //= ranks.size
        layer = swiglu_mlp(library, size.hidden, ffn, ranks.device.torch_device, group)
        forward = under_recipe(library, name, layer, group)
        step = _stepper(forward, layer, rows, size.hidden, ranks)
        if library != "fp8core" or is_alone:
            return Entrant(step)
        return Entrant(step, lambda: _traffic_of(step, ranks))

    return make


def _traffic_of(step: Step, ranks: Ranks) -> tuple[int, int]:
    traffic = of_group(ranks.group).traffic
    traffic.clear()
    step()
    calls, num_bytes = traffic.total
    return calls, num_bytes


def _inputs(rows: int, columns: int, ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normal rows of this rank and a gradient, a hundredth of it."""
    device = ranks.device.torch_device
    source = torch.Generator(device).manual_seed(ranks.rank)
    x = torch.randn(rows, columns, generator=source, device=device).bfloat16()
    return x, (torch.randn(rows, columns, generator=source, device=device) * 1e-2).bfloat16()


def _stepper(
    forward: Callable[..., Any], layer: Any, rows: int, columns: int, ranks: Ranks
) -> Step:
    x, grad = _inputs(rows, columns, ranks)
    return step_of(forward, x.requires_grad_(), grad, list(layer.parameters()))


def _collectives(size: Size, ranks: Ranks) -> Entrant:
    """Return the collectives of a column and a row layer's step: codes gathered three times, sums
    scattered twice, one after the other."""
    communicator, device = of_group(ranks.group), ranks.device.torch_device
    shard = (size.tokens // ranks.size, size.hidden)
    codes = torch.zeros(shard, dtype=torch.float8_e4m3fn, device=device)
    sums = torch.zeros(size.tokens, size.hidden, dtype=torch.bfloat16, device=device)

    def step() -> None:
        communicator.gather(codes).wait()
        communicator.scatter(sums).wait()
        communicator.gather(codes).wait()
        communicator.gather(codes).wait()
        communicator.scatter(sums).wait()

    return Entrant(step)


class _TorchMLP(torch.nn.Module):
    """The same MLP of torch's modules; the gate and the factor are two linears, so that columns can
    be split evenly."""

    def __init__(self, size: Size, device: torch.device) -> None:
        super().__init__()
        own: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "bias": False}
        self.norm = torch.nn.RMSNorm(size.hidden, EPS, device=device, dtype=torch.bfloat16)
        self.gate = torch.nn.Linear(size.hidden, size.ffn, **own)
        self.up = torch.nn.Linear(size.hidden, size.ffn, **own)
        self.down = torch.nn.Linear(size.ffn, size.hidden, **own)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        result: torch.Tensor = self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))
        return result


def _torchao_async(size: Size, ranks: Ranks) -> Entrant:
    """Return torchao's tensorwise layers, compiled, with torch's overlapped collectives."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.float8_tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
    )

    device = ranks.device.torch_device
    mesh = DeviceMesh.from_group(ranks.group, device.type)
    enable_symm_mem_for_group(ranks.group.group_name)
    torch._inductor.config._micro_pipeline_tp = True
    model = _TorchMLP(size, device)
    convert_to_float8_training(model)
    # Each of gate and up gathers the input for itself, and torch merges equal collectives.
    plan: dict[str, Any] = {
        "norm": SequenceParallel(sequence_dim=0),
        "gate": Float8ColwiseParallel(input_layouts=Shard(0)),
        "up": Float8ColwiseParallel(input_layouts=Shard(0)),
        "down": Float8RowwiseParallel(output_layouts=Shard(0), use_local_output=True),
    }
    parallelize_module(model, mesh, plan)
    rows = size.tokens // ranks.size
    compiled = torch.compile(model, dynamic=False)
    return Entrant(_stepper(compiled, compiled, rows, size.hidden, ranks))


def _fsdp(job: Job, ranks: Ranks) -> Contestants:
    made: Contestants = {f"torch {HIGH}": lambda: _torch_sharded(job.size, ranks, is_fp8=False)}
    made["torchao tensorwise"] = lambda: _torch_sharded(job.size, ranks, is_fp8=True)
    for name in job.recipes:
        made[f"fp8core {name}"] = _ours_sharded(name, job.size, ranks)
    return made


def _ours_sharded(name: str, size: Size, ranks: Ranks) -> Callable[[], Entrant]:
    def make() -> Entrant:
        from fp8core.distributed import gather_quantized

        device = ranks.device.torch_device
        layers = (swiglu_mlp("fp8core", size.hidden, size.ffn, device) for _ in range(size.layers))
        model = torch.nn.Sequential(*layers)
        if name not in (HIGH, "delayed"):
            gather_quantized(model, recipe.by_name(name))
        forward = under_recipe("fp8core", name, model, ranks.group)
        return Entrant(_training_step(forward, model, size, ranks))

    return make


def _torch_sharded(size: Size, ranks: Ranks, *, is_fp8: bool) -> Entrant:
    layers = [_TorchMLP(size, ranks.device.torch_device) for _ in range(size.layers)]
    model = torch.nn.Sequential(*layers)
    precompute: Callable[[Any], object] = lambda _: None  # noqa: E731  one of two functions
    if is_fp8:
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(model, config=config)
        precompute = precompute_float8_dynamic_scale_for_fsdp
    for layer in model:
        layer.compile(dynamic=False)
    return Entrant(_training_step(model, model, size, ranks, precompute))


def _training_step(
    forward: Callable[..., Any],
    model: torch.nn.Sequential,
    size: Size,
    ranks: Ranks,
    after: Callable[[Any], object] = lambda _: None,
) -> Step:
    """Shard ``model``; return forward, backward and a step of Adam. ``after`` runs last."""
    mesh = DeviceMesh.from_group(ranks.group, ranks.device.torch_device.type)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)
    x, grad = _inputs(size.tokens // ranks.size, size.hidden, ranks)

    def step() -> None:
        forward(x).backward(grad)
        optimizer.step()
        optimizer.zero_grad()
        after(model)

    return step
