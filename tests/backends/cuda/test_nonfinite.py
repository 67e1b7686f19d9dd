"""What the native casts count: each NaN and inf once, and no code differs for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import QuantizeDesc
from tests.backends.cuda.cuda_cases import (
    DEVICE,
    backend,
    nothing_waits,
    spec,
    values,
)

pytestmark = pytest.mark.needs_accelerator("cuda")


def test_streams_add_to_one_count() -> None:
    own = spec("current")
    run = backend("cuda").bind(QuantizeDesc(torch.bfloat16, own, own, counted=True), DEVICE)
    x = values("specials", (512, 512), torch.bfloat16)
    count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 4]):
            run(x, nonfinite_out=count)
    torch.cuda.synchronize()
    assert int(count) == 40 * int((~x.isfinite()).sum())


# torch's own: that its check is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("name", ["delayed", "current", "block", "rowwise"])
def test_a_layer_counts_without_waiting_for_the_device(name: str) -> None:
    layer = fp8core.Linear(256, 128, bias=False, device=DEVICE, params_dtype=torch.bfloat16)
    fp8core.clear_found_inf(layer)
    x = torch.randn(256, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def step(*places: tuple[int, int]) -> None:
        with fp8core.autocast(recipe=recipe.by_name(name)):
            y = layer(x)
        grad = torch.ones_like(y)
        for place in places:
            grad[place].fill_(math.inf)
        y.backward(grad)

    step()
    with nothing_waits():
        step((3, 5), (200, 100))
    assert layer._bindings.nonfinite[DEVICE].tolist() == [2, 0]


def test_a_replayed_graph_counts() -> None:
    layer = fp8core.Linear(256, 128, bias=False, device=DEVICE, params_dtype=torch.bfloat16)
    fp8core.clear_found_inf(layer)
    x = torch.randn(256, 256, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad(), fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x)
    x[0, :9] = math.nan
    for _ in range(3):
        graph.replay()
    assert layer._bindings.nonfinite[DEVICE].tolist() == [0, 27]


def chosen(name: str, **options: Any) -> recipe.Recipe:
    return type(recipe.by_name(name))(**options)


@pytest.mark.parametrize("rows", [96, 8192])  # the gradient of the latter is cast in parts
@pytest.mark.parametrize("name", ["delayed", "current", "block", "rowwise"])
def test_what_propagates_makes_results_nan(name: str, rows: int) -> None:
    layers = [
        fp8core.Linear(512, 4096, bias=False, device=DEVICE, params_dtype=torch.bfloat16)
        for _ in range(2)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(rows, 512, device=DEVICE, dtype=torch.bfloat16)

    def step(layer: torch.nn.Module, own: recipe.Recipe, *place: int) -> list[torch.Tensor]:
        source = x.detach().requires_grad_()
        layer.zero_grad()
        with fp8core.autocast(recipe=own):
            y = layer(source)
        grad = torch.full_like(y, 0.25)
        if place:
            grad[place] = math.inf
        y.backward(grad)
        return [y.detach(), source.grad, layer.weight.grad]

    for _ in range(2):
        plain = step(layers[0], chosen(name))
        marked = step(layers[1], chosen(name, nonfinite="propagate"))
        assert torch.equal(plain[0], marked[0])
        for one, other in zip(plain[1:], marked[1:], strict=True):  # parts may sum in another order
            torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)
    y, dx, dw = step(layers[1], chosen(name, nonfinite="propagate"), rows - 1, 4095)
    assert y.isfinite().all()
    assert dx.isnan().all()
    assert dw.isnan().all()
    assert all(own.isfinite().all() for own in layers[1].buffers() if own.is_floating_point())


@pytest.mark.parametrize("on_device", [False, True])
def test_groups_propagate(on_device: bool) -> None:
    layer = fp8core.GroupedLinear(
        3, 256, 128, bias=False, device=DEVICE, params_dtype=torch.bfloat16
    )
    fp8core.clear_found_inf(layer)
    x = torch.randn(384, 256, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    sizes: Any = torch.tensor([128, 0, 256], device=DEVICE) if on_device else [128, 0, 256]
    with fp8core.autocast(recipe=chosen("current", nonfinite="propagate")):
        y = layer(x, sizes)
    grad = torch.ones_like(y)
    assert y.isfinite().all()
    grad[200, 5] = math.nan
    y.backward(grad)
    assert x.grad.isnan().all()
    assert layer.weight2.grad.isnan().all()
    assert fp8core.found_inf(layer) == 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current", "block", "rowwise"])
def test_a_watched_scaler_skips_the_step(name: str, fused: bool) -> None:
    layer = fp8core.Linear(256, 128, bias=False, device=DEVICE, params_dtype=torch.float32)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    fp8core.watch_grad_scaler(scaler, layer)
    fp8core.clear_found_inf(layer)  # graphs of other tests count for all models
    x = torch.randn(128, 256, device=DEVICE)

    def step(*place: int) -> bool:
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        with fp8core.autocast(recipe=recipe.by_name(name)):
            y = layer(x)
        grad = torch.ones_like(y)
        if place:
            grad[place] = math.inf
        scaler.scale(y).backward(grad)
        with nothing_waits():
            scaler.unscale_(optimizer)
            found = fp8core.found_inf(layer)
            fp8core.clear_found_inf(layer)
        assert found.device == DEVICE
        assert float(found) == float(bool(place))
        scaler.step(optimizer)
        scaler.update()
        return not torch.equal(before, layer.weight)

    assert [step(), step(3, 5), step()] == [True, False, True]
    assert scaler.get_scale() == 512.0


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
# Where the operators of a compiled layer leave a CUDA graph nothing to hold, torch 2.11 says so.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_layer_is_counted(mode: str) -> None:
    layer = fp8core.Linear(256, 128, bias=False, device=DEVICE, params_dtype=torch.bfloat16)
    compiled = torch.compile(layer, mode=mode)
    x = torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def step(*place: int) -> float:
        torch.compiler.cudagraph_mark_step_begin()
        fp8core.clear_found_inf(layer)
        layer.zero_grad()
        x.grad = None  # the graph's own memory, which the next replay writes
        with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
            y = compiled(x)
        grad = torch.ones_like(y)
        if place:
            grad[place] = math.inf
        y.backward(grad)
        return float(fp8core.found_inf(layer))

    assert [step() for _ in range(4)] == [0.0] * 4
    assert [step(1, 2), step(), step(7, 7)] == [1.0, 0.0, 1.0]
