"""A checkpoint read into a model that FSDP2 has spread over two ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fp8core.checkpoints import load_pretrained, save_pretrained
from tests.interchange.models import QUANTIZED, codes_of, model, write
from tests.ranks import run_ranks

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Module()
        weight = torch.zeros(3, 128, 128, dtype=torch.bfloat16)
        self.experts.down_proj = torch.nn.Parameter(weight)


def load(rank: int, folder: str, experts: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    net = model(seed=1)
    for expert in net.blocks[0].experts:
        fully_shard(expert, mesh=mesh)
    fully_shard(net, mesh=mesh)
    loaded = load_pretrained(folder, net)
    values = {name: one.full_tensor() for name, one in net.named_parameters()}
    sizes = {name: one.to_local().numel() for name, one in net.named_parameters()}
    mixture = Experts()
    fully_shard(mixture, mesh=mesh)
    load_pretrained(experts, mixture)
    values["experts"] = mixture.experts.down_proj.full_tensor()
    return {"values": values, "sizes": sizes, "dequantized": list(loaded.dequantized)}


def test_each_rank_reads_its_share(tmp_path: Path) -> None:
    folder, experts = tmp_path / "model", tmp_path / "experts"
    save_pretrained(model(), folder, "block")
    tensors = {}
    for expert in range(3):
        name = f"experts.{expert}.down_proj.weight"
        tensors[name] = codes_of((128, 128), seed=expert)
        tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
    write(experts, tensors, FP8)
    whole = model(seed=1)
    load_pretrained(folder, whole)
    mixture = Experts()
    load_pretrained(experts, mixture)
    expected = {**dict(whole.named_parameters()), "experts": mixture.experts.down_proj}
    ranks = run_ranks(load, tmp_path, str(folder), str(experts))
    for result in ranks:
        assert result["dequantized"] == list(QUANTIZED)
        for name, value in result["values"].items():
            assert torch.equal(value, expected[name]), name
    for name, size in ranks[0]["sizes"].items():
        assert size + ranks[1]["sizes"][name] == expected[name].numel()
