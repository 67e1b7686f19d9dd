"""A small model with everything that stays in high precision, and files written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from fp8core.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)

H = 160  # no multiple of 128

# By recipe: the method, and the layout's name.
RECIPES: dict[str, tuple[Any, str | None]] = {
    "fp8 block": (Float8BlockScaling(use_f32_scales=True), None),
    "fp8 block, powers of two": (Float8BlockScaling(), None),
    "fp8 rows of 128": (Float8BlockScaling(w_block_scaling_dim=1), None),
    "fp8 tensor": (Float8CurrentScaling(), None),
    "fp8 microscaling": (MXFP8BlockScaling(), None),
    "fp8 square microscaling": (MXFP8BlockScaling(enable_2d_quantization=True), None),
    "float-quantized tensor": (Float8CurrentScaling(), "compressed-tensors"),
    "float-quantized channel": (Float8RowwiseScaling(), None),
    "float-quantized block": (Float8BlockScaling(use_f32_scales=True), "compressed-tensors"),
    "mxfp8-quantized": (MXFP8BlockScaling(), "compressed-tensors"),
    "nvfp4-pack-quantized": (NVFP4BlockScaling(), None),
    "nvfp4-pack-quantized, rows": (NVFP4BlockScaling(disable_2d_quantization=True), None),
}


class Block(torch.nn.Module):
    def __init__(self, width: int = H) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.gate = torch.nn.Linear(width, 2, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        weights = self.gate(y).softmax(-1)
        outputs = torch.stack([expert(y) for expert in self.experts], -1)
        return x + (outputs * weights[:, None]).sum(-1)


class Model(torch.nn.Module):
    def __init__(self, width: int = H, *, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, width)
        self.blocks = torch.nn.ModuleList([Block(width)])
        self.lm_head = torch.nn.Linear(width, 16, bias=False)
        self.register_buffer("positions", torch.arange(4))
        if is_tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.lm_head(x)
        return out


QUANTIZED = ("blocks.0.experts.0.weight", "blocks.0.experts.1.weight")


def model(seed: int = 0, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Model:
    torch.manual_seed(seed)
    return Model(**options).to(dtype)


def write(
    directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any] | None = None
) -> Path:
    """Write a checkpoint of one file, with an index, as others write them."""
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model-00001-of-00001.safetensors")
    places = dict.fromkeys(tensors, "model-00001-of-00001.safetensors")
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    content = {} if config is None else {"quantization_config": config}
    (directory / "config.json").write_text(json.dumps(content))
    return directory


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint, by the places that its index states."""
    from safetensors import safe_open

    index = json.loads((directory / "model.safetensors.index.json").read_text())
    tensors = {}
    for name, file in index["weight_map"].items():
        with safe_open(directory / file, framework="pt") as opened:
            tensors[name] = opened.get_tensor(name)
    return tensors


def spread(scale: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """Return a scale for each element, by repetition."""
    rows, columns = shape
    wide = scale.float().repeat_interleave(block[0], 0)[:rows]
    return wide.repeat_interleave(block[1], 1)[:, :columns]


def codes_of(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Return e4m3 codes of all finite values."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x3C
    return codes.view(torch.float8_e4m3fn)
