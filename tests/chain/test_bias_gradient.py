"""The gradient of a bias: an operation, which a backend that denies it leaves to the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fp8core
from fp8core import ops, recipe
from fp8core.backend_api import API_VERSION, OPTIONAL_OPS, OpDesc, variant_of
from fp8core_backends.reference.backend import ReferenceBackend
from tests.dispatch import toys
from tests.dispatch.toys import Bind
from tests.pairs import turns

BF16 = torch.bfloat16
LAYERS: dict[str, tuple[Callable[[], torch.nn.Module], int]] = {
    "linear": (lambda: fp8core.Linear(32, 32, params_dtype=BF16), 1),
    "linear without bias": (lambda: fp8core.Linear(32, 32, bias=False, params_dtype=BF16), 0),
    "norm and linear": (lambda: fp8core.LayerNormLinear(32, 32, params_dtype=BF16), 1),
    "norm and two linears": (lambda: fp8core.LayerNormMLP(32, 32, params_dtype=BF16), 2),
    "bias alone": (lambda: ops.Sequential(ops.Bias(32, dtype=BF16)), 1),
}
RECIPES = {"none": None, "delayed": recipe.DelayedScaling(), "mxfp8": recipe.MXFP8BlockScaling()}


pytestmark = pytest.mark.usefixtures("isolated")


def train(layer: torch.nn.Module, chosen: recipe.Recipe | None = None) -> list[torch.Tensor]:
    """Return the gradients of the parameters."""
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(BF16)
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(BF16))
    return [one.grad for one in layer.parameters() if one.grad is not None]


def without_fusions(desc: OpDesc) -> str | None:
    return f"fuses no {desc.op}" if desc.op in OPTIONAL_OPS else None


def without_chunks(desc: OpDesc) -> str | None:
    return without_fusions(desc) if variant_of(desc) in (None, "sums") else "no chunks"


def made(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return LAYERS[name][0]()


@pytest.mark.parametrize(("name", "chosen"), turns(LAYERS, RECIPES))
def test_each_trained_bias_is_one_call_of_the_backend(name: str, chosen: str) -> None:
    calls: list[str] = []
    toys.register(toys.backend("toy", refuse=without_fusions, calls=calls))
    with fp8core.use_backend("toy"):
        train(made(name), RECIPES[chosen])
    assert calls.count("column_sums") == LAYERS[name][1]


def test_frozen_bias_is_not_summed() -> None:
    calls: list[str] = []
    toys.register(toys.backend("toy", refuse=without_fusions, calls=calls))
    layer = fp8core.Linear(32, 32, params_dtype=BF16)
    layer.bias.requires_grad_(False)
    with fp8core.use_backend("toy"):
        train(layer)
    assert "column_sums" not in calls


def test_each_group_is_summed_alone() -> None:
    calls: list[str] = []
    toys.register(toys.backend("toy", refuse=without_fusions, calls=calls))
    layer = fp8core.GroupedLinear(3, 32, 32, params_dtype=BF16)
    x = torch.randn(64, 32).to(BF16)
    with fp8core.use_backend("toy"):
        layer(x, [30, 0, 34]).sum().backward()
    assert calls.count("column_sums") == 3
    assert [layer.get_parameter(f"bias{at}").grad[0].item() for at in range(3)] == [30, 0, 34]


@pytest.mark.parametrize(("name", "chosen"), turns(LAYERS, RECIPES))
def test_backend_of_an_older_contract_leaves_it_to_the_reference(name: str, chosen: str) -> None:
    def refuse(desc: OpDesc) -> str | None:
        return f"knows no {desc.op}" if desc.op in ("column_sums", *OPTIONAL_OPS) else None

    expected = train(made(name), RECIPES[chosen])
    toys.register(toys.backend("toy", refuse=refuse, api_version=(API_VERSION[0], 0), priority=50))
    grads = train(made(name), RECIPES[chosen])
    assert all(map(torch.equal, grads, expected))
    assert len(grads) == len(expected)


def summing(calls: list[str]) -> Bind:
    """Return the binding of a backend whose casts offer column sums, and which takes them down."""

    def bind(backend: toys.ToyBackend, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        run = ReferenceBackend().bind(desc, device)

        def counted(*given: Any, **named: Any) -> Any:
            calls.append(desc.op)
            return run(*given, **named)

        def quantize_and_sum(x: torch.Tensor, **named: Any) -> Any:
            calls.append("quantize_and_sum")
            return run(x, **named), x.sum(0, dtype=torch.float32)

        return quantize_and_sum if variant_of(desc) == "sums" else counted

    return bind


@pytest.mark.parametrize(
    ("name", "chosen", "fused"),
    [("linear", "delayed", 1), ("linear", "none", 0), ("norm and two linears", "mxfp8", 2)],
)
def test_sums_come_with_the_cast_where_the_backend_offers_them(
    name: str, chosen: str, fused: int
) -> None:
    calls: list[str] = []
    expected = train(made(name), RECIPES[chosen])
    toys.register(
        toys.backend("toy", refuse=without_chunks, bind=summing(calls), has_variants=True)
    )
    with fp8core.use_backend("toy"):
        grads = train(made(name), RECIPES[chosen])
    assert all(map(torch.equal, grads, expected))
    assert calls.count("quantize_and_sum") == fused
    assert calls.count("column_sums") == LAYERS[name][1] - fused


@pytest.mark.parametrize("frozen", ["input", "weight", "both"])
def test_sums_come_with_the_cast_of_either_orientation(frozen: str) -> None:
    calls: list[str] = []
    toys.register(
        toys.backend("toy", refuse=without_chunks, bind=summing(calls), has_variants=True)
    )
    layer = made("linear")
    layer.get_parameter("weight").requires_grad_(frozen == "input")
    x = torch.randn(64, 32).to(BF16).requires_grad_(frozen == "weight")
    with fp8core.use_backend("toy"), fp8core.autocast(recipe=RECIPES["mxfp8"]):
        layer(x).sum().backward()
    assert torch.equal(layer.get_parameter("bias").grad, torch.full((32,), 64.0, dtype=BF16))
    is_cast = frozen != "both"
    assert (calls.count("quantize_and_sum"), calls.count("column_sums")) == (is_cast, not is_cast)
