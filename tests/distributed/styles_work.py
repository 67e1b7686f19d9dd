"""What the ranks of the tests of styles run, and its judge: the same shards, by arguments."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import fp8core
from fp8core import distributed, recipe
from fp8core.collectives import Communicator
from tests.ranks import device, emulated

HIDDEN, FFN, ROWS, BATCH = 128, 256, 64, 2
RECIPES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "current": recipe.Float8CurrentScaling,
    "rowwise": recipe.Float8RowwiseScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
}
PARAMETERS = ("norm.weight", "ffn.up.weight", "ffn.up.bias", "ffn.down.weight", "ffn.down.bias")
WAIT = timedelta(seconds=60)


def values(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator).to(device())
    return (
        x * torch.linspace(0.5, 4, shape[0], device=device()).reshape(-1, *[1] * (len(shape) - 1))
    ).bfloat16()


def input_of(step: int, replica: int = 0) -> torch.Tensor:
    return values(ROWS, BATCH, HIDDEN, seed=100 * replica + step)


def gradient_of(step: int, replica: int = 0) -> torch.Tensor:
    return values(ROWS, BATCH, HIDDEN, seed=1000 + 100 * replica + step)


class FeedForward(torch.nn.Module):
    def __init__(self, up: torch.nn.Module, down: torch.nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return result


class Block(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module, ffn: FeedForward) -> None:
        super().__init__()
        self.norm, self.ffn = norm, ffn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.ffn(self.norm(x))
        return result


def fill(block: Block, rank: int | None = None) -> Block:
    """Fill a block with the whole parameters, or with the share of a rank of two."""
    whole = {
        "norm.weight": values(HIDDEN, seed=1),
        "ffn.up.weight": values(FFN, HIDDEN, seed=2) * 0.05,
        "ffn.up.bias": values(FFN, seed=3),
        "ffn.down.weight": values(HIDDEN, FFN, seed=4) * 0.05,
        "ffn.down.bias": values(HIDDEN, seed=5),
    }
    dims = {"ffn.up.weight": 0, "ffn.up.bias": 0, "ffn.down.weight": 1}
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            value = whole[name]
            if rank is not None and name in dims:
                value = value.chunk(2, dims[name])[rank]
            parameter.copy_(value)
    return block


def native() -> Block:
    given: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}
    up, down = fp8core.Linear(HIDDEN, FFN, **given), fp8core.Linear(FFN, HIDDEN, **given)
    return fill(Block(fp8core.RMSNorm(HIDDEN, **given), FeedForward(up, down)))


def converted() -> Block:
    given: dict[str, Any] = {"dtype": torch.bfloat16}
    up, down = torch.nn.Linear(HIDDEN, FFN, **given), torch.nn.Linear(FFN, HIDDEN, **given)
    block = fill(Block(torch.nn.RMSNorm(HIDDEN, eps=1e-5, **given), FeedForward(up, down)))
    fp8core.convert(block, filter=lambda module, name: True)
    return block


def spread(block: Block, mesh: DeviceMesh, dim: int = 0) -> Block:
    plan = {
        "norm": distributed.SequenceParallel(sequence_dim=dim),
        "ffn": distributed.PrepareModuleInput(
            input_layouts=(Shard(dim),), desired_input_layouts=(Replicate(),)
        ),
        "ffn.up": distributed.ColwiseParallel(),
        "ffn.down": distributed.RowwiseParallel(output_layouts=Shard(dim)),
    }
    parallelize_module(block, mesh, plan)
    return block


def by_arguments(group: Communicator) -> Block:
    given: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}
    spread_over: dict[str, Any] = {"tp_group": group, "sequence_parallel": True}
    up = fp8core.Linear(HIDDEN, FFN, parallel_mode="column", **given, **spread_over)
    down = fp8core.Linear(FFN, HIDDEN, parallel_mode="row", **given, **spread_over)
    block = Block(fp8core.RMSNorm(HIDDEN, **given), FeedForward(up, down))
    return fill(block, group.rank)


def step(block: Block, name: str, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """One forward and backward pass: the output, and the gradients that this rank has."""
    x = x.clone().requires_grad_()
    chosen = RECIPES[name]()
    with emulated(name), fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        y = block(x)
    y.backward(dy)
    results = {"y": y.detach(), "dx": x.grad}
    for parameter_name, parameter in block.named_parameters():
        grad = parameter.grad
        results[parameter_name] = grad.to_local() if isinstance(grad, DTensor) else grad
        parameter.grad = None
    return {key: value.clone() for key, value in results.items() if value is not None}


def mine(x: torch.Tensor, rank: int, dim: int = 0) -> torch.Tensor:
    return x.chunk(2, dim)[rank].contiguous()


def judge(group: Communicator, name: str, steps: int = 2) -> list[dict[str, torch.Tensor]]:
    """What layers with Transformer Engine's arguments compute for the same shards."""
    block, results = by_arguments(group), []
    for at in range(steps):
        part = [mine(one, group.rank) for one in (input_of(at), gradient_of(at))]
        result = step(block, name, *part)
        for summed in ("norm.weight", "ffn.down.bias"):  # each rank saw some of the rows
            result[summed] = group.sum(result[summed]).wait()
        results.append(result)
    return results


