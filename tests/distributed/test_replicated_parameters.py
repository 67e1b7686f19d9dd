"""Gradients of parameters that all ranks have: after the documented sum, those of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import fp8core
from fp8core.distributed import Experts, get_batch_on_this_cp_rank
from tests.ranks import device, run_ranks

HIDDEN, FFN, HEADS, SEQUENCE, BATCH = 32, 64, 4, 8, 2
F64 = torch.float64


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def new_layer(qk_norm: str, **arguments: Any) -> fp8core.TransformerLayer:
    return fp8core.TransformerLayer(
        HIDDEN,
        FFN,
        HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        qk_norm_type=qk_norm,
        softmax_type="learnable",
        params_dtype=F64,
        device=device(),
        **arguments,
    )


def fill(layer: torch.nn.Module, rank: int, size: int) -> None:
    """Fill the parameters of one process, or those that a rank has of them by its marks."""
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parts = size if getattr(parameter, "tensor_model_parallel", False) else 1
            dim = getattr(parameter, "partition_dim", 0)
            shape = list(parameter.shape)
            shape[dim] *= parts
            value = values(*shape, seed=seed) * 0.3
            parameter.copy_(value.chunk(parts, dim)[rank if parts > 1 else 0])


def gradients(
    layer: fp8core.TransformerLayer, x: torch.Tensor, dy: torch.Tensor
) -> dict[str, torch.Tensor]:
    layer(x).backward(dy)
    return {name: one.grad for name, one in layer.named_parameters() if one.grad is not None}


def spread(rank: int, qk_norm: str, *, sequence: bool) -> dict[str, torch.Tensor]:
    layer = new_layer(
        qk_norm, tp_group=dist.group.WORLD, set_parallel_mode=True, sequence_parallel=sequence
    )
    fill(layer, rank, 2)
    pair = [values(SEQUENCE, BATCH, HIDDEN, seed=100 + at) for at in range(2)]
    found = gradients(layer, *[one.chunk(2)[rank] if sequence else one for one in pair])
    replicated = {}
    for name, parameter in layer.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            continue
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(found[name])
        replicated[name] = found[name]
    return replicated


def shared(qk_norm: str) -> dict[str, torch.Tensor]:
    """Ranks with a context-parallel group sum all gradients."""
    layer = new_layer(qk_norm)
    fill(layer, 0, 1)
    layer.set_context_parallel_group(dist.group.WORLD)
    pair = [values(SEQUENCE, BATCH, HIDDEN, seed=100 + at) for at in range(2)]
    mine = [get_batch_on_this_cp_rank(one, dist.group.WORLD, seq_dim=0) for one in pair]
    found = gradients(layer, *mine)
    for one in found.values():
        dist.all_reduce(one)
    return found


class Routed(torch.nn.Module):
    """A norm on each rank before two experts, or one of two on each of two ranks."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.norm = fp8core.RMSNorm(HIDDEN, params_dtype=F64, device=device())
        num = 2 if group is None else 1
        self.up = fp8core.GroupedLinear(num, HIDDEN, FFN, params_dtype=F64, device=device())
        self.exchange = None if group is None else Experts(self.up, group=group)

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        rows = self.norm(x)
        if self.exchange is None:
            result: torch.Tensor = self.up(rows, counts)
        else:
            result = self.exchange(rows, torch.tensor(counts))
        return result


def norm_of_experts(rank: int | None) -> torch.Tensor:
    """The gradient of the norm, summed over the ranks, each of which has three rows."""
    layer = Routed(None if rank is None else dist.group.WORLD)
    with torch.no_grad():
        for at in range(2) if rank is None else (rank,):
            getattr(layer.up, f"weight{at}").copy_(values(FFN, HIDDEN, seed=at))
    # By expert: two rows of rank 0 and one of rank 1, one of rank 0 and two of rank 1.
    x, dy = values(6, HIDDEN, seed=100), values(6, FFN, seed=101)
    rows, counts = {None: ([0, 1, 2, 3, 4, 5], [3, 3]), 0: ([0, 1, 3], [2, 1])}.get(
        rank, ([2, 4, 5], [1, 2])
    )
    layer(x[rows], counts).backward(dy[rows])
    grad = layer.norm.weight.grad
    assert grad is not None
    if rank is not None:
        dist.all_reduce(grad)
    return grad


def work(rank: int) -> dict[str, Any]:
    return {
        "tensor": spread(rank, "RMSNorm", sequence=False),
        "sequence": spread(rank, "LayerNorm", sequence=True),
        "context": shared("LayerNorm"),
        "expert": {"norm": norm_of_experts(rank)},
    }


def in_one_process(qk_norm: str) -> dict[str, torch.Tensor]:
    layer = new_layer(qk_norm)
    fill(layer, 0, 1)
    return gradients(layer, *[values(SEQUENCE, BATCH, HIDDEN, seed=100 + at) for at in range(2)])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return run_ranks(work, folder)


def test_replicated_parameters_have_the_gradients_of_one_process(
    ranks: list[dict[str, Any]],
) -> None:
    for way, qk_norm in [
        ("tensor", "RMSNorm"),
        ("sequence", "LayerNorm"),
        ("context", "LayerNorm"),
        ("expert", ""),
    ]:
        judge = {"norm": norm_of_experts(None)} if way == "expert" else in_one_process(qk_norm)
        for rank in ranks:
            assert rank[way], (way, qk_norm)
            for name, found in rank[way].items():
                # Sums of at most 2^9 float64 numbers of this size in another order.
                limit = 2.0**-40 * judge[name].abs().max()
                # The learned offset of the softmax is float32.
                limit = max(float(limit), 2.0**-20 * (found.dtype == torch.float32))
                assert (found - judge[name]).abs().max() <= limit, name
