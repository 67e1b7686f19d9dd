"""One layer of each kind, in bfloat16, and steps of training that return every bit they make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import fp8core as te
from fp8core import ops

BF16 = torch.bfloat16
ROWS = 21  # no multiple of a block: layers pad
CURRENT = te.recipe.Float8CurrentScaling()
Make = Callable[[], torch.nn.Module]


def _in_bf16(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    torch.set_default_dtype(BF16)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


LAYERS: dict[str, Make] = {
    "linear": lambda: te.Linear(32, 48, params_dtype=BF16),
    "grouped": lambda: te.GroupedLinear(3, 32, 48, params_dtype=BF16),
    "layernorm_linear": lambda: te.LayerNormLinear(32, 48, params_dtype=BF16),
    "returned_norm": lambda: te.LayerNormLinear(
        32, 48, params_dtype=BF16, return_layernorm_output=True
    ),
    "mlp": lambda: te.LayerNormMLP(32, 64, params_dtype=BF16),
    "gated_mlp": lambda: te.LayerNormMLP(
        32, 64, params_dtype=BF16, normalization="RMSNorm", activation="swiglu"
    ),
    "sequential": lambda: _in_bf16(
        lambda: ops.Sequential(
            ops.Linear(32, 64),
            ops.AddExtraInput(),
            ops.LayerNorm(64),
            ops.Linear(64, 96),
            ops.SwiGLU(),
            ops.Quantize(forward=True, backward=True),
            ops.Linear(48, 32),
        )
    ),
}


def make(name: str) -> torch.nn.Module:
    """Return the layer called ``name``, filled from a fixed seed."""
    torch.manual_seed(1)
    layer = LAYERS[name]()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    return layer


def call(layer: torch.nn.Module, x: torch.Tensor, **named: Any) -> torch.Tensor:
    """Run the layer on ``x [rows, 32]`` with whatever else it takes."""
    if isinstance(layer, te.GroupedLinear):
        return layer(x, [5, 0, x.shape[0] - 5], **named)
    if isinstance(layer, ops.Sequential):
        return layer(x, torch.ones(x.shape[0], 64, dtype=x.dtype), **named)
    made = layer(x, **named)
    return made[0] + made[1].sum() if isinstance(made, tuple) else made


def train(
    layer: torch.nn.Module,
    recipe: te.recipe.Recipe | None,
    *,
    steps: int = 3,
    rows: int = ROWS,
    after: Callable[[], None] = lambda: None,
    run: Callable[..., torch.Tensor] = call,
) -> list[torch.Tensor]:
    """Train ``steps`` steps of two microbatches; return outputs, gradients and all state."""
    torch.manual_seed(2)
    found: list[torch.Tensor] = []
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.01)
    for step in range(steps):
        optimizer.zero_grad()
        for _ in range(2):
            x = (torch.randn(rows, 32) * (step + 1)).to(BF16).requires_grad_()
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                y = run(layer, x)
            y.backward(torch.randn(y.shape).to(BF16))
            assert x.grad is not None
            found += [y.detach(), x.grad]
        found += [own.grad.clone() for own in layer.parameters() if own.grad is not None]
        optimizer.step()
        found += [value.clone() for value in layer.state_dict().values()]
        after()
    return found


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    """Say whether two runs made the same bits."""
    return len(got) == len(want) and all(map(torch.equal, got, want))


def step(
    model: torch.nn.Module,
    x: torch.Tensor,
    chosen: te.recipe.Recipe | None = CURRENT,
    grad: float = 1.0,
) -> None:
    """Run the layer on ``x`` and back from a gradient of ``grad`` throughout."""
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        y = call(model, x)
    y.backward(torch.full_like(y, grad))
