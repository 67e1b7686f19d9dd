"""Answer from codes that others wrote: DeepSeek's blocks, and channels of compressed-tensors."""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import fp8core


def check(name: str, scale: torch.Tensor, spread: torch.Tensor, config: dict) -> None:
    """Write codes and their scales as ``name``, load the files, and compare with the product."""
    folder = Path(tempfile.mkdtemp())
    tensors = {"fc.weight": codes, f"fc.{name}": scale, "fc.bias": torch.zeros(256)}
    save_file({key: tensor.cpu() for key, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    with torch.device("meta"):
        model = nn.ModuleDict({"fc": nn.Linear(384, 256)})
    print(fp8core.huggingface.load_quantized(folder, model, device=codes.device))
    assert isinstance(model.fc.weight, fp8core.QuantizedTensor)
    x = torch.randn(32, 384)
    assert torch.equal(model.fc.weight.dequantize(), codes.float() * spread)
    want = x @ model.fc.weight.dequantize().t()
    assert (model.fc(x) - want).norm() < 0.05 * want.norm()  # activations are quantized too


torch.manual_seed(0)
codes = (torch.randn(256, 384) * 64).to(torch.float8_e4m3fn)
blocks, channels = torch.rand(2, 3) / 64, torch.rand(256, 1) / 64
every = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
deepseek = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
check("weight_scale_inv", blocks, every, {**deepseek, "activation_scheme": "dynamic"})
weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}}
vllm = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups}
check("weight_scale", channels, channels, vllm)
