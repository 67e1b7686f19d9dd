"""The converter and the override of torchtitan, on its models' configs and modules."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import fp8core
from fp8core import RecipeError
from fp8core.recipe import DelayedScaling
from fp8core.recipe.data import as_data

# It imports triton, which machines without a GPU often lack.
pytest.importorskip("triton", reason="triton is not installed, which torchtitan imports")
pytest.importorskip("torchtitan.models.common", reason="torchtitan is not installed")

from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.llama3 import model_registry

from fp8core.torchtitan import Fp8CoreConverter, Fp8CoreLinear

INIT = {"weight": partial(nn.init.normal_, std=0.1), "bias": nn.init.zeros_}


def feed_forward() -> Any:
    sizes = {"w1": (32, 64), "w2": (64, 32), "w3": (32, 64)}
    return FeedForward.Config(
        **{
            name: Linear.Config(in_features=k, out_features=n, bias=True, param_init=INIT)
            for name, (k, n) in sizes.items()
        }
    )


def built(config: Any) -> Any:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = config.build()
    model.to_empty(device="cpu")
    model.init_states()
    return model


def converted(recipe: Any, **named: Any) -> Any:
    return built(Fp8CoreConverter.Config(recipe=recipe, **named).build().convert(feed_forward()))


def train(model: Any, steps: int = 4) -> list[float]:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_converted_config_builds_a_model_that_trains_as_a_converted_model() -> None:
    """The same weights as torchtitan's linear gets, and the same losses as ``fp8core.convert``."""
    model = converted("mxfp8")
    plain = built(feed_forward())
    assert model.state_dict().keys() == plain.state_dict().keys()
    other = nn.ModuleDict(
        {
            name: nn.Linear(*reversed(getattr(plain, name).weight.shape))
            for name in ("w1", "w2", "w3")
        }
    )
    other.load_state_dict(plain.state_dict())
    fp8core.convert(other, "mxfp8")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = other

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = nn.functional.silu(self.parts["w1"](x)) * self.parts["w3"](x)
            result: torch.Tensor = self.parts["w2"](gate)
            return result

    losses = train(model)
    assert losses == train(Model())
    assert losses[-1] < losses[0]


def test_delayed_scaling_trains() -> None:
    losses = train(converted(as_data(DelayedScaling(amax_history_len=4))))
    assert losses[-1] < losses[0]


def test_delayed_scales_are_updated_with_each_call() -> None:
    model = converted(as_data(DelayedScaling(amax_history_len=4)))
    x = torch.randn(32, 32)
    model(x).sum().backward()
    assert model.w1.scale_fwd[0].item() == pytest.approx(448 / x.abs().max().item())


def test_llama_is_converted_but_its_head() -> None:
    converter = Fp8CoreConverter.Config(recipe="mxfp8")
    config = model_registry("debugmodel", converters=[converter]).model
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert sum(kind is Fp8CoreLinear for kind in kinds.values()) == 6 * 5
    assert kinds["lm_head"] is Linear
    assert model.layers["0"].attention.wo.name == "layers.0.attention.wo"


def test_the_override_replaces_the_layers_of_blocks() -> None:
    config = model_registry("debugmodel").model
    entry = ("fp8core.torchtitan.fp8core_linear", {"recipe": "current"})
    lines = apply_overrides(OverrideConfig(imports=[entry]), config)
    assert len(lines) == 6 * 5
    found = {fqn: one for fqn, one, _, _ in config.traverse(Linear.Config)}
    ours = {fqn for fqn, one in found.items() if isinstance(one, Fp8CoreLinear.Config)}
    assert len(ours) == 6 * 5
    assert found.keys() - ours == {"lm_head"}
    assert {found[fqn].recipe for fqn in ours} == {"current"}


def test_patterns_choose_the_layers() -> None:
    model = converted("mxfp8", filter_fqns=["w2"])
    assert type(model.w2) is Linear
    assert type(model.w1) is Fp8CoreLinear
    model = converted("mxfp8", fqns=["w2"])
    assert type(model.w2) is Fp8CoreLinear
    assert type(model.w1) is Linear


def test_a_config_is_written_as_json() -> None:
    config = Fp8CoreConverter.Config(recipe=as_data(DelayedScaling(amax_history_len=4)))
    written = json.loads(json.dumps(config.to_dict()))
    assert written["recipe"] == {"recipe": "DelayedScaling", "amax_history_len": 4}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe": "mxpf8"}, "Did you mean 'mxfp8'"),
        ({"recipe": None}, "expected a recipe"),
        ({"fqns": ["w4"]}, r"filter='w4'.*no layer has that in its path"),
        ({"filter_fqns": ["w4"]}, r"skip='w4'.*no layer has that in its path"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Fp8CoreConverter.Config(**given).build().convert(feed_forward())
