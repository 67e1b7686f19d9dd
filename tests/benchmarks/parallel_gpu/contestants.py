"""Who is measured: steps of layers over ranks, of fp8core, Transformer Engine and torchao."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from fp8core import recipe
from fp8core.collectives import of_group
from fp8core.distributed import gather_quantized
from tests.benchmarks.measuring.contest import step_of
from tests.benchmarks.measuring.libraries import EPS, swiglu_mlp, under_recipe
from tests.benchmarks.model_gpu.contestants import decoder_of, torch_decoder, torch_loss
from tests.benchmarks.model_gpu.weights import Shape
from tests.benchmarks.parallel_gpu.cases import HIGH, Job, Size
from tests.benchmarks.parallel_gpu.together import Ranks, Step

__all__ = ["ALONE", "COLLECTIVES", "Contestants", "Entrant", "contestants"]

ALONE = "alone"
"""After a contestant's name: the same shards without communication."""
COLLECTIVES = "collectives"
"""The collectives of a step by themselves, quantized as Float8CurrentScaling has them."""
ASYNC = "torchao tensorwise"
LEARNING_RATE = 1e-4
HEAD, SEQUENCE, BYTES = 128, 1024, 256
"""Of decoders: features of a head, the longest sequences, and the vocabulary."""
GATHERS = ("all_gather_single", "all_gather_into_tensor")
SCATTERS = ("reduce_scatter_single", "reduce_scatter_tensor")
"""What FSDP2 calls: the name since torch 2.13, and that before."""


class Entrant(NamedTuple):
    """A step, and how many collectives it takes part in and bytes it sends, where that is known."""

    step: Step
    traffic: Callable[[], tuple[int, int]] | None = None


Contestants = dict[str, Callable[[], Entrant]]


def contestants(job: Job, ranks: Ranks) -> Contestants:
    """Return the makers of all contestants of the job's kind, by name."""
    kinds = {"sequence_parallel": _sequence_parallel, "fsdp": _fsdp, "decoder": _decoder}
    made = kinds[job.kind](job, ranks)
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
        device = ranks.device.torch_device
        layers = (swiglu_mlp("fp8core", size.hidden, size.ffn, device) for _ in range(size.layers))
        model = torch.nn.Sequential(*layers)
        _gather(model, name)
        forward = under_recipe("fp8core", name, model, ranks.group)
        return _training(model, model, _backward(forward, size, ranks), ranks)

    return make


def _gather(model: torch.nn.Module, name: str) -> None:
    """Have the ranks gather codes of the weights of a recipe."""
    if name != HIGH:
        gather_quantized(model, recipe.by_name(name))


def _torch_sharded(size: Size, ranks: Ranks, *, is_fp8: bool) -> Entrant:
    layers = [_TorchMLP(size, ranks.device.torch_device) for _ in range(size.layers)]
    model = torch.nn.Sequential(*layers)
    after = _compiled(model, is_fp8=is_fp8)
    return _training(model, model, _backward(model, size, ranks), ranks, after)


def _compiled(layers: Any, *, is_fp8: bool) -> Callable[[Any], object]:
    """Compile layers, if ``is_fp8`` of torchao with FP8 all-gather; return what runs on the model
    after each step of the optimizer."""
    after: Callable[[Any], object] = lambda _: None  # noqa: E731  one of two functions
    if is_fp8:
        from torchao.float8 import (
            Float8LinearConfig,
            convert_to_float8_training,
            precompute_float8_dynamic_scale_for_fsdp,
        )

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True)
        convert_to_float8_training(layers, config=config)
        after = precompute_float8_dynamic_scale_for_fsdp
    for layer in layers:
        layer.compile(dynamic=False)
    return after


def _backward(forward: Callable[..., Any], size: Size, ranks: Ranks) -> Step:
    """Return forward and backward of this rank's rows."""
    x, grad = _inputs(size.tokens // ranks.size, size.hidden, ranks)
    return lambda: forward(x).backward(grad)


def _decoder(job: Job, ranks: Ranks) -> Contestants:
    """Return the makers of decoders of bytes, whose layers are sharded."""
    size, device = job.size, ranks.device.torch_device
    heads = max(1, size.hidden // HEAD)
    shape = Shape(size.hidden, size.ffn, heads, heads, size.layers, BYTES)
    tokens = size.tokens // ranks.size
    sequence = min(SEQUENCE, tokens)
    source = torch.Generator(device).manual_seed(ranks.rank)
    rows = (tokens // sequence, sequence + 1)
    text = torch.randint(BYTES, rows, generator=source, device=device)

    def run_of(logits: Callable[..., Any]) -> Step:
        return lambda: torch_loss(logits(text[:, :-1]), text[:, 1:]).backward()

    def of_torch(*, is_fp8: bool) -> Entrant:
        model = torch_decoder(shape, sequence, device)
        after = _compiled(model.layers, is_fp8=is_fp8)
        return _training(model, model.layers, run_of(model), ranks, after)

    def of_fp8core(name: str) -> Entrant:
        model = decoder_of("fp8core", shape, sequence, device)
        _gather(model, name)
        forward = under_recipe("fp8core", name, model, ranks.group)
        return _training(model, model.layers, run_of(forward), ranks)

    made: Contestants = {f"torch {HIGH}": partial(of_torch, is_fp8=False)}
    made["torchao tensorwise"] = partial(of_torch, is_fp8=True)
    return made | {f"fp8core {name}": partial(of_fp8core, name) for name in job.recipes}


def _training(
    model: Any,
    layers: Iterable[torch.nn.Module],
    run: Step,
    ranks: Ranks,
    after: Callable[[Any], object] = lambda _: None,
) -> Entrant:
    """Shard ``model`` by its ``layers``; return ``run`` and a step of Adam. ``after`` runs last."""
    mesh = DeviceMesh.from_group(ranks.group, ranks.device.torch_device.type)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)

    def step() -> None:
        run()
        optimizer.step()
        optimizer.zero_grad()
        after(model)

    return Entrant(step, lambda: _traffic_of_shards(step, ranks))


def _traffic_of_shards(step: Step, ranks: Ranks) -> tuple[int, int]:
    """Return the collectives of a step, torch's and the library's, and the bytes that this rank
    sends in them: its shard to each other rank, and of a sum all but its own part."""
    others, sent = ranks.size - 1, []

    def counting(call: Callable[..., Any], parts: float) -> Callable[..., Any]:
        def counted(*tensors: Any, **keywords: Any) -> Any:
            found = [keywords[name] for name in ("input", "input_tensor") if name in keywords]
            sent.append(round((found or tensors[1:])[0].nbytes * parts))
            return call(*tensors, **keywords)

        return counted

    with contextlib.ExitStack() as stack:
        for names, parts in ((GATHERS, others), (SCATTERS, others / ranks.size)):
            name = next(name for name in names if hasattr(dist, name))
            stack.enter_context(patch.object(dist, name, counting(getattr(dist, name), parts)))
        calls, num_bytes = _traffic_of(step, ranks)
    return calls + len(sent), num_bytes + sum(sent)
