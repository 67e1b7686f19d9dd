"""Hidden dropout of a TransformerLayer: backward drops what forward dropped, also in CUDA graphs,
where each replay drops anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

import fp8core
from fp8core import autocast, recipe
from tests.backends.cuda.cuda_cases import DEVICE

# Warming up and capturing run on a stream of their own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
    # torch 2.11 warns of its own code where it imports its compiler first.
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

LENGTH, BATCH, HIDDEN = 32, 4, 256
ATTENTION, MLP = 4.0, 1.0  # the constant that each branch consists of; dropout of 1/2 doubles it
NAMES = (None, "current", "delayed")
OPTIONS = {
    "pre_ln": {},
    "parallel": {"parallel_attention_mlp": True},
}


class Constants(torch.nn.Module):
    """A layer whose branches are constants, the biases of their last products, so that its result
    is the sum of the two dropout masks."""

    def __init__(self, option: str, name: str | None, device: str) -> None:
        super().__init__()
        self.layer = fp8core.TransformerLayer(
            HIDDEN,
            2 * HIDDEN,
            4,
            hidden_dropout=0.5,
            attention_dropout=0.0,
            params_dtype=torch.bfloat16,
            device=device,
            **OPTIONS[option],  # type: ignore[arg-type]
        )
        self.recipe = None if name is None else recipe.by_name(name)
        named = dict(self.layer.named_parameters())
        self.biases = {
            "attention": named["self_attention.proj.bias"],
            "mlp": named["layernorm_mlp.fc2_bias"],
        }
        with torch.no_grad():
            named["self_attention.proj.weight"].zero_()
            named["layernorm_mlp.fc2_weight"].zero_()
            self.biases["attention"].fill_(ATTENTION)
            self.biases["mlp"].fill_(MLP)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with autocast(enabled=self.recipe is not None, recipe=self.recipe):
            y: torch.Tensor = self.layer(x)
        return y


class Step(NamedTuple):
    """The masks that forward multiplied by, as the result shows them, and the biases' gradients."""

    masks: dict[str, torch.Tensor]
    grads: dict[str, torch.Tensor]


def signs(device: str) -> torch.Tensor:
    """Return a gradient of the result that is +1 or -1: sums of it are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    picked = torch.randint(0, 2, (LENGTH, BATCH, HIDDEN), generator=generator)
    return (picked * 2 - 1).to(device, torch.bfloat16)


def step(model: Constants, call: Callable[[torch.Tensor], torch.Tensor], device: str) -> Step:
    """Run forward and backward of zeros."""
    for bias in model.biases.values():
        bias.grad = None
    x = torch.zeros(LENGTH, BATCH, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    y = call(x)
    y.backward(signs(device))
    return result(model, y)


def result(model: Constants, y: torch.Tensor) -> Step:
    """Take the result's elements, 0, 2, 8 or 10, apart."""
    attention = (y.detach() >= 2 * ATTENTION).to(y.dtype)
    masks = {"attention": 2 * attention, "mlp": (y.detach() - 2 * ATTENTION * attention) / MLP}
    grads = {name: bias.grad.clone() for name, bias in model.biases.items()}  # type: ignore[union-attr]
    return Step(masks, grads)


def check_masks(done: Step, device: str, is_parallel: bool = False) -> None:
    """Hold each bias's gradient to the sum of the gradients of what its mask kept."""
    for name, mask in done.masks.items():
        assert bool(((mask == 0) | (mask == 2)).all()), name
        kept = float((mask == 2).double().mean())
        assert abs(kept - 0.5) < 4 * 0.5 / mask.numel() ** 0.5, name
        # Up to 128 rows of +2, -2 or 0: an integer that bfloat16 holds, even, up to 256.
        want = (signs(device).double() * mask.double()).sum((0, 1))
        assert torch.equal(done.grads[name].double(), want), name
    # The sum of parallel branches is dropped once.
    assert torch.equal(done.masks["attention"], done.masks["mlp"]) == is_parallel


def check_differ(one: Step, other: Step) -> None:
    """See that both branches dropped other elements."""
    for name, mask in one.masks.items():
        assert not torch.equal(mask, other.masks[name]), name


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "device", ["cpu", pytest.param(DEVICE, marks=pytest.mark.needs_accelerator("cuda"))]
)
def test_eager_backward_drops_what_forward_dropped(
    device: str, name: str | None, option: str
) -> None:
    model = Constants(option, name, device)
    first, second = (step(model, model, device) for _ in range(2))
    for done in (first, second):
        check_masks(done, device, option == "parallel")
    check_differ(first, second)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", NAMES)
def test_each_replay_of_a_step_drops_anew(name: str | None, option: str) -> None:
    model = Constants(option, name, DEVICE)
    x = torch.zeros(LENGTH, BATCH, HIDDEN, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    grad = signs(DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x).backward(grad)
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
        y.backward(grad)
    replays = []
    for _ in range(3):
        graph.replay()
        replays.append(result(model, y))
    for done in replays:
        check_masks(done, DEVICE, option == "parallel")
    check_differ(replays[0], replays[1])
    check_differ(replays[1], replays[2])


@pytest.mark.needs_accelerator("cuda")
def test_a_seed_repeats_a_replay() -> None:
    model = Constants("pre_ln", "current", DEVICE)
    x = torch.zeros(LENGTH, BATCH, HIDDEN, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(x).backward(signs(DEVICE))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
    outs = []
    for seed in (7, 7, 8):
        torch.cuda.manual_seed(seed)
        graph.replay()
        outs.append(y.detach().clone())
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("name", NAMES)
def test_graphs_of_forward_and_of_backward_share_a_mask(name: str | None) -> None:
    model = Constants("pre_ln", name, DEVICE)
    sample = torch.zeros(LENGTH, BATCH, HIDDEN, dtype=torch.bfloat16, device=DEVICE)
    chosen = {} if model.recipe is None else {"recipe": model.recipe}
    graphed = fp8core.make_graphed_callables(model.layer, (sample.requires_grad_(),), **chosen)
    first, second = (step(model, graphed, DEVICE) for _ in range(2))
    for done in (first, second):
        check_masks(done, DEVICE)
    check_differ(first, second)


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("name", [None, "current"])
def test_compiled_steps_drop_anew(name: str | None) -> None:
    torch._dynamo.reset()
    model = Constants("pre_ln", name, DEVICE)
    compiled = torch.compile(model.layer, fullgraph=True)
    with autocast(enabled=model.recipe is not None, recipe=model.recipe):  # torch 2.11: outside
        done = [step(model, compiled, DEVICE) for _ in range(3)]
    for one in done:
        check_masks(one, DEVICE)
    check_differ(done[1], done[2])