def fused(**arguments: Any) -> FeedForward:
    """A feed-forward network whose first linear has the norm inside."""
    given: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}
    column, row = (arguments | {"parallel_mode": mode} for mode in ("column", "row"))
    if not arguments:
        column, row = {}, {}
    up = fp8core.LayerNormLinear(HIDDEN, FFN, **given, **column)
    return FeedForward(up, fp8core.Linear(FFN, HIDDEN, **given, **row))


def fill_fused(block: FeedForward, rank: int | None = None) -> FeedForward:
    up, down = fill(native()).ffn.up, fill(native()).ffn.down
    state = {f"up.{name}": one for name, one in up.state_dict().items()}
    state |= {f"down.{name}": one for name, one in down.state_dict().items()}
    state |= {f"up.layer_norm_{name}": values(HIDDEN, seed=6) for name in ("weight", "bias")}
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            value = state[name]
            if rank is not None and name in dims:
                value = value.chunk(2, dims[name])[rank]
            parameter.copy_(value)
    return block


def fused_step(block: Any, rank: int, sequence: bool) -> dict[str, torch.Tensor]:
    given = input_of(0), gradient_of(0)
    x, dy = (mine(one, rank) for one in given) if sequence else given
    return step(block, "block", x, dy)


def fused_judge(group: Communicator, sequence: bool) -> dict[str, torch.Tensor]:
    block = fill_fused(fused(tp_group=group, sequence_parallel=sequence), group.rank)
    result = fused_step(block, group.rank, sequence)
    if sequence:
        for name in ("up.layer_norm_weight", "up.layer_norm_bias", "down.bias"):
            result[name] = group.sum(result[name]).wait()
    return result


def fused_by_styles(rank: int, mesh: DeviceMesh, sequence: bool) -> dict[str, torch.Tensor]:
    layout = Shard(0) if sequence else Replicate()
    plan = {
        "up": distributed.ColwiseParallel(input_layouts=layout),
        "down": distributed.RowwiseParallel(output_layouts=layout),
    }
    block = parallelize_module(fill_fused(fused()), mesh, plan)
    return fused_step(block, rank, sequence)


def said(call: Callable[[], object]) -> str:
    try:
        call()
    except fp8core.errors.Fp8CoreError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """What each rank is told about what does not fit."""
    given: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}

    def styled(layer: torch.nn.Module, style: Any) -> torch.nn.Module:
        return parallelize_module(layer, mesh, style)

    column, row = distributed.ColwiseParallel, distributed.RowwiseParallel
    odd, mlp = fp8core.Linear(64, 33, **given), fp8core.LayerNormMLP(64, 64, **given)
    spread_linear = styled(fp8core.Linear(64, 64, **given), row())
    replicated = DTensor.from_local(values(4, 64, seed=0), mesh, [Shard(0)], run_check=False)
    columns = DTensor.from_local(values(4, 64, seed=0), mesh, [Shard(1)], run_check=False)
    column_linear = styled(fp8core.Linear(64, 64, **given), column())
    return {
        "odd": said(lambda: styled(odd, column())),
        "odd_is_whole": str(list(odd.weight.shape)),
        "mlp": said(lambda: styled(mlp, column())),
        "norm": said(lambda: styled(mlp, distributed.SequenceParallel())),
        "output": said(
            lambda: styled(fp8core.Linear(64, 64, **given), row(output_layouts=Shard(2)))
        ),
        "rows": said(lambda: spread_linear(replicated)),
        "columns": said(lambda: column_linear(columns)),
        "twice": said(lambda: styled(column_linear, column())),
    }


def two_ranks(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("tp",))
    results: dict[str, Any] = {}
    for kind, make in (("native", native), ("converted", converted)):
        for name in RECIPES:
            block = spread(make(), mesh)
            results[f"{kind}_{name}"] = [
                step(block, name, mine(input_of(at), rank), mine(gradient_of(at), rank))
                for at in range(2)
            ]
    results["placements"] = {
        name: str(one.placements) for name, one in block.state_dict().items() if name in PARAMETERS
    }
    batch_first = spread(native(), mesh, dim=1)
    given = (input_of(0), gradient_of(0))
    parts = [mine(one, rank).transpose(0, 1).contiguous() for one in given]
    results["batch_first"] = [step(batch_first, "current", *parts)]
    for sequence in (False, True):
        results[f"fused_{sequence}"] = fused_by_styles(rank, mesh, sequence)
    results["refusals"] = refusals(mesh)
    return results


def four_ranks(rank: int) -> dict[str, Any]:
    """Training on two by two ranks, with weights gathered in high precision, and quantized."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    return {kind: train_sharded(mesh, kind == "quantized") for kind in ("plain", "quantized")}


def train_sharded(mesh: DeviceMesh, quantized: bool) -> dict[str, Any]:
    """Two steps of SGD with tensor parallelism of two by FSDP2 of two."""
    block = spread(native(), mesh["tp"])
    if quantized:
        distributed.gather_quantized(block, recipe.Float8CurrentScaling())
    fully_shard(block.ffn, mesh=mesh["dp"])
    fully_shard(block, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    replica, part = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    for at in range(2):
        with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
            y = block(mine(input_of(at, replica), part))
        y.backward(mine(gradient_of(at, replica), part))
        optimizer.step()
        optimizer.zero_grad()
    full = {name: one.full_tensor().detach() for name, one in block.named_parameters()}
    return {"y": y.detach(), **full}
