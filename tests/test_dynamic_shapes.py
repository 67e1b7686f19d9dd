"""Graphs that do not depend on the number of rows, and backward compiled by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters

import fp8core as te
from fp8core import recipe
from fp8core.chain import run as chain
from tests.pairs import turns

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
]
LAYERS = {"linear": te.Linear, "layernorm_linear": te.LayerNormLinear}
each_layer = pytest.mark.parametrize("kind", LAYERS)


def make(kind: str) -> torch.nn.Module:
    torch._dynamo.reset()
    counters.clear()
    layer: torch.nn.Module = LAYERS[kind](64, 48, params_dtype=torch.bfloat16)
    return layer


def rows_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, 64, dtype=torch.bfloat16, requires_grad=True)


@pytest.mark.parametrize(("kind", "name"), turns(LAYERS, [None, "current"]))
def test_one_graph_serves_any_number_of_rows(kind: str, name: str | None) -> None:
    layer = make(kind)
    fast = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for rows in (33, 17, 200, 500):  # fewer and more than the layer has input features
        x = rows_of(rows)
        with te.autocast(enabled=name is not None, recipe=name):
            y, want = fast(x), layer(x)
        assert torch.equal(y, want)
        y.sum().backward()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize(("kind", "chosen"), turns(LAYERS, [recipe.Float8CurrentScaling(), None]))
def test_an_exported_program_takes_any_number_of_rows(
    kind: str, chosen: recipe.Recipe | None
) -> None:
    layer = make(kind).eval()
    with te.autocast(enabled=chosen is not None, recipe=chosen):
        rows = torch.export.Dim("rows", min=2, max=4096)
        made = torch.export.export(layer, (rows_of(32).detach(),), dynamic_shapes=({0: rows},))
        for count in (8, 200):
            x = rows_of(count).detach()
            assert torch.equal(made.module()(x), layer(x))


def test_an_exported_program_pads_any_number_of_rows() -> None:
    layer = make("linear").eval()
    with torch.no_grad(), te.autocast(recipe=recipe.MXFP8BlockScaling()):
        rows = ({0: torch.export.Dim("rows")},)
        program = torch.export.export(layer, (rows_of(32),), dynamic_shapes=rows)
        for count in (5, 64, 77):
            x = rows_of(count)
            assert torch.equal(program.module()(x), layer(x))


# torch's own, about a tensor that is no leaf: what one node of a layer hands to the next.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@each_layer
def test_backward_alone_compiles_to_one_graph(kind: str) -> None:
    layer = make(kind)
    x = rows_of(32)
    layer(x).sum().backward()
    want, x.grad = x.grad, None
    y = layer(x)
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        y.sum().backward()
    assert torch.equal(cast(torch.Tensor, x.grad), cast(torch.Tensor, want))


def test_autocast_of_a_device_that_torch_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    x: Any = SimpleNamespace(is_cuda=False, is_cpu=False, device=SimpleNamespace(type="mps"))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device_type: device_type == "mps")
    assert chain.is_under_torch_autocast(x)
