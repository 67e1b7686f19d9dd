"""What is measured: layers, sizes, recipes, and the job of one process.

Imports no torch, which takes seconds: the command itself does without, its processes import it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

__all__ = [
    "DONE",
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
    "Size",
]

EPS = 1e-5
HIGH = "bf16"
"""The name of a layer without a recipe."""
RECIPES = (HIGH, "delayed", "current", "block", "rowwise")


class Size(NamedTuple):
    """Rows of the input, and the features outside and inside of an MLP."""

    tokens: int
    hidden: int
    ffn: int


SIZES = {
    "tiny": Size(256, 512, 2048),
    "1.3B": Size(8192, 2048, 8192),
    "8B": Size(8192, 4096, 14336),
    "70B": Size(8192, 8192, 28672),
}


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer without biases: a norm or None, one linear or two with an activation between.

    A gated activation takes twice as many features as it returns.
    """

    title: str
    norm: str | None = None
    activation: str | None = None
    is_gated: bool = False

    def linears(self, size: Size) -> tuple[tuple[int, int], ...]:
        """Return ``(in_features, out_features)`` of each linear."""
        if self.activation is not None:
            inner = size.ffn * (2 if self.is_gated else 1)
            return (size.hidden, inner), (size.ffn, size.hidden)
        return ((size.hidden, size.ffn if self.norm is None else 3 * size.hidden),)


LAYERS = {
    "linear": Layer("Linear"),
    "norm_linear": Layer("LayerNormLinear (RMSNorm)", "rmsnorm"),
    "mlp_swiglu": Layer("LayerNormMLP (RMSNorm, SwiGLU)", "rmsnorm", "swiglu", True),
    "mlp_gelu": Layer("LayerNormMLP (LayerNorm, GELU)", "layernorm", "gelu"),
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
    def linears(self) -> tuple[tuple[int, int], ...]:
        """``(in_features, out_features)`` of each linear."""
        return self.layer.linears(self.size)

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of parameters by Transformer Engine's names."""
        shapes: dict[str, tuple[int, ...]] = {}
        if self.layer.norm is not None:
            shapes["layer_norm_weight"] = (self.size.hidden,)
        if self.layer.norm == "layernorm":
            shapes["layer_norm_bias"] = (self.size.hidden,)
        names = ("weight",) if len(self.linears) == 1 else ("fc1_weight", "fc2_weight")
        shapes |= {name: (n, k) for name, (k, n) in zip(names, self.linears, strict=True)}
        return shapes


TURNS = ("graph", "eager", "host")
"""Measures that are taken in turns."""
FIGURES, KERNELS = "figures", "kernels"
FILE = "layers"
"""The name of the one file that all processes add to, one after the other."""
DONE = "done"
"""Of a record which says that a measure was taken, and for which recipes and libraries."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one process measures.

    ``seconds`` is the most that each measure's turns take; ``deadline`` (Unix time) ends them
    earlier, and no measure begins after it.
    """

    case: Case
    recipes: tuple[str, ...]
    measures: tuple[str, ...]
    libraries: tuple[str, ...]
    out: str
    seconds: float = 15.0
    width: float = 0.01
    deadline: float = float("inf")

    @classmethod
    def from_json(cls, text: str) -> Job:
        """Return the job that ``json.dumps(asdict(job))`` wrote."""
        fields = json.loads(text)
        fields["case"] = Case(*fields["case"])
        for name in ("recipes", "measures", "libraries"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def to_json(self) -> str:
        """Return the job as one line."""
        return json.dumps(asdict(self))
