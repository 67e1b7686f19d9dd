"""The gradient of an activation in chunks: the same bits, and what it is from is never whole."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import fp8core
from fp8core import LayerNormMLP, recipe, use_backend
from fp8core.backend_api import API_VERSION, BackendSpec, GemmDesc, Operand, hookimpl
from fp8core.dispatch import plugins, table
from tests.conformance import broken
from tests.device import DEVICE
from tests.pairs import pairs
from tests.recording_backend import RECORDER, Operation

ROWS, HIDDEN, FFN = 272, 64, 128  # two chunks of 128 rows and a short one
CHUNKED = ("delayed", "block")
events: list[str] = []


class Product:
    """A product that offers parts, and takes note of both."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, a: Operand, b: Operand, **given: Any) -> Any:
        events.append(f"product {len(a.data)} x {len(b.data)}")
        return self._run(a, b, **given)

    def gemm_part(self, rows: int, a: Operand, b: Operand, *, bias: Any = None, out: Any) -> Any:
        events.append(f"part {len(a.data)} of {rows} x {len(b.data)}")
        return self._run(a, b, bias=bias, out=out)


class Made(broken.GivesFusedChunks):
    def bind(self, desc: Any, device: torch.device) -> Callable[..., Any]:
        run = super().bind(desc, device)
        return Product(run) if type(desc) is GemmDesc and not desc.accumulate else run


class WithoutParts(broken.GivesFusedChunks):
    """Its products have no parts."""


