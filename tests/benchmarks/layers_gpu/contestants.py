"""Who is measured: the same layer of torch, torchao, Transformer Engine and fp8core.

What needs no turns is measured here: bytes held for backward, copies of weights, and errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tests.benchmarks.layers_gpu.cases import EPS, HIGH, RECIPES, Case
from tests.benchmarks.layers_gpu.data import ACTIVATION_FUNCTIONS, Data
from tests.benchmarks.layers_gpu.transformer import TorchTransformer, layer_arguments
from tests.benchmarks.measuring.contest import MIB, step_of
from tests.benchmarks.measuring.device import Device
from tests.benchmarks.measuring.libraries import layers_of, under_recipe


class Contestant(NamedTuple):
    """A layer's forward under its recipe, and its parameters by Transformer Engine's names."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    parameters: dict[str, torch.nn.Parameter]

    def stepper(self, data: Data) -> Callable[[], None]:
        """Return forward and backward of one step."""
        x = data.x.detach().requires_grad_()
        return step_of(self.forward, x, data.grad, tuple(self.parameters.values()))


Make = Callable[[Case, Data], Contestant]
COMPILED_BF16 = "torch.compile bf16"
NORM_NAMES = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


class _Activation(torch.nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self._function = ACTIVATION_FUNCTIONS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)


class TorchModel(NamedTuple):
    """A layer of torch's own modules, its parameters by Transformer Engine's names, and its
    linears by the names of their weights."""

    module: torch.nn.Module
    parameters: dict[str, torch.nn.Parameter]
    linears: dict[str, torch.nn.Linear]


def torch_model(case: Case, data: Data) -> TorchModel:
    """Return the layer of torch's own modules."""
    owners: dict[str, tuple[torch.nn.Module, str]] = {}
    own: dict[str, Any] = {"device": "meta", "dtype": torch.bfloat16}
    norms: list[torch.nn.Module] = []
    kinds = {"rmsnorm": torch.nn.RMSNorm, "layernorm": torch.nn.LayerNorm}
    for prefix in case.layer.norms:
        norm = kinds[str(case.layer.norm)](case.size.hidden, eps=EPS, **own)
        norms.append(norm)
        owners |= {f"{prefix}{name}": (norm, name) for name, _ in norm.named_parameters()}
    linears = {}
    for one in case.linears:
        linear = torch.nn.Linear(one.in_features, one.out_features, case.layer.has_bias, **own)
        linears[one.weight] = linear
        owners[one.weight] = (linear, "weight")
        if case.layer.has_bias:
            owners[one.bias] = (linear, "bias")
    parameters = {}
    for name, (module, attribute) in owners.items():
        parameters[name] = torch.nn.Parameter(data.parameters[name])
        setattr(module, attribute, parameters[name])
    return TorchModel(_assembled(case, norms, list(linears.values())), parameters, linears)


def _assembled(
    case: Case, norms: list[torch.nn.Module], linears: list[torch.nn.Module]
) -> torch.nn.Module:
    """Return the layer that consists of these parts."""
    if case.layer.activation is None:
        return torch.nn.Sequential(*norms, *linears)
    activation = _Activation(case.layer.activation)
    if case.layer.has_attention:
        return TorchTransformer(case, norms, linears, activation)
    return torch.nn.Sequential(*norms, linears[0], activation, linears[1])


def torch_eager(case: Case, data: Data) -> Contestant:
    model = torch_model(case, data)
    return Contestant(model.module, model.parameters)


def torch_compiled(case: Case, data: Data) -> Contestant:
    model = torch_model(case, data)
    return Contestant(torch.compile(model.module, dynamic=False), model.parameters)


def torchao(name: str) -> Make:
    def make(case: Case, data: Data) -> Contestant:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        model = torch_model(case, data)
        paths = {linear: path for path, linear in model.module.named_modules()}
        config = Float8LinearConfig.from_recipe_name(name)
        converted = convert_to_float8_training(model.module, config=config)
        parameters = dict(model.parameters)
        for one in case.linears:
            linear: Any = converted.get_submodule(paths[model.linears[one.weight]])
            parameters[one.weight] = linear.weight
            if case.layer.has_bias:
                parameters[one.bias] = linear.bias
        return Contestant(torch.compile(converted, dynamic=False), parameters)

    return make


