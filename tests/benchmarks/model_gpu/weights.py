"""The shapes of decoders, and the weights that all contestants train."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

import torch

__all__ = ["SHAPES", "Shape", "Shared"]

BF16 = torch.bfloat16
SEED = 0


class Shape(NamedTuple):
    """Of a decoder: features, features inside of an MLP, heads of queries, and of keys and values,
    layers, and tokens of the vocabulary."""

    hidden: int
    ffn: int
    heads: int
    groups: int
    layers: int = 4
    vocabulary: int = 32768

    @property
    def head(self) -> int:
        """The features of a head."""
        return self.hidden // self.heads

    def layer_tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of a layer's parameters; ``qkv`` and ``fc1`` have several parts of rows."""
        return {
            "norm1": (self.hidden,),
            "qkv": (sum(self.parts["qkv"].values()), self.hidden),
            "proj": (self.hidden, self.hidden),
            "norm2": (self.hidden,),
            "fc1": (2 * self.ffn, self.hidden),
            "fc2": (self.hidden, self.ffn),
        }

    @property
    def parts(self) -> dict[str, dict[str, int]]:
        """The rows of each part of a layer's tensors that have several."""
        keys = self.groups * self.head
        return {
            "qkv": {"q": self.hidden, "k": keys, "v": keys},
            "fc1": {"gate": self.ffn, "up": self.ffn},
        }

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters."""
        layers = {
            f"layers.{at}.{name}": shape
            for at in range(self.layers)
            for name, shape in self.layer_tensors().items()
        }
        matrix = (self.vocabulary, self.hidden)
        return {"embedding": matrix, **layers, "norm": (self.hidden,), "head": matrix}

    def flops(self, tokens: int, sequence: int) -> float:
        """The model's FLOPs of forward and backward of ``tokens`` in sequences of a length."""
        sizes = (shape for name, shape in self.tensors().items() if name != "embedding")
        products = sum(shape[0] * shape[1] for shape in sizes if len(shape) == 2)
        # Two products of [s, d] by [d, s] for each head, half of which are masked: 2 s^2 d forward.
        attention = self.layers * self.hidden * sequence
        return 6.0 * tokens * (products + attention)


SHAPES = {
    "tiny": Shape(64, 128, 4, 2, 2, 256),
    "1.3B": Shape(2048, 8192, 16, 16),
    "8B": Shape(4096, 14336, 32, 8),
    "70B-pair": Shape(8192, 28672, 64, 8, 2),
}
TENSORS = {
    **{f"{name}.weight": name for name in ("norm1", "qkv", "proj", "norm2", "fc1", "fc2")},
    "self_attention.layernorm_qkv.layer_norm_weight": "norm1",
    "self_attention.layernorm_qkv.weight": "qkv",
    "self_attention.proj.weight": "proj",
    "layernorm_mlp.layer_norm_weight": "norm2",
    "layernorm_mlp.fc1_weight": "fc1",
    "layernorm_mlp.fc2_weight": "fc2",
    "input_layernorm.weight": "norm1",
    **{f"self_attn.{name}_proj.weight": name for name in "qkv"},
    "self_attn.o_proj.weight": "proj",
    "post_attention_layernorm.weight": "norm2",
    **{f"mlp.{name}_proj.weight": name for name in ("gate", "up")},
    "mlp.down_proj.weight": "fc2",
    **{f"{name}.weight": name for name in ("embedding", "norm", "head")},
    "embed_tokens.weight": "embedding",
    "lm_head.weight": "head",
}
"""The tensor of :class:`Shared` for each parameter of a contestant, within a layer or outside."""


class Shared:
    """The parameters that all contestants train, and their averages: dictionaries of bfloat16
    tensors by the names of :meth:`Shape.tensors` and of their parts."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        self.values, *averages = (self._tensors(device) for _ in range(3))
        self.averages = dict(zip(("exp_avg", "exp_avg_sq"), averages, strict=True))
        self.reset()

    def _tensors(self, device: torch.device) -> dict[str, torch.Tensor]:
        tensors = {
            name: torch.zeros(shape, dtype=BF16, device=device)
            for name, shape in self.shape.tensors().items()
        }
        for name, rows in self.shape.parts.items():
            for at in range(self.shape.layers):
                parts = tensors[f"layers.{at}.{name}"].split(list(rows.values()))
                tensors |= {
                    f"layers.{at}.{key}": part for key, part in zip(rows, parts, strict=True)
                }
        return tensors

    def reset(self) -> None:
        """Write the initial values, which follow from the seed, and averages of 0."""
        source = torch.Generator(self.values["norm"].device).manual_seed(SEED)
        for name in self.shape.tensors():
            value = self.values[name]
            if value.dim() == 1:
                value.fill_(1.0)
            else:
                value.normal_(0.0, 0.02, generator=source)
            for averages in self.averages.values():
                averages[name].zero_()

    def of(self, model: torch.nn.Module) -> Iterator[tuple[torch.nn.Parameter, str]]:
        """Yield each parameter of a contestant and the name of its tensor."""
        for name, parameter in model.named_parameters():
            if not parameter.numel():  # a bias that there is not
                continue
            match = re.fullmatch(r"(?:model\.)?(layers\.\d+\.)?(.+)", name)
            assert match is not None
            yield parameter, (match[1] or "") + TENSORS[match[2]]

    def lend(self, model: torch.nn.Module) -> None:
        """Have the parameters of a contestant be these."""
        for parameter, name in self.of(model):
            assert parameter.shape == self.values[name].shape, name
            parameter.data = self.values[name]
