"""Low-precision parameters in state dicts and in torch.distributed.checkpoint, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import fp8core
from fp8core import recipe
from fp8core.recipe import Recipe
from tests.ranks import run_ranks

RECIPES: dict[str, Recipe] = {
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "nvfp4": recipe.NVFP4BlockScaling(),
}


def make(used: Recipe | None, seed: int) -> fp8core.LayerNormMLP:
    torch.manual_seed(seed)
    with fp8core.quantized_model_init(used is not None, used):
        return fp8core.LayerNormMLP(64, 96, params_dtype=torch.bfloat16)


def tensors(layer: torch.nn.Module) -> list[torch.Tensor]:
    found = []
    for own in layer.parameters():
        found += own.tensors() if isinstance(own, fp8core.QuantizedTensor) else [own]
    return found


def equal(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(tensors(a), tensors(b), strict=True))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_state_dict_round_trip_is_bit_exact(name: str, assign: bool, tmp_path: Path) -> None:
    saved, loaded = make(RECIPES[name], 0), make(RECIPES[name], 1)
    torch.save(saved.state_dict(), tmp_path / "file")
    loaded.load_state_dict(torch.load(tmp_path / "file", weights_only=True), assign=assign)
    assert equal(saved, loaded)


def test_a_quantized_checkpoint_loads_into_high_precision() -> None:
    saved, loaded = make(RECIPES["mxfp8"], 0), make(None, 1)
    loaded.load_state_dict(saved.state_dict())
    assert torch.equal(loaded.fc1_weight, saved.fc1_weight.dequantize())


def test_a_high_precision_checkpoint_is_quantized() -> None:
    saved, loaded = make(None, 0), make(RECIPES["mxfp8"], 1)
    loaded.load_state_dict(saved.state_dict())
    assert equal(loaded, make(RECIPES["mxfp8"], 0))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", RECIPES)
def test_distributed_checkpoint_of_one_process_is_bit_exact(name: str, tmp_path: Path) -> None:
    saved, loaded = make(RECIPES[name], 0), make(RECIPES[name], 1)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    loaded.load_state_dict(state)
    assert equal(saved, loaded)


def checkpoint_of_a_rank(rank: int, folder: str) -> None:
    saved, loaded = make(RECIPES["mxfp8"], 0), make(RECIPES["mxfp8"], 1 + rank)
    dcp.save(saved.state_dict(), checkpoint_id=folder)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state)
    assert equal(saved, loaded)
    with pytest.raises(fp8core.UnsupportedError, match=r"\.tensors\(\)"):
        dist.all_reduce(loaded.fc1_weight.detach())
    other = make(RECIPES["mxfp8"], 2 + rank)
    dist.broadcast(other.fc1_weight.detach(), 0)
    expected = make(RECIPES["mxfp8"], 2).fc1_weight.tensors()
    assert all(map(torch.equal, other.fc1_weight.tensors(), expected))


def test_distributed_checkpoint_of_two_processes_is_bit_exact(tmp_path: Path) -> None:
    run_ranks(checkpoint_of_a_rank, tmp_path, str(tmp_path / "checkpoint"))
