"""Gradients that are quantized some rows at a time: the same bits, and less memory at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import fp8core
from fp8core import LayerNormMLP, Linear, recipe, use_backend
from fp8core.backend_api import GemmDesc, Operand, variant_of
from tests.chain import fused_toy
from tests.conformance import broken
from tests.pairs import pairs
from tests.recording_backend import RECORDER, Operation

ROWS, HIDDEN, FFN = 272, 64, 128  # two chunks of 128 rows and a short one
CHUNKED = ("delayed", "block")
asked: tuple[list[int], list[int]] = ([], [])
"""Rows of the tensors that ``Recording`` was asked for in chunks, of its GEMMs into a result."""
events: list[str] = []
"""The products of ``Made`` since the last backward began."""


class Recording(broken.GivesChunks):
    """Takes down the rows of tensors asked for in chunks, and of GEMMs into a given result."""

    def bind(self, desc: Any, device: torch.device) -> Callable[..., Any]:
        run = super().bind(desc, device)
        if getattr(desc, "chunked", False):
            return self._recorded(run)
        if desc.op != "gemm":
            return run

        def gemm(a: Operand, b: Operand, **given: Any) -> Any:
            if given.get("out") is not None:
                asked[1].append(len(a.data))
            return run(a, b, **given)

        return gemm

    def _recorded(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def quantize_chunked(x: torch.Tensor, **given: Any) -> Any:
            asked[0].append(len(x))
            return inner(x, **given)

        return quantize_chunked


class Made(broken.GivesFusedChunks):
    """Its products have parts; takes note of both."""

    def unsupported(self, desc: Any, device: torch.device) -> str | None:
        return super().unsupported(replace(desc, part=False) if has_parts(desc) else desc, device)

    def bind(self, desc: Any, device: torch.device) -> Callable[..., Any]:
        run = super().bind(desc, device)

        def product(a: Operand, b: Operand, **given: Any) -> Any:
            events.append(f"product {len(a.data)} x {len(b.data)}")
            return run(a, b, **given)

        def part(rows: int, a: Operand, b: Operand, *, bias: Any = None, out: Any) -> Any:
            events.append(f"part {len(a.data)} of {rows} x {len(b.data)}")
            return run(a, b, bias=bias, out=out)

        if not has_parts(desc):
            return run
        return part if desc.part else product


def has_parts(desc: Any) -> bool:
    return type(desc) is GemmDesc and not desc.accumulate


class WithoutParts(broken.GivesFusedChunks):
    """Its products have no parts."""


class Recorded(Made):
    def bind(self, desc: Any, device: torch.device) -> Callable[..., Any]:
        run = super().bind(desc, device)
        return run if variant_of(desc) == "chunked" else Operation(run)

    def recorder(self, desc: Any, device: torch.device) -> Any:
        return RECORDER


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """Register the backends of this file by the names of their classes."""
    kinds = (Recording, Made, WithoutParts, Recorded)
    for notes in (events, *asked):
        notes.clear()
    with fused_toy.registered(0, **{kind.__name__: kind for kind in kinds}):
        yield


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
    x = torch.randn(rows, next(layer.parameters()).shape[-1], requires_grad=True)
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
    ("name", "bias", "requantizes"),
    pairs(["delayed", "current", "block", "rowwise"], [False, True], [False, True]),
)
def test_gradients_in_chunks_have_the_same_bits(name: str, bias: bool, requantizes: bool) -> None:
    layer = Linear(64, 96, bias=bias)
    want = step(layer, name, "reference")
    layer.reset_delayed_state()
    got = step(layer, name, "Recording", requantize_weights=requantizes)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    assert asked == ([ROWS], [128, 128, 16])


def test_the_gradient_from_outside_alone_comes_in_chunks_where_that_saves_memory() -> None:
    frozen = Linear(64, 96)
    frozen.weight.requires_grad_(False)
    layers = {"an MLP": LayerNormMLP(64, 96), "few rows": Linear(ROWS, 96), "frozen": frozen}
    for name, layer in layers.items():
        step(layer, "current", "Recording")
        assert asked == (([ROWS], [128, 128, 16]) if name == "an MLP" else ([], [])), name
        for notes in asked:
            notes.clear()


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


def test_what_is_computed_whole_follows_from_the_scales() -> None:
    def parts(*columns: int) -> list[str]:
        return [f"part {rows} of {ROWS} x {own}" for rows in (128, 128, 16) for own in columns]

    def whole(columns: int) -> str:
        return f"product {ROWS} x {columns}"

    wgrads = [f"product {HIDDEN} x {FFN}", f"product {FFN} x {HIDDEN}"]
    # Scales of all rows leave the cast whole. The gradient from outside comes in chunks, where its
    # product is not computed later.
    of_all_rows = [*parts(FFN), wgrads[0], whole(HIDDEN), wgrads[1]]
    expected = {
        "delayed": [wgrads[0], *parts(FFN, HIDDEN), wgrads[1]],  # neither gradient is ever whole
        "block": [whole(FFN), wgrads[0], *parts(HIDDEN), wgrads[1]],
        "current": of_all_rows,
        "rowwise": of_all_rows,
    }
    for name, products in expected.items():
        step(mlp(), name, "Made")
        assert events == products, name


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
    for layer, backend in ((Linear(64, 96), "Recording"), (mlp(), "Made")):
        model = fp8core.prepare(torch.nn.Sequential(layer))
        with fp8core.monitor(model) as watch:
            step(model, "delayed", backend)
            watch.step()
            assert any(row.role == "grad_output" and row.amax > 0 for row in watch.rows), backend
    assert asked == ([], [])
    assert not any(event.startswith("part") for event in events)
