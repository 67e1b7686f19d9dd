"""Two devices: where a tensor is decides where it is computed, whichever device is current."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import AmaxDesc, GemmDesc, QuantizeDesc, ScaleUpdateDesc
from tests.backends.cuda.cuda_cases import backend, differs, spec

pytestmark = pytest.mark.needs_accelerator("cuda")
NAMES = ("delayed", "current", "block", "rowwise")
M, K, N = 272, 256, 384


@pytest.fixture(autouse=True)
def two_devices() -> None:
    found = torch.cuda.device_count()
    if found < 2:
        pytest.skip(f"needs an accelerator more: two CUDA devices, found {found}")


def steps(layer: torch.nn.Module, name: str, device: torch.device) -> list[torch.Tensor]:
    """Run three steps; return what came of them, on the CPU."""
    chosen = recipe.by_name(name)
    made: list[torch.Tensor] = []
    for seed in range(3):
        torch.manual_seed(seed)
        x, grad = (torch.randn(M, size).bfloat16().to(device) for size in (K, N))
        x.requires_grad_()
        with fp8core.autocast(recipe=chosen):
            y = layer(x)
        made += [y, *torch.autograd.grad(y, (x, *layer.parameters()), grad)]
    return [tensor.detach().cpu() for tensor in (*made, *layer.buffers())]


@pytest.mark.parametrize("current", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_computes_the_same_on_either_device(name: str, current: int) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    layer = fp8core.Linear(K, N, params_dtype=torch.bfloat16, device=first)
    moved = copy.deepcopy(layer).to(second)
    with torch.cuda.device(current):
        wanted, found = steps(layer, name, first), steps(moved, name, second)
        assert torch.cuda.current_device() == current
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one, other), number


def everything(device: torch.device) -> list[torch.Tensor]:
    """Run every operation of the backend on ``device``; return the results on the CPU."""
    torch.manual_seed(0)
    x = torch.randn(260, 528).bfloat16().to(device)
    other = torch.randn(144, 528).bfloat16().to(device)
    amax = AmaxDesc(QuantizeDesc(torch.bfloat16, spec("current"), None))
    made = [backend("cuda").bind(amax, device)(x)]
    for a, b in (("delayed", "delayed"), ("rowwise", "rowwise"), ("vector", "square")):
        given = {"scale": torch.full((1,), 3.0, device=device)} if a == "delayed" else {}
        operands = []
        for name, source in ((a, x), (b, other)):
            desc = QuantizeDesc(torch.bfloat16, spec(name), spec(name))
            ours, theirs = (
                backend(which).bind(desc, device)(source, **given)
                for which in ("cuda", "reference")
            )
            assert differs(ours.rowwise, theirs.rowwise) is None
            assert differs(ours.columnwise, theirs.columnwise) is None
            operands.append(ours.rowwise)
        run = backend("cuda").bind(GemmDesc(spec(a), spec(b), torch.bfloat16), device)
        made.append(run(*operands))
        total = torch.ones(260, 144, device=device)
        desc = GemmDesc(spec(a), spec(b), torch.float32, accumulate=True)
        made.append(backend("cuda").bind(desc, device)(*operands, out=total))
    history = torch.rand(16, 3).to(device)
    scale, target = (torch.ones(3).mul_(value).to(device) for value in (1.0, 448.0))
    backend("cuda").bind(ScaleUpdateDesc("max"), device)([history], [scale], [target])
    return [tensor.cpu() for tensor in (*made, history, scale)]


def in_thread(work: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    """Return what ``work`` makes in a thread of its own, or raise what it raises."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize(("current", "other"), [(0, 1), (1, 0)])
def test_operations_run_where_their_tensors_are(current: int, other: int) -> None:
    def work() -> list[torch.Tensor]:
        torch.cuda.set_device(current)
        made = everything(torch.device("cuda", other))
        assert torch.cuda.current_device() == current
        return made

    wanted = everything(torch.device("cuda", 0))
    for number, (one, two) in enumerate(zip(in_thread(work), wanted, strict=True)):
        assert torch.equal(one, two), number


def test_one_autocast_holds_layers_of_both_devices() -> None:
    """Delayed scales are updated together, each on its own device."""
    devices = [torch.device("cuda", index) for index in range(2)]
    layers = [fp8core.Linear(K, K, params_dtype=torch.bfloat16, device=one) for one in devices]
    alone = copy.deepcopy(layers)
    chosen = recipe.by_name("delayed")
    for seed in range(3):
        torch.manual_seed(seed)
        x, grad = (torch.randn(M, K, dtype=torch.bfloat16, device="cuda:0") for _ in range(2))
        x.requires_grad_()
        with fp8core.autocast(recipe=chosen):
            middle = layers[0](x)
            y = layers[1](middle.to(devices[1]))
        y.backward(grad.to(devices[1]))
        with fp8core.autocast(recipe=chosen):
            first = alone[0](x.detach().requires_grad_())
        handed = first.detach().to(devices[1]).requires_grad_()
        with fp8core.autocast(recipe=chosen):
            second = alone[1](handed)
        second.backward(grad.to(devices[1]))
        first.backward(handed.grad.to(devices[0]))
        assert torch.equal(y, second)
        for ours, theirs in zip(layers, alone, strict=True):
            for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                assert torch.equal(one.grad, other.grad), seed
            for one, other in zip(ours.buffers(), theirs.buffers(), strict=True):
                assert torch.equal(one, other), seed


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_the_second_device_can_be_captured(name: str) -> None:
    chosen, device = recipe.by_name(name), torch.device("cuda", 1)
    layer = fp8core.Linear(K, N, params_dtype=torch.bfloat16, device=device)
    eager = copy.deepcopy(layer)
    x, grad = (torch.randn(M, size, dtype=torch.bfloat16, device=device) for size in (K, N))
    x.requires_grad_()
    with torch.cuda.device(1):
        graphed = fp8core.make_graphed_callables(layer, (x,), recipe=chosen)
        found = graphed(x)
        ours = [found, *torch.autograd.grad(found, (x, *layer.parameters()), grad)]
    with fp8core.autocast(recipe=chosen):
        y = eager(x)
    theirs = [y, *torch.autograd.grad(y, (x, *eager.parameters()), grad)]
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
