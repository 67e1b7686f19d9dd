"""Who is measured: the same layer of torch, torchao, Transformer Engine and fp8core."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

import fp8core
from fp8core import recipe
from tests.benchmarks.layers_gpu.cases import EPS, HIGH, RECIPES, Case
from tests.benchmarks.layers_gpu.data import ACTIVATION_FUNCTIONS, Data

__all__ = [
    "COMPILED_BF16",
    "CONTESTANTS",
    "PEERS",
    "Contestant",
    "ours",
    "stepper",
    "theirs",
]


class Contestant(NamedTuple):
    """A layer's forward under its recipe, and its parameters by Transformer Engine's names."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    parameters: dict[str, torch.nn.Parameter]


Make = Callable[[Case, Data], Contestant]
COMPILED_BF16 = "torch.compile bf16"
NORM_NAMES = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


class _Activation(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._function = ACTIVATION_FUNCTIONS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


def torch_model(
    case: Case, data: Data
) -> tuple[torch.nn.Sequential, dict[str, torch.nn.Parameter]]:
    """Return the layer of torch's own modules, and its parameters by Transformer Engine's names."""
    parts: list[torch.nn.Module] = []
    owners: dict[str, tuple[torch.nn.Module, str]] = {}
    own: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    if case.layer.norm is not None:
        kind = {"rmsnorm": torch.nn.RMSNorm, "layernorm": torch.nn.LayerNorm}[case.layer.norm]
        norm = kind(case.size.hidden, eps=EPS, **own)
        parts.append(norm)
        owners |= {f"layer_norm_{name}": (norm, name) for name, _ in norm.named_parameters()}
    names = [name for name in data.parameters if not name.startswith("layer_norm")]
    for name, (k, n) in zip(names, case.linears, strict=True):
        if name == "fc2_weight":
            assert case.layer.activation is not None
            parts.append(_Activation(case.layer.activation))
        linear = torch.nn.Linear(k, n, bias=False, **own)
        parts.append(linear)
        owners[name] = (linear, "weight")
    parameters = {}
    for name, (module, attribute) in owners.items():
        parameters[name] = torch.nn.Parameter(data.parameters[name])
        setattr(module, attribute, parameters[name])
    return torch.nn.Sequential(*parts), parameters


def torch_eager(case: Case, data: Data) -> Contestant:
    return Contestant(*torch_model(case, data))


def torch_compiled(case: Case, data: Data) -> Contestant:
    model, parameters = torch_model(case, data)
    return Contestant(torch.compile(model, dynamic=False), parameters)


def torchao(name: str) -> Make:
    def make(case: Case, data: Data) -> Contestant:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model, parameters = torch_model(case, data)
        convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(name))
        linears = [part for part in model if isinstance(part, torch.nn.Linear)]
        names = [own for own in parameters if not own.startswith("layer_norm")]
        for own, part in zip(names, linears, strict=True):
            weight: Any = part.weight
            parameters[own] = weight
        return Contestant(torch.compile(model, dynamic=False), parameters)

    return make


def theirs(name: str) -> Make:
    """Return the maker of Transformer Engine's layer under recipe ``name``."""

    def make(case: Case, data: Data) -> Contestant:
        import transformer_engine.pytorch as te
        from transformer_engine.common import recipe as te_recipe

        if name == HIGH:
            return _of_library(te, case, data, contextlib.nullcontext)
        chosen = {
            "delayed": te_recipe.DelayedScaling,
            "current": te_recipe.Float8CurrentScaling,
            "block": te_recipe.Float8BlockScaling,
        }[name]()
        return _of_library(te, case, data, lambda: te.autocast(enabled=True, recipe=chosen))

    return make


def ours(name: str) -> Make:
    """Return the maker of fp8core's layer under recipe ``name``."""

    def make(case: Case, data: Data) -> Contestant:
        if name == HIGH:
            return _of_library(fp8core, case, data, contextlib.nullcontext)
        chosen = recipe.by_name(name)
        return _of_library(
            fp8core, case, data, lambda: fp8core.autocast(enabled=True, recipe=chosen)
        )

    return make


def _of_library(
    library: Any,
    case: Case,
    data: Data,
    autocast: Callable[[], contextlib.AbstractContextManager[Any]],
) -> Contestant:
    """Return a layer of Transformer Engine or of fp8core, which take the same arguments."""
    options = {
        "bias": False,
        "params_dtype": torch.bfloat16,
        "device": str(data.x.device.type),
    }
    if case.layer.norm is not None:
        options |= {"normalization": NORM_NAMES[case.layer.norm], "eps": EPS}
    if case.layer.activation is not None:
        options["activation"] = case.layer.activation
        layer = library.LayerNormMLP(case.size.hidden, case.size.ffn, **options)
    else:
        kind = library.Linear if case.layer.norm is None else library.LayerNormLinear
        layer = kind(*case.linears[0], **options)
    parameters = {name: getattr(layer, name) for name in data.parameters}
    for name, parameter in parameters.items():
        parameter.data = data.parameters[name]  # shared: no step writes to a parameter

    def forward(x: torch.Tensor) -> torch.Tensor:
        with autocast():
            y: torch.Tensor = layer(x)
        return y

    return Contestant(forward, parameters)


CONTESTANTS: dict[str, Make] = {
    "torch bf16": torch_eager,
    COMPILED_BF16: torch_compiled,
    "torchao tensorwise": torchao("tensorwise"),
    "torchao rowwise": torchao("rowwise"),
    **{f"te {name}": theirs(name) for name in RECIPES if name != "rowwise"},
    **{f"fp8core {name}": ours(name) for name in RECIPES},
}

PEERS: dict[str, tuple[str, ...]] = {
    HIGH: (COMPILED_BF16, "te bf16", "torch bf16"),
    "delayed": ("te delayed", "torchao tensorwise"),
    "current": ("te current", "torchao tensorwise"),
    "block": ("te block",),
    "rowwise": ("torchao rowwise",),
}
"""Those that compute as fp8core does under a recipe; the first is the one that bars name."""


def stepper(contestant: Contestant, data: Data) -> Callable[[], None]:
    """Return forward and backward of one step, whose gradients take the place of the last."""
    x = data.x.detach().requires_grad_()
    parameters = tuple(contestant.parameters.values())

    def step() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        contestant.forward(x).backward(data.grad)

    return step
