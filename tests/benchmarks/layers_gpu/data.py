"""The same data for every contestant, its results in float32, and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from fp8core import recipe
from fp8core.recipe.plan import HIGH_PRECISION, LayerRole, LinearPlan
from tests.benchmarks.layers_gpu.cases import EPS, HIGH, Case
from tests.benchmarks.measuring import ideal_bytes

__all__ = ["ACTIVATION_FUNCTIONS", "Data", "exact_results", "make_data", "plan_of", "step_bytes"]


def step_bytes(case: Case, recipe_name: str) -> list[ideal_bytes.OpBytes]:
    """Return the memory-bound operations of a step and their fewest bytes."""
    return list(
        ideal_bytes.layer(
            case.size.tokens,
            case.linears,
            norm_kind=case.layer.norm,
            activation_name=case.layer.activation,
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
