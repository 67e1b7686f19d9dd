"""Weights that backward quantizes again on CUDA: the same bits, and less memory in between."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, recipe

pytestmark = pytest.mark.needs_accelerator("cuda")
BF16 = torch.bfloat16
NAMES = ("delayed", "current", "block", "rowwise")


def recipes(name: str) -> tuple[Any, Any]:
    """Return a recipe that holds weights' codes, and one that quantizes weights again."""
    chosen: Any = dataclasses.replace(recipe.by_name(name), holding="fastest")  # type: ignore[type-var]
    return chosen, dataclasses.replace(chosen, requantize_weights=True)


def train(layer: torch.nn.Module, chosen: Any) -> list[torch.Tensor]:
    """Train three steps of two microbatches; return outputs, gradients and all state."""
    torch.manual_seed(2)
    found: list[torch.Tensor] = []
    for _ in range(3):
        for rows in (512, 333):
            x = torch.randn(rows, 250, dtype=BF16, device="cuda", requires_grad=True)
            splits = [[rows - 100, 0, 100]] if isinstance(layer, fp8core.GroupedLinear) else []
            with fp8core.autocast(recipe=chosen):
                y = layer(x, *splits)
            y.backward(torch.randn_like(y))
            assert x.grad is not None
            found += [y.detach(), x.grad]
        with torch.no_grad():
            for own in layer.parameters():
                if own.grad is not None:
                    found.append(own.grad.clone())
                    own.sub_(own.grad, alpha=1e-3)
                    own.grad = None
        found += [own.clone() for own in layer.buffers()]
    return found


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("groups", [0, 3])
def test_training_with_padded_features_is_the_same_bit_for_bit(groups: int, name: str) -> None:
    """The matrix of ways has the layers whose sizes need no padding."""
    held, again = recipes(name)
    options: dict[str, Any] = {"params_dtype": BF16, "device": "cuda"}
    layer = (
        fp8core.GroupedLinear(groups, 250, 390, **options)
        if groups
        else fp8core.Linear(250, 390, **options)
    )
    other = copy.deepcopy(layer)
    ours, theirs = train(layer, again), train(other, held)
    assert len(ours) == len(theirs)
    for number, (one, another) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, another), number


@pytest.mark.parametrize("name", NAMES)
def test_the_codes_take_no_memory_between_forward_and_backward(name: str) -> None:
    """A byte an element of the weight less; the peak of the step is not above the default's."""
    held, peaks = [], []
    for chosen in recipes(name):
        layer = fp8core.Linear(4096, 4096, bias=False, params_dtype=BF16, device="cuda")
        x = torch.randn(256, 4096, dtype=BF16, device="cuda", requires_grad=True)
        for _ in range(2):  # the first creates state
            x.grad = layer.weight.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with fp8core.autocast(recipe=chosen):
                y = layer(x)
            during = torch.cuda.memory_allocated() - before
            y.sum().backward()
            peak = torch.cuda.max_memory_allocated() - before
            del y
        held.append(during)
        peaks.append(peak)
    assert held[0] - held[1] >= 4096 * 4096 - 2**20
    assert peaks[1] <= peaks[0] + 2**20


@pytest.mark.parametrize("name", ["delayed", "current", "block"])
def test_a_gradient_in_chunks_meets_one_weight(name: str) -> None:
    """16,384 rows of 4,096 features are quantized 4,096 rows at a time for dgrad."""
    found = []
    for chosen in recipes(name):
        torch.manual_seed(3)
        layer = fp8core.Linear(1024, 4096, bias=False, params_dtype=BF16, device="cuda")
        x = torch.randn(16384, 1024, dtype=BF16, device="cuda", requires_grad=True)
        with fp8core.autocast(recipe=chosen):
            y = layer(x)
        y.backward(torch.randn_like(y))
        found.append((y.detach(), x.grad, layer.weight.grad))
    for one, another in zip(*found, strict=True):
        assert one is not None
        assert another is not None
        assert torch.equal(one, another)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # a capture is elsewhere
@pytest.mark.parametrize("name", NAMES)
def test_graphed_training_equals_eager_training(name: str) -> None:
    held, again = recipes(name)
    eager = fp8core.Linear(256, 384, params_dtype=BF16, device="cuda")
    graphed = copy.deepcopy(eager)
    sample = torch.randn(64, 256, dtype=BF16, device="cuda", requires_grad=True)
    run = fp8core.make_graphed_callables(graphed, (sample,), recipe=again)
    for seed in range(4):  # weights change from step to step, and so do delayed scales
        torch.manual_seed(seed)
        value, grad = torch.randn(64, 256).to("cuda", BF16), torch.randn(64, 384).to("cuda", BF16)
        found = []
        for layer, step in ((graphed, run), (eager, eager)):
            x = value.clone().requires_grad_()
            with nullcontext() if step is run else fp8core.autocast(recipe=held):
                y = step(x)
            y.backward(grad)
            found.append([y.detach().clone(), x.grad.clone(), layer.weight.grad.clone()])  # type: ignore[union-attr]
            with torch.no_grad():
                for own in layer.parameters():
                    own.sub_(own.grad, alpha=1e-2)
                    own.grad = None
        for one, another in zip(*found, strict=True):
            assert torch.equal(one, another), seed
    for one, another in zip(graphed.buffers(), eager.buffers(), strict=True):
        assert torch.equal(one, another)


def test_a_weight_on_another_device_in_backward_is_refused_by_name() -> None:
    layer = fp8core.Linear(256, 384, params_dtype=BF16, device="cuda")
    x = torch.randn(64, 256, dtype=BF16, device="cuda", requires_grad=True)
    with fp8core.autocast(recipe=recipes("current")[1]):
        y = layer(x)
    with torch.no_grad():
        layer.weight.data = layer.weight.data.cpu()
    with pytest.raises(OperandError, match=r"in backward the weight is on cpu"):
        y.sum().backward()
