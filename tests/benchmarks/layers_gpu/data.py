"""The same data for every contestant, its results in float32, and the bytes that it moves."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from fp8core import recipe
from fp8core.recipe.plan import HIGH_PRECISION, LayerRole, LinearPlan
from tests.benchmarks.layers_gpu.cases import EPS, HIGH, MLP, QKV, Case, Linear
from tests.benchmarks.measuring import ideal_bytes

__all__ = ["ACTIVATION_FUNCTIONS", "Data", "exact_results", "make_data", "plan_of", "step_bytes"]


def step_bytes(case: Case, recipe_name: str) -> list[ideal_bytes.OpBytes]:
    """Return the memory-bound operations of a step and their fewest bytes."""
    layer, plan = case.layer, dict(plan_of(recipe_name).tensors)
    features = tuple((one.in_features, one.out_features) for one in case.linears)
    if layer.has_attention:
        assert layer.norm is not None
        assert layer.activation is not None
        return list(
            ideal_bytes.transformer_layer(
                case.size.tokens,
                features,
                norm_kind=layer.norm,
                activation_name=layer.activation,
                has_bias=layer.has_bias,
                plan=plan,
            )
        )
    return list(
        ideal_bytes.layer(
            case.size.tokens,
            features,
            norm_kind=layer.norm,
            activation_name=layer.activation,
            plan=plan,
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
    """What every contestant gets: parameters by name, the input, the gradient of the output.

    The input is ``[tokens, k]``, of a Transformer layer ``[sequences, tokens of each, k]``.
    """

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
    leading, k, n = case.leading, case.linears[0].in_features, case.linears[-1].out_features
    x = torch.randn(*leading, k, device=device).bfloat16()
    return Data(parameters, x, (torch.randn(*leading, n, device=device) * 1e-2).bfloat16())


def _parameter(name: str, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    values: torch.Tensor = torch.randn(shape, device=device)
    if len(shape) == 2:
        return values * float(shape[1] ** -0.5)
    return values * 0.1 + (1.0 if name.endswith("weight") else 0.0)


Parameters = dict[str, torch.Tensor]
_NORMS: dict[str, Callable[[torch.Tensor, Parameters, str], torch.Tensor]] = {
    "rmsnorm": lambda x, own, prefix: torch.nn.functional.rms_norm(
        x, x.shape[-1:], own[f"{prefix}layer_norm_weight"], EPS
    ),
    "layernorm": lambda x, own, prefix: torch.nn.functional.layer_norm(
        x, x.shape[-1:], own[f"{prefix}layer_norm_weight"], own[f"{prefix}layer_norm_bias"], EPS
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
    y = _transformer(case, x, own) if case.layer.has_attention else _block(case, x, own, "")
    y.backward(data.grad.float())
    gradients = {"x": x, **own}
    results = {"y": y.detach()}
    for name, tensor in gradients.items():
        assert tensor.grad is not None
        results[name] = tensor.grad
    return results


def _transformer(case: Case, x: torch.Tensor, own: Parameters) -> torch.Tensor:
    """Return a Transformer layer's output ``[b, s, hidden]``."""
    qkv, proj, *_ = case.linears
    packed = _linear(_normalized(case, x, own, QKV), qkv, own)
    attended = [
        checkpoint(_attend, case, sequence, use_reentrant=False, preserve_rng_state=False)
        for sequence in packed.unbind()  # the logits of one sequence at a time
    ]
    x = x + _linear(torch.stack(attended), proj, own)
    return x + _block(case, x, own, MLP)


def _attend(case: Case, packed: torch.Tensor) -> torch.Tensor:
    """Return attention ``[s, heads * d]`` of the rows of one sequence ``[s, (heads + 2 groups)
    * d]``: queries, then keys, then values."""
    _, _, _, heads, groups, sequence = case.size
    head_dim = packed.shape[-1] // (heads + 2 * groups)
    by_head = packed.unflatten(-1, (-1, head_dim)).transpose(0, 1)  # [heads + 2 groups, s, d]
    q, k, v = by_head.split([heads, groups, groups])
    k, v = (x.repeat_interleave(heads // groups, 0) for x in (k, v))
    logits = q @ k.mT * head_dim**-0.5  # [heads, s, d] x [heads, d, s] -> [heads, s, s]
    if case.layer.is_causal:
        later = torch.ones(sequence, sequence, dtype=torch.bool, device=packed.device).triu(1)
        logits = logits.masked_fill(later, -torch.inf)
    return (logits.softmax(-1) @ v).transpose(0, 1).flatten(1)


def _block(case: Case, x: torch.Tensor, own: Parameters, prefix: str) -> torch.Tensor:
    """Return the linears behind a norm, if there is one, with an activation between them."""
    y = x if case.layer.norm is None else _normalized(case, x, own, prefix)
    first, *rest = case.linears[2:] if case.layer.has_attention else case.linears
    y = _linear(y, first, own)
    for linear in rest:
        assert case.layer.activation is not None
        y = _linear(ACTIVATION_FUNCTIONS[case.layer.activation](y), linear, own)
    return y


def _normalized(case: Case, x: torch.Tensor, own: Parameters, prefix: str) -> torch.Tensor:
    assert case.layer.norm is not None
    return _NORMS[case.layer.norm](x, own, prefix)


def _linear(x: torch.Tensor, linear: Linear, own: Parameters) -> torch.Tensor:
    # [tokens, k] x [n, k] -> [tokens, n]
    return torch.nn.functional.linear(x, own[linear.weight], own.get(linear.bias))
