"""Who is measured: steps of layers over ranks, of fp8core, Transformer Engine and torchao."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import fp8core
from fp8core import recipe
from fp8core.collectives import of_group
from tests.benchmarks.parallel_gpu.cases import HIGH, Job, Size
from tests.benchmarks.parallel_gpu.together import Ranks, Step

__all__ = ["ALONE", "COLLECTIVES", "Contestants", "Entrant", "contestants"]

EPS = 1e-5
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


def _autocast(library: str, name: str, group: dist.ProcessGroup | None) -> Any:
    """Return what makes the context in which a layer of ``library`` computes by recipe ``name``."""
    if name == HIGH:
        return contextlib.nullcontext
    if library == "fp8core":
        chosen: Any = recipe.by_name(name)
        return lambda: fp8core.autocast(recipe=chosen, amax_reduction_group=group)
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as te_recipe

    chosen = {
        "delayed": te_recipe.DelayedScaling,
        "current": te_recipe.Float8CurrentScaling,
        "block": te_recipe.Float8BlockScaling,
    }[name]()
    return lambda: te.autocast(enabled=True, recipe=chosen, amax_reduction_group=group)


def _library(name: str) -> Any:
    if name == "fp8core":
        return fp8core
    import transformer_engine.pytorch as te

    return te


def _layernorm_mlp(
    library: str, name: str, size: Size, ranks: Ranks, is_alone: bool
) -> Callable[[], Entrant]:
    """Return the maker of an RMSNorm, SwiGLU MLP without biases, whose columns are split.

    ``is_alone``: the same shards on all tokens, and no collective.
    """

    def make() -> Entrant:
        shared: dict[str, Any] = {
            "eps": EPS,
            "bias": False,
            "normalization": "RMSNorm",
            "activation": "swiglu",
            "params_dtype": torch.bfloat16,
            "device": ranks.device.torch_device,
        }
        ffn, rows = size.ffn, size.tokens
        if is_alone:
            ffn //= ranks.size
        else:
            rows //= ranks.size
            shared |= {"set_parallel_mode": True, "sequence_parallel": True}
            shared |= {"tp_group": ranks.group, "tp_size": ranks.size}
        layer = _library(library).LayerNormMLP(size.hidden, ffn, **shared)
        autocast = _autocast(library, name, None if is_alone else ranks.group)
        step = _stepper(layer, rows, size.hidden, ranks, autocast)
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


def _stepper(
    layer: Any, rows: int, columns: int, ranks: Ranks, autocast: Callable[[], Any]
) -> Step:
    """Return forward and backward of one step, whose gradients take the place of the last."""
    device = ranks.device.torch_device
    source = torch.Generator(device).manual_seed(ranks.rank)
    x = torch.randn(rows, columns, generator=source, device=device).bfloat16().requires_grad_()
    grad = (torch.randn(rows, columns, generator=source, device=device) * 1e-2).bfloat16()
    parameters = list(layer.parameters())

    def step() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        with autocast():
            y = layer(x)
        y.backward(grad)

    return step


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
    return Entrant(_stepper(compiled, rows, size.hidden, ranks, contextlib.nullcontext))


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
        layers = [
            fp8core.LayerNormMLP(
                size.hidden,
                size.ffn,
                eps=EPS,
                bias=False,
                normalization="RMSNorm",
                activation="swiglu",
                params_dtype=torch.bfloat16,
                device=device,
            )
            for _ in range(size.layers)
        ]
        model = torch.nn.Sequential(*layers)
        if name not in (HIGH, "delayed"):
            gather_quantized(model, recipe.by_name(name))
        autocast = _autocast("fp8core", name, ranks.group)
        return Entrant(_training_step(model, size, ranks, autocast))

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
    return Entrant(_training_step(model, size, ranks, contextlib.nullcontext, precompute))


def _training_step(
    model: torch.nn.Sequential,
    size: Size,
    ranks: Ranks,
    autocast: Callable[[], Any],
    after: Callable[[Any], object] = lambda _: None,
) -> Step:
    """Shard ``model``; return forward, backward and a step of Adam. ``after`` runs last."""
    device = ranks.device.torch_device
    mesh = DeviceMesh.from_group(ranks.group, device.type)
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)
    rows = size.tokens // ranks.size
    source = torch.Generator(device).manual_seed(ranks.rank)
    x = torch.randn(rows, size.hidden, generator=source, device=device).bfloat16()
    grad = (torch.randn(rows, size.hidden, generator=source, device=device) * 1e-2).bfloat16()

    def step() -> None:
        with autocast():
            y = model(x)
        y.backward(grad)
        optimizer.step()
        optimizer.zero_grad()
        after(model)

    return step
