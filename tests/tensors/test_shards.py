"""Quantized tensors as the shards of a DTensor, in two processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core import QuantizedTensor, UnsupportedError, functional
from fp8core.quantizers import Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer
from tests.ranks import run_ranks

QUANTIZERS = {
    "mxfp8": MXFP8Quantizer("e4m3"),
    "nvfp4_row": NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False),
    "current": Float8CurrentScalingQuantizer("e4m3", "cpu"),
}


def whole(name: str) -> QuantizedTensor:
    torch.manual_seed(0)
    return QUANTIZERS[name](torch.randn(64, 128))


def work(rank: int, name: str) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh, tensor = init_device_mesh("cpu", (2,)), whole(name)
    part = tensor.chunk(2)[rank]
    shards = DTensor.from_local(part, mesh, [Shard(0)])
    full = shards.full_tensor()
    spread = distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
    refused = ""
    try:
        torch.distributed.all_reduce(tensor)
    except UnsupportedError as error:
        refused = str(error)
    return {
        "kind": type(shards.to_local()).__name__,
        "gathered": type(full).__name__,
        "values": functional.dequantize(full),
        "spread": functional.dequantize(spread.full_tensor()),
        "spread_kind": type(spread.to_local()).__name__,
        "sum": (shards + 1).full_tensor(),
        "view": functional.dequantize(shards.view(2, 32, 128).full_tensor()),
        "refused": refused,
    }


@pytest.mark.parametrize(
    ("name", "gathered"),
    [("mxfp8", "QuantizedTensor"), ("nvfp4_row", "QuantizedTensor"), ("current", "Tensor")],
)
def test_shards_stay_quantized_and_are_gathered(tmp_path: Path, name: str, gathered: str) -> None:
    expected = whole(name).dequantize()
    for made in run_ranks(work, tmp_path, name):
        assert (made["kind"], made["spread_kind"]) == ("QuantizedTensor", "QuantizedTensor")
        assert made["gathered"] == gathered
        for key in ("values", "spread"):
            assert torch.equal(made[key], expected)
        assert torch.equal(made["sum"], expected + 1)
        assert torch.equal(made["view"], expected.view(2, 32, 128))
        assert "tensors()" in made["refused"]


def test_memory_that_is_not_there_is_not_read(tmp_path: Path) -> None:
    """Operators with lists of lists of tensors reach C++ code past ``__torch_dispatch__``."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for tensor in (whole("mxfp8"), whole("mxfp8").t()):
            out = torch.zeros(tensor.shape)
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                torch.distributed.scatter(out, [tensor], src=0)
            assert tensor.data_ptr() == 0
    finally:
        torch.distributed.destroy_process_group()
