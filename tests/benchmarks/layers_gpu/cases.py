"""What is measured: layers, sizes, recipes, and the job of one process.

Imports no torch, which takes seconds: the command itself does without, its processes import it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tests.benchmarks.measuring import command
from tests.benchmarks.measuring.command import HIGH

__all__ = [
    "COMMON_SIZES",
    "EPS",
    "FIGURES",
    "FILE",
    "HIGH",
    "KERNELS",
    "LAYERS",
    "RECIPES",
    "SIZES",
    "TURNS",
    "Case",
    "Job",
    "Layer",
    "Linear",
    "Size",
]

EPS = 1e-5
RECIPES = (HIGH, "delayed", "current", "block", "rowwise")


class Size(NamedTuple):
    """Rows of the input, and the features outside and inside of an MLP; of attention the heads of
    the queries, those of keys and values, and the tokens of a sequence."""

    tokens: int
    hidden: int
    ffn: int
    heads: int
    groups: int
    sequence: int


SIZES = {
    "tiny": Size(256, 512, 2048, 8, 8, 128),
    "1.3B": Size(8192, 2048, 8192, 16, 16, 4096),
    "8B": Size(8192, 4096, 14336, 32, 8, 4096),
    "70B": Size(8192, 8192, 28672, 64, 8, 4096),
    "b32_s1024": Size(32768, 4096, 16384, 32, 8, 1024),
}
COMMON_SIZES = ("tiny", "1.3B", "8B", "70B")


class Linear(NamedTuple):
    """A linear of a layer: the name of its weight, and its features."""

    weight: str
    in_features: int
    out_features: int

    @property
    def bias(self) -> str:
        """The name of its bias."""
        return self.weight.removesuffix("weight") + "bias"


@dataclass(frozen=True, slots=True)
class Layer:
    """A norm or None, one linear or two with an activation between; with ``has_attention`` a
    Transformer layer, whose attention and MLP have such a norm each, and add their input.

    A gated activation takes twice as many features as it returns.
    """

    title: str
    norm: str | None = None
    activation: str | None = None
    is_gated: bool = False
    has_bias: bool = False
    has_attention: bool = False
    is_causal: bool = False
    sizes: tuple[str, ...] = COMMON_SIZES

    def linears(self, size: Size) -> tuple[Linear, ...]:
        """Return the linears in order."""
        if self.activation is None:
            n = size.ffn if self.norm is None else 3 * size.hidden
            return (Linear("weight", size.hidden, n),)
        inner, mlp = size.ffn * (2 if self.is_gated else 1), ""
        attention: tuple[Linear, ...] = ()
        if self.has_attention:
            packed = size.hidden // size.heads * (size.heads + 2 * size.groups)
            mlp = MLP
            attention = (
                Linear(f"{QKV}weight", size.hidden, packed),
                Linear("self_attention.proj.weight", size.hidden, size.hidden),
            )
        return (
            *attention,
            Linear(f"{mlp}fc1_weight", size.hidden, inner),
            Linear(f"{mlp}fc2_weight", size.ffn, size.hidden),
        )

    @property
    def norms(self) -> tuple[str, ...]:
        """What the names of each norm's parameters begin with."""
        prefixes = (QKV, MLP) if self.has_attention else ("",)
        return () if self.norm is None else tuple(f"{prefix}layer_norm_" for prefix in prefixes)


QKV, MLP = "self_attention.layernorm_qkv.", "layernorm_mlp."
LAYERS = {
    "linear": Layer("Linear"),
    "norm_linear": Layer("LayerNormLinear (RMSNorm)", "rmsnorm"),
    "mlp_swiglu": Layer("LayerNormMLP (RMSNorm, SwiGLU)", "rmsnorm", "swiglu", True),
    "mlp_gelu": Layer("LayerNormMLP (LayerNorm, GELU)", "layernorm", "gelu"),
    "transformer_layer": Layer(
        "TransformerLayer (RMSNorm, causal, SwiGLU)",
        "rmsnorm",
        "swiglu",
        is_gated=True,
        has_attention=True,
        is_causal=True,
    ),
    "transformer_layer_gelu": Layer(
        "TransformerLayer (LayerNorm, no mask, GELU, bias)",
        "layernorm",
        "gelu",
        has_bias=True,
        has_attention=True,
        sizes=("b32_s1024",),
    ),
}


class Case(NamedTuple):
    """A layer at a size, by their names."""

    layer_name: str
    size_name: str

    @property
    def layer(self) -> Layer:
        """The layer."""
        return LAYERS[self.layer_name]

    @property
    def size(self) -> Size:
        """The size."""
        return SIZES[self.size_name]

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The linears in order."""
        return self.layer.linears(self.size)

    @property
    def leading(self) -> tuple[int, ...]:
        """The dimensions of the input before the last: tokens, or sequences and their tokens."""
        tokens, sequence = self.size.tokens, self.size.sequence
        return (tokens // sequence, sequence) if self.layer.has_attention else (tokens,)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of parameters by Transformer Engine's names."""
        shapes: dict[str, tuple[int, ...]] = {}
        for prefix in self.layer.norms:
            shapes[f"{prefix}weight"] = (self.size.hidden,)
            if self.layer.norm == "layernorm":
                shapes[f"{prefix}bias"] = (self.size.hidden,)
        for linear in self.linears:
            shapes[linear.weight] = (linear.out_features, linear.in_features)
            if self.layer.has_bias:
                shapes[linear.bias] = (linear.out_features,)
        return shapes


TURNS = ("graph", "eager", "host")
"""Measures that are taken in turns."""
FIGURES, KERNELS = "figures", "kernels"
FILE = "layers"
"""The name of the one file that all processes add to, one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(command.Job):
    """What one process measures; ``deadline`` (Unix time) ends turns, and nothing begins later."""

    layer_name: str
    measures: tuple[str, ...]
    deadline: float = float("inf")

    @property
    def case(self) -> Case:
        """The layer at its size."""
        return Case(self.layer_name, self.size_name)
