"""Who is measured: a Linear of torch, torchao, Transformer Engine and fp8core, on the same data."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

import fp8core
from fp8core import recipe

SIZES = {  # tokens, in_features, out_features
    "tiny": (256, 512, 2048),
    "1.3B": (8192, 2048, 8192),
    "8B": (8192, 4096, 14336),
    "70B": (8192, 8192, 28672),
}
DEVICE = torch.device("cuda", 0)


class Data(NamedTuple):
    """What every contestant gets."""

    weight: torch.Tensor
    x: torch.Tensor
    grad: torch.Tensor


class Contestant(NamedTuple):
    """A layer's forward under its recipe, and its weight."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    weight: torch.Tensor


def torch_eager(data: Data) -> Contestant:
    layer = torch.nn.Linear(*reversed(data.weight.shape), bias=False, device="meta")
    layer.weight = torch.nn.Parameter(data.weight.clone())
    return Contestant(layer, layer.weight)


def torch_compiled(data: Data) -> Contestant:
    made = torch_eager(data)
    return Contestant(torch.compile(made.forward, dynamic=False), made.weight)


def torchao_eager(name: str) -> Callable[[Data], Contestant]:
    def make(data: Data) -> Contestant:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = torch.nn.Sequential(torch_eager(data).forward)
        config = Float8LinearConfig.from_recipe_name(name)
        convert_to_float8_training(model, config=config)
        return Contestant(model, model[0].weight)

    return make


def torchao(name: str) -> Callable[[Data], Contestant]:
    def make(data: Data) -> Contestant:
        made = torchao_eager(name)(data)
        return Contestant(torch.compile(made.forward, dynamic=False), made.weight)

    return make


def transformer_engine(name: str) -> Callable[[Data], Contestant]:
    def make(data: Data) -> Contestant:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as te_recipe

        chosen = {
            "delayed": te_recipe.DelayedScaling,
            "current": te_recipe.Float8CurrentScaling,
            "block": te_recipe.Float8BlockScaling,
        }[name]()
        n, k = data.weight.shape
        layer = te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")
        layer.weight.data.copy_(data.weight)

        def forward(x: torch.Tensor) -> torch.Tensor:
            with te.autocast(enabled=True, recipe=chosen):
                made: torch.Tensor = layer(x)
            return made

        return Contestant(forward, layer.weight)

    return make


def ours(name: str) -> Callable[[Data], Contestant]:
    def make(data: Data) -> Contestant:
        chosen = recipe.by_name(name)
        n, k = data.weight.shape
        layer = fp8core.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda")
        with torch.no_grad():
            layer.weight.copy_(data.weight)

        def forward(x: torch.Tensor) -> torch.Tensor:
            with fp8core.autocast(enabled=True, recipe=chosen):
                made: torch.Tensor = layer(x)
            return made

        return Contestant(forward, layer.weight)

    return make


CONTESTANTS: dict[str, Callable[[Data], Contestant]] = {
    "torch bf16": torch_eager,
    "torch.compile bf16": torch_compiled,
    "torchao tensorwise": torchao("tensorwise"),
    "torchao rowwise": torchao("rowwise"),
    "te delayed": transformer_engine("delayed"),
    "te current": transformer_engine("current"),
    "te block": transformer_engine("block"),
    "fp8core delayed": ours("delayed"),
    "fp8core current": ours("current"),
    "fp8core block": ours("block"),
    "fp8core rowwise": ours("rowwise"),
}

LIBRARIES: dict[str, Callable[[Data], Contestant]] = {
    "torch": torch_eager,
    "torchao": torchao_eager("tensorwise"),
    "te": transformer_engine("current"),
    "fp8core": ours("current"),
}
"""One layer of each library, to have it make what it keeps for the whole process."""


def make_data(size: str) -> Data:
    tokens, k, n = SIZES[size]
    torch.manual_seed(0)
    return Data(
        (torch.randn(n, k, device=DEVICE) * k**-0.5).bfloat16(),
        torch.randn(tokens, k, device=DEVICE).bfloat16(),
        (torch.randn(tokens, n, device=DEVICE) * 1e-2).bfloat16(),
    )


def stepper(made: Contestant, data: Data) -> Callable[[], None]:
    x = data.x.detach().requires_grad_()

    def step() -> None:
        x.grad = made.weight.grad = None
        made.forward(x).backward(data.grad)

    return step
