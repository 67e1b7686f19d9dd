"""Side streams and odd operands: layers compute bit for bit what they do on the default stream.

A stream's work begins with a wait of milliseconds before its inputs are written: a kernel that is
launched on another stream reads what was there before.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

import fp8core
from fp8core import recipe

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    # A gradient is accumulated on the stream of its first step.
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream"),
]
NAMES = ("delayed", "current", "block", "rowwise")
CYCLES = 10_000_000  # about 5 ms
M, K, N = 272, 256, 384
Results = list[torch.Tensor]


def make(name: str, seed: int) -> Callable[[torch.Tensor, torch.Tensor], Results]:
    """Return a step of a new layer: y, both gradients, and delayed scales."""
    torch.manual_seed(seed)
    layer = fp8core.Linear(K, N, bias=True, params_dtype=torch.bfloat16, device="cuda")
    chosen = recipe.by_name(name)

    def step(x: torch.Tensor, grad: torch.Tensor) -> Results:
        with fp8core.autocast(recipe=chosen):
            y = layer(x)
        made = torch.autograd.grad(y, (x, *layer.parameters()), grad)
        return [y.detach(), *made, *(buffer.clone() for buffer in layer.buffers())]

    return step


def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(100 + seed)
    x, grad = (torch.randn(M, size, dtype=torch.bfloat16, device="cuda") for size in (K, N))
    return x, grad


def late(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs of ``seed``, which are written only when the current stream has waited."""
    given = inputs(seed)
    empty = [torch.zeros_like(one) for one in given]
    torch.cuda.synchronize()
    torch.cuda._sleep(CYCLES)
    x, grad = (made.copy_(one) for made, one in zip(empty, given, strict=True))
    return x.requires_grad_(), grad


def same(ours: Results, theirs: Results) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_steps_on_a_side_stream_equal_the_default_stream_s(name: str) -> None:
    ours, theirs = make(name, 0), make(name, 0)
    stream = torch.cuda.Stream()
    for seed in range(3):
        x, grad = inputs(seed)
        wanted = theirs(x.requires_grad_(), grad)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            found = ours(*late(seed))
        stream.synchronize()
        assert same(found, wanted), seed


@pytest.mark.parametrize("name", NAMES)
def test_two_layers_on_two_streams_at_once_equal_one_after_the_other(name: str) -> None:
    layers = [make(name, number) for number in range(2)]
    alone = [make(name, number) for number in range(2)]
    streams = [torch.cuda.Stream() for _ in range(2)]
    for seed in range(3):
        x, grad = inputs(seed)
        wanted = [step(x.detach().requires_grad_(), grad) for step in alone]
        given = [torch.zeros_like(one) for one in (x, grad)]
        torch.cuda.synchronize()
        found = []
        for step, stream in zip(layers, streams, strict=True):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES)
                own = [torch.empty_like(one) for one in given]
                for made, one in zip(own, (x, grad), strict=True):
                    made.copy_(one)
                found.append(step(own[0].requires_grad_(), own[1]))
        torch.cuda.synchronize()
        for number in range(2):
            assert same(found[number], wanted[number]), (seed, number)


def odd(kind: str, x: torch.Tensor) -> torch.Tensor:
    """Return the values of ``x`` where they lie as ``kind`` says."""
    rows, cols = x.shape
    if kind == "transposed":
        return x.t().contiguous().t()
    if kind == "part of wider rows":
        wide = torch.full((rows, cols + 8), float("nan"), dtype=x.dtype, device=x.device)
        wide[:, 8:] = x
        return wide[:, 8:]
    if kind == "every second row":
        return x.repeat_interleave(2, 0)[::2]
    moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=x.device)
    return moved[1:].view(x.shape).copy_(x)  # two bytes off


@pytest.mark.parametrize(
    "kind", ["transposed", "part of wider rows", "every second row", "misaligned"]
)
@pytest.mark.parametrize("name", [*NAMES, "high precision"])
def test_inputs_and_gradients_may_lie_anywhere(name: str, kind: str) -> None:
    if name == "high precision":
        layer = fp8core.Linear(K, N, params_dtype=torch.bfloat16, device="cuda")

        def step(x: torch.Tensor, grad: torch.Tensor) -> Results:
            y = layer(x)
            return [y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), grad)]

        ours = theirs = step
    else:
        ours, theirs = make(name, 0), make(name, 0)
    x, grad = inputs(0)
    wanted = theirs(x.requires_grad_(), grad)
    x, grad = (odd(kind, one.detach()) for one in (x, grad))
    found = ours(x.requires_grad_(), grad)
    if name == "high precision":  # torch's own product may take another order
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2.0**-6, atol=2.0**-4)
    else:
        assert same(found, wanted)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_without_strides_equals_its_copy(name: str) -> None:
    """That of ``y.sum()``: one element, seen everywhere."""
    ours, theirs = make(name, 0), make(name, 0)
    x, grad = inputs(0)
    one = grad[:1, :1].expand(M, N)
    x.requires_grad_()
    assert same(ours(x, one), theirs(x, one.contiguous()))


# In a process of its own: torch gives a context to threads that it has made.
_FRESH_THREAD = """
import threading, torch, fp8core
layer = fp8core.Linear(256, 128, params_dtype=torch.bfloat16, device="cuda")
x, found = torch.randn(64, 256, dtype=torch.bfloat16, device="cuda"), []
def run():
    with torch.no_grad(), fp8core.autocast(recipe={name!r}):
        found.append(layer(x))
for _ in range(3):
    run()  # memory that is freed again serves the thread, without a call of CUDA's
torch.cuda.synchronize()
found.clear()
run()
kept = found.pop().clone()
thread = threading.Thread(target=run)
thread.start()
thread.join()
assert torch.equal(found[0], kept)
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_thread_that_has_called_nothing_of_cuda_computes(name: str) -> None:
    command = [sys.executable, "-c", _FRESH_THREAD.format(name=name)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
