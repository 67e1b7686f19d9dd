"""Parameters that are computed from others: by a parametrization, or as views of a flat one."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from fp8core import LayerNorm, autocast, recipe
from tests.inspection import models
from tests.inspection.models import BF16, make
from tests.pairs import turns

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
