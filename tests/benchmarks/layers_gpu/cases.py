"""What is measured: the layers, their sizes, and the same data for every contestant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8core import recipe
from fp8core.backend_api import GATED
from fp8core.recipe.plan import HIGH_PRECISION, LayerRole, LinearPlan
from tests.benchmarks.measuring import ideal_bytes

__all__ = [
    "EPS",
    "HIGH",
    "LAYERS",
    "RECIPES",
    "SIZES",
    "Case",
    "Data",
    "Layer",
    "Size",
    "exact_results",
    "make_data",
    "plan_of",
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
    """A layer without biases: a norm or None, one linear or two with an activation between."""

    title: str
    norm: str | None = None
    activation: str | None = None

    def linears(self, size: Size) -> tuple[tuple[int, int], ...]:
        """Return ``(in_features, out_features)`` of each linear."""
        if self.activation is not None:
            inner = size.ffn * (2 if self.activation in GATED else 1)
            return (size.hidden, inner), (size.ffn, size.hidden)
        return ((size.hidden, size.ffn if self.norm is None else 3 * size.hidden),)


LAYERS = {
    "linear": Layer("Linear"),
    "norm_linear": Layer("LayerNormLinear (RMSNorm)", "rmsnorm"),
    "mlp_swiglu": Layer("LayerNormMLP (RMSNorm, SwiGLU)", "rmsnorm", "swiglu"),
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

    def ideal_bytes(self, recipe_name: str) -> list[ideal_bytes.OpBytes]:
        """Return the memory-bound operations of a step and their fewest bytes."""
        return list(
            ideal_bytes.layer(
                self.size.tokens,
                self.linears,
                norm_kind=self.layer.norm,
                activation_name=self.layer.activation,
                plan=dict(plan_of(recipe_name).tensors),
            )
        )


def plan_of(recipe_name: str) -> LinearPlan:
    """Return how a recipe quantizes a linear's tensors; without a recipe, not at all."""
    if recipe_name == HIGH:
        return HIGH_PRECISION
    plan = recipe.by_name(recipe_name).plan(LayerRole("linear"), torch.bfloat16)
    assert isinstance(plan, LinearPlan)
    return plan


class Data(NamedTuple):
    """What every contestant gets: parameters by name, the input, the gradient of the output."""

    parameters: dict[str, torch.Tensor]
    x: torch.Tensor
    grad: torch.Tensor


def make_data(case: Case, device: torch.device) -> Data:
    """Return normal data from the seed 0: weights of variance 1 / k, gradients times 0.01."""
    torch.manual_seed(0)
    parameters = {
        name: _parameter(name, shape, device).bfloat16()
        for name, shape in case.parameter_shapes().items()
    }
    tokens, (k, _), (_, n) = case.size.tokens, case.linears[0], case.linears[-1]
    x = torch.randn(tokens, k, device=device).bfloat16()
    return Data(parameters, x, (torch.randn(tokens, n, device=device) * 1e-2).bfloat16())


def _parameter(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    values: torch.Tensor = torch.randn(shape, device=device)
    if len(shape) == 2:
        return values * float(shape[1] ** -0.5)
    return values * 0.1 + (1.0 if name.endswith("weight") else 0.0)


_NORMS: dict[str, Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]] = {
    "rmsnorm": lambda x, own: torch.nn.functional.rms_norm(
        x, x.shape[-1:], own["layer_norm_weight"], EPS
    ),
    "layernorm": lambda x, own: torch.nn.functional.layer_norm(
        x, x.shape[-1:], own["layer_norm_weight"], own["layer_norm_bias"], EPS
    ),
}


def _swiglu(x: torch.Tensor) -> torch.Tensor:
    activated, factor = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(activated) * factor


ACTIVATION_FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": _swiglu,
    "gelu": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def exact_results(case: Case, data: Data) -> dict[str, torch.Tensor]:
    """Return the output and all gradients in float32: ``y``, ``x``, and the parameters by name."""
    own = {name: value.float().requires_grad_() for name, value in data.parameters.items()}
    x = data.x.float().requires_grad_()
    y = x
    if case.layer.norm is not None:
        y = _NORMS[case.layer.norm](y, own)
    first, *rest = (value for name, value in own.items() if not name.startswith("layer_norm"))
    y = torch.nn.functional.linear(y, first)  # [tokens, k] x [n, k] -> [tokens, n]
    for weight in rest:
        assert case.layer.activation is not None
        y = ACTIVATION_FUNCTIONS[case.layer.activation](y)
        y = torch.nn.functional.linear(y, weight)  # [tokens, ffn] x [hidden, ffn]
    y.backward(data.grad.float())
    gradients = {"x": x, **own}
    results = {"y": y.detach()}
    for name, tensor in gradients.items():
        assert tensor.grad is not None
        results[name] = tensor.grad
    return results
