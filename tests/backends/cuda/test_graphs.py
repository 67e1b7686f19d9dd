"""Layers in CUDA graphs: replays equal eager steps bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch

import fp8core
from fp8core import UnsupportedError, recipe

# Warming up and capturing run on a stream of their own.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")

NAMES = ("delayed", "current", "block", "rowwise")


def make(bias: bool = True) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        fp8core.Linear(256, 384, bias=bias, params_dtype=torch.bfloat16, device="cuda"),
        torch.nn.GELU(),
        fp8core.Linear(384, 128, bias=bias, params_dtype=torch.bfloat16, device="cuda"),
    )


class InAutocast(torch.nn.Module):
    """A model that enters an autocast of its own in each call."""

    def __init__(self, model: torch.nn.Module, chosen: recipe.Recipe) -> None:
        super().__init__()
        self.model = model
        self.context = fp8core.autocast(recipe=chosen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.context:
            y: torch.Tensor = self.model(x)
        return y


def step(model: torch.nn.Module, seed: int) -> list[torch.Tensor]:
    """Run forward, backward and an optimizer step; return what came of them."""
    torch.manual_seed(seed)
    x = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    grad = torch.randn(64, 128, dtype=torch.bfloat16, device="cuda")
    y = model(x)
    y.backward(grad)
    grads = [own.grad.clone() for own in model.parameters()]
    with torch.no_grad():
        for own in model.parameters():
            own -= 1e-2 * own.grad
            own.grad = None
    return [y.detach().clone(), x.grad.clone(), *grads]


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("name", NAMES)
def test_graphed_training_equals_eager_training(name: str) -> None:
    chosen = recipe.by_name(name)
    eager, graphed = make(), make()
    sample = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    graphed = fp8core.make_graphed_callables(graphed, (sample,), recipe=chosen)
    for seed in range(4):  # weights change from step to step, and so do delayed scales
        ours = step(graphed, seed)
        theirs = step(InAutocast(eager, chosen), seed)
        for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(one, other), (seed, number)
    for one, other in zip(graphed.buffers(), eager.buffers(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.needs_accelerator("cuda")
def test_a_capture_leaves_delayed_scales_as_they_were() -> None:
    model = make()
    with fp8core.autocast(recipe=recipe.by_name("delayed")):
        model(torch.randn(64, 256, dtype=torch.bfloat16, device="cuda")).sum().backward()
    model.zero_grad()
    before = copy.deepcopy(model.state_dict())
    sample = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    fp8core.make_graphed_callables(model, (sample,), recipe=recipe.by_name("delayed"))
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.needs_accelerator("cuda")
def test_a_kept_weight_in_a_graph_is_refused() -> None:
    layer = fp8core.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
    x = torch.randn(16, 64, dtype=torch.bfloat16, device="cuda")
    with fp8core.autocast(recipe=recipe.by_name("current")), torch.no_grad():
        layer(x, is_first_microbatch=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(UnsupportedError, match="of the capture"), torch.cuda.graph(graph):
            layer(x, is_first_microbatch=False)


def test_a_layer_that_is_not_on_cuda_is_refused() -> None:
    layer = fp8core.Linear(16, 16, device="cpu")
    with pytest.raises(UnsupportedError, match=r"no CUDA device|is on cpu"):
        fp8core.make_graphed_callables(layer, (torch.randn(4, 16),))


def test_no_modules_are_refused() -> None:
    with pytest.raises(fp8core.RecipeError, match="there are no modules"):
        fp8core.make_graphed_callables([], [])