class Recorded(Made):
    def bind(self, desc: Any, device: torch.device) -> Callable[..., Any]:
        run = super().bind(desc, device)
        operation = Operation(run)
        for name in ("quantize_chunked", "run_chunked"):
            if hasattr(run, name):
                setattr(operation, name, getattr(run, name))
        return operation

    def recorder(self, desc: Any, device: torch.device) -> Any:
        return RECORDER


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Register the backends of this file by the names of their classes."""
    module, plugin = types.ModuleType("fused_chunks_made"), types.ModuleType("fused_chunks_plugin")
    kinds = (Made, WithoutParts, Recorded)
    for kind in kinds:
        setattr(module, kind.__name__, kind)

    @hookimpl
    def fp8core_register_backends(register: Callable[[BackendSpec], None]) -> None:
        for kind in kinds:
            factory = f"fused_chunks_made:{kind.__name__}"
            register(BackendSpec(kind.__name__, (DEVICE.type,), factory, api_version=API_VERSION))

    plugin.fp8core_register_backends = fp8core_register_backends  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(plugins, "_loaded", [])
    plugins.register(plugin, "fused_chunks")
    events.clear()
    yield
    table._resolve.cache_clear()


def mlp(activation: str = "gelu", *, bias: bool = False, hidden: int = HIDDEN) -> LayerNormMLP:
    torch.manual_seed(1)
    return LayerNormMLP(hidden, FFN, bias=bias, activation=activation)


def step(
    layer: torch.nn.Module,
    name: str,
    backend: str,
    rows: int = ROWS,
    *,
    seed: int = 0,
    **changes: Any,
) -> list[torch.Tensor]:
    """Return the output and the gradients of a step."""
    torch.manual_seed(seed)
    chosen: Any = dataclasses.replace(recipe.by_name(name), **changes)
    x = torch.randn(rows, layer.layer_norm_weight.shape[0], requires_grad=True)
    with use_backend(backend), fp8core.autocast(recipe=chosen):
        y = layer(x)
    dy = torch.randn_like(y)
    events.clear()
    y.backward(dy)
    grads = [x.grad, *(own.grad for own in layer.parameters())]
    found = [y.detach(), *(one.clone() for one in grads if one is not None)]
    layer.zero_grad()
    return found


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


@pytest.mark.parametrize(
    ("name", "activation", "bias", "backend"),
    pairs(
        ["delayed", "block", "current", "rowwise"],
        ["gelu", "swiglu"],
        [False, True],
        ["Made", "WithoutParts", "Recorded"],
    ),
)
def test_steps_have_the_same_bits(name: str, activation: str, bias: bool, backend: str) -> None:
    ours, theirs = mlp(activation, bias=bias), mlp(activation, bias=bias)
    for seed in range(4):
        got = step(ours, name, backend, seed=seed)
        want = step(theirs, name, "reference", seed=seed)
        sums = [at for at, one in enumerate(want) if one.dim() == 1]
        for at in sums:  # of a bias: added up in another order
            torch.testing.assert_close(got[at], want[at], rtol=1e-5, atol=1e-5)
        assert same(*([one for one in both if one.dim() > 1] for both in (got, want)))
    assert same(list(ours.state_dict().values()), list(theirs.state_dict().values()))


def test_neither_gradient_of_the_activation_is_ever_whole() -> None:
    step(mlp(), "delayed", "Made")
    parts = []
    for rows in (128, 128, 16):
        parts += [f"part {rows} of {ROWS} x {FFN}", f"part {rows} of {ROWS} x {HIDDEN}"]
    wgrads = [f"product {HIDDEN} x {FFN}", f"product {FFN} x {HIDDEN}"]
    assert events == [wgrads[0], *parts, wgrads[1]]


def test_scales_of_rows_leave_the_product_whole() -> None:
    step(mlp(), "block", "Made")
    parts = [f"part {rows} of {ROWS} x {HIDDEN}" for rows in (128, 128, 16)]
    wgrads = [f"product {HIDDEN} x {FFN}", f"product {FFN} x {HIDDEN}"]
    assert events == [f"product {ROWS} x {FFN}", wgrads[0], *parts, wgrads[1]]


def test_scales_that_follow_from_all_rows_leave_the_cast_whole() -> None:
    for name in ["current", "rowwise"]:
        step(mlp(), name, "Made")
        # The gradient from outside comes in chunks, where its product is not computed later.
        parts = [f"part {rows} of {ROWS} x {FFN}" for rows in (128, 128, 16)]
        wgrads = [f"product {HIDDEN} x {FFN}", f"product {FFN} x {HIDDEN}"]
        assert events == [*parts, wgrads[0], f"product {ROWS} x {HIDDEN}", wgrads[1]], name


def test_few_rows_are_computed_at_once() -> None:
    step(mlp(), "delayed", "Made", HIDDEN)
    assert events[0] == f"product {HIDDEN} x {FFN}"
    assert not any(one.startswith("part") for one in events)


@pytest.mark.parametrize("name", CHUNKED)
def test_a_step_in_chunks_is_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []
    record = RECORDER.record

    def noting(*args: Any, **keywords: Any) -> Any:
        recorded.append(record(*args, **keywords))
        return recorded[-1]

    monkeypatch.setattr(RECORDER, "record", noting)
    RECORDER.problems.clear()
    layer = mlp()
    for seed in range(4):
        step(layer, name, "Recorded", seed=seed)
    assert RECORDER.problems == []
    assert [one.repeat is not None for one in recorded] == [True, True]


def test_weights_that_are_quantized_again() -> None:
    for name in CHUNKED:
        got = step(mlp(), name, "Made", requantize_weights=True)
        assert f"part 128 of {ROWS} x {HIDDEN}" in events, name
        assert same(got, step(mlp(), name, "reference", requantize_weights=True)), name


def test_frozen_weights() -> None:
    for frozen in ["fc1_weight", "fc2_weight", "layer_norm_weight"]:
        found = []
        for backend in ("Made", "reference"):
            layer = mlp()
            getattr(layer, frozen).requires_grad_(False)
            found.append(step(layer, "delayed", backend))
        assert same(*found), frozen


def test_a_graph_that_is_retained_is_read_twice() -> None:
    layer = mlp()
    x = torch.randn(ROWS, HIDDEN, requires_grad=True)
    with use_backend("Made"), fp8core.autocast(recipe=recipe.by_name("block")):
        y = layer(x)
    dy = torch.randn_like(y)
    once = torch.autograd.grad(y, [x, *layer.parameters()], dy, retain_graph=True)
    assert same(list(torch.autograd.grad(y, [x, *layer.parameters()], dy)), list(once))


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_of_weights_that_are_added_or_delayed(accumulates: bool) -> None:
    found = []
    for backend in ("Made", "reference"):
        torch.manual_seed(1)
        own = {"fuse_wgrad_accumulation": True} if accumulates else {"delay_wgrad_compute": True}
        layer = LayerNormMLP(HIDDEN, FFN, bias=False, **own)
        for weight in (layer.fc1_weight, layer.fc2_weight):
            weight.main_grad = torch.zeros(weight.shape)
        x = torch.randn(ROWS, HIDDEN, requires_grad=True)
        with use_backend(backend), fp8core.autocast(recipe=recipe.by_name("delayed")):
            y = layer(x)
        y.backward(torch.randn_like(y))
        if not accumulates:
            layer.backward_dw()
        weights = [layer.fc1_weight, layer.fc2_weight]
        grads = [one.main_grad if accumulates else one.grad for one in weights]
        found.append([x.grad, *grads])
    assert same(*found)


def test_a_monitor_sees_whole_gradients() -> None:
    layer = fp8core.prepare(torch.nn.Sequential(mlp()))
    with fp8core.monitor(layer) as watch:
        torch.manual_seed(0)
        x = torch.randn(ROWS, HIDDEN, requires_grad=True)
        with use_backend("Made"), fp8core.autocast(recipe=recipe.by_name("delayed")):
            y = layer(x)
        events.clear()
        y.backward(torch.randn_like(y))
        watch.step()
    assert not any(one.startswith("part") for one in events)
