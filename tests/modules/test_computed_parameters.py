"""Parameters that are computed from others, or have several dtypes, are cast as what they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fp8core import (
    GroupedLinear,
    LayerNorm,
    LayerNormMLP,
    Linear,
    OperandError,
    autocast,
    recipe,
    use_backend,
)
from fp8core.backend_api import OPTIONAL_OPS, OpDesc, QuantizeDesc
from fp8core_backends.reference.backend import ReferenceBackend
from tests.dispatch import toys
from tests.inspection import models
from tests.inspection.models import BF16, make
from tests.pairs import pairs, turns

RECIPES = {
    "none": None,
    "delayed": recipe.DelayedScaling(amax_history_len=2),
    "current": recipe.Float8CurrentScaling(),
    "current, weights quantized again": recipe.Float8CurrentScaling(requantize_weights=True),
}
KINDS = [*models.LAYERS, "layernorm"]


class Twice(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def layer(kind: str) -> nn.Module:
    if kind != "layernorm":
        return make(kind)
    own = LayerNorm(32, params_dtype=BF16)
    with torch.no_grad():
        own.bias.fill_(0.5)
    return own


def names(own: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the owner and the name of each parameter."""
    return [
        (module, name)
        for module in own.modules()
        for name in [*module._parameters]
        if module._parameters[name] is not None
    ]


def flattened(own: nn.Module) -> nn.Parameter:
    """Make the parameters of ``own`` views of one, which is returned, as FSDP does."""
    places = names(own)
    values = [module._parameters[name].detach() for module, name in places]
    flat = nn.Parameter(torch.cat([value.flatten() for value in values]))
    parts = torch.split(flat, [value.numel() for value in values])
    for (module, name), part, value in zip(places, parts, values, strict=True):
        del module._parameters[name]
        setattr(module, name, part.view(value.shape))
    return flat


def train(own: nn.Module, chosen: recipe.Recipe | None) -> list[torch.Tensor]:
    torch.manual_seed(2)
    x = torch.randn(models.ROWS, 32, dtype=BF16, requires_grad=True)
    with autocast(enabled=chosen is not None, recipe=chosen):
        y = models.call(own, x)
    y.square().sum().backward()
    return [y.detach(), x.grad]


@pytest.mark.parametrize(("kind", "chosen"), turns(KINDS, RECIPES))
def test_views_of_a_flat_parameter_train_as_parameters(kind: str, chosen: str) -> None:
    whole, own = layer(kind), layer(kind)
    want = train(whole, RECIPES[chosen])
    flat = flattened(own)
    got = train(own, RECIPES[chosen])
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    grads = [module._parameters[name].grad for module, name in names(whole)]
    assert torch.equal(flat.grad, torch.cat([grad.flatten() for grad in grads]))


@pytest.mark.parametrize(("kind", "chosen"), turns(KINDS, RECIPES))
def test_parametrized_parameters_are_what_is_computed(kind: str, chosen: str) -> None:
    """Twice a power of two has the same bits but for the exponent."""
    whole, own = layer(kind), layer(kind)
    for module, name in names(own):
        parametrize.register_parametrization(module, name, Twice())
        with torch.no_grad():
            module.parametrizations[name].original.div_(2)
    want, got = train(whole, RECIPES[chosen]), train(own, RECIPES[chosen])
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)
    assert all(parameter.grad is not None for parameter in own.parameters())


# --- several dtypes: each cast is given the dtype that it was bound for ---

QUANTIZING = [name for name in RECIPES if name != "none"]
CURRENT = RECIPES["current"]


def without_fusions(desc: OpDesc) -> str | None:
    return f"fuses no {desc.op}" if desc.op in OPTIONAL_OPS else None


strictly = pytest.mark.usefixtures("strict")