def of_library(library: str, name: str) -> Make:
    """Return the maker of the layer of Transformer Engine or of fp8core under recipe ``name``."""

    def make(case: Case, data: Data) -> Contestant:
        layer = _layer_of(layers_of(library), case, str(data.x.device.type))
        parameters = {key: layer.get_parameter(key) for key in data.parameters}
        for key, parameter in parameters.items():
            parameter.data = data.parameters[key]  # shared: no step writes to a parameter
        return Contestant(under_recipe(library, name, layer), parameters)

    return make


def _layer_of(library: Any, case: Case, device: str) -> torch.nn.Module:
    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device}
    layer: torch.nn.Module
    norm, activation = case.layer.norm, case.layer.activation
    if case.layer.has_attention:
        assert norm is not None
        arguments = layer_arguments(case, NORM_NAMES[norm])
        layer = library.TransformerLayer(**arguments, **options)
        return layer
    options["bias"] = case.layer.has_bias
    if norm is not None:
        options |= {"normalization": NORM_NAMES[norm], "eps": EPS}
    if activation is not None:
        options["activation"] = activation
        layer = library.LayerNormMLP(case.size.hidden, case.size.ffn, **options)
        return layer
    (linear,) = case.linears
    kind = library.Linear if norm is None else library.LayerNormLinear
    layer = kind(linear.in_features, linear.out_features, **options)
    return layer


CONTESTANTS: dict[str, Make] = {
    "torch bf16": torch_eager,
    COMPILED_BF16: torch_compiled,
    "torchao tensorwise": torchao("tensorwise"),
    "torchao rowwise": torchao("rowwise"),
    **{f"te {name}": of_library("te", name) for name in RECIPES if name != "rowwise"},
    **{f"fp8core {name}": of_library("fp8core", name) for name in RECIPES},
}

PEERS: dict[str, tuple[str, ...]] = {
    HIGH: (COMPILED_BF16, "te bf16", "torch bf16"),
    "delayed": ("te delayed", "torchao tensorwise"),
    "current": ("te current", "torchao tensorwise"),
    "block": ("te block",),
    "rowwise": ("torchao rowwise",),
}
"""Those that compute as fp8core does under a recipe; the first is the one that bars name."""


class Held(NamedTuple):
    """What a forward leaves for backward, MiB without the output; and relative errors."""

    held_mib: float
    errors: dict[str, float]


def held_and_errors(
    contestant: Contestant, data: Data, exact: dict[str, torch.Tensor], device: Device
) -> Held:
    """Run a step; measure what it holds in its middle, and its results against ``exact``.

    An error is the Frobenius norm of the difference over that of the exact result.
    """
    x = data.x.detach().requires_grad_()
    for parameter in contestant.parameters.values():
        parameter.grad = None
    held, y = _held_bytes(contestant, x, device)
    y.backward(data.grad)
    results = {"y": y.detach(), "x": x.grad}
    results |= {name: parameter.grad for name, parameter in contestant.parameters.items()}
    for parameter in contestant.parameters.values():
        parameter.grad = None
    errors = {}
    for name, result in results.items():
        assert result is not None
        wanted = exact[name]
        errors[name] = ((result.float() - wanted).norm() / wanted.norm()).item()
    return Held(held / MIB, errors)


def weight_copies_mib(contestant: Contestant, data: Data, held_mib: float, device: Device) -> float:
    """Return the part of ``held_mib`` that does not grow with the rows of the input.

    It is that of a forward of half as many rows, twice, less the whole: copies of weights in the
    main, also states and workspaces of the layer.
    """
    x = data.x[: data.x.shape[0] // 2].detach().requires_grad_()
    contestant.forward(x).backward(data.grad[: x.shape[0]])  # first: what it makes once is made
    for parameter in contestant.parameters.values():
        parameter.grad = None
    x.grad = None
    half, y = _held_bytes(contestant, x, device)
    del y
    return 2 * half / MIB - held_mib


def _held_bytes(
    contestant: Contestant, x: torch.Tensor, device: Device
) -> tuple[int, torch.Tensor]:
    """Run forward; return the bytes it leaves besides its output, and the output."""
    device.clock.synchronize()
    before = device.allocated()
    y = contestant.forward(x)
    device.clock.synchronize()
    return device.allocated() - before - y.numel() * y.element_size(), y
