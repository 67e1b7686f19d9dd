"""The decoder of ``docs/examples/train_decoder.py`` of torch's modules, in torchao's FP8.

    torchrun --nproc-per-node 2 -m tests.on_ranks.torchao_decoder [options of train_decoder.py]

The same text, sizes, initial distributions and schedule. Layers are compiled, their linears those
of ``convert_to_float8_training`` with FP8 all-gather, its scales computed once a step for all
weights. Parameters are float32 and computed with in bfloat16, which is what masters are there.
"""

from __future__ import annotations

import importlib.util
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tests.benchmarks.model_gpu.contestants import compile_layers, torch_decoder, torch_loss
from tests.benchmarks.model_gpu.weights import Shape

__all__ = ["SCRIPT", "example", "main"]

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "examples" / "train_decoder.py"
BYTES, STD = 256, 0.02


def example() -> Any:
    """Return ``train_decoder.py`` as a module of its own."""
    spec = importlib.util.spec_from_file_location("train_decoder", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Decoder(nn.Module):
    """Rows of bytes in, the mean loss of each next byte out; parameters in float32."""

    def __init__(self, args: Any, device: torch.device) -> None:
        super().__init__()
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        shape = Shape(args.hidden, args.ffn, args.heads, args.heads, args.layers, BYTES)
        self.whole = torch_decoder(shape, args.context, device).float()
        for name, weight in self.whole.named_parameters():
            if weight.dim() == 2:
                is_last = name.endswith(("proj.weight", "fc2.weight"))
                nn.init.normal_(weight, std=STD / (2 * args.layers) ** 0.5 if is_last else STD)
        config = Float8LinearConfig(
            enable_fsdp_float8_all_gather=True, emulate=device.type == "cpu"
        )
        convert_to_float8_training(self.whole.layers, config=config)
        if device.type != "cpu":
            compile_layers(self.whole)

    @property
    def layers(self) -> Any:
        """The layers, which are sharded one by one."""
        return self.whole.layers

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the loss of ``rows [b, s + 1]``."""
        return torch_loss(self.whole(rows[:, :-1]), rows[:, 1:])


def main(arguments: list[str]) -> None:
    """Train as ``train_decoder.py`` does, several ranks of torchrun alone."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    module = example()

    def decoder(args: Any) -> Decoder:
        index = None if args.device == "cpu" else torch.accelerator.current_device_index()
        return Decoder(args, torch.device(args.device, index))

    def adam(parameters: Any, rate: float, betas: Any, *, weight_decay: float, **_: Any) -> Any:
        optimizer = torch.optim.AdamW(list(parameters), rate, betas, weight_decay=weight_decay)
        optimizer.register_step_post_hook(compute_scales)
        return optimizer

    def compute_scales(*_: Any) -> None:
        precompute_float8_dynamic_scale_for_fsdp(models[-1])

    def shard(model: nn.Module, **keywords: Any) -> None:
        models.append(fully_shard(model, **keywords))

    models: list[Any] = []
    module.Decoder, module.FusedAdam, module.fully_shard = decoder, adam, shard
    module.MixedPrecisionPolicy = partial(MixedPrecisionPolicy, param_dtype=torch.bfloat16)
    module.main(module.parser().parse_args([*arguments, "--recipe", "bf16"]))


if __name__ == "__main__":
    main(sys.argv[1:])