@pytest.fixture
def strict() -> Iterator[None]:
    """Have a backend run whose casts refuse another dtype than their descriptor's, as a kernel
    would read beyond the end of the tensor."""

    def bind(backend: toys.ToyBackend, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        run = ReferenceBackend().bind(desc, device)

        def checked(x: Any, *more: Any, **named: Any) -> Any:
            if isinstance(desc, QuantizeDesc):
                assert x.dtype == desc.dtype
            return run(x, *more, **named)

        return checked

    with toys.isolation():
        toys.register(toys.backend("toy", bind=bind, refuse=without_fusions))
        with use_backend("toy"):
            yield


def trained(own: nn.Module, chosen: recipe.Recipe) -> list[torch.Tensor]:
    torch.manual_seed(2)
    x = torch.randn(models.ROWS, 32, dtype=BF16, requires_grad=True)
    with autocast(recipe=chosen):
        y = models.call(own, x)
    y.square().sum().backward()
    return [x.grad, *(one.grad.to(BF16) for one in own.parameters())]


def named(own: nn.Module, kind: str) -> list[nn.Parameter]:
    norms = ("norm", "2.")  # of ops.Sequential
    return [
        param
        for name, param in own.named_parameters()
        if (kind == "norms" and any(one in name for one in norms))
        or (kind == "vectors" and param.dim() == 1)
        or (kind == "second weights" and param.dim() == 2 and "2" in name)
    ]


@strictly
@pytest.mark.parametrize(
    ("kind", "wide", "chosen"),
    pairs(
        ["linear", "layernorm_linear", "mlp", "gated_mlp", "sequential"],
        ["norms", "vectors", "second weights"],
        QUANTIZING,
    ),
)
def test_some_parameters_may_be_in_float32(kind: str, wide: str, chosen: str) -> None:
    """Their values are the same, and so are the codes of those that are quantized."""
    plain, own = make(kind), make(kind)
    for parameter in named(own, wide):
        parameter.data = parameter.data.float()
    want = trained(plain, RECIPES[chosen])
    for mine, theirs in zip(trained(own, RECIPES[chosen]), want, strict=True):
        assert torch.equal(mine, theirs)


@strictly
def test_a_dtype_that_data_got_since_is_refused_by_name() -> None:
    for chosen in QUANTIZING:
        own = LayerNormMLP(32, 64, params_dtype=BF16)
        trained(own, RECIPES[chosen])
        own.fc2_weight.data = own.fc2_weight.data.float()
        own.fc2_weight.grad = None
        with pytest.raises(OperandError, match=r"LayerNormMLP\(32, 64, 32\): .*float32.*bfloat16"):
            trained(own, RECIPES[chosen])


@strictly
def test_groups_of_several_dtypes_are_refused_by_name() -> None:
    own = GroupedLinear(3, 32, 48, params_dtype=BF16)
    own.weight1.data = own.weight1.data.float()
    with pytest.raises(OperandError, match=r"GroupedLinear\(32, 48\): .*float32.*bfloat16"):
        trained(own, CURRENT)


class Narrow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(BF16)


@strictly
def test_a_parametrization_that_changes_the_dtype_is_refused_by_name() -> None:
    own = Linear(32, 48)
    parametrize.register_parametrization(own, "weight", Narrow(), unsafe=True)
    with (
        pytest.raises(OperandError, match=r"Linear\(32, 48\): .*bfloat16.*float32"),
        autocast(recipe=CURRENT),
    ):
        own(torch.randn(32, 32).to(BF16))


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * 2


@strictly
@pytest.mark.parametrize("chosen", QUANTIZING)
def test_a_parametrization_is_computed_once_a_call(chosen: str) -> None:
    """It may draw random numbers, or write to its buffers, as spectral_norm does."""
    own = Linear(32, 48, params_dtype=BF16)
    parametrize.register_parametrization(own, "weight", Counted())
    counted = own.parametrizations.weight[0]
    for steps in (1, 2):
        before = counted.calls
        trained(own, RECIPES[chosen])
        assert counted.calls == before + 1, steps
